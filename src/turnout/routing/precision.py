"""Read and change how torch multiplies float32 (IEEE, TF32, bfloat16), without its older flags.

`torch.backends.*.fp32_precision` may be set for everything, for a backend or for one kind of op of a backend.
The older flags (`allow_tf32`, `set_float32_matmul_precision`) show some of these settings, and their getters
raise where a newer setting has no older equivalent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

from turnout.routing.torch_private import get_precision, set_precision

Backend = Literal["cuda", "mkldnn"]
Kind = Literal["conv", "matmul"]


@contextlib.contextmanager
def strict_float32(*places: tuple[Backend, Kind]) -> Iterator[None]:
    """Inside this block these kinds of op multiply float32 in IEEE precision, whatever torch is set to.

    >>> with strict_float32(("mkldnn", "conv")):
    ...     get_precision("mkldnn", "conv")
    'ieee'
    """
    before = {place: get_precision(*place) for place in places}
    for place in places:
        set_precision(*place, "ieee")
    try:
        yield
    finally:
        for place, precision in before.items():
            set_precision(*place, "none")  # what was inherited is inherited again
            if get_precision(*place) != precision:
                set_precision(*place, precision)

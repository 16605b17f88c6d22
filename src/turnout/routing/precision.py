"""Read and change how torch multiplies float32 (IEEE, TF32, bfloat16), without its older flags.

`torch.backends.*.fp32_precision` may be set for everything, for a backend or for one kind of op of a backend.
The older flags (`allow_tf32`, `set_float32_matmul_precision`) show some of these settings, and their getters
raise where a newer setting has no older equivalent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch

Backend = Literal["cuda", "mkldnn"]
Kind = Literal["conv", "matmul"]

_c: Any = torch._C

# The setting in force for a kind of op, its own or an inherited one: "ieee", "tf32", "bf16", or "none", which
# means ieee.
get_precision: Callable[[str, str], str] = _c._get_fp32_precision_getter
_set: Callable[[str, str, str], object] = _c._set_fp32_precision_setter


@contextlib.contextmanager
def strict_float32(*places: tuple[Backend, Kind]) -> Iterator[None]:
    """Inside this block these kinds of op multiply float32 in IEEE precision, whatever torch is set to.

    >>> with strict_float32(("mkldnn", "conv")):
    ...     get_precision("mkldnn", "conv")
    'ieee'
    """
    before = {place: get_precision(*place) for place in places}
    for place in places:
        _set(*place, "ieee")
    try:
        yield
    finally:
        for place, precision in before.items():
            _set(*place, "none")  # what was inherited is inherited again
            if get_precision(*place) != precision:
                _set(*place, precision)

"""How torch multiplies float32, for tests: what one sets must not reach the next."""

import contextlib
import itertools

import torch

from turnout.routing.precision import get_precision

PLACES = [("generic", "all"), *itertools.product(("cuda", "mkldnn"), ("all", "conv", "matmul", "rnn"))]


def all_precisions():
    """All settings, by backend and kind of op; some may be inherited."""
    return {place: get_precision(*place) for place in PLACES}


@contextlib.contextmanager
def left_as_it_was():
    """Whatever changes a setting inside this block and leaves it so fails, and the setting is put back."""
    before = all_precisions()
    try:
        yield
    finally:
        changed = {place: now for place, now in all_precisions().items() if now != before[place]}
        for place in changed:  # wider ones first: others may inherit them
            torch._C._set_fp32_precision_setter(*place, "none")
            if get_precision(*place) != before[place]:
                torch._C._set_fp32_precision_setter(*place, before[place])
    assert not changed, f"float32 is multiplied in another way than before: {changed}"

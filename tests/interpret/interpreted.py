"""GPU routes in Triton's interpreter, on CPU tensors. Collected by test_interpret.py in a process of its own with TRITON_INTERPRET=1.

float32, float16 and complex64 only: the interpreter of Triton 3.6 and 3.7 is silently wrong for bfloat16.
"""

import functools
import time

import pytest
import torch

from tests.walk import CPU, H200, calls, equal, lets_pass, triton_routes

SMALL = {"block": 64, "vectors": 4, "channels": 16, "groups": 2, "rows": 2}
ENOUGH, SECONDS = 6, 1.5  # checks at least, and how long to go on for more

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")


def suits(args):
    """Small enough for an interpreter, and in types it knows."""
    kinds = {x.dtype for x in args if isinstance(x, torch.Tensor)}
    return args[0].numel() <= 1100 and torch.bfloat16 not in kinds


@triton_routes
@pytest.mark.usefixtures("poison")
def test_interpreted(op, route):
    """Every configuration of random calls, and of each a variant with small tiles: several of them and a ragged end in a short call."""
    seen, end = 0, time.monotonic() + SECONDS
    for args in calls(op, route, CPU, H200, 40):
        if not suits(args):
            continue
        configs = list(route.configs(op.problem(*args), H200))
        small = {name: min(value, SMALL.get(name, value)) for name, value in configs[0].items()}
        for chosen in (*configs, small):
            assert equal(op, functools.partial(route.run, **chosen), args)
            seen += 1
        if seen > ENOUGH and time.monotonic() > end:
            break
    assert seen > ENOUGH


@triton_routes
def test_nan_and_inf_pass_through(op, route):
    seen, end = 0, time.monotonic() + SECONDS
    for args in calls(op, route, CPU, H200, 20):
        if args[0].dtype not in (torch.float32, torch.float16) or not suits(args):
            continue
        if time.monotonic() > end and seen:
            break
        assert lets_pass(op, route.run, args) is None
        seen += 1
    assert seen

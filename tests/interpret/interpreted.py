"""GPU routes in Triton's interpreter, on CPU tensors. Collected by test_interpret.py in a process of its own with TRITON_INTERPRET=1.

float32, float16 and complex64 only: the interpreter of Triton 3.6 and 3.7 is silently wrong for bfloat16.
"""

import functools

import pytest
import torch

from tests.walk import CPU, H200, calls, equal, gpu_routes
from turnout.routing.case import copy
from turnout.routing.verify import Trial

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")


@gpu_routes
def test_interpreted(op, route):
    seen = 0
    for args in calls(op, route, CPU, H200, 25):
        if any(isinstance(x, torch.Tensor) and x.dtype is torch.bfloat16 for x in args):
            continue
        for config in route.configs(op.problem(*args), H200):
            # Small blocks make several chunks and a ragged tail out of a short call.
            small = {name: min(value, 64) if name == "block" else value for name, value in config.items()}
            for chosen in (config, small):
                assert equal(op, functools.partial(route.run, **chosen), args)
                seen += 1
    assert seen > 10


@gpu_routes
def test_nan_and_inf_pass_through(op, route):
    seen = 0
    for args in calls(op, route, CPU, H200, 12):
        kinds = {x.dtype for x in args if isinstance(x, torch.Tensor)}
        if args[0].dtype not in (torch.float32, torch.float16) or torch.bfloat16 in kinds:
            continue
        for value in (float("nan"), float("inf")):
            first = copy(args[0])
            first.select(-1, -1).fill_(value)
            changed = (first, *args[1:])
            assert Trial(op, changed).complaint(route.numerics, route.run) is None
            seen += 1
    assert seen

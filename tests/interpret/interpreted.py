"""GPU routes in Triton's interpreter, on CPU tensors. Collected by test_interpret.py in a process of its own
with TRITON_INTERPRET=1.

float32, float16 and complex64 only: the interpreter of Triton 3.6 and 3.7 is silently wrong for bfloat16.
"""

import functools
import time

import pytest
import torch

from tests.own_outputs import as_tuple, assert_apart
from tests.walk import CPU, H200, LAUNCHING, calls, copy, equal, lets_pass, triton_routes
from turnout.routing.overlap import Layout, overlaps_itself

SMALL = {"block": 64, "vectors": 4, "channels": 16, "groups": 2, "rows": 2}
ENOUGH, SECONDS = 6, 0.4  # checks at least, and how long to go on for more

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")


def suits(args):
    """Small enough for an interpreter, and in types it knows."""
    kinds = {x.dtype for x in args if isinstance(x, torch.Tensor)}
    return args[0].numel() <= 1100 and torch.bfloat16 not in kinds


@triton_routes
@pytest.mark.usefixtures("poison")
def test_interpreted(op, route):
    """Every configuration of random calls, and of each a variant with small tiles: several of them and a
    ragged end in a short call.
    """
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


@triton_routes
def test_outputs_are_tensors_of_their_own(op, route):
    """Outputs share no memory and may be written in place, also those of a call without gradients."""
    seen = 0
    for args in calls(op, route, CPU, H200, 40):
        if not suits(args):
            continue
        config = next(iter(route.configs(op.problem(*args), H200)))
        small = {key: min(n, SMALL.get(key, n)) for key, n in config.items()}
        arguments = tuple(copy(x) if isinstance(x, torch.Tensor) else x for x in args)
        with torch.no_grad():
            results = as_tuple(route.run(*arguments, **small))
        assert not any(y._is_view() for y in results)
        assert_apart(results, arguments, lambda y: y.zero_())
        seen += 1
        if seen == ENOUGH:
            break
    assert seen == ENOUGH


IN_PLACE = [(op, route) for op, route in LAUNCHING if route.in_place]


@pytest.mark.parametrize(("op", "route"), IN_PLACE, ids=[f"{op.name}-{route.name}" for op, route in IN_PLACE])
def test_in_place(op, route):
    """A route that says `in_place` is right where it writes the very elements that it reads."""
    names = list(op.signature.parameters)
    [name], [into] = route.in_place, op.mutates
    seen, end = 0, time.monotonic() + SECONDS
    for args in calls(op, route, CPU, H200, 40):
        x = copy(args[names.index(name)])
        same = list(args)
        same[names.index(name)] = same[names.index(into)] = x
        if not suits(same) or any(route.refuses(op.problem(*same), H200)) or overlaps_itself(Layout.of(x)):
            continue
        expected = copy(x)
        apart = [*same[: names.index(into)], expected, *same[names.index(into) + 1 :]]
        apart[names.index(name)] = copy(x)
        op.reference(*apart)
        small = {
            key: min(n, SMALL.get(key, n))
            for key, n in next(iter(route.configs(op.problem(*same), H200))).items()
        }
        route.run(*same, **small)
        torch.testing.assert_close(x, expected, rtol=2e-3, atol=2e-3)
        seen += 1
        if seen > 3 and time.monotonic() > end:
            break
    assert seen > 3

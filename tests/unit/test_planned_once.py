"""Routes whose only launch is planned once: what is launched for other addresses is what a plan of their own would launch."""

import functools
import inspect

import pytest
import torch

from tests.walk import CPU, H200, calls, elsewhere, planned_routes
from turnout.ops import launching
from turnout.routing.op import OPS

pytest.importorskip("triton")


@pytest.fixture
def launches(monkeypatch):
    """What would be launched: a tensor that was given counts by its address, one that was made by its dtype."""
    found = []

    def launch(kernel, programs, tensors, numbers, constants, **options):
        found.append((kernel.fn, programs, [x if x is None else (x.data_ptr(), x.dtype) for x in tensors], numbers, constants, options))

    monkeypatch.setattr(launching, "launch", launch)
    return found


def is_bound(ready):
    return not isinstance(ready, functools.partial)


def launched(launches, run, args):
    launches.clear()
    made = run(*args)
    ((*what, tensors, numbers, constants, options),) = launches
    given = {x.data_ptr() for x in args if isinstance(x, torch.Tensor)}
    seen = [x and (x[0] if x[0] in given else "made", x[1]) for x in tensors]
    outputs = [(x.shape, x.stride(), x.dtype) for x in ((made,) if isinstance(made, torch.Tensor) else made or ())]
    return *what, seen, numbers, constants, options, type(made), outputs


@planned_routes
def test_launches_the_same(op, route, launches):
    bound = 0
    for args in calls(op, route, CPU, H200, 60):
        config = route.configs(op.problem(*args), H200)[0]
        args = elsewhere(args)
        ready = route.ready(args, config)
        if is_bound(ready):
            bound += 1
            for given in (args, elsewhere(args), elsewhere(args, off=1)):
                assert launched(launches, ready, given) == launched(launches, lambda *a: route.run(*a, **config), given)  # noqa: B023
    assert bound > 20


def norm_of(x, weight):
    route = OPS["rms_norm_silu"].routes["rows"]
    args = (x, weight, None, 1e-6, 1, "rms_norm", False)
    return route, args, route.configs(OPS["rms_norm_silu"].problem(*args), H200)[0]


def test_a_tensor_that_is_moved_first_is_not_known_by_its_address():
    route, args, config = norm_of(torch.zeros(4, 64), torch.zeros(64, 2)[:, 0])
    assert not is_bound(route.ready(args, config))


def test_which_of_two_in_one_place_cannot_be_told():
    op = OPS["gated_add"]
    x, other = torch.zeros(1, 4, 64), torch.zeros(1, 4, 64)
    args, apart = (op.arguments(x, given, None) for given in (x, other))
    route = op.routes["rows"]
    config = route.configs(op.problem(*args), H200)[0]
    assert not is_bound(route.ready(args, config))
    assert is_bound(route.ready(apart, config))


def test_addresses_that_are_off_are_not_planned_for_all():
    route, args, config = norm_of(torch.zeros(257)[1:].view(4, 64), torch.zeros(64))
    assert not is_bound(route.ready(args, config))


def test_outputs_are_new_each_time(launches):
    route, args, config = norm_of(torch.zeros(4, 64), torch.zeros(64))
    ready = route.ready(args, config)
    assert len({x.data_ptr() for x in [ready(*args) for _ in range(5)]}) == 5


def test_what_is_written_into_is_what_was_given(launches):
    op = OPS["rms_norm_silu_into"]
    x, weight, out = torch.zeros(4, 64), torch.zeros(64), torch.zeros(4, 64)
    args = (x, weight, None, out, 1e-6, 1, "rms_norm", False)
    route = op.routes["rows"]
    ready = route.ready(args, route.configs(op.problem(*args), H200)[0])
    assert is_bound(ready)
    assert ready(*args) is None
    assert launches[0][2][-1][0] == out.data_ptr()


def test_a_route_of_one_launch_says_what_it_takes():
    """Its signature and its defaults are those of its plan."""
    route = OPS["norm_rope"].routes["one-pass"]
    assert {"tokens", "heads", "chunks", "warps", "by_head"} <= set(inspect.signature(route.run).parameters)

"""Routes whose only launch is prepared once launch the same for other addresses as a plan of their own would."""

import functools
import inspect

import pytest
import torch

from tests.walk import CPU, H200, calls, elsewhere, planned_routes
from turnout.launch.recording import recorded
from turnout.routing.op import OPS

pytest.importorskip("triton")


@pytest.fixture
def launches():
    """What would be launched on an H200."""
    with recorded(H200) as launches:
        yield launches


def is_prepared(ready):
    return not isinstance(ready, functools.partial)


def launched(launches, run, args):
    """The one launch of a call, with an argument's tensor by its address and an output's as "output"."""
    launches.clear()
    result = run(*args)
    (launch,) = launches
    given = {x.data_ptr() for x in args if isinstance(x, torch.Tensor)}
    tensors = [x if x is None else (x.data_ptr() if x.data_ptr() in given else "output", x.dtype) for x in launch.tensors]
    outputs = [(x.shape, x.stride(), x.dtype) for x in ((result,) if isinstance(result, torch.Tensor) else result or ())]
    return launch._replace(tensors=tensors), type(result), outputs


@planned_routes
def test_prepared_routes_launch_the_same(op, route, launches):
    prepared = 0
    for args in calls(op, route, CPU, H200, 60):
        config = route.configs(op.problem(*args), H200)[0]
        args = elsewhere(args)
        ready = route.ready(args, config)
        if is_prepared(ready):
            prepared += 1
            for given in (args, elsewhere(args), elsewhere(args, off=1)):
                assert launched(launches, ready, given) == launched(launches, lambda *a: route.run(*a, **config), given)  # noqa: B023
    assert prepared > 20


def norm_of(x, weight):
    route = OPS["rms_norm_silu"].routes["rows"]
    args = (x, weight, None, 1e-6, 1, "rms_norm", False)
    return route, args, route.configs(OPS["rms_norm_silu"].problem(*args), H200)[0]


def test_prepare_rejects_argument_copied_before_launch():
    route, args, config = norm_of(torch.zeros(4, 64), torch.zeros(64, 2)[:, 0])
    assert not is_prepared(route.ready(args, config))


def test_prepare_rejects_aliased_arguments():
    op = OPS["gated_add"]
    x, other = torch.zeros(1, 4, 64), torch.zeros(1, 4, 64)
    args, apart = (op.arguments(x, given, None) for given in (x, other))
    route = op.routes["rows"]
    config = route.configs(op.problem(*args), H200)[0]
    assert not is_prepared(route.ready(args, config))
    assert is_prepared(route.ready(apart, config))


def test_prepare_rejects_unaligned_addresses():
    route, args, config = norm_of(torch.zeros(257)[1:].view(4, 64), torch.zeros(64))
    assert not is_prepared(route.ready(args, config))


def test_outputs_are_new_at_each_call(launches):
    route, args, config = norm_of(torch.zeros(4, 64), torch.zeros(64))
    ready = route.ready(args, config)
    assert len({x.data_ptr() for x in [ready(*args) for _ in range(5)]}) == 5


def test_writes_into_the_tensor_that_was_passed(launches):
    op = OPS["rms_norm_silu_into"]
    x, weight, out = torch.zeros(4, 64), torch.zeros(64), torch.zeros(4, 64)
    args = (x, weight, None, out, 1e-6, 1, "rms_norm", False)
    route = op.routes["rows"]
    ready = route.ready(args, route.configs(op.problem(*args), H200)[0])
    assert is_prepared(ready)
    assert ready(*args) is None
    assert launches[0].tensors[-1].data_ptr() == out.data_ptr()


def test_a_route_of_one_launch_has_the_signature_of_its_plan():
    route = OPS["norm_rope"].routes["one-pass"]
    assert {"tokens", "heads", "chunks", "warps", "by_head"} <= set(inspect.signature(route.run).parameters)


def test_recording_ends_with_its_block():
    from turnout.launch import recording
    from turnout.routing.device import Device

    with recorded(H200):
        assert Device.of("cpu") is H200
    assert recording.recording.get() is None
    assert Device.of("cpu").type == "cpu"

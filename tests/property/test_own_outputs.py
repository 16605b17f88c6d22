"""Outputs of every op and route on a CPU may be written in place, and arguments keep their storages."""

import pytest
import torch

import turnout
from tests import own_outputs
from tests.faults.public_calls import CALLS, flat, routes_for, tensors_in, wanting_gradients
from tests.walk import CPU, cpu_routes, ops, random_call
from turnout.routing.choose import REFERENCE
from turnout.routing.device import Device

HERE = Device.of("cpu")


@cpu_routes
def test_written_in_place_after_a_call_that_records_nothing(op, route):
    for args in own_outputs.calls(op, route, CPU, HERE, 8):
        own_outputs.check_written_later(op, route.name, args)


@ops
def test_what_the_reference_returns_is_written_in_place_too(op):
    count = 0
    for seed in range(100):
        args = random_call(op, seed, CPU)
        if args[0].dtype in own_outputs.DTYPES and args[0].numel():
            own_outputs.check_written_later(op, REFERENCE, args)
            count += 1
    assert count > 5


@cpu_routes
def test_written_in_place_while_gradients_are_recorded(op, route):
    if op.mutates:
        with pytest.raises(turnout.Refused, match="gradients are wanted"):
            wanting(op, route)
        return
    # torch's own gradients of 3-D convolutions are wrong for inputs with gaps, in bfloat16 on a CPU (2.13).
    for args in own_outputs.calls(op, route, CPU, HERE, 3, seeds=1000, gaps=False):
        own_outputs.check_written_while_recording(op, route.name, args)


def wanting(op, route):
    """A call of an op that writes, with gradients: no route takes it."""
    (args, *_) = own_outputs.calls(op, route, CPU, HERE, 1)
    own_outputs.call(op, route.name, (args[0].requires_grad_(), *args[1:]))


@cpu_routes
def test_written_in_place_behind_a_compiled_call(op, route):
    """Inside what is compiled and outside of it."""
    torch.compiler.reset()
    args = own_outputs.calls(op, route, CPU, HERE, 1)[0]
    if op.mutates:
        compiled = torch.compile(lambda *a: op(*a), fullgraph=True, backend="aot_eager")
        with turnout.pin(**{op.name: route.name}), torch.no_grad():
            results = own_outputs.as_tuple(compiled(*args))
        own_outputs.assert_apart(results, args, lambda y: y.mul_(torch.full_like(y, 2, requires_grad=True)))
        return

    def changed(*args):
        first, *others = own_outputs.as_tuple(op(*args))
        return (first.mul_(2), *others)

    compiled = torch.compile(changed, fullgraph=True, backend="aot_eager")
    with turnout.pin(**{op.name: route.name}):
        arguments, ours = (tuple(own_outputs.wanting_gradients(args)) for _ in range(2))
        actual, expected = compiled(*arguments), changed(*ours)
        for y in (*actual, *expected):
            y += 1
        for results in (actual, expected):
            sum(y.sum() for y in results if y.requires_grad).backward()
    for x, y in zip(arguments, ours, strict=True):
        if own_outputs.is_floating(x):
            torch.testing.assert_close(x.grad, y.grad)
    torch.compiler.reset()


@pytest.mark.parametrize("call", [call for call in CALLS if not call.written()], ids=str)
def test_results_of_public_functions_are_written_in_place(call):
    """What stands between a function and its op keeps to that: every result may be written, but for the cache
    of causal_conv3d, which is a view of the input, as its docstring says."""
    for name in routes_for(call):

        def total(change, name=name):
            kwargs = wanting_gradients(call.make())
            with turnout.pin(**{call.name: name}):
                results = [y for y in flat(call.function(**kwargs)) if y.is_floating_point()]
            results = results[:1] if call.name == "causal_conv3d" or name == REFERENCE else results
            sum(change(y).square().sum() for y in results).backward()
            return [x.grad for value in kwargs.values() for x in tensors_in(value) if x.requires_grad]

        if (call, name) == (
            ("attention", 0),
            REFERENCE,
        ):  # torch's fused attention needs its output for backward
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                total(lambda y: torch.relu_(y.mul_(2)))
            continue
        actual, expected = total(lambda y: torch.relu_(y.mul_(2))), total(lambda y: torch.relu(y * 2))
        assert actual
        assert all(map(own_outputs.close, actual, expected)), name


def test_the_cache_of_causal_conv3d_is_part_of_its_input():
    """And autograd knows: a route needs the input for backward, which raises where that was written into."""
    clip, weight = (torch.randn(*shape, requires_grad=True) for shape in ((1, 4, 3, 6, 6), (4, 4, 3, 3, 3)))
    for name in ("depth-taps", "winograd"):
        with turnout.pin(causal_conv3d=name):
            y, cache = turnout.causal_conv3d(clip * 1, weight, padding=1, return_cache=True)
        y += 1
        y.sum().backward(retain_graph=True)
        cache += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()

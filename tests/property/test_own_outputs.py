"""What every op returns, through every route that takes it on a CPU, may be written in place, and storages stay as they are."""

import pytest
import torch

import turnout
from tests import own_outputs
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
    taken = 0
    for seed in range(100):
        args = random_call(op, seed, CPU)
        if args[0].dtype in own_outputs.DTYPES and args[0].numel():
            own_outputs.check_written_later(op, REFERENCE, args)
            taken += 1
    assert taken > 5


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
        given, ours = ([x.clone().requires_grad_() if own_outputs.is_floating(x) else x for x in args] for _ in range(2))
        found, expected = compiled(*given), changed(*ours)
        for y in (*found, *expected):
            y += 1
        for results in (found, expected):
            sum(y.sum() for y in results if y.requires_grad).backward()
    for x, y in zip(given, ours, strict=True):
        if own_outputs.is_floating(x):
            torch.testing.assert_close(x.grad, y.grad)
    torch.compiler.reset()

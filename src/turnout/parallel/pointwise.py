"""Ops of a split model that see one pixel at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from turnout.parallel.part_calls import PartCall, choose_for_whole
from turnout.parallel.whole_problem import scaled
from turnout.routing.op import Op

if TYPE_CHECKING:
    from turnout.parallel.split import Split


ACTIVATIONS = ("input", "x", "out", "cache", "residual")  # arguments of ops that are split; weights are not


def pointwise(split: Split, op: Op, args: tuple) -> tuple[Any, PartCall]:
    """The kind of a call that computes every pixel by itself, and the functions for calls of that kind."""
    exchange, axis, names = split.exchange, split.exchange.axis, list(op.signature.parameters)
    shared = [i for i, name in enumerate(names) if name in ACTIVATIONS and isinstance(args[i], Tensor)]
    rows = args[shared[0]].shape[axis]
    key = op.key(args)
    problem = scaled(key.problem, axis, exchange.global_size(rows))
    run, route, grain = choose_for_whole(op, key._replace(problem=problem), None)
    written = names.index("out") if op.mutates else None

    def part(*args: Any) -> Any:
        return run(args)

    def whole(*args: Any) -> Any:
        operands = list(args)
        for i in shared:
            operands[i] = split.room_of_all(operands[i]) if i == written else split.gathered(operands[i])
        with split.plainly():
            y = op(*operands)
        if written is None:
            return split.own_of(y)
        args[written].copy_(exchange.own(operands[written]))
        return None

    frame_grain = grain.in_frames(args[shared[0]].dim())
    keeps_bits = grain.along(axis) == 1 or exchange.ranks == 1
    return (op.name, problem), PartCall(part, whole, keeps_bits, written, route, frame_grain)

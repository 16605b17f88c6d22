"""Upsampling with a convolution, of a split model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from turnout.parallel.layout import dense
from turnout.parallel.part_calls import PartCall, choose_for_whole
from turnout.parallel.whole_problem import scaled
from turnout.routing.op import Op

if TYPE_CHECKING:
    from turnout.parallel.split import Split


def upsampling(split: Split, op: Op, args: tuple) -> tuple[Any, PartCall]:
    """The kind of an upsampling with its convolution, and the functions for calls of that kind."""
    exchange, axis = split.exchange, split.exchange.axis
    x, weight, _, scale, padding = args
    rows = x.shape[axis]
    key = op.key(args)
    problem = scaled(key.problem, axis, exchange.global_size(rows))
    run, route, grain = choose_for_whole(op, key._replace(problem=problem), None)
    high = padding[axis]
    if weight.shape[axis] != 2 * high + 1 or high > scale:
        raise NotImplementedError(
            f"an upsampling with a kernel of {weight.shape[axis]} and padding {high} in a distributed model"
        )
    before, after = (
        0 if rank == end else 1 for rank, end in ((exchange.rank, 0), (exchange.rank, exchange.ranks - 1))
    )

    def part(x: Tensor, *rest: Any) -> Tensor:
        size = scale * x.shape[axis]
        # Pixels of neighbours are computed too, from too few of theirs; they are dropped.
        y = run((exchange.halo(x, 1, 1, edge="none") if exchange.ranks > 1 else x, *rest))
        return dense(y.narrow(axis, scale * before, size), y, axis) if before or after else y

    def whole(x: Tensor, *rest: Any) -> Tensor:
        with split.plainly():
            return split.own_of(op(exchange.all_gather(x), *rest))

    keeps_bits = grain.along(axis) == 1 or exchange.ranks == 1
    return (op.name, problem), PartCall(part, whole, keeps_bits, None, route, grain.in_frames(x.dim()))

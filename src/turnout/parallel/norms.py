"""Group norms of a split model: sums of blocks of this rank's part, those of all ranks, the norm of the part.

Which route the whole call takes decides. Where that is one whose sums are of blocks, and parts begin where
blocks do, a rank sums its own part, and only sums travel. Else every rank gathers x and computes the whole.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from turnout.ops.group_norm_silu.block_routes import NAME, NAME_ON_GPU, room_for
from turnout.ops.group_norm_silu.blocks import (
    Where,
    block_sums,
    grain,
    moments_of,
    normalise,
    normalise_scaled,
    rows_and_columns,
)
from turnout.ops.group_norm_silu.padded import fill_border, inside_of
from turnout.parallel.exchange import EDGES, Halo
from turnout.parallel.layout import dense, empty_resized
from turnout.routing.op import Op

if TYPE_CHECKING:
    from turnout.parallel.split import Split

NORMS = ("group_norm_silu", "group_norm_silu_into", "group_norm_silu_pad", "spatial_norm_silu")
BLOCKS = (NAME_ON_GPU, NAME)
_SHARED = ("x", "out", "scale", "shift")  # arguments of which each rank has a part


class Norm:
    """One kind of call of one of these ops on this rank: `part` of its own rows or columns, `whole` of all of
    them.

    problem: that of the whole call, which takes `route`. in_blocks: whether `part` gives its bits.
    """

    def __init__(self, split: Split, op: Op, args: tuple):
        self.split, self.op, self.exchange = split, op, split.exchange
        self.names = list(op.signature.parameters)
        self.shared = [
            i for i, name in enumerate(self.names) if name in _SHARED and isinstance(args[i], Tensor)
        ]
        like = [torch.empty_like(x, device="meta") if isinstance(x, Tensor) else x for x in args]
        for i in self.shared:
            size = self.exchange.global_size(args[i].shape[self.exchange.axis])
            like[i] = empty_resized(like[i], self.exchange.axis, size)
        self.shape = like[0].shape
        self.problem = op.problem(*like)
        verdict = op.verdict(op.key(args)._replace(problem=self.problem))
        size = self.shape[self.exchange.axis]
        whole_blocks = not any(begin % grain(size) for begin, _ in self.exchange.spans(size))
        self.route = verdict.chosen
        self.in_blocks = verdict.chosen in BLOCKS and len(self.shape) > 3 and whole_blocks

    def moments(self, x: Tensor, groups: int, eps: float) -> Tensor:
        """Those of the whole."""
        exchange, axis = self.exchange, self.exchange.axis
        height, width = rows_and_columns(self.shape)
        spans = exchange.spans(self.shape[axis])
        begin = spans[exchange.rank][0]
        where = Where(height, width, *((begin, 0) if axis == -2 else (0, begin)))
        along = 1 if axis == -2 else 2
        step = grain(self.shape[axis])
        counts = [-(-(end - first) // step) for first, end in spans]
        own = block_sums(x, groups, where).transpose(0, along)  # [down or across, ..., 2, groups]
        sums = torch.cat(exchange.all_gather_stats(own, counts)).transpose(0, along)
        return moments_of(sums.contiguous(), prod(self.shape[1:]) // groups, eps)

    def part(self, *args: Any) -> Any:
        arguments = dict(zip(self.names, args, strict=True))
        x, weight, bias, silu = (arguments[name] for name in ("x", "weight", "bias", "silu"))
        moments = self.moments(x, arguments["groups"], arguments["eps"])
        if self.op.mutates:
            normalise(x, moments, weight, bias, silu=silu, out=arguments["out"])
            return None
        if "scale" in arguments:
            return normalise_scaled(
                x,
                moments,
                weight,
                bias,
                arguments["scale"],
                arguments["shift"],
                silu=silu,
                first_apart=arguments["first_apart"],
            )
        if "padding" not in arguments:
            return normalise(x, moments, weight, bias, silu=silu, out=self.split.with_room(x))
        padding, mode = list(arguments["padding"]), arguments["mode"]
        out = room_for(x, padding)
        normalise(x, moments, weight, bias, silu=silu, out=inside_of(out, padding))
        at = self._sides()
        before, after = padding[at : at + 2]
        padding[at : at + 2] = 0, 0
        if before or after:
            self.exchange.fill_halo(
                inside_of(out, padding), before, after, before=before, after=after, edge=EDGES[mode]
            )
            self.split.halos[out] = Halo(before, after, EDGES[mode])
        fill_border(out, padding, mode)
        return out

    def whole(self, *args: Any) -> Any:
        operands = list(args)
        for i in self.shared:
            operands[i] = (
                self.split.room_of_all(args[i]) if self.names[i] == "out" else self.split.gathered(args[i])
            )
        with self.split.plainly():
            y = self.op(*operands)
        if self.op.mutates:
            at = self.names.index("out")
            args[at].copy_(self.exchange.own(operands[at]))
            return None
        if "padding" not in self.names:
            return dense(self.exchange.own(y), y, self.exchange.axis)
        at, padding = self._sides(), operands[self.names.index("padding")]
        before, after = padding[at : at + 2]
        begin, end = self.exchange.spans(self.shape[self.exchange.axis])[self.exchange.rank]
        own = dense(y.narrow(self.exchange.axis, begin, before + end - begin + after), y, self.exchange.axis)
        if before or after:
            self.split.halos[own] = Halo(before, after, EDGES[operands[self.names.index("mode")]])
        return own

    def _sides(self) -> int:
        """Where the two numbers of the split axis stand in a padding."""
        return 2 * (-1 - self.exchange.axis)

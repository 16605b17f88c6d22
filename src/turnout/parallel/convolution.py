"""Convolutions of a split model: a part with the rows of its neighbours around it, by the route of the
whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from turnout.parallel.layout import dense
from turnout.parallel.part_calls import PartCall, choose_for_whole
from turnout.parallel.whole_problem import resized, scaled
from turnout.routing.choose import REFERENCE
from turnout.routing.op import Op

if TYPE_CHECKING:
    from turnout.parallel.split import Split


def convolution(
    split: Split, op: Op, args: tuple, chosen: str | None = None, *, axis: int | None = None, margin: int = 0
) -> tuple[Any, PartCall]:
    """The kind of a call, and the functions for calls of that kind."""
    call = Convolution(split, op, args, chosen, split.exchange.axis if axis is None else axis, margin)
    frame_grain = call.route.grain.in_frames(args[call.at["input"]].dim())
    functions = PartCall(call.part, call.whole, call.keeps_bits, None, call.route.route, frame_grain)
    return (op.name, chosen, call.problem), functions


class Convolution:
    """One kind of call of a convolution on this rank.

    axis: of the split. margin: halo rows that stand around the input in the place of so much padding.
    problem: that of the whole call, which takes `route`. reach: rows that a window sees beside the first of
    it. is_padded: whether the rows around the part are there already. keeps_bits: whether the route declares
    that `part` has the bits of the whole.
    """

    def __init__(self, split: Split, op: Op, args: tuple, chosen: str | None, axis: int, margin: int):
        self.split, self.op, self.exchange, self.axis = split, op, split.exchange, axis
        self.margin, self.runs_torch = margin, chosen == REFERENCE
        self.at = {name: i for i, name in enumerate(op.signature.parameters)}
        self.windowed = [self.at[name] for name in ("input", "cache") if name in self.at]
        of_axis = (args[self.at[name]][axis] for name in ("stride", "padding", "dilation"))
        self.stride, self.padding, dilation = of_axis
        self.reach = dilation * (args[self.at["weight"]].shape[axis] - 1)
        self.is_padded = self.reach > 0 and not self.padding
        whole_rows = self._whole_rows(args[self.at["input"]])
        self.problem = self._whole_problem(args, whole_rows)
        self.route = choose_for_whole(op, op.key(args)._replace(problem=self.problem), chosen)
        # the call is that of one process
        self.is_alone = self.exchange.ranks == 1 and not self.is_padded
        along = self.route.grain.along(self.exchange.axis)
        self.grain = along or 1
        strides_over_grain = self.grain > 1 and (self.is_padded or self.stride > 1)
        self.keeps_bits = (along is not None or self.is_alone) and not strides_over_grain
        self.outputs = (whole_rows + 2 * self.padding - self.reach - 1) // self.stride + 1
        spans = None if self.is_padded else self.exchange.spans(self.outputs)
        self.own = None if spans is None else spans[self.exchange.rank]
        self.is_off_grain = (
            self.grain > 1 and spans is not None and any(begin % self.grain for begin, _ in spans)
        )

    def _whole_rows(self, x: Tensor) -> int:
        """Rows of the input of the whole call."""
        rows, halo = x.shape[self.axis], self.split.halos.get(x)
        if not self.is_padded:
            return self.exchange.global_size(rows)
        outputs = (rows - self.reach - 1) // self.stride + 1
        if halo is not None:  # whose last rows a stride may leave out
            own = rows - halo.before - halo.after
            whole_rows = self.exchange.global_size(own) + halo.before + halo.after
            if self.exchange.global_size(outputs) != (whole_rows - self.reach - 1) // self.stride + 1:
                raise ValueError(
                    f"a convolution of {own} rows or columns with stride {self.stride}, which gives {outputs}"
                )
            return whole_rows
        if (outputs - 1) * self.stride + self.reach + 1 != rows:
            raise ValueError(
                f"a convolution of {rows} rows or columns with stride {self.stride}, which leaves some out"
            )
        return self.exchange.global_size(outputs) * self.stride + self.reach + 1 - self.stride

    def _whole_problem(self, args: tuple, whole_rows: int) -> Any:
        residual = args[self.at["residual"]]
        residual_rows = None if residual is None else self.exchange.global_size(residual.shape[self.axis])
        problem = scaled(self.op.problem(*args), self.axis, whole_rows - 2 * self.margin, residual_rows)
        if self.margin:
            problem = problem._replace(padding=resized(problem.padding, self.axis, self.margin))
        return problem

    def part(self, *args: Any) -> Tensor:
        if self.is_padded or self.is_alone or not (self.reach or self.padding):
            return self.route.run(args)
        operands = list(args)
        operands[self.at["padding"]] = list(resized(operands[self.at["padding"]], self.axis, 0))
        if self.is_off_grain:
            return self._part_on_grain(operands)
        self._widen(operands, 0)
        return self.route.run(tuple(operands))

    def _widen(self, operands: list, more: int) -> None:
        """Put around the input, and cached frames, the rows that windows see, and so many more."""
        before, after = self.padding, self.reach + 1 - self.stride - self.padding
        for i in self.windowed:
            if operands[i] is not None:
                operands[i] = self.split.with_halo(operands[i], before + more, after + more)

    def _part_on_grain(self, operands: list) -> Tensor:
        """Outputs from one multiple of the grain to another, of which the own ones are kept."""
        assert self.own is not None
        axis, (begin, end), more = self.axis, self.own, self.grain - 1
        early = begin % self.grain
        late = min(-(-end // self.grain) * self.grain, self.outputs) - end
        self._widen(operands, more)
        for i in self.windowed:
            if operands[i] is not None:
                rows = operands[i].shape[axis]
                operands[i] = operands[i].narrow(axis, more - early, rows - 2 * more + early + late)
        residual = operands[self.at["residual"]]
        if residual is not None:
            wide = self.exchange.halo(residual, more, more)
            operands[self.at["residual"]] = wide.narrow(
                axis, more - early, residual.shape[axis] + early + late
            )
        y = self.route.run(tuple(operands))
        return dense(y.narrow(axis, early, end - begin), y, axis)

    def whole(self, *args: Any) -> Tensor:
        axis, margin, operands = self.axis, self.margin, list(args)
        for i in self.windowed:
            if margin:
                x = operands[i].narrow(axis, margin, operands[i].shape[axis] - 2 * margin)
                operands[i] = self.exchange.all_gather(dense(x, operands[i], axis), axis)
            elif operands[i] is not None:
                operands[i] = self.split.whole_of(operands[i])
        if margin:
            operands[self.at["padding"]] = list(resized(operands[self.at["padding"]], axis, margin))
        residual = operands[self.at["residual"]]
        if residual is not None:
            operands[self.at["residual"]] = self.exchange.all_gather(residual, axis)
        with self.split.plainly():
            y = self.op.reference(*operands) if self.runs_torch else self.op(*operands)
        return dense(self.exchange.own(y, axis), y, axis)

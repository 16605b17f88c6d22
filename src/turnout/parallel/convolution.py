"""Convolutions of a split model: a part with the rows of its neighbours around it, by the route of the
whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from turnout.parallel.layout import dense
from turnout.parallel.ways import Way, choose
from turnout.parallel.whole_problem import resized, scaled
from turnout.routing.choose import REFERENCE
from turnout.routing.op import Op

if TYPE_CHECKING:
    from turnout.parallel.split import Split


def convolution(
    split: Split, op: Op, args: tuple, chosen: str | None = None, *, axis: int | None = None, margin: int = 0
) -> tuple[Any, Way]:
    """axis: of the split, where it is not the usual one. margin: halo rows that stand around the input in
    the place of so much padding."""
    exchange, names = split.exchange, list(op.signature.parameters)
    axis = exchange.axis if axis is None else axis
    at = {name: names.index(name) for name in names}
    x, weight, residual = args[at["input"]], args[at["weight"]], args[at["residual"]]
    stride, padding, dilation = (args[at[name]][axis] for name in ("stride", "padding", "dilation"))
    reach = dilation * (weight.shape[axis] - 1)
    is_padded = reach > 0 and not padding
    rows = x.shape[axis]
    outputs, halo = ((rows - reach - 1) // stride + 1 if is_padded else None), split.halos.get(x)
    if outputs is not None and halo is not None:  # whose last rows a stride may leave out
        own = rows - halo.before - halo.after
        whole_rows = exchange.global_size(own) + halo.before + halo.after
        if exchange.global_size(outputs) != (whole_rows - reach - 1) // stride + 1:
            raise ValueError(
                f"a convolution of {own} rows or columns with stride {stride}, which gives {outputs}"
            )
    elif outputs is not None:
        whole_rows = exchange.global_size(outputs) * stride + reach + 1 - stride
        if (outputs - 1) * stride + reach + 1 != rows:
            raise ValueError(
                f"a convolution of {rows} rows or columns with stride {stride}, which leaves some out"
            )
    else:
        whole_rows = exchange.global_size(rows)
    key = op.key(args)
    beside = None if residual is None else exchange.global_size(residual.shape[axis])
    problem = scaled(key.problem, axis, whole_rows - 2 * margin, beside)
    if margin:
        problem = problem._replace(padding=resized(problem.padding, axis, margin))
    run, taken, grains = choose(op, key._replace(problem=problem), chosen)
    along = grains.along(exchange.axis)
    is_alone = exchange.ranks == 1 and not is_padded  # the call is that of one process
    is_known, grain = along is not None or is_alone, along or 1
    before, after = padding, reach + 1 - stride - padding
    outer = (whole_rows + 2 * padding - reach - 1) // stride + 1
    own_size = None if is_padded else exchange.spans(outer)[exchange.rank]
    off_grain = (
        grain > 1 and own_size is not None and any(begin % grain for begin, _ in exchange.spans(outer))
    )
    if grain > 1 and (is_padded or stride > 1):
        is_known = False
    cache_at = at.get("cache")
    seen = [at["input"], *([] if cache_at is None else [cache_at])]  # what a window slides over

    def part(*args: Any) -> Tensor:
        operands = list(args)
        if not is_padded and not is_alone and (reach or padding):
            extra = grain - 1 if off_grain else 0
            for i in seen:
                if operands[i] is not None:
                    operands[i] = split.with_halo(operands[i], before + extra, after + extra)
            numbers = list(operands[at["padding"]])
            numbers[axis] = 0
            operands[at["padding"]] = numbers
            if off_grain:
                assert own_size is not None
                begin, end = own_size
                early = begin % grain
                late = min(-(-end // grain) * grain, outer) - end
                for i in seen:
                    if operands[i] is not None:
                        size = operands[i].shape[axis]
                        operands[i] = operands[i].narrow(axis, extra - early, size - 2 * extra + early + late)
                beside = operands[at["residual"]]
                if beside is not None:
                    wide = exchange.halo(beside, extra, extra)
                    operands[at["residual"]] = wide.narrow(
                        axis, extra - early, beside.shape[axis] + early + late
                    )
                y = run(tuple(operands))
                return dense(y.narrow(axis, early, end - begin), y, axis)
        return run(tuple(operands))

    def whole(*args: Any) -> Tensor:
        operands = list(args)
        for i in seen:
            if margin:
                x = operands[i].narrow(axis, margin, operands[i].shape[axis] - 2 * margin)
                operands[i] = exchange.all_gather(dense(x, operands[i], axis), axis)
            elif operands[i] is not None:
                operands[i] = split.whole_of(operands[i])
        if margin:
            operands[at["padding"]] = list(resized(operands[at["padding"]], axis, margin))
        if operands[at["residual"]] is not None:
            operands[at["residual"]] = exchange.all_gather(operands[at["residual"]], axis)
        with split.plainly():
            y = op.reference(*operands) if chosen == REFERENCE else op(*operands)
        return dense(exchange.own(y, axis), y, axis)

    return (op.name, chosen, problem), Way(part, whole, is_known, None, taken, grains.in_frames(x.dim()))

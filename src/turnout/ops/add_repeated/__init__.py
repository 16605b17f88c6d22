"""add_repeated: add the shortcut of an upsampling block to its output, without repeating it in memory."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from turnout.ops.layouts import in_format_of
from turnout.routing.device import Device
from turnout.routing.mistakes import UNCLEAR, raise_clearer
from turnout.routing.op import Op
from turnout.routing.public import public
from turnout.routing.route import Work


class AddRepeated(NamedTuple):
    """Everything that may change the answer or the speed of one call."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    x_shape: tuple[int, ...]
    x_strides: tuple[int, ...]
    times: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(y: Tensor, x: Tensor, times: Sequence[int]) -> AddRepeated:
        check(y, x, times)
        return AddRepeated(tuple(y.shape), y.stride(), tuple(x.shape), x.stride(), tuple(times), y.dtype)

    @property
    def elements(self) -> int:
        return prod(self.shape)


def check(y: Tensor, x: Tensor, times: Sequence[int]) -> None:
    """Raise where shapes, dtypes or devices do not fit together. Looks at no values."""
    if (
        y.dim() != 5
        or x.dim() != 5
        or not y.is_floating_point()
        or (x.dtype, x.device) != (y.dtype, y.device)
    ):
        raise ValueError(
            f"y is {y.dtype} {list(y.shape)} on {y.device}, x is {x.dtype} {list(x.shape)} on {x.device}; "
            "both need to be [batch, channels, frames, height, width] of one floating-point dtype and device"
        )
    if len(times) != 3 or min(times) < 1:
        raise ValueError(f"times {list(times)}, it needs three whole numbers of at least 1")
    (batch, channels, frames, height, width), own = y.shape, x.shape
    kept = frames // max(own[2], 1)
    if (batch, frames, height, width) != (own[0], own[2] * kept, own[3] * times[1], own[4] * times[2]) or (
        own[2] > 0 and not 1 <= kept <= times[0]
    ):
        raise ValueError(
            f"y is {list(y.shape)}, x repeated {list(times)} times is "
            f"{[own[0], channels, own[2] * times[0], own[3] * times[1], own[4] * times[2]]}, "
            "it needs to be as large, or to have fewer frames, as many of each of x's"
        )
    if picks_of(own[1], channels, times) is None:
        raise ValueError(
            f"{channels} channels of y, {own[1]} of x and times {list(times)}: it needs 1 of x's channels "
            "for each of y's, or as many as its first, its first two or all axes are repeated"
        )


def picks_of(before: int, after: int, times: Sequence[int]) -> tuple[int, int, int] | None:
    """How many of x's channels supply the repeats along each axis; None where the numbers do not fit
    together.

    >>> picks_of(8, 8, (2, 2, 2)), picks_of(8, 4, (1, 2, 2)), picks_of(6, 2, (2, 2, 2))
    ((1, 1, 1), (1, 2, 1), None)
    """
    for count in range(4):
        if before == after * prod(times[:count]):
            time, row, column = (*times[:count], 1, 1, 1)[:3]
            return time, row, column
    return None


def reference(y: Tensor, x: Tensor, times: list[int]) -> Tensor:
    check(y, x, times)
    picks = picks_of(x.shape[1], y.shape[1], times)
    assert picks is not None
    kept = y.shape[2] // max(x.shape[2], 1) if x.shape[2] else times[0]
    # [B, C, t, h, w, T, H, W], with repeats of size 1 wherever all of them are the same
    repeats = x.unflatten(1, (y.shape[1], *picks)).expand(-1, -1, *times, -1, -1, -1)[:, :, times[0] - kept :]
    return in_format_of(y + repeats.permute(0, 1, 5, 2, 6, 3, 7, 4).reshape(y.shape), y)


def work(problem: AddRepeated) -> Work:
    """y and x read once, the sum written once."""
    size = problem.elements * problem.dtype.itemsize
    return Work(2 * size + prod(problem.x_shape) * problem.dtype.itemsize, problem.elements, size)


def side_by_side(problem: AddRepeated) -> bool:
    """Whether channels are next to each other, in y and in x."""
    return all(
        shape[1] == 1 or strides[1] == 1
        for shape, strides in ((problem.shape, problem.strides), (problem.x_shape, problem.x_strides))
    )


def family(problem: AddRepeated) -> tuple[tuple, int]:
    """Problems that differ in frames, rows and columns only share a family; the size is y's pixels."""
    channels = problem.shape[1]
    kept = problem.shape[2] // max(problem.x_shape[2], 1)
    same = (channels, problem.x_shape[1], kept, problem.times, side_by_side(problem), problem.dtype)
    return same, problem.elements // max(channels, 1)


def reference_cost(problem: AddRepeated, device: Device) -> float | None:
    """A copy over six dimensions, an element at a time, and an addition: a guess."""
    moving = device.seconds(work(problem).bytes)
    return None if moving is None else max(3e-5, 4 * moving)


ADD_REPEATED = Op(
    "add_repeated",
    reference,
    problem_type=AddRepeated,
    cost=reference_cost,
    work=work,
    cases="turnout.ops.add_repeated.cases",
    family=family,
    autocast="ignore",
)


@public(ADD_REPEATED)
def add_repeated(y: Tensor, x: Tensor, *, times: Sequence[int]) -> Tensor:
    """`y` plus x with each of its pixels repeated `times` along time, height and width, in one pass: the
    shortcut of an upsampling block.

    y: `[B, C, T', H', W']`, x: `[B, C', T, H, W]`, with `H' = times[1] * H` and `W' = times[2] * W`. Of each
    frame of x only the last repeats are used where y has fewer than `times[0] * T`. Where x has more channels
    than y, neighbours among them are the repeats in turn, along the first axis, the first two or all. Returns
    a new tensor in y's memory format.

    >>> import torch, turnout
    >>> x = torch.tensor([1.0, 2.0]).view(1, 1, 1, 1, 2)
    >>> turnout.add_repeated(torch.zeros(1, 1, 1, 1, 4), x, times=(1, 1, 2)).flatten()
    tensor([1., 1., 2., 2.])
    >>> x = torch.tensor([1.0, 2.0]).view(1, 2, 1, 1, 1)  # two channels are two frames
    >>> turnout.add_repeated(torch.zeros(1, 1, 2, 1, 1), x, times=(2, 1, 1)).flatten()
    tensor([1., 2.])
    """
    try:
        repeats = list(times)
    except UNCLEAR as failure:
        raise_clearer("add_repeated", add_repeated, locals().items(), failure)
        raise
    return ADD_REPEATED(y, x, repeats)

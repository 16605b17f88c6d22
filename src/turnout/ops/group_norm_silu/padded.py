"""group_norm_silu_pad: the group norm and the activation of a video decoder, inside the border that its
convolution needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from turnout.ops.group_norm_silu import GroupNormSilu, check, normalised, reference_cost
from turnout.routing.device import Device
from turnout.routing.mistakes import UNCLEAR, raise_clearer
from turnout.routing.op import Op
from turnout.routing.public import public
from turnout.routing.route import Work

MODES = ("replicate", "reflect", "constant")


class GroupNormSiluPad(NamedTuple):
    """Everything that may change the answer or the speed of one call."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    groups: int
    dtype: torch.dtype
    weight_dtype: torch.dtype | None
    bias_dtype: torch.dtype | None
    silu: bool
    padding: tuple[int, ...]
    mode: str

    @staticmethod
    def of(
        x: Tensor,
        groups: int,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        silu: bool,
        padding: Sequence[int],
        mode: str,
    ) -> GroupNormSiluPad:
        check_padded(x, groups, weight, bias, padding, mode)
        return GroupNormSiluPad(
            tuple(x.shape),
            x.stride(),
            groups,
            x.dtype,
            None if weight is None else weight.dtype,
            None if bias is None else bias.dtype,
            silu,
            tuple(padding),
            mode,
        )

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def out_shape(self) -> tuple[int, ...]:
        return padded_shape(self.shape, self.padding)

    @property
    def out_strides(self) -> tuple[int, ...]:
        return padded_strides(self.out_shape, self.rows)

    @property
    def rows(self) -> bool:
        """Whether channels are side by side."""
        return self.strides[1] == 1 and self.shape[1] > 1

    @property
    def unpadded(self) -> GroupNormSilu:
        """The same norm without a border."""
        strides = padded_strides(self.shape, self.rows)
        return GroupNormSilu(
            self.shape,
            self.strides,
            strides,
            self.groups,
            self.dtype,
            self.weight_dtype,
            self.bias_dtype,
            self.silu,
        )


def padded_shape(shape: Sequence[int], padding: Sequence[int]) -> tuple[int, ...]:
    """The shape of a tensor `[B, C, ...]` with a border, as `torch.nn.functional.pad` makes it.

    >>> padded_shape((1, 8, 4, 5), (1, 2, 3, 0))
    (1, 8, 7, 8)
    """
    sizes = list(shape)
    for i, (before, after) in enumerate(zip(padding[::2], padding[1::2], strict=True)):
        sizes[-1 - i] += before + after
    return tuple(sizes)


def padded_strides(shape: Sequence[int], rows: bool) -> tuple[int, ...]:
    """The strides of a fresh tensor of that shape: channels side by side, or contiguous."""
    dims = range(len(shape) - 1, -1, -1)
    strides, step = [0] * len(shape), 1
    for dim in (1, *(dim for dim in dims if dim > 1), 0) if rows else dims:
        strides[dim], step = step, step * max(shape[dim], 1)
    return tuple(strides)


def inside_of(y: Tensor, padding: Sequence[int]) -> Tensor:
    """The inside of a tensor with a border: a view."""
    for i, (before, after) in enumerate(zip(padding[::2], padding[1::2], strict=True)):
        y = y.narrow(-1 - i, before, y.shape[-1 - i] - before - after)
    return y


def fill_border(y: Tensor, padding: Sequence[int], mode: str) -> None:
    """Fill the border of a tensor whose inside is there, as `torch.nn.functional.pad` does.

    >>> import torch
    >>> y = torch.tensor([[[0.0, 0, 1, 2, 3, 0]]])
    >>> fill_border(y, (2, 1), "reflect")
    >>> y
    tensor([[[3., 2., 1., 2., 3., 2.]]])
    """
    for i, (before, after) in enumerate(zip(padding[::2], padding[1::2], strict=True)):
        dim, last = y.dim() - 1 - i, y.shape[-1 - i] - after - 1
        # Dimensions before this one are filled later, from all of this one.
        rows = inside_of(y, [*[0] * (2 * i + 2), *padding[2 * i + 2 :]])
        for place in (*range(before), *range(last + 1, last + 1 + after)):
            if mode == "constant":
                rows.select(dim, place).zero_()
                continue
            edge = before if place < before else last
            rows.select(dim, place).copy_(rows.select(dim, 2 * edge - place if mode == "reflect" else edge))


def check_padded(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, padding: Sequence[int], mode: str
) -> None:
    """Raise where shapes, dtypes, devices or the border do not fit together. Looks at no values."""
    check(x, groups, weight, bias, None)
    if not 3 <= x.dim() <= 5:
        raise ValueError(f"x is {list(x.shape)}, it needs to be [B, C, W], [B, C, H, W] or [B, C, D, H, W]")
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}, it needs to be one of {', '.join(MODES)}")
    if len(padding) != 2 * (x.dim() - 2) or any(n < 0 for n in padding):
        raise ValueError(
            f"padding is {list(padding)}, it needs to be numbers from 0 on: before and after each of the last"
            f" {x.dim() - 2} dimensions, the last one first"
        )
    if mode == "reflect" and any(n >= x.shape[-1 - i // 2] for i, n in enumerate(padding) if n):
        raise ValueError(
            f"padding is {list(padding)}, "
            f"in mode reflect each needs to be smaller than its size of x {list(x.shape)}"
        )


def reference(
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    silu: bool,
    padding: list[int],
    mode: str,
) -> Tensor:
    check_padded(x, groups, weight, bias, padding, mode)
    y = normalised(x, groups, weight, bias, eps, silu)
    y = F.pad(y, tuple(padding), mode) if any(padding) else y
    strides = padded_strides(y.shape, x.stride(1) == 1 and x.shape[1] > 1)
    return y if y.stride() == strides else y.new_empty_strided(y.shape, strides).copy_(y)


def work(problem: GroupNormSiluPad) -> Work:
    """x read for its moments and again for the norm, the output written once; about ten operations an
    element.
    """
    out = prod(problem.out_shape)
    return Work((2 * problem.elements + out) * problem.dtype.itemsize, 10 * out, out * problem.dtype.itemsize)


def family(problem: GroupNormSiluPad) -> tuple[tuple, int]:
    """Problems that differ in the number of positions only, and that number."""
    batch, channels, *sizes = problem.shape
    dense = problem.strides == padded_strides(problem.shape, problem.rows)
    layout_key = (problem.rows, dense) if dense else (problem.rows, problem.strides)
    return (layout_key, len(sizes), batch, channels, *problem[2:]), prod(sizes)


def cost(problem: GroupNormSiluPad, device: Device) -> float | None:
    """The norm, then a copy with the border."""
    norm = reference_cost(problem.unpadded, device)
    if device.type == "cpu":
        return (
            None
            if norm is None
            else norm + prod(problem.out_shape) * device.fitted("group_norm_silu.reference").element_padded
        )
    copy = device.seconds(2 * prod(problem.out_shape) * problem.dtype.itemsize)
    return None if norm is None or copy is None else norm + copy


GROUP_NORM_SILU_PAD = Op(
    "group_norm_silu_pad",
    reference,
    problem_type=GroupNormSiluPad,
    cost=cost,
    work=work,
    cases="turnout.ops.group_norm_silu.cases_padded",
    family=family,
    autocast="ignore",
)


@public(GROUP_NORM_SILU_PAD)
def group_norm_silu_pad(
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    padding: Sequence[int],
    mode: str = "replicate",
    eps: float = 1e-5,
    silu: bool = True,
) -> Tensor:
    """`pad(silu(group_norm(x)))` in two launches: the border is written with the rest; `silu=False` leaves
    the activation out.

    x: `[B, C, W]`, `[B, C, H, W]` or `[B, C, D, H, W]`; weight, bias: `[C]` or None.
    padding: how much to add before and after each dimension, the last one first, as in
    `torch.nn.functional.pad`; what is left out is 0. mode: the border repeats the edge ("replicate"), mirrors
    what is inside ("reflect") or is zero ("constant"). Returns a new tensor, channels-last where the channels
    of x are side by side, else contiguous.

    The input of HunyuanVideo's causal convolutions, two frames before the first and one pixel around:

    >>> import torch, turnout
    >>> x = torch.randn(1, 8, 3, 4, 5).contiguous(memory_format=torch.channels_last_3d)
    >>> y = turnout.group_norm_silu_pad(x, 2, padding=(1, 1, 1, 1, 2, 0))
    >>> y.shape, y.is_contiguous(memory_format=torch.channels_last_3d)
    (torch.Size([1, 8, 5, 6, 7]), True)
    >>> torch.equal(y[:, :, 0], y[:, :, 2])
    True
    """
    try:
        missing = 0 if len(padding) % 2 else 2 * (x.dim() - 2) - len(padding)
        sides = [*padding, *[0] * missing]
    except UNCLEAR as failure:
        raise_clearer("group_norm_silu_pad", group_norm_silu_pad, locals().items(), failure)
        raise
    return GROUP_NORM_SILU_PAD(x, groups, weight, bias, eps, silu, sides, mode)

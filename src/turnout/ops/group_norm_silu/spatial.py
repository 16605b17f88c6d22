"""spatial_norm_silu: a group norm whose scale and shift come from the latents, at their resolution, and the
activation.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from turnout.ops.group_norm_silu import GroupNormSilu, check, normalised, reference_cost
from turnout.ops.layouts import fresh_strides, in_format_of
from turnout.routing.device import Device
from turnout.routing.op import Op
from turnout.routing.public import public
from turnout.routing.route import Work


class SpatialNormSilu(NamedTuple):
    """Everything that may change the answer or the speed of one call."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    out_strides: tuple[int, ...]
    scale_shape: tuple[int, ...]
    scale_strides: tuple[int, ...]
    shift_strides: tuple[int, ...]
    groups: int
    dtype: torch.dtype
    weight_dtype: torch.dtype | None
    bias_dtype: torch.dtype | None
    scale_dtype: torch.dtype
    shift_dtype: torch.dtype
    silu: bool
    first_apart: bool

    @staticmethod
    def of(
        x: Tensor,
        groups: int,
        weight: Tensor | None,
        bias: Tensor | None,
        scale: Tensor,
        shift: Tensor,
        eps: float,
        silu: bool,
        first_apart: bool,
    ) -> SpatialNormSilu:
        check_spatial(x, groups, weight, bias, scale, shift, first_apart)
        return SpatialNormSilu(
            tuple(x.shape),
            x.stride(),
            fresh_strides(x),
            tuple(scale.shape),
            scale.stride(),
            shift.stride(),
            groups,
            x.dtype,
            None if weight is None else weight.dtype,
            None if bias is None else bias.dtype,
            scale.dtype,
            shift.dtype,
            silu,
            first_apart,
        )

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def norm(self) -> GroupNormSilu:
        """The norm alone."""
        return GroupNormSilu(
            self.shape,
            self.strides,
            self.out_strides,
            self.groups,
            self.dtype,
            self.weight_dtype,
            self.bias_dtype,
            self.silu,
        )


def repeats(size: int, small: int, apart: int) -> int:
    """How many of `size` positions of x take one of the `small` of scale and shift, after the `apart` first,
    which have one each; 0 where that is not a whole number.

    >>> repeats(480, 60, 0), repeats(9, 3, 1), repeats(9, 2, 0)
    (8, 4, 0)
    """
    size, small = size - apart, small - apart
    if size == small:
        return 1
    return size // small if small > 0 and size > 0 and size % small == 0 else 0


def check_spatial(
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor,
    shift: Tensor,
    first_apart: bool,
) -> None:
    """Raise where shapes, dtypes or devices do not fit together. Looks at no values."""
    check(x, groups, weight, bias, None)
    if not 3 <= x.dim() <= 5:
        raise ValueError(f"x is {list(x.shape)}, it needs to be [B, C, W], [B, C, H, W] or [B, C, T, H, W]")
    for name, tensor in (("scale", scale), ("shift", shift)):
        if not tensor.is_floating_point() or tensor.device != x.device or tensor.shape != scale.shape:
            raise ValueError(
                f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}, "
                f"it needs to be floating-point {list(scale.shape)} on {x.device}"
            )
    if scale.dim() != x.dim() or scale.shape[:2] != x.shape[:2]:
        raise ValueError(
            f"scale is {list(scale.shape)}, it needs to be {list(x.shape)} or smaller behind the channels"
        )
    for dim in range(2, x.dim()):
        if not repeats(x.shape[dim], scale.shape[dim], int(first_apart and dim == 2)):
            apart = " after the first of each" if first_apart and dim == 2 else ""
            raise ValueError(
                f"scale has {scale.shape[dim]} positions along dimension {dim} and x has {x.shape[dim]}:"
                f" it needs to have a whole number for each{apart}; make scale and shift as large as x"
            )


def modulated(y: Tensor, scale: Tensor, shift: Tensor, first_apart: bool) -> Tensor:
    """y * scale + shift, each value of scale and shift for a whole block of y."""
    if first_apart and y.shape[2] > 1:
        frames = (slice(0, 1), slice(1, None))
        return torch.cat([modulated(y[:, :, i], scale[:, :, i], shift[:, :, i], False) for i in frames], 2)
    shape = y.shape
    for dim in range(y.dim() - 1, 1, -1):
        y = y.unflatten(dim, (scale.shape[dim], repeats(y.shape[dim], scale.shape[dim], 0)))
    for dim in range(scale.dim() - 1, 1, -1):
        scale, shift = scale.unsqueeze(dim + 1), shift.unsqueeze(dim + 1)
    if y.dtype == scale.dtype == shift.dtype:
        return torch.addcmul(shift, y, scale).reshape(shape)
    wide = torch.promote_types(y.dtype, torch.float32)
    return (y.to(wide) * scale.to(wide) + shift.to(wide)).to(y.dtype).reshape(shape)


def reference(
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor,
    shift: Tensor,
    eps: float,
    silu: bool,
    first_apart: bool,
) -> Tensor:
    check_spatial(x, groups, weight, bias, scale, shift, first_apart)
    y = normalised(x, groups, weight, bias, eps, False)
    elements = x.numel()
    if isinstance(elements, int) and not elements:  # gradients reach scale and shift: zeros
        y = y + (0 * (scale.sum() + shift.sum())).to(y.dtype)
    else:
        y = modulated(y, scale, shift, first_apart)
    return in_format_of(
        F.silu(y) if silu else y.clone(), x
    )  # y may be a view of blocks, which nobody could write into


def work(problem: SpatialNormSilu) -> Work:
    """x read for its moments and again for the norm, scale and shift read, the output written once."""
    size = problem.elements * problem.dtype.itemsize
    small = prod(problem.scale_shape) * (problem.scale_dtype.itemsize + problem.shift_dtype.itemsize)
    return Work(3 * size + small, 12 * problem.elements, size)


def cost(problem: SpatialNormSilu, device: Device) -> float | None:
    """The norm, then the modulation and the activation, each read and written."""
    norm = reference_cost(problem.norm, device)
    if device.type == "cpu":
        return (
            None
            if norm is None
            else norm + problem.elements * device.fitted("group_norm_silu.reference").element_spatial
        )
    passes = device.seconds(4 * problem.elements * problem.dtype.itemsize)
    return None if norm is None or passes is None else norm + passes


def family(problem: SpatialNormSilu) -> tuple[tuple, int]:
    """Problems that differ in the number of positions only, and that number."""
    batch, channels, *sizes = problem.shape
    apart = [int(problem.first_apart and dim == 0) for dim in range(len(sizes))]
    smalls = problem.scale_shape[2:]
    factors = tuple(
        repeats(size, small, first) for size, small, first in zip(sizes, smalls, apart, strict=True)
    )
    rows = (problem.strides[1], problem.out_strides[1], problem.scale_strides[1], problem.shift_strides[1])
    dense = problem.strides == problem.out_strides
    return (rows, dense, factors, batch, channels, *problem[6:]), prod(sizes)


SPATIAL_NORM_SILU = Op(
    "spatial_norm_silu",
    reference,
    problem_type=SpatialNormSilu,
    cost=cost,
    work=work,
    cases="turnout.ops.group_norm_silu.cases_spatial",
    family=family,
    autocast="ignore",
)


@public(SPATIAL_NORM_SILU)
def spatial_norm_silu(
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor,
    shift: Tensor,
    *,
    eps: float = 1e-5,
    silu: bool = True,
    first_apart: bool = False,
) -> Tensor:
    """`silu(group_norm(x) * scale + shift)`, scale and shift at a lower resolution; `silu=False` leaves the
    activation out.

    x: `[B, C, W]`, `[B, C, H, W]` or `[B, C, T, H, W]`; weight, bias: `[C]` or None; scale, shift: `[B, C,
    ...]` with as many dimensions, each value for a whole block of x, as nearest-neighbour upsampling repeats
    it. first_apart: the first along dimension 2, a clip's first frame, takes the first of scale and shift,
    and the other frames share the others. Where a size of x is no multiple, give scale and shift that are as
    large as x. Returns a new tensor in x's memory format. Moments are taken in float32, and rounding happens
    once.

    The norms of CogVideoX's decoder, whose scale and shift are 1x1 convolutions of the latents:

    >>> import torch, turnout
    >>> x, scale, shift = torch.randn(1, 8, 5, 4, 6), torch.randn(1, 8, 3, 2, 3), torch.randn(1, 8, 3, 2, 3)
    >>> y = turnout.spatial_norm_silu(x, 2, None, None, scale, shift, silu=False, first_apart=True)
    >>> normed = torch.nn.functional.group_norm(x, 2)
    >>> last = normed[0, :, 4, 3, 5] * scale[0, :, 2, 1, 2] + shift[0, :, 2, 1, 2]
    >>> torch.allclose(y[0, :, 4, 3, 5], last, atol=1e-5)
    True
    """
    return SPATIAL_NORM_SILU(x, groups, weight, bias, scale, shift, eps, silu, first_apart)

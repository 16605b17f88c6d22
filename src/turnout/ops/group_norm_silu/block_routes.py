"""Routes of the group norms whose sums are those of blocks, so that a picture in parts has the same bits as
one in one piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from turnout.ops import needs
from turnout.ops.group_norm_silu import (
    GROUP_NORM_SILU,
    GROUP_NORM_SILU_INTO,
    LARGE_ON_CPU,
    MOST_AXES,
    GroupNormSilu,
    guards,
)
from turnout.ops.group_norm_silu.block_launches import launch_moments, launch_norm, launch_sums, steps_of
from turnout.ops.group_norm_silu.blocks import (
    Where,
    block_sums,
    blocks_of,
    grain,
    moments_of,
    normalise,
    normalise_scaled,
    rows_and_columns,
    scaled,
)
from turnout.ops.group_norm_silu.padded import (
    GROUP_NORM_SILU_PAD,
    GroupNormSiluPad,
    fill_border,
    inside_of,
    padded_shape,
    padded_strides,
)
from turnout.ops.group_norm_silu.routes import INTO
from turnout.ops.group_norm_silu.spatial import SPATIAL_NORM_SILU, SpatialNormSilu
from turnout.ops.layouts import folded
from turnout.routing.device import Device

if TYPE_CHECKING:
    from turnout.ops.group_norm_silu.guards import AnyNorm

NAME = "cpu-block-sums"
NAME_ON_GPU = "block-sums"


def refuses_anywhere(problem: AnyNorm, device: Device) -> Iterator[str]:
    yield from needs.needs_numba(device)
    yield from guards.refuses_any_call(problem)
    sizes, _ = folded(problem.shape[2:], problem.strides[2:], problem.out_strides[2:])
    if len(sizes) > MOST_AXES:
        yield f"positions in {len(sizes)} dimensions that do not fold, this route needs at most {MOST_AXES}"


def refuses_spatial(problem: SpatialNormSilu, device: Device) -> Iterator[str]:
    yield from refuses_anywhere(problem, device)
    yield from needs.needs_half_or_single(scale=problem.scale_dtype, shift=problem.shift_dtype)


def cost(problem: AnyNorm, device: Device) -> float | None:
    """Measured on one core, see NOTES.md: an element, a pixel, a channel of a block, the host."""
    if device.type != "cpu":
        return None
    fitted, rows = device.fitted("group_norm_silu.cpu-blocks"), problem.strides[1] == 1
    start = fitted.start if isinstance(problem, GroupNormSilu) else fitted.start_around
    blocks = prod([-(-size // grain(size)) for size in rows_and_columns(problem.shape)])
    sums = problem.elements * (fitted.sums_rows if rows else fitted.sums_planes)
    reduced = (
        problem.shape[0] * problem.shape[1] * blocks * (fitted.block_rows if rows else fitted.block_planes)
    )
    large = problem.elements * problem.dtype.itemsize >= LARGE_ON_CPU
    written = problem.elements * (
        fitted.written + (fitted.byte_of_large * problem.dtype.itemsize if large else 0)
    )
    if rows:
        written += problem.elements / problem.shape[1] * fitted.row
    elif isinstance(problem, GroupNormSiluPad):
        written += problem.elements * fitted.element_padded
    return start + (sums + reduced + written) / device.cores


ON_CPU: Any = {
    "cost": cost,
    "numerics": "close",
    "version": 1,
    "kernels": [
        f"turnout.ops.group_norm_silu.cpu_kernels:{name}"
        for name in ("row_sums", "line_sums", "combine", "apply_rows", "apply_lines", "apply_spatial")
    ],
}


def moments(x: Tensor, groups: int, eps: float) -> Tensor:
    """Those of a picture in one piece, `[B, 3, groups]`."""
    return moments_of(block_sums(x, groups), prod(x.shape[1:]) // groups, eps)


def room_for(x: Tensor, padding: list[int]) -> Tensor:
    """Memory for x and a border around it."""
    shape = padded_shape(x.shape, padding)
    strides = padded_strides(shape, x.stride(1) == 1 and x.shape[1] > 1)
    return torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device)


@GROUP_NORM_SILU.route(NAME, refuses=refuses_anywhere, **ON_CPU)
def in_blocks(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, silu: bool
) -> Tensor:
    return normalise(x, moments(x, groups, eps), weight, bias, silu=silu)


# All of x is read for the sums before the first value is written, and then each value before its own place
# is.
@GROUP_NORM_SILU_INTO.route(NAME, refuses=refuses_anywhere, in_place=("x",), **ON_CPU)
def in_blocks_into(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, out: Tensor, eps: float, silu: bool
) -> None:
    normalise(x, moments(x, groups, eps), weight, bias, silu=silu, out=out)


@GROUP_NORM_SILU_PAD.route(NAME, refuses=refuses_anywhere, **ON_CPU)
def in_blocks_padded(
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    silu: bool,
    padding: list[int],
    mode: str,
) -> Tensor:
    out = room_for(x, padding)
    normalise(x, moments(x, groups, eps), weight, bias, silu=silu, out=inside_of(out, padding))
    fill_border(out, padding, mode)
    return out


@SPATIAL_NORM_SILU.route(NAME, refuses=refuses_spatial, **ON_CPU)
def in_blocks_scaled(
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
    return normalise_scaled(
        x, moments(x, groups, eps), weight, bias, scale, shift, silu=silu, first_apart=first_apart
    )


# Routes on a GPU. Not measured: they have no cost, so that nothing but a pin or a measured row chooses them.


def refuses_on_gpu(problem: AnyNorm, device: Device) -> Iterator[str]:
    yield from guards.refuses_on_gpu(problem, device)
    channels = problem.shape[1]
    if channels == 1 or (problem.strides[1], problem.out_strides[1]) != (1, 1):
        yield f"x with strides {list(problem.strides)}, this route needs more than one channel, side by side"
    for name, strides in (("x", problem.strides), ("the output", problem.out_strides)):
        if steps_of(problem.shape, strides) is None:
            yield (
                f"{name} with strides {list(strides)}, "
                "this route needs dimensions before the rows that are one walk"
            )
    yield from guards.refuses_sizes(channels // problem.groups, prod(problem.shape[2:]))


def no_cost(problem: Any, device: Device) -> None:
    return None


BLOCK_KERNELS = [
    f"turnout.ops.group_norm_silu.block_kernels:block_{step}" for step in ("sums", "moments", "apply")
]
ON_GPU: Any = {
    "refuses": refuses_on_gpu,
    "cost": no_cost,
    "numerics": "close",
    "version": 1,
    "kernels": BLOCK_KERNELS,
}


def norm_on_gpu(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, silu: bool, out: Tensor
) -> Tensor:
    where = Where.whole(x.shape)
    sums = launch_sums(x, groups, (grain(where.height), grain(where.width)), blocks_of(x.shape, where))
    return launch_norm(x, launch_moments(sums, prod(x.shape[1:]) // groups, eps), weight, bias, silu, out)


@GROUP_NORM_SILU.route(NAME_ON_GPU, **ON_GPU)
def on_gpu(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, silu: bool
) -> Tensor:
    return norm_on_gpu(x, groups, weight, bias, eps, silu, torch.empty_like(x))


@GROUP_NORM_SILU_INTO.route(NAME_ON_GPU, **ON_GPU, **INTO)
def on_gpu_into(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, out: Tensor, eps: float, silu: bool
) -> None:
    norm_on_gpu(x, groups, weight, bias, eps, silu, out)


@GROUP_NORM_SILU_PAD.route(NAME_ON_GPU, **ON_GPU)
def on_gpu_padded(
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    silu: bool,
    padding: list[int],
    mode: str,
) -> Tensor:
    out = room_for(x, padding)
    norm_on_gpu(x, groups, weight, bias, eps, silu, inside_of(out, padding))
    fill_border(out, padding, mode)
    return out


@SPATIAL_NORM_SILU.route(NAME_ON_GPU, **ON_GPU)
def on_gpu_scaled(
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
    y = norm_on_gpu(x, groups, weight, bias, eps, False, torch.empty_like(x))
    return scaled(y, scale, shift, silu, first_apart)

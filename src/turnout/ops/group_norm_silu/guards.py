"""What the routes of the group norms refuse."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from turnout.ops import needs
from turnout.ops.group_norm_silu import GroupNormSilu, axes, layout
from turnout.routing.device import Device

if TYPE_CHECKING:
    from turnout.ops.group_norm_silu.padded import GroupNormSiluPad
    from turnout.ops.group_norm_silu.spatial import SpatialNormSilu

    AnyNorm = GroupNormSilu | GroupNormSiluPad | SpatialNormSilu

WIDEST_GROUP = 4096  # channels of a group, channels side by side
MOST_POSITIONS = 2**30  # of one batch entry where they have gaps: kernels count them in 32 bits


def refuses_any_call(problem: AnyNorm) -> Iterator[str]:
    """Reasons why no kernel of ours takes a problem."""
    if problem.elements == 0:
        yield "nothing to normalise, this route needs at least one element"
    yield from needs.needs_half_or_single(
        x=problem.dtype, weight=problem.weight_dtype, bias=problem.bias_dtype
    )
    if any(stride == 0 and size > 1 for size, stride in zip(problem.shape, problem.out_strides, strict=True)):
        yield "an output whose elements share memory, this route needs one place for each"


def refuses_on_gpu(problem: AnyNorm, device: Device) -> Iterator[str]:
    yield from needs.needs_triton(device)
    yield from refuses_any_call(problem)


def refuses_layout(problem: GroupNormSilu, wanted: str) -> Iterator[str]:
    if layout(problem) != wanted:
        strides = f"strides {list(problem.strides)} into {list(problem.out_strides)}"
        yield f"{layout(problem)} with {strides}, this route needs {wanted}"


def refuses_rows(problem: GroupNormSilu, device: Device) -> Iterator[str]:
    yield from refuses_on_gpu(problem, device)
    yield from refuses_layout(problem, "rows")
    each = problem.shape[1] // problem.groups
    if each > WIDEST_GROUP:
        yield f"{each} channels a group, this route needs at most {WIDEST_GROUP}"


def refuses_gapped_rows(problem: GroupNormSilu, device: Device) -> Iterator[str]:
    yield from refuses_on_gpu(problem, device)
    yield from refuses_layout(problem, "gapped-rows")
    yield from refuses_sizes(problem.shape[1] // problem.groups, math.prod(problem.shape[2:]))


def refuses_sizes(each: int, positions: int) -> Iterator[str]:
    """Channels of a group and positions that are too many for the kernels of rows with gaps."""
    if each > WIDEST_GROUP:
        yield f"{each} channels a group, this route needs at most {WIDEST_GROUP}"
    if positions >= MOST_POSITIONS:
        yield f"{positions} positions, this route needs fewer than {MOST_POSITIONS}"


def refuses_padded(problem: GroupNormSiluPad, device: Device) -> Iterator[str]:
    yield from refuses_on_gpu(problem, device)
    if not problem.rows:
        yield f"x with strides {list(problem.strides)}, this route needs more than one channel, side by side"
    elif axes(problem.shape, problem.strides, problem.out_strides, problem.padding) is None:
        yield (
            f"x with strides {list(problem.strides)}, this route needs positions of at most three dimensions"
        )
    yield from refuses_sizes(problem.shape[1] // problem.groups, math.prod(problem.out_shape[2:]))


def refuses_spatial(problem: SpatialNormSilu, device: Device) -> Iterator[str]:
    yield from refuses_on_gpu(problem, device)
    yield from needs.needs_half_or_single(scale=problem.scale_dtype, shift=problem.shift_dtype)
    if problem.shape[1] == 1 or (problem.strides[1], problem.out_strides[1]) != (1, 1):
        yield f"x with strides {list(problem.strides)}, this route needs more than one channel, side by side"
    yield from refuses_sizes(problem.shape[1] // problem.groups, math.prod(problem.shape[2:]))


def refuses_planes(problem: GroupNormSilu, device: Device) -> Iterator[str]:
    yield from refuses_on_gpu(problem, device)
    yield from refuses_layout(problem, "planes")

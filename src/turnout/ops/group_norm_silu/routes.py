"""The routes of group_norm_silu and of its form that writes into a buffer: two launches a layout."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from turnout.launch import LaunchPlan, prepare_from_plan, runs_plan
from turnout.ops import needs
from turnout.ops.group_norm_silu import (
    GROUP_NORM_SILU,
    GROUP_NORM_SILU_INTO,
    GroupNormSilu,
    axes,
    layout,
    work,
)
from turnout.ops.group_norm_silu.launches import (
    block_of,
    gapped_plan,
    plan_spatial,
    plan_two,
    planes_plan,
    rows_plan,
)
from turnout.ops.group_norm_silu.padded import (
    GROUP_NORM_SILU_PAD,
    GroupNormSiluPad,
    padded_shape,
    padded_strides,
)
from turnout.ops.group_norm_silu.padded import work as padded_work
from turnout.ops.group_norm_silu.spatial import SPATIAL_NORM_SILU, SpatialNormSilu
from turnout.ops.group_norm_silu.spatial import work as spatial_work
from turnout.ops.integers import power_of_two
from turnout.routing.device import Device
from turnout.routing.op import Config

LARGE = 2**20  # elements from which on a second configuration is worth trying
VERY_LARGE = 2**28  # elements from which on combining the moments takes a program no time to speak of
WIDEST_GROUP = 4096  # channels of a group, channels side by side
MOST_POSITIONS = 2**30  # of one batch entry where they have gaps: kernels count them in 32 bits


def refuses_on_gpu(
    problem: GroupNormSilu | GroupNormSiluPad | SpatialNormSilu, device: Device
) -> Iterator[str]:
    yield from needs.needs_triton(device)
    if problem.elements == 0:
        yield "nothing to normalise, this route needs at least one element"
    yield from needs.needs_half_or_single(
        x=problem.dtype, weight=problem.weight_dtype, bias=problem.bias_dtype
    )
    if any(stride == 0 and size > 1 for size, stride in zip(problem.shape, problem.out_strides, strict=True)):
        yield "an output whose elements share memory, this route needs one place for each"


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


def gpu_cost(problem: GroupNormSilu, device: Device) -> float | None:
    """Where x fits the cache, its second reading is nearly free.

    Shares and time of the host: measured on an H200, see NOTES.md.
    """
    size = problem.elements * problem.dtype.itemsize
    moving = device.seconds(work(problem).bytes - (size if size < device.cache // 2 else 0))
    fitted = device.fitted("group_norm_silu.kernels")
    return (
        None
        if moving is None or device.type != "cuda"
        else max(fitted.host, fitted.start + moving / fitted.share)
    )


def gapped_cost(problem: GroupNormSilu, device: Device) -> float | None:
    """As `gpu_cost`, with a smaller share: predicted, not measured. See NOTES.md."""
    cost = gpu_cost(problem, device)
    fitted = device.fitted("group_norm_silu.kernels")
    return None if cost is None else cost * fitted.share / fitted.gapped


def padded_cost(problem: GroupNormSiluPad, device: Device) -> float | None:
    """As `gapped_cost`."""
    size = problem.elements * problem.dtype.itemsize
    moving = device.seconds(padded_work(problem).bytes - (size if size < device.cache // 2 else 0))
    fitted = device.fitted("group_norm_silu.kernels")
    return (
        None
        if moving is None or device.type != "cuda"
        else max(fitted.host, fitted.start + moving / fitted.gapped)
    )


def spatial_cost(problem: SpatialNormSilu, device: Device) -> float | None:
    """As `gapped_cost`; a scale and a shift whose channels are not side by side are copied first."""
    size, small = problem.elements * problem.dtype.itemsize, math.prod(problem.scale_shape)
    copied = sum(
        2 * small * dtype.itemsize
        for dtype, strides in (
            (problem.scale_dtype, problem.scale_strides),
            (problem.shift_dtype, problem.shift_strides),
        )
        if strides[1] != 1
    )
    moving = device.seconds(spatial_work(problem).bytes + copied - (size if size < device.cache // 2 else 0))
    if moving is None or device.type != "cuda":
        return None
    fitted = device.fitted("group_norm_silu.kernels")
    return max(fitted.host_copied if copied else fitted.host, fitted.start + moving / fitted.gapped)


def waves_of(problem: GroupNormSilu, first: int) -> tuple[int, ...]:
    """What to try: in a large problem also twice as many programs."""
    return (first, 2 * first) if problem.elements >= LARGE else (first,)


def rows_configs(problem: GroupNormSilu, device: Device) -> list[Config]:
    """About 64 channels and 8 elements for each of 256 threads, four such tiles in flight. More parts keep
    more of a card busy, but every program that applies them reads them all. In a large problem also other
    numbers are tried: ptxas 13.4 asks for the last of four tiles only when the first has come, and for all of
    six at once."""
    together, each, _ = block_of(problem.shape[1], problem.groups, 64)
    rows = max(1, 2048 // (together * each))
    tried = ((4, 2), (4, 3), (4, 4), (6, 2), (6, 3)) if problem.elements >= LARGE else ((4, 2),)
    return [
        {"columns": together * each, "rows": rows, "unroll": unroll, "waves": waves, "walks": 4, "warps": 8}
        for unroll, waves in tried
    ]


def gapped_configs(problem: GroupNormSilu | GroupNormSiluPad, device: Device) -> list[Config]:
    """The tiles of `rows_configs`. Working out indices takes registers, so that 3 programs that apply the
    norm share a multiprocessor, 2 in float32: their number is one that both divide, and in a very large
    problem four times that, so that those which begin last end soon."""
    return gapped_tiles(problem.shape[1], problem.groups, problem.elements)


def gapped_tiles(channels: int, groups: int, elements: int) -> list[Config]:
    together, each, _ = block_of(channels, groups, 64)
    tile = {"columns": together * each, "rows": max(1, 2048 // (together * each)), "warps": 8}
    tried = ((4, 2, 6), (4, 2, 24), (4, 3, 6), (6, 2, 6)) if elements >= LARGE else ((4, 2, 6),)
    if elements >= VERY_LARGE:
        tried = ((4, 2, 24), (4, 2, 6), (4, 3, 24), (6, 2, 24))
    return [{**tile, "unroll": unroll, "waves": waves, "walks": walks} for unroll, waves, walks in tried]


def spatial_configs(problem: SpatialNormSilu, device: Device) -> list[Config]:
    """Three tensors are asked for at once: two tiles of each are as many bytes in flight as four of one. For
    an A100 ptxas 13.4 makes a kernel of two that spills, and one of four that does not; neither was measured
    there."""
    tiles = gapped_tiles(problem.shape[1], problem.groups, problem.elements)
    tried = [
        {**tile, "unroll": unroll}
        for unroll in ((4, 2) if device.capability == (8, 0) else (2, 4))
        for tile in tiles
        if tile["unroll"] == 4
    ]
    return tried if problem.elements >= LARGE else tried[:1]


def planes_configs(problem: GroupNormSilu, device: Device) -> list[Config]:
    """8 elements for each thread, four tiles in flight where there are so many."""
    size = torch.Size(problem.shape[2:]).numel()
    lanes = min(1024, max(32, power_of_two(size)))
    return [
        {
            "lanes": lanes,
            "unroll": 4 if size > 2 * lanes else 1,
            "waves": waves,
            "warps": max(1, lanes // 256),
        }
        for waves in waves_of(problem, 4)
    ]


ON_GPU: Any = {"cost": gpu_cost, "prepare": prepare_from_plan, "numerics": "close", "version": 1}
# The second launch is the only one that writes, and reads each element before it writes there.
INTO: Any = {"in_place": ("x",), "fails_before_writing": True}
ROW_KERNELS = [f"turnout.ops.group_norm_silu.kernels:row_{part}" for part in ("moments", "apply")]
GAPPED: Any = {
    "cost": gapped_cost,
    "configs": gapped_configs,
    "prepare": prepare_from_plan,
    "numerics": "close",
    "version": 1,
    "kernels": [
        ROW_KERNELS[0],
        *(f"turnout.ops.group_norm_silu.gapped_kernels:gapped_{part}" for part in ("moments", "apply")),
    ],
}
PLANE_KERNELS = [f"turnout.ops.group_norm_silu.kernels:plane_{part}" for part in ("moments", "apply")]


@GROUP_NORM_SILU.route("rows", refuses=refuses_rows, configs=rows_configs, kernels=ROW_KERNELS, **ON_GPU)
@runs_plan
def rows(
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    silu: bool,
    *,
    columns: int = 64,
    rows: int = 32,
    unroll: int = 4,
    waves: int = 2,
    walks: int = 4,
    warps: int = 8,
) -> LaunchPlan:
    out = torch.empty_like(x)
    return plan_two(
        rows_plan,
        x,
        groups,
        weight,
        bias,
        out,
        eps,
        silu,
        columns,
        rows,
        unroll,
        waves,
        walks,
        warps=warps,
        outputs=out,
    )


@GROUP_NORM_SILU_INTO.route(
    "rows", refuses=refuses_rows, configs=rows_configs, kernels=ROW_KERNELS, **ON_GPU, **INTO
)
@runs_plan
def rows_into(
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    eps: float,
    silu: bool,
    *,
    columns: int = 64,
    rows: int = 32,
    unroll: int = 4,
    waves: int = 2,
    walks: int = 4,
    warps: int = 8,
) -> LaunchPlan:
    return plan_two(
        rows_plan,
        x,
        groups,
        weight,
        bias,
        out,
        eps,
        silu,
        columns,
        rows,
        unroll,
        waves,
        walks,
        warps=warps,
        outputs=None,
    )


@GROUP_NORM_SILU.route("gapped-rows", refuses=refuses_gapped_rows, **GAPPED)
@runs_plan
def gapped_rows(
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    silu: bool,
    *,
    columns: int = 64,
    rows: int = 32,
    unroll: int = 4,
    waves: int = 2,
    walks: int = 6,
    warps: int = 8,
) -> LaunchPlan:
    out = torch.empty_like(x)
    return plan_two(
        _unpadded,
        x,
        groups,
        weight,
        bias,
        out,
        eps,
        silu,
        columns,
        rows,
        unroll,
        waves,
        walks,
        warps=warps,
        outputs=out,
    )


@GROUP_NORM_SILU_INTO.route("gapped-rows", refuses=refuses_gapped_rows, **GAPPED, **INTO)
@runs_plan
def gapped_rows_into(
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    eps: float,
    silu: bool,
    *,
    columns: int = 64,
    rows: int = 32,
    unroll: int = 4,
    waves: int = 2,
    walks: int = 6,
    warps: int = 8,
) -> LaunchPlan:
    return plan_two(
        _unpadded,
        x,
        groups,
        weight,
        bias,
        out,
        eps,
        silu,
        columns,
        rows,
        unroll,
        waves,
        walks,
        warps=warps,
        outputs=None,
    )


_unpadded = functools.partial(gapped_plan, (), "constant")


@GROUP_NORM_SILU_PAD.route("gapped-rows", refuses=refuses_padded, **{**GAPPED, "cost": padded_cost})
@runs_plan
def padded(
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    silu: bool,
    padding: list[int],
    mode: str,
    *,
    columns: int = 64,
    rows: int = 32,
    unroll: int = 4,
    waves: int = 2,
    walks: int = 6,
    warps: int = 8,
) -> LaunchPlan:
    shape = padded_shape(x.shape, padding)
    out = torch.empty_strided(shape, padded_strides(shape, True), dtype=x.dtype, device=x.device)
    plan = functools.partial(gapped_plan, tuple(padding), mode)
    return plan_two(
        plan,
        x,
        groups,
        weight,
        bias,
        out,
        eps,
        silu,
        columns,
        rows,
        unroll,
        waves,
        walks,
        warps=warps,
        outputs=out,
    )


SPATIAL: Any = {
    "cost": spatial_cost,
    "configs": spatial_configs,
    "kernels": [*GAPPED["kernels"][:2], "turnout.ops.group_norm_silu.gapped_kernels:spatial_apply"],
}


@SPATIAL_NORM_SILU.route("gapped-rows", refuses=refuses_spatial, **{**GAPPED, **SPATIAL})
@runs_plan
def spatial(
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor,
    shift: Tensor,
    eps: float,
    silu: bool,
    first_apart: bool,
    *,
    columns: int = 64,
    rows: int = 32,
    unroll: int = 2,
    waves: int = 2,
    walks: int = 6,
    warps: int = 8,
) -> LaunchPlan:
    out, tile = torch.empty_like(x), (columns, rows, unroll, waves, walks)
    return plan_spatial(
        x, groups, weight, bias, scale, shift, out, eps, silu, first_apart, *tile, warps=warps
    )


@GROUP_NORM_SILU.route(
    "planes", refuses=refuses_planes, configs=planes_configs, kernels=PLANE_KERNELS, **ON_GPU
)
@runs_plan
def planes(
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    silu: bool,
    *,
    lanes: int = 1024,
    unroll: int = 4,
    waves: int = 4,
    warps: int = 4,
) -> LaunchPlan:
    out = torch.empty_like(x)
    return plan_two(
        planes_plan, x, groups, weight, bias, out, eps, silu, lanes, unroll, waves, warps=warps, outputs=out
    )


@GROUP_NORM_SILU_INTO.route(
    "planes", refuses=refuses_planes, configs=planes_configs, kernels=PLANE_KERNELS, **ON_GPU, **INTO
)
@runs_plan
def planes_into(
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    eps: float,
    silu: bool,
    *,
    lanes: int = 1024,
    unroll: int = 4,
    waves: int = 4,
    warps: int = 4,
) -> LaunchPlan:
    return plan_two(
        planes_plan, x, groups, weight, bias, out, eps, silu, lanes, unroll, waves, warps=warps, outputs=None
    )

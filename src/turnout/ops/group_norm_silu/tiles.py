"""What the two launches of a group norm cost on a GPU, and the configurations they are tried in."""

from __future__ import annotations

import math

import torch

from turnout.ops.group_norm_silu import GroupNormSilu, work
from turnout.ops.group_norm_silu.launches import block_of
from turnout.ops.group_norm_silu.padded import GroupNormSiluPad
from turnout.ops.group_norm_silu.padded import work as padded_work
from turnout.ops.group_norm_silu.spatial import SpatialNormSilu
from turnout.ops.group_norm_silu.spatial import work as spatial_work
from turnout.ops.integers import power_of_two
from turnout.routing.device import Device
from turnout.routing.route import Config

LARGE = 2**20  # elements from which on a second configuration is worth trying
VERY_LARGE = 2**28  # elements from which on combining the moments takes a program no time to speak of


# Costs in seconds. Shares of the bandwidth and time of the host: measured on an H200, see NOTES.md


def gpu_cost(problem: GroupNormSilu, device: Device) -> float | None:
    """Where x fits the cache, its second reading is nearly free.

    Shares and time of the host: measured on an H200, see NOTES.md.
    """
    size = problem.elements * problem.dtype.itemsize
    moving = device.seconds(work(problem).bytes - (size if size < device.cache // 2 else 0))
    fitted = device.fitted("group_norm_silu.kernels")
    if moving is None or device.type != "cuda":
        return None
    return max(fitted.host, fitted.start + moving / fitted.share)


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
    if moving is None or device.type != "cuda":
        return None
    return max(fitted.host, fitted.start + moving / fitted.gapped)


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


# Configurations, best guess first


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

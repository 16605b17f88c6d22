"""The routes of rms_norm_silu and of its form that writes into a buffer: one kernel a layout."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from turnout.launch import LaunchPlan, prepare_from_plan, runs_plan
from turnout.ops import needs
from turnout.ops.integers import power_of_two
from turnout.ops.layouts import VECTOR_BYTES, array, flat
from turnout.ops.rms_norm_silu import RMS_NORM_SILU, RMS_NORM_SILU_INTO, Positions, RmsNormSilu, layout, work
from turnout.ops.rms_norm_silu.launches import (
    Plan,
    PlaneTile,
    RowTile,
    fill,
    plan_launch,
    planes_plan,
    rows_plan,
)
from turnout.routing.configured import configured
from turnout.routing.device import Device
from turnout.routing.route import Config

MOST_CHANNELS = 8192  # a program keeps all channels of its positions in registers
MOST_CPU_CHANNELS = 4096  # as wide as the buffer of cpu_kernels
THREADS = 128
LARGE = 2**20  # elements from which on a second configuration is worth trying


def refuses_anywhere(problem: RmsNormSilu) -> Iterator[str]:
    if problem.elements == 0:
        yield "nothing to normalise, this route needs at least one element"
    yield from needs.needs_half_or_single(
        x=problem.dtype, weight=problem.weight_dtype, bias=problem.bias_dtype
    )
    if any(stride == 0 and size > 1 for size, stride in zip(problem.shape, problem.out_strides, strict=True)):
        yield "an output whose elements share memory, this route needs one place for each"


def refuses_layout(problem: RmsNormSilu, wanted: str) -> Iterator[str]:
    if layout(problem) != wanted:
        strides = f"strides {list(problem.strides)} into {list(problem.out_strides)}"
        yield f"{layout(problem)} with {strides}, this route needs {wanted}"
    sizes = Positions.of(problem.shape, problem.dim, problem.strides, problem.out_strides).sizes
    if len(sizes) > 3:
        yield f"positions in {len(sizes)} dimensions that do not fold, this route needs at most 3"


def refuses_on_gpu(problem: RmsNormSilu, device: Device) -> Iterator[str]:
    yield from needs.needs_triton(device)
    yield from refuses_anywhere(problem)
    if problem.channels > MOST_CHANNELS:
        yield f"{problem.channels} channels, this route needs at most {MOST_CHANNELS}"


def refuses_rows(problem: RmsNormSilu, device: Device) -> Iterator[str]:
    yield from refuses_on_gpu(problem, device)
    yield from refuses_layout(problem, "rows")


def refuses_planes(problem: RmsNormSilu, device: Device) -> Iterator[str]:
    yield from refuses_on_gpu(problem, device)
    yield from refuses_layout(problem, "planes")


def gpu_cost(layout: str) -> Callable[[RmsNormSilu, Device], float | None]:
    """Share of the bandwidth and time of the host: measured on an H200, see NOTES.md."""

    def seconds(problem: RmsNormSilu, device: Device) -> float | None:
        moving = device.seconds(work(problem).bytes)
        if moving is None or device.type != "cuda":
            return None
        fitted = device.fitted("rms_norm_silu.kernels")
        return max(fitted.host, fitted.start + moving / getattr(fitted, layout))

    return seconds


def tile_channels(problem: RmsNormSilu) -> int:
    """Channels of one tile: a power of two that divides them into eight tiles at most, and leaves a row of a
    tile to one warp or at least to four; else one that holds them all."""
    size, vector = problem.channels, VECTOR_BYTES // problem.dtype.itemsize
    for lanes in (32, THREADS):
        divisor = min(size & -size, lanes * vector)
        if divisor >= vector and 8 * divisor >= size:
            return divisor
    return power_of_two(max(size, 2))


def tries(problem: RmsNormSilu) -> int:
    """How many configurations are worth trying."""
    return 2 if problem.elements >= LARGE else 1


def rows_configs(problem: RmsNormSilu, device: Device) -> list[Config]:
    """Three or six vectors for each thread."""
    channels, vector = tile_channels(problem), VECTOR_BYTES // problem.dtype.itemsize
    least = max(1, THREADS * vector // channels)
    return [{"rows": rows, "channels": channels, "warps": 4} for rows in (least, 2 * least)[: tries(problem)]]


def planes_configs(problem: RmsNormSilu, device: Device) -> list[Config]:
    """Few positions, so that many programs are at work, some reading, some writing: 64 bytes side by side are
    enough. A tile has a vector for each thread, or half of one where there are few channels. Fewer positions
    where not all of their channels would fit."""
    positions = 1 << (max(8, min(32, 49152 // problem.channels)).bit_length() - 1)
    warps = 4 if problem.channels * positions <= 12288 else 8 if problem.channels * positions <= 24576 else 16
    tiles = [
        (256 * warps, warps),
        (128 * warps, warps) if problem.channels <= 128 else (512 * warps, 2 * warps),
    ]
    return [
        {"positions": positions, "channels": size // positions, "warps": n}
        for size, n in tiles[: tries(problem)]
    ]


PLANNED: Any = {"prepare": prepare_from_plan, "numerics": "close", "version": 1}
INTO: Any = {"in_place": ("x",)}  # every kernel reads all channels of its positions before it writes there


def declare(plan: Callable[..., Plan], tile: RowTile | PlaneTile, name: str, **declaration: Any) -> None:
    """Declare a route of rms_norm_silu, and of its form that writes into a buffer, by one launch.

    plan: gives the launch for a `Norm` and a tile of this type, whose values are the defaults.
    """

    def new(
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        dim: int,
        style: str,
        silu: bool,
        **config: int,
    ) -> LaunchPlan:
        out = torch.empty_like(x)
        return into(x, weight, bias, out, eps, dim, style, silu, **config)._replace(outputs=out)

    def into(
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        out: Tensor,
        eps: float,
        dim: int,
        style: str,
        silu: bool,
        **config: int,
    ) -> LaunchPlan:
        now = tile._replace(**config)
        return LaunchPlan((plan_launch(plan, x, weight, bias, out, eps, dim, style, silu, now),), None)

    defaults = tile._asdict()
    RMS_NORM_SILU.route(name, **declaration, **PLANNED)(runs_plan(configured(new, defaults)))
    RMS_NORM_SILU_INTO.route(name, **declaration, **PLANNED, **INTO, fails_before_writing=True)(
        runs_plan(configured(into, defaults))
    )


declare(
    rows_plan,
    RowTile(),
    "rows",
    refuses=refuses_rows,
    cost=gpu_cost("rows"),
    configs=rows_configs,
    kernels=("turnout.ops.rms_norm_silu.kernels:rows",),
)
declare(
    planes_plan,
    PlaneTile(),
    "planes",
    refuses=refuses_planes,
    cost=gpu_cost("planes"),
    configs=planes_configs,
    kernels=("turnout.ops.rms_norm_silu.kernels:planes",),
)


# Routes on a CPU


def refuses_on_cpu(problem: RmsNormSilu, device: Device, wanted: str) -> Iterator[str]:
    yield from needs.needs_numba(device)
    yield from refuses_anywhere(problem)
    yield from refuses_layout(problem, wanted)
    if problem.channels > MOST_CPU_CHANNELS:
        yield f"{problem.channels} channels, this route needs at most {MOST_CPU_CHANNELS}"


def refuses_cpu_rows(problem: RmsNormSilu, device: Device) -> Iterator[str]:
    yield from refuses_on_cpu(problem, device, "rows")


def refuses_cpu_planes(problem: RmsNormSilu, device: Device) -> Iterator[str]:
    yield from refuses_on_cpu(problem, device, "planes")


def cpu_cost(problem: RmsNormSilu, device: Device) -> float | None:
    """Measured on two cores, see NOTES.md."""
    if device.type != "cpu":
        return None
    fitted = device.fitted("rms_norm_silu.kernels")
    return fitted.start + problem.elements * fitted.element / device.cores


def into_on_cpu(
    by_rows: bool,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    eps: float,
    dim: int,
    style: str,
    silu: bool,
) -> None:
    import numpy as np

    from turnout.ops.threads import import_uninterrupted, in_shares

    import_uninterrupted("turnout.ops.rms_norm_silu.cpu_kernels")
    from turnout.ops.rms_norm_silu import cpu_kernels

    channels, positions = x.shape[dim], Positions.of(x.shape, dim, x.stride(), out.stride())
    sizes, x_steps, y_steps = fill(positions.sizes, 1), fill(positions.x, 0), fill(positions.out, 0)
    scale = np.ones(channels, np.float32) if weight is None else array(weight.float().contiguous())
    shift = np.zeros(channels, np.float32) if bias is None else array(bias.float().contiguous())
    rest = (np.float32(eps), style == "normalize", silu)
    if by_rows:
        arguments = (flat(x), x_steps, scale, shift, flat(out), y_steps, sizes, *rest)
        in_shares(functools.partial(cpu_kernels.rows, *arguments), sizes[0] * sizes[1] * sizes[2])
    else:
        tile, tiles = cpu_kernels.tiles_of(sizes[0] * sizes[1], sizes[2], channels)
        read = (flat(x), x_steps, x.stride(dim), scale, shift)
        written = (flat(out), y_steps, out.stride(dim))
        in_shares(functools.partial(cpu_kernels.planes, *read, *written, sizes, tile, *rest), tiles)


def new_on_cpu(
    by_rows: bool,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dim: int,
    style: str,
    silu: bool,
) -> Tensor:
    out = torch.empty_like(x)
    into_on_cpu(by_rows, x, weight, bias, out, eps, dim, style, silu)
    return out


ON_CPU: Any = {
    "cost": cpu_cost,
    "numerics": "close",
    "version": 1,
    "kernels": ("turnout.ops.rms_norm_silu.cpu_kernels:rows", "turnout.ops.rms_norm_silu.cpu_kernels:planes"),
}
for name, refuses, by_rows in (
    ("cpu-rows", refuses_cpu_rows, True),
    ("cpu-planes", refuses_cpu_planes, False),
):
    RMS_NORM_SILU.route(name, refuses=refuses, **ON_CPU)(functools.partial(new_on_cpu, by_rows))
    RMS_NORM_SILU_INTO.route(name, refuses=refuses, **ON_CPU, **INTO)(functools.partial(into_on_cpu, by_rows))

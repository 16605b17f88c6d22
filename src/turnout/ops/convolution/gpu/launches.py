"""Launch the GPU kernels of convolutions on tensors.

Each launch writes `out`. `task.<name>_refuses` says which calls a kernel cannot take.

All kernels see three spatial axes: tensors [N, C, D, H, W], weights [F, C, KD, KH, KW], depth 1 for a 2-D
convolution. `padding` counts the zeros before the first frame, row and column; the padding behind the last
follows from the size of `out`, so the two ends may differ. `cache` holds the frames right before the first
one of `x`; before those come zeros, or copies of the very first frame where `pad_mode` is "replicate".
`residual` is added before the one rounding at the end. Sums are taken in float32; TF32 (`precision`) only
changes the operands of the products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from turnout.launch import Launch, start
from turnout.launch import descriptors as tma
from turnout.ops.convolution.gpu import tiles
from turnout.ops.convolution.gpu.task import Task, Triple
from turnout.ops.convolution.problem import channels_last
from turnout.ops.integers import ceil_div, power_of_two
from turnout.ops.layouts import VECTOR_BYTES, folded
from turnout.ops.needs import HALF_AND_SINGLE
from turnout.routing.device import Device
from turnout.routing.op import Config
from turnout.routing.prepared import worked_out_once

ROW_BYTES = 128  # of a pixel, the most that TMA reads or writes at a time
REGISTERS = {1: 168, 2: 80}  # of a thread, by the programs that share a multiprocessor
FETCHING = 24  # registers of a thread of the warp that fetches
# The order of axes: batch, the one along which outputs share inputs, the other one, width, channels.
AXES = {"depth": (0, 2, 3, 4, 1), "height": (0, 3, 2, 4, 1), "rolled": (0, 2, 3, 4, 1)}


def implicit_gemm_launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    stride: Triple,
    padding: Triple,
    dilation: Triple,
    residual: Tensor | None = None,
    cache: Tensor | None = None,
    pad_mode: str = "zeros",
    precision: str = "tf32",
    pixels: int = 64,
    filters: int = 32,
    channels: int = 32,
    warps: int = 4,
) -> Launch:
    """Convolve by one matrix product over pixels, without an unfolded copy of the input.

    Any GPU, any strides.
    """
    from turnout.ops.convolution.gpu.kernels import implicit_gemm as kernel

    count = out.shape[0] * prod(out.shape[2:])
    constants = {
        "KD": weight.shape[2],
        "KH": weight.shape[3],
        "KW": weight.shape[4],
        "SD": stride[0],
        "SH": stride[1],
        "SW": stride[2],
        "DD": dilation[0],
        "DH": dilation[1],
        "DW": dilation[2],
        "FLAT": x.shape[1] < channels,
        "REPLICATE": pad_mode == "replicate",
        "PRECISION": precision,
        "BM": pixels,
        "BN": filters,
        "BK": channels,
    }
    numbers = (count, *numbers_of(x, weight, out, padding, residual, cache))
    programs = ceil_div(count, pixels) * ceil_div(out.shape[1], filters)
    tensors = (x, weight, bias, residual, cache, out)
    return Launch(kernel, programs, tensors, numbers, constants, warps, {"num_stages": 3})


def implicit_gemm(*args: Any, **settings: Any) -> None:
    """Launch `implicit_gemm_launch`."""
    start(implicit_gemm_launch(*args, **settings))


def implicit_gemm_configs(task: Task) -> list[Config]:
    filters, channels, size = max(power_of_two(task.weight[0]), 16), task.weight[1], task.dtype.itemsize
    # IEEE float32 has no tensor cores, and the registers of larger unrolled tiles are spilled.
    if task.dtype is torch.float32 and task.precision == "ieee":
        return [{"pixels": 64, "filters": min(filters, 64), "channels": 16, "warps": 4}]
    if channels * size % VECTOR_BYTES or task.x_strides[1] != 1:  # element by element
        narrow: Config = {"pixels": 64, "filters": min(filters, 32), "channels": 32, "warps": 4}
        # Few channels: finding an element costs more than multiplying it by all filters.
        if channels >= 32 or filters <= 32:
            return [narrow]
        return [{**narrow, "filters": min(filters, 128)}, narrow]
    deep = 64 if size == 2 and channels % 64 == 0 else 32
    return [
        {"pixels": 64 if channels < deep else 128, "filters": min(filters, 128), "channels": deep, "warps": 8}
    ]


def implicit_gemm_hopper(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    stride: Triple,
    padding: Triple,
    dilation: Triple,
    residual: Tensor | None = None,
    cache: Tensor | None = None,
    pad_mode: str = "zeros",
    precision: str = "tf32",
    share: str = "depth",
    slots: int = 1,
    rows: int = 8,
    columns: int = 16,
    channels: int = 32,
    filters: int = 64,
    stages: int = 3,
    from_registers: bool = False,
) -> None:
    """Convolve like `implicit_gemm`, by TMA and warpgroups of Hopper.

    Tensors that start at an address TMA cannot take go to `implicit_gemm`.
    """
    if not tma.aligned(x, weight, out, residual, cache):
        implicit_gemm(
            x,
            weight,
            bias,
            out,
            stride=stride,
            padding=padding,
            dilation=dilation,
            residual=residual,
            cache=cache,
            pad_mode=pad_mode,
            precision=precision,
        )
        return
    from_registers = from_registers or x.dtype is torch.float32  # where TF32 is rounded
    tile = tiles.Tile(share, slots, rows, columns, channels, filters, stages, from_registers)
    weight, layouts = pack_weight(weight), map(memory, (x, out, cache, residual))
    plan = _implicit_gemm_plan(
        *layouts, weight.shape, x.dtype, padding, dilation, pad_mode == "replicate", tile, Device.of(x.device)
    )
    start(_implicit_gemm_launch(plan, x, weight, bias, out, residual, cache))


class HopperPlan(NamedTuple):
    """All arguments of a launch but the tensors.

    They follow from shapes and are cached, as working them out takes longer than the launch.
    """

    patterns: tuple
    programs: int
    numbers: tuple[int, ...]
    constants: dict[str, Any]
    registers: int | None = None  # of a thread


def _implicit_gemm_launch(
    plan: HopperPlan,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    residual: Tensor | None,
    cache: Tensor | None,
) -> Launch:
    from turnout.ops.convolution.gpu.gluon_kernels import implicit_gemm as kernel

    tensors = (
        *map(tma.described, (x, cache, weight, weight, out, out, residual, residual), plan.patterns),
        bias,
    )
    return Launch(
        kernel, plan.programs, tensors, plan.numbers, plan.constants, 4, {"operands_are_kept": True}
    )


Memory = tuple[tuple[int, ...], ...]  # shape and strides of a tensor; empty if there is none


def memory(t: Tensor | None) -> Memory:
    return () if t is None else (t.shape, t.stride())


@worked_out_once
def _implicit_gemm_plan(
    x: Memory,
    out: Memory,
    cache: Memory,
    residual: Memory,
    weight: tuple[int, ...],
    dtype: torch.dtype,
    padding: Triple,
    dilation: Triple,
    replicate: bool,
    tile: tiles.Tile,
    device: Device,
) -> HopperPlan:
    axes = AXES[tile.share]
    wide, narrow = (*tiles.split(tile.filters), 0)[:2]
    box = (tile.rows, tile.columns)
    half = (tile.rows // 2, tile.columns) if tile.rows > 1 else (1, tile.columns // 2)
    part = half if tile.boxes == 1 else box  # what a warpgroup writes at a time

    def pixels(layout: Memory, block: tuple[int, int], last: int) -> Any:
        return (
            pattern_along(axes, layout, dtype, (1, 1, *block, min(last, ROW_BYTES // dtype.itemsize)))
            if last
            else None
        )

    (filters, channels, *size), taps = weight, prod(weight[2:])

    def taps_of(count: int) -> Any:  # [F, KD*KH*KW, C]
        block = (count, 1, tile.channels)
        return (
            tma.pattern((filters, taps, channels), (taps * channels, channels, 1), dtype, block)
            if count
            else None
        )

    patterns = (
        pixels(x, box, tile.channels),
        pixels(cache, box, tile.channels),
        taps_of(wide),
        taps_of(narrow),
        pixels(out, part, wide),
        pixels(out, part, narrow),
        pixels(residual, part, wide),
        pixels(residual, part, narrow),
    )
    batch, places, others, width, _ = (out[0][a] for a in axes)
    ns, nw = ceil_div(places, tile.slots), ceil_div(width, tile.columns)
    nt = ceil_div(ceil_div(others, tile.rows) * nw, tile.boxes)
    blocks = ceil_div(filters, tile.filters)
    s, u = axes[1] - 2, axes[2] - 2
    frames, count = cache[0][2] if cache else 0, batch * ns * nt * blocks
    deep = ceil_div(channels, tile.channels)
    numbers = (count, nw, nt, ns, deep, frames, x[0][axes[1]], padding[s], padding[u], padding[2], filters)
    apart, shared = (size[1] * size[2], size[2]), tile.slots > 1
    constants = {
        "BLOCKS": blocks,
        "KO": 1 if shared else size[s],
        "KS": size[s] if shared else 1,
        "KU": size[u],
        "KW": size[2],
        "TAP_S": apart[s],
        "TAP_U": apart[u],
        "DS": dilation[s],
        "DU": dilation[u],
        "DW": dilation[2],
        "REPLICATE": replicate and tile.share == "depth" and padding[0] > frames,
        "SLOTS": tile.slots,
        "STAGES": tile.stages,
        "BOXES": tile.boxes,
        "BU": tile.rows,
        "BW": tile.columns,
        "BC": tile.channels,
        "BN1": wide,
        "BN2": narrow,
        "RS": tile.from_registers,
        "BY_FRAME": bool(cache) and tile.share == "height",
    }
    return HopperPlan(patterns, min(count, device.units), numbers, constants)


def pattern_along(axes: tuple[int, ...], layout: Memory, dtype: torch.dtype, block: tuple[int, ...]) -> Any:
    """The pattern of TMA descriptors for a tensor with its axes in another order."""
    return (
        tma.pattern(*(tuple(numbers[a] for a in axes) for numbers in layout), dtype, block)
        if layout
        else None
    )


def pack_weight(weight: Tensor) -> Tensor:
    """Pack a weight `[F, C, KD, KH, KW]` for TMA and the tensor cores.

    Channels come last, without gaps, and float32 is rounded to TF32.
    """
    from turnout.launch import launch
    from turnout.ops.convolution.gpu.gluon_kernels import round_to_tf32

    steps, dense = channels_last_steps(weight.shape, weight.stride())
    if not dense:
        weight = weight.permute(0, 2, 3, 4, 1).contiguous().permute(0, 4, 1, 2, 3)
    if weight.dtype is not torch.float32:
        return weight
    rounded = torch.empty_strided(weight.shape, steps, dtype=weight.dtype, device=weight.device)
    launch(
        round_to_tf32,
        ceil_div(weight.numel(), 1024),
        (weight, rounded),
        (weight.numel(),),
        {"BLOCK": 1024},
        warps=4,
    )
    return rounded


@worked_out_once
def channels_last_steps(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[tuple[int, ...], bool]:
    """The strides of a dense tensor with channels last, and whether it has these."""
    _, channels, _, height, width = shape
    steps = (prod(shape[1:]), 1, height * width * channels, width * channels, channels)
    return steps, all(n == 1 or have == want for n, have, want in zip(shape, strides, steps, strict=True))


def implicit_gemm_hopper_configs(task: Task, device: Device) -> list[Config]:
    return [tile._asdict() for tile in tiles.best(task, device.shared, device.units)]


def narrow_out_launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    stride: Triple,
    padding: Triple,
    dilation: Triple,
    residual: Tensor | None = None,
    cache: Tensor | None = None,
    pad_mode: str = "zeros",
    precision: str = "tf32",
    rows: int = 16,
    columns: int = 128,
    warps: int = 4,
) -> Launch:
    """Convolve with few filters and stride 1: a strip of rows is read once for every frame of the kernel.

    Any GPU, any strides.
    """
    from turnout.ops.convolution.gpu.kernels import narrow_out as kernel

    kd, kh, kw = weight.shape[2:]
    rows, columns = (
        min(rows, power_of_two(out.shape[3])),
        min(columns, max(power_of_two(out.shape[4] + kw - 1), 16)),
    )
    strips = ceil_div(out.shape[3], rows)
    deep = min(max(power_of_two(x.shape[1]), 16), 128)
    wide = power_of_two(kw)
    constants = {
        "KD": kd,
        "KH": kh,
        "KW": kw,
        "REPLICATE": pad_mode == "replicate",
        "PRECISION": precision,
        "ROWS": rows,
        "BW": columns,
        "BC": deep,
        "BLOCKS": ceil_div(x.shape[1], deep),
        "BK": wide,
        "BF": tiles.narrow_columns(weight.shape) // wide,
    }
    numbers = (strips, *numbers_of(x, weight, out, padding, residual, cache))
    programs = out.shape[0] * out.shape[2] * strips * ceil_div(out.shape[4], columns - kw + 1)
    # One stage: Triton 3.6 fails to pipeline sums that move from one accumulator to the next.
    tensors = (x, weight, bias, residual, cache, out)
    return Launch(kernel, programs, tensors, numbers, constants, warps, {"num_stages": 1})


def narrow_out(*args: Any, **settings: Any) -> None:
    """Launch `narrow_out_launch`."""
    start(narrow_out_launch(*args, **settings))


def narrow_out_configs(device: Device) -> list[Config]:
    """Tiles of 128 columns on Hopper, where they were measured, and of 64 elsewhere.

    On other cards 128 columns need more registers than there are; with Triton 3.9 also at eight warps.
    """
    return [{"rows": 16, "columns": 128 if device.capability == (9, 0) else 64}]


def narrow_out_hopper(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    stride: Triple,
    padding: Triple,
    dilation: Triple,
    residual: Tensor | None = None,
    cache: Tensor | None = None,
    pad_mode: str = "zeros",
    precision: str = "tf32",
    share: str = "depth",
    slots: int = 1,
    channels: int = 32,
    stages: int = 3,
) -> None:
    """Convolve like `narrow_out`, by TMA and warpgroups of Hopper.

    Tensors that start at an address TMA cannot take go to `implicit_gemm`.
    """
    if not tma.aligned(x, weight, cache):
        implicit_gemm(
            x,
            weight,
            bias,
            out,
            stride=stride,
            padding=padding,
            dilation=dilation,
            residual=residual,
            cache=cache,
            pad_mode=pad_mode,
            precision=precision,
        )
        return
    tile = tiles.NarrowTile(share, slots, channels, stages)
    weight, layouts = pack_weight(weight), map(memory, (x, out, cache, residual))
    plan = _narrow_out_plan(
        *layouts, weight.shape, x.dtype, padding, dilation, pad_mode == "replicate", tile, Device.of(x.device)
    )
    start(_narrow_out_launch(plan, x, weight, bias, out, residual, cache))


def _narrow_out_launch(
    plan: HopperPlan,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    residual: Tensor | None,
    cache: Tensor | None,
) -> Launch:
    from turnout.ops.convolution.gpu.gluon_narrow_kernels import narrow_out, narrow_out_rolled

    kernel = narrow_out_rolled if "ROWS" in plan.constants else narrow_out
    tensors = (*map(tma.described, (x, cache, weight), plan.patterns), out, residual, bias)
    options = {"maxnreg": plan.registers, "operands_are_kept": True}
    return Launch(kernel, plan.programs, tensors, plan.numbers, plan.constants, 4, options)


@worked_out_once
def _narrow_out_plan(
    x: Memory,
    out: Memory,
    cache: Memory,
    residual: Memory,
    weight: tuple[int, ...],
    dtype: torch.dtype,
    padding: Triple,
    dilation: Triple,
    replicate: bool,
    tile: tiles.NarrowTile,
    device: Device,
) -> HopperPlan:
    axes, (filters, channels, *size) = AXES[tile.share], weight
    s, u = axes[1] - 2, axes[2] - 2
    window, wide = 64 - size[2] + 1, power_of_two(size[2])
    deep = tiles.narrow_columns(weight) // wide
    taps, row = size[0] * size[1], size[2] * channels
    shape, steps = (size[2], filters, taps, channels), (channels, taps * row, row, 1)  # [KW, F, KD*KH, C]
    pixels = (1, 1, 1, 64, tile.channels)
    patterns = (
        pattern_along(axes, x, dtype, pixels),
        pattern_along(axes, cache, dtype, pixels),
        tma.pattern(shape, steps, dtype, (wide, deep, 1, tile.channels)),
    )
    batch, places, others, width, _ = (out[0][a] for a in axes)
    frames, blocks = cache[0][2] if cache else 0, ceil_div(channels, tile.channels)
    resident = tile.resident(weight, dtype.itemsize, device.shared)
    registers = REGISTERS[resident]
    before = (padding[s], padding[u], padding[2])
    strides = [layout[1][a] if layout else 0 for layout in (out, residual) for a in axes]
    replicate = replicate and tile.share != "height" and padding[0] > frames
    constants = {
        "STAGES": tile.stages,
        "BC": tile.channels,
        "BK": wide,
        "BF": deep,
        "WINDOW": window,
        "REGISTERS": (3 * registers - FETCHING) // 16 * 8,
    }
    if tile.share == "rolled":
        nw, strips = ceil_div(width, 2 * window), ceil_div(others, tile.slots)
        count = batch * places * strips * nw
        numbers = (count, nw, strips, places, frames, *before, filters, others, width, *strides)
        constants = {
            "KS": size[0],
            "KU": size[1],
            "BLOCKS": blocks,
            "REPLICATE": replicate,
            "ROWS": tile.slots,
            **constants,
        }
    else:
        ns, nw = ceil_div(places, tile.slots), ceil_div(width, window)
        nt = ceil_div(others * nw, 2)
        count = batch * ns * nt
        sizes = (*before, filters, places, others, width, *strides)
        numbers = (count, nw, nt, ns, blocks, frames, x[0][axes[1]], *sizes)
        apart = {"TAP_S": (size[1], 1)[s], "TAP_U": (size[1], 1)[u]}
        constants = {
            "KS": size[s],
            "KU": size[u],
            **apart,
            "REPLICATE": replicate,
            "SLOTS": tile.slots,
            **constants,
        }
    return HopperPlan(patterns, min(count, resident * device.units), numbers, constants, registers)


def narrow_out_hopper_configs(task: Task, device: Device) -> list[Config]:
    return [tile._asdict() for tile in tiles.narrow(task, device.shared, device.units)]


class Lowering(NamedTuple):
    """The functions that launch one kernel.

    general: launches on any tensors with channels last, and may copy them first. portable: the one launch on
    tensors as they are, of a kernel for any GPU. plan, tile, launch: the same for a Hopper kernel, from its
    plan, its tile and the tensors.
    """

    general: Callable[..., None]
    portable: Callable[..., Launch] | None = None
    plan: Callable[..., HopperPlan] | None = None
    tile: Callable[..., tiles.Tile | tiles.NarrowTile] | None = None
    launch: Callable[..., Launch] | None = None


GEMM = Lowering(implicit_gemm, implicit_gemm_launch)
GEMM_HOPPER = Lowering(implicit_gemm_hopper, None, _implicit_gemm_plan, tiles.Tile, _implicit_gemm_launch)
NARROW = Lowering(narrow_out, narrow_out_launch)
NARROW_HOPPER = Lowering(narrow_out_hopper, None, _narrow_out_plan, tiles.NarrowTile, _narrow_out_launch)


def direct_launch(
    lowering: Lowering,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    padding: Sequence[int],
    dilation: Sequence[int],
    residual: Tensor | None,
    cache: Tensor | None,
    pad_mode: str,
    config: Config,
) -> Launch | None:
    """The launch of a Hopper kernel on tensors as they are, 2-D or 3-D, stride 1.

    None where a tensor has to be copied or rounded first or starts at an address that TMA cannot take, and
    for kernels that are not Hopper's.
    """
    if lowering.launch is None or not tma.aligned(x, weight, out, residual, cache):
        return None
    plan = _direct_plan(
        lowering,
        tuple(map(memory, (x, out, cache, residual, weight))),
        None if bias is None else bias.stride(),
        x.dtype,
        tuple(padding),
        tuple(dilation),
        pad_mode == "replicate",
        tuple(config.items()),
        Device.of(x.device),
    )
    return None if plan is None else lowering.launch(plan, x, weight, bias, out, residual, cache)


@worked_out_once
def _direct_plan(
    lowering: Lowering,
    layouts: tuple[Memory, ...],
    bias: tuple[int, ...] | None,
    dtype: torch.dtype,
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    replicate: bool,
    config: tuple[tuple[str, Any], ...],
    device: Device,
) -> HopperPlan | None:
    """The plan of `direct_launch`. `layouts` are those of x, out, cache, residual and weight."""
    x, out, cache, residual, weight = layouts
    if lowering.plan is None or lowering.tile is None or dtype is torch.float32 or bias not in (None, (1,)):
        return None
    in_place = all(channels_last(*layout) for layout in (x, cache, residual) if layout)
    if not in_place or x[0][1] * dtype.itemsize % tma.ALIGNMENT:
        return None
    filters, steps = as_clip(*weight)
    if not channels_last_steps(filters, steps)[1]:
        return None
    three = len(padding) == 3
    padding, dilation = padding if three else (0, *padding), dilation if three else (1, *dilation)
    clips = [as_clip(*layout) if layout else () for layout in (x, out, cache, residual)]
    return lowering.plan(
        *clips, filters, dtype, padding, dilation, replicate, lowering.tile(**dict(config)), device
    )


def phase_filters(
    weight: Tensor, scale: int, padding: Sequence[int], rows: int, columns: int
) -> tuple[Launch, Tensor]:
    """The launch that computes `phases.phase_weights`, and the tensor that it fills.

    That tensor is `[scale * scale, Cout, rows, columns, Cin]`, in this order in memory.
    """
    from turnout.ops.convolution.gpu.kernels import phase_filters as kernel

    filters, channels, high, wide = weight.shape
    out = torch.empty(
        (scale * scale, filters, rows, columns, channels), dtype=weight.dtype, device=weight.device
    )
    constants = {
        "SCALE": scale,
        "PH": padding[0],
        "PW": padding[1],
        "KH": high,
        "KW": wide,
        "ROWS": rows,
        "COLUMNS": columns,
        "BLOCK": 512,
    }
    count = filters * channels
    programs = len(out) * rows * columns * ceil_div(count, 512)
    return Launch(kernel, programs, (weight, out), (count, channels, *weight.stride()), constants, 4), out


def as_clip(shape: tuple[int, ...], strides: tuple[int, ...]) -> Memory:
    """Shape and strides with three spatial axes."""
    if len(shape) == 5:
        return tuple(shape), strides
    return (*shape[:2], 1, *shape[2:]), (*strides[:2], strides[2] * shape[2], *strides[2:])


def transpose(x: Tensor, out: Tensor) -> bool:
    """Copy x from channels first into `out`, channels last, or the other way round.

    False, and nothing done, for other layouts.
    """
    from turnout.launch import launch
    from turnout.ops.convolution.gpu.kernels import transpose as kernel

    steps = [one_axis(t.shape[2:], t.stride()[2:]) for t in (x, out)]
    last = x.stride(1) == 1
    if (
        None in steps
        or x.dtype not in HALF_AND_SINGLE
        or (x if last else out).stride(1) != 1
        or (out if last else x).stride(-1) != 1
    ):
        return False
    channels, pixels = x.shape[1], prod(x.shape[2:])
    block = min(64 if channels % 64 == 0 or channels > 256 else 32, power_of_two(channels))
    across = 4096 // block
    programs = len(x) * ceil_div(pixels, across) * ceil_div(channels, block)
    numbers = (channels, pixels, x.stride(0), x.stride(1), steps[0], out.stride(0), out.stride(1), steps[1])
    if programs:
        launch(kernel, programs, (x, out), numbers, {"LAST": last, "BC": block, "BP": across}, warps=4)
    return True


def one_axis(sizes: Sequence[int], strides: Sequence[int]) -> int | None:
    """The stride from pixel to pixel if all axes of pixels fold into one; else None.

    >>> one_axis((4, 5, 6), (60, 12, 2)), one_axis((4, 5, 6), (90, 12, 2))
    (2, None)
    """
    _, (steps,) = folded(sizes, strides)
    return None if len(steps) > 1 else steps[0] if steps else 1


def numbers_of(
    x: Tensor, weight: Tensor, out: Tensor, padding: Triple, residual: Tensor | None, cache: Tensor | None
) -> tuple[int, ...]:
    """Sizes, paddings and strides in the order of the Triton kernels' parameters."""
    before = (0, 0, 0, 0) if cache is None else (cache.stride(0), *cache.stride()[2:])
    return (
        *out.shape[2:],
        *x.shape[1:],
        out.shape[1],
        0 if cache is None else cache.shape[2],
        *padding,
        *x.stride(),
        *weight.stride(),
        *((0,) * 5 if residual is None else residual.stride()),
        *before,
        *out.stride(),
    )

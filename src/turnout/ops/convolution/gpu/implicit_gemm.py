"""Launch implicit GEMM: a convolution as one matrix product over pixels, for any GPU and for Hopper.

`task.<name>_refuses` says which calls a kernel cannot take.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from turnout.launch import Launch
from turnout.launch import descriptors as tma
from turnout.ops.convolution.gpu import tiles
from turnout.ops.convolution.gpu.lowering import (
    AXES,
    Hopper,
    HopperCall,
    HopperPlan,
    Portable,
    pattern_along,
)
from turnout.ops.convolution.gpu.operands import Geometry, Layout, Operands, kernel_numbers
from turnout.ops.convolution.gpu.task import Task
from turnout.ops.integers import ceil_div, power_of_two
from turnout.ops.layouts import VECTOR_BYTES
from turnout.routing.device import Device
from turnout.routing.prepared import worked_out_once
from turnout.routing.route import Config

ROW_BYTES = 128  # of a pixel, the most that TMA reads or writes at a time


def portable_launch(operands: Operands, geometry: Geometry, tile: tiles.GemmTile) -> Launch:
    """One matrix product over pixels, without an unfolded copy of the input. Any GPU, any strides."""
    from turnout.ops.convolution.gpu.kernels import implicit_gemm as kernel

    x, weight, bias, out, residual, cache = operands
    count = out.shape[0] * prod(out.shape[2:])
    constants = {
        "KERNEL": tuple(weight.shape[2:]),
        "STRIDE": tuple(geometry.stride),
        "DILATION": tuple(geometry.dilation),
        "FLAT": x.shape[1] < tile.channels,
        "REPLICATE": geometry.pad_mode == "replicate",
        "PRECISION": geometry.precision,
        "BM": tile.pixels,
        "BN": tile.filters,
        "BK": tile.channels,
    }
    numbers = (count, *kernel_numbers(operands, geometry.padding))
    programs = ceil_div(count, tile.pixels) * ceil_div(out.shape[1], tile.filters)
    tensors = (x, weight, bias, residual, cache, out)
    return Launch(kernel, programs, tensors, numbers, constants, tile.warps, {"num_stages": 3})


def portable_configs(task: Task, device: Device) -> list[Config]:
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


@worked_out_once
def hopper_plan(call: HopperCall, tile: tiles.Tile) -> HopperPlan:
    axes, dtype = AXES[tile.share], call.dtype
    (filters, channels, *size), taps = call.weight, prod(call.weight[2:])
    batch, places, others, width, _ = (call.out[0][axis] for axis in axes)
    ns, nw = ceil_div(places, tile.slots), ceil_div(width, tile.columns)
    nt = ceil_div(ceil_div(others, tile.rows) * nw, tile.boxes)
    blocks = ceil_div(filters, tile.filters)
    s, u = axes[1] - 2, axes[2] - 2
    frames, count = call.cache[0][2] if call.cache else 0, batch * ns * nt * blocks
    deep = ceil_div(channels, tile.channels)
    before = (call.padding[s], call.padding[u], call.padding[2])
    numbers = (count, nw, nt, ns, deep, frames, call.x[0][axes[1]], *before, filters)
    apart, shared = (size[1] * size[2], size[2]), tile.slots > 1
    wide, narrow = (*tiles.split(tile.filters), 0)[:2]
    constants = {
        "BLOCKS": blocks,
        "KO": 1 if shared else size[s],
        "KS": size[s] if shared else 1,
        "KU": size[u],
        "KW": size[2],
        "TAP_S": apart[s],
        "TAP_U": apart[u],
        "DS": call.dilation[s],
        "DU": call.dilation[u],
        "DW": call.dilation[2],
        "REPLICATE": call.replicates and tile.share == "depth" and call.padding[0] > frames,
        "SLOTS": tile.slots,
        "STAGES": tile.stages,
        "BOXES": tile.boxes,
        "BU": tile.rows,
        "BW": tile.columns,
        "BC": tile.channels,
        "BN1": wide,
        "BN2": narrow,
        "RS": tile.from_registers or dtype is torch.float32,  # where TF32 is rounded
        "BY_FRAME": bool(call.cache) and tile.share == "height",
    }

    box = (tile.rows, tile.columns)
    half = (tile.rows // 2, tile.columns) if tile.rows > 1 else (1, tile.columns // 2)
    part = half if tile.boxes == 1 else box  # what a warpgroup writes at a time

    def pixels(layout: Layout, block: tuple[int, int], last: int) -> Any:
        row = min(last, ROW_BYTES // dtype.itemsize)
        return pattern_along(axes, layout, dtype, (1, 1, *block, row)) if last else None

    def taps_of(count: int) -> Any:  # [F, KD*KH*KW, C]
        shape, steps = (filters, taps, channels), (taps * channels, channels, 1)
        return tma.pattern(shape, steps, dtype, (count, 1, tile.channels)) if count else None

    # Without a cache nothing is read before the first frame but zeros, which any tensor has there.
    cache = call.x if call.streams and not call.cache and tile.share == "depth" else call.cache
    patterns = (
        pixels(call.x, box, tile.channels),
        pixels(cache, box, tile.channels),
        taps_of(wide),
        taps_of(narrow),
        pixels(call.out, part, wide),
        pixels(call.out, part, narrow),
        pixels(call.residual, part, wide),
        pixels(call.residual, part, narrow),
    )
    return HopperPlan(patterns, min(count, call.device.units), numbers, constants)


def hopper_launch(plan: HopperPlan, operands: Operands) -> Launch:
    from turnout.ops.convolution.gpu.gluon_kernels import implicit_gemm as kernel

    x, weight, bias, out, residual, cache = operands
    by_tma = (x, x if cache is None else cache, weight, weight, out, out, residual, residual)
    tensors = (*map(tma.described, by_tma, plan.patterns), bias)
    options = {"operands_are_kept": True}
    return Launch(kernel, plan.programs, tensors, plan.numbers, plan.constants, 4, options)


def hopper_configs(task: Task, device: Device) -> list[Config]:
    """The usual tile of the layer, and those to try: the fastest by the bound, and others nearly as fast."""
    usual = tiles.usual(task, device.shared, device.units)
    tried = tiles.best(task, device.shared, device.units)
    return [tile._asdict() for tile in dict.fromkeys((usual, *tried)) if tile is not None]


PORTABLE = Portable(tiles.GemmTile, portable_launch)
HOPPER = Hopper(
    tiles.Tile,
    hopper_plan,
    hopper_launch,
    by_tma=("x", "weight", "out", "residual", "cache"),
    portable=PORTABLE,
    pads_channels=True,
)

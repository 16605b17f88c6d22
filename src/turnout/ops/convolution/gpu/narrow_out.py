"""Launch convolutions with few filters, which take the time of reading their input: for any GPU, for Hopper.

`task.<name>_refuses` says which calls a kernel cannot take.
"""

from __future__ import annotations

from turnout.launch import Launch
from turnout.launch import descriptors as tma
from turnout.ops.convolution.gpu import implicit_gemm, tiles
from turnout.ops.convolution.gpu.lowering import (
    AXES,
    Hopper,
    HopperCall,
    HopperPlan,
    Portable,
    pattern_along,
)
from turnout.ops.convolution.gpu.operands import Geometry, Operands, kernel_numbers
from turnout.ops.convolution.gpu.task import Task
from turnout.ops.integers import ceil_div, power_of_two
from turnout.routing.device import Device
from turnout.routing.prepared import worked_out_once
from turnout.routing.route import Config

REGISTERS = {1: 168, 2: 80}  # of a thread, by the programs that share a multiprocessor
FETCHING = 24  # registers of a thread of the warp that fetches


def portable_launch(operands: Operands, geometry: Geometry, tile: tiles.StripTile) -> Launch:
    """Few filters and stride 1: a strip of rows is read once for every frame of the kernel.

    Any GPU, any strides.
    """
    from turnout.ops.convolution.gpu.kernels import narrow_out as kernel

    x, weight, bias, out, residual, cache = operands
    kw = weight.shape[4]
    rows = min(tile.rows, power_of_two(out.shape[3]))
    columns = min(tile.columns, max(power_of_two(out.shape[4] + kw - 1), 16))
    strips = ceil_div(out.shape[3], rows)
    deep = min(max(power_of_two(x.shape[1]), 16), 128)
    wide = power_of_two(kw)
    constants = {
        "KERNEL": tuple(weight.shape[2:]),
        "REPLICATE": geometry.pad_mode == "replicate",
        "PRECISION": geometry.precision,
        "ROWS": rows,
        "BW": columns,
        "BC": deep,
        "BLOCKS": ceil_div(x.shape[1], deep),
        "BK": wide,
        "BF": tiles.narrow_columns(weight.shape) // wide,
    }
    numbers = (strips, *kernel_numbers(operands, geometry.padding))
    programs = out.shape[0] * out.shape[2] * strips * ceil_div(out.shape[4], columns - kw + 1)
    # One stage: Triton 3.6 fails to pipeline sums that move from one accumulator to the next.
    tensors = (x, weight, bias, residual, cache, out)
    return Launch(kernel, programs, tensors, numbers, constants, tile.warps, {"num_stages": 1})


def portable_configs(task: Task, device: Device) -> list[Config]:
    """Tiles of 128 columns on Hopper, where they were measured, and of 64 elsewhere.

    On other cards 128 columns need more registers than there are; with Triton 3.9 also at eight warps.
    """
    return [{"rows": 16, "columns": 128 if device.capability == (9, 0) else 64}]


@worked_out_once
def hopper_plan(call: HopperCall, tile: tiles.NarrowTile) -> HopperPlan:
    axes, (filters, channels, *size) = AXES[tile.share], call.weight
    s, u = axes[1] - 2, axes[2] - 2
    window, wide = 64 - size[2] + 1, power_of_two(size[2])
    deep = tiles.narrow_columns(call.weight) // wide
    taps, row = size[0] * size[1], size[2] * channels
    shape, steps = (size[2], filters, taps, channels), (channels, taps * row, row, 1)  # [KW, F, KD*KH, C]
    pixels = (1, 1, 1, 64, tile.channels)
    patterns = (
        pattern_along(axes, call.x, call.dtype, pixels),
        pattern_along(axes, call.cache, call.dtype, pixels),
        tma.pattern(shape, steps, call.dtype, (wide, deep, 1, tile.channels)),
    )
    batch, places, others, width, _ = (call.out[0][axis] for axis in axes)
    frames, blocks = call.cache[0][2] if call.cache else 0, ceil_div(channels, tile.channels)
    resident = tile.resident(call.weight, call.dtype.itemsize, call.device.shared)
    registers = REGISTERS[resident]
    before = (call.padding[s], call.padding[u], call.padding[2])
    strides = [layout[1][axis] if layout else 0 for layout in (call.out, call.residual) for axis in axes]
    replicates = call.replicates and tile.share != "height" and call.padding[0] > frames
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
            "REPLICATE": replicates,
            "ROWS": tile.slots,
            **constants,
        }
    else:
        ns, nw = ceil_div(places, tile.slots), ceil_div(width, window)
        nt = ceil_div(others * nw, 2)
        count = batch * ns * nt
        sizes = (*before, filters, places, others, width, *strides)
        numbers = (count, nw, nt, ns, blocks, frames, call.x[0][axes[1]], *sizes)
        apart = (size[1], 1)  # taps from one frame of the kernel to the next, from one row to the next
        constants = {
            "KS": size[s],
            "KU": size[u],
            "TAP_S": apart[s],
            "TAP_U": apart[u],
            "REPLICATE": replicates,
            "SLOTS": tile.slots,
            **constants,
        }
    return HopperPlan(patterns, min(count, resident * call.device.units), numbers, constants, registers)


def hopper_launch(plan: HopperPlan, operands: Operands) -> Launch:
    from turnout.ops.convolution.gpu.gluon_narrow_kernels import narrow_out, narrow_out_rolled

    x, weight, bias, out, residual, cache = operands
    kernel = narrow_out_rolled if "ROWS" in plan.constants else narrow_out
    tensors = (*map(tma.described, (x, cache, weight), plan.patterns), out, residual, bias)
    options = {"maxnreg": plan.registers, "operands_are_kept": True}
    return Launch(kernel, plan.programs, tensors, plan.numbers, plan.constants, 4, options)


def hopper_configs(task: Task, device: Device) -> list[Config]:
    return [tile._asdict() for tile in tiles.narrow(task, device.shared, device.units)]


PORTABLE = Portable(tiles.StripTile, portable_launch)
HOPPER = Hopper(
    tiles.NarrowTile,
    hopper_plan,
    hopper_launch,
    by_tma=("x", "weight", "cache"),
    portable=implicit_gemm.PORTABLE,
    pads_channels=False,
)

"""Estimate the work of a convolution and the seconds of torch's kernels and of the methods in plain torch.

The constants are those of the device (`devices/`). They serve to choose without a table; `tune` measures.
"""

from __future__ import annotations

import itertools
from math import prod
from typing import Any

import torch

from turnout.ops.convolution.cpu.winograd import AT_ONCE
from turnout.ops.convolution.guards import HALVES, on_torchs_own_loop
from turnout.ops.convolution.methods import LONGEST_PART, reached
from turnout.ops.convolution.problem import Convolution, channels_last
from turnout.routing.device import Device
from turnout.routing.op import Simpler
from turnout.routing.route import Work


def work(problem: Convolution) -> Work:
    """Count input, weight and residual read once, the output written once, and two operations per tap."""
    written = prod(problem.output)
    read = prod(problem.input) + prod(problem.weight) + (0 if problem.residual is None else written)
    return Work((read + written) * problem.dtype.itemsize, problem.flops, written * problem.dtype.itemsize)


def family(problem: Convolution) -> tuple[Any, int]:
    """What problems share that differ only in frames, rows and columns, and the output's number of pixels."""
    if problem.invalid() is not None:
        return problem, 0
    layouts = tuple(map(layout_of, *zip(*_tensors(problem), strict=True)))
    without_sizes = problem._replace(
        input=problem.input[:2], input_strides=(), weight_strides=(), residual=None
    )
    return (layouts, *without_sizes), prod(problem.output[2:])


def simpler(problem: Convolution) -> Simpler | None:
    """Without the residual: a kernel adds it to what it has in registers, the reference in another pass."""
    return (
        None if problem.residual is None else Simpler(problem._replace(residual=None), "without a residual")
    )


def _tensors(problem: Convolution) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    tensors = [(problem.input, problem.input_strides), (problem.weight, problem.weight_strides)]
    return tensors if problem.residual is None else [*tensors, problem.residual[:2]]


def layout_of(shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """A layout by name, so that tensors of other sizes may have the same; strides where it has no name."""
    order = sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1)
    step = 1
    for stride, size in order:
        if stride != step:
            return strides
        step *= size
    if channels_last(shape, strides):
        return "channels-last"
    return "contiguous" if all(a >= b for a, b in itertools.pairwise(strides)) else strides


# GPU


def gpu_arithmetic(problem: Convolution, device: Device) -> float | None:
    """The seconds of cuDNN's products with channels last.

    Filters fill tiles of 64. At 96 cuDNN takes an old kernel, half as fast as the others; with few input
    channels it reaches a tenth of the peak.
    """
    kind = "tf32" if problem.float32.conv == "tf32" else str(problem.dtype).removeprefix("torch.")
    peak = device.flops.get(kind)
    if peak is None:
        return None
    filters = -(-problem.weight[0] // problem.groups // 64) * 64 * problem.groups
    channels = -(-problem.weight[1] // 16) * 16
    wasted = filters * channels / (problem.weight[0] * problem.weight[1])
    fitted = device.fitted("convolution.torch")
    if kind == "float32":
        share = fitted.share_float32
    elif kind == "tf32":
        share = fitted.share_tf32_of_3d if problem.spatial == 3 else fitted.share_tf32
    else:
        share = fitted.share_of_few_filters if problem.weight[0] <= 96 else fitted.share
    share = min(share, fitted.share_of_few_channels) if channels <= 16 else share
    return problem.flops * wasted / (peak.value * share)


def launch(device: Device) -> float:
    """Host time of one torch op on a GPU."""
    return device.fitted("convolution.torch").launch


def gpu_moving(bytes: float, device: Device, share: float | None = None) -> float:
    """Reading and writing at a share of the bandwidth, by default that of torch's kernels."""
    seconds = device.seconds(bytes)
    return 0.0 if seconds is None else seconds / (share or device.fitted("convolution.torch").moving)


def gpu_relayout(shape: tuple[int, ...], problem: Convolution, device: Device) -> float:
    """From one layout to the other: cuDNN's transposing copies reach half of the bandwidth, ours more."""
    share = device.fitted("convolution.torch").relayout
    return launch(device) / 2 + gpu_moving(2 * prod(shape) * problem.dtype.itemsize, device, share)


def gpu_bias(problem: Convolution, device: Device) -> float:
    """cuDNN leaves the bias to a kernel of its own, which reads and writes all of the output."""
    share = device.fitted("convolution.torch").bias
    return 0.0 if problem.bias_dtype is None else gpu_moving(2 * work(problem).written, device, share)


def gpu_kernel(problem: Convolution, device: Device) -> float | None:
    """The convolution itself, channels last."""
    arithmetic = gpu_arithmetic(problem, device)
    return (
        None
        if arithmetic is None
        else max(arithmetic, gpu_moving(work(problem).bytes, device)) + gpu_bias(problem, device)
    )


def gpu_residual(problem: Convolution, device: Device) -> float:
    return 0.0 if problem.residual is None else gpu_moving(3 * work(problem).written, device)


# CPU


def cpu_kernel(problem: Convolution, device: Device) -> float:
    """oneDNN with channels side by side: filters in vectors of 16, or with AVX2 of 8."""
    fitted = device.fitted("convolution.torch")
    lanes, rate = (16, fitted.avx512) if device.has_avx512 else (8, fitted.avx2)
    filters = -(-problem.weight[0] // problem.groups // lanes) * lanes * problem.groups
    arithmetic = problem.flops * filters / problem.weight[0] / rate
    moving = work(problem).bytes / fitted.bytes
    return fitted.start + (arithmetic + moving) / device.cores * half_factor(problem.dtype, device)


def half_factor(dtype: torch.dtype, device: Device) -> float:
    """The time of a half type in oneDNN as a multiple of that of float32."""
    fitted = device.fitted("convolution.torch")
    return (
        1.0
        if dtype not in HALVES
        else fitted.native_half
        if dtype in device.native_halves
        else fitted.emulated_half
    )


def cpu_relayout(shape: tuple[int, ...], problem: Convolution, device: Device) -> float:
    fitted = device.fitted("convolution.torch")
    return fitted.relayout_start + prod(shape) * 4 / fitted.relayout / device.cores


def cpu_reference(problem: Convolution, device: Device) -> float:
    if on_torchs_own_loop(problem, device):
        fitted = device.fitted("convolution.torch")
        if problem.dtype is not torch.float32:
            return fitted.half_loop_start + problem.flops / fitted.half_loop / device.cores
        # The bytes of the unfolded input; a small one stays in the cache.
        columns = prod(problem.output[2:]) * prod(problem.weight[1:]) * 4
        unfolding = columns / (fitted.loop_columns if columns > 2**20 else fitted.loop_columns_in_cache)
        return fitted.loop_start + unfolding + problem.flops / fitted.loop
    return (
        cpu_kernel(problem, device) if problem.output_channels_last else cpu_channels_first(problem, device)
    )


def cpu_channels_first(problem: Convolution, device: Device) -> float:
    """oneDNN with channels first: slower with up to 96 of them, then hardly, and not at all for kernels of
    one pixel, with AVX2, or for half types that have instructions. What a call takes to start is the same."""
    fitted, kernel = device.fitted("convolution.torch"), cpu_kernel(problem, device)
    slower = device.has_avx512 and half_factor(problem.dtype, device) >= 1.0
    few = min(problem.input[1], problem.weight[0]) <= 96 and prod(problem.weight[2:]) > 1
    return fitted.start + (kernel - fitted.start) * (fitted.channels_first if slower and few else 1.0)


# torch as called, and the methods


def copying(elements: float, problem: Convolution, device: Device) -> float:
    """Reading or writing that many elements beside the convolution."""
    bytes = elements * problem.dtype.itemsize
    if device.type != "cpu":
        return launch(device) / 2 + gpu_moving(bytes, device)
    fitted = device.fitted("convolution.torch")
    return fitted.copy_start + bytes / fitted.copy / device.cores


def reference_cost(problem: Convolution, device: Device) -> float | None:
    if problem.invalid() is not None:
        return None
    if device.type == "cpu":
        return cpu_reference(problem, device)
    kernel = gpu_kernel(problem, device)
    if kernel is None:
        return None
    moved = 0.0
    if problem.output_channels_last:
        moved += 0.0 if problem.channels_last else gpu_relayout(problem.input, problem, device)
    else:
        moved += gpu_relayout(problem.input, problem, device) + gpu_relayout(problem.output, problem, device)
    return max(2 * launch(device), kernel + moved + gpu_residual(problem, device))


def relayout(shape: tuple[int, ...], problem: Convolution, device: Device) -> float:
    return (cpu_relayout if device.type == "cpu" else gpu_relayout)(shape, problem, device)


def around(problem: Convolution, device: Device) -> float:
    """What a channels-last method pays for layouts that are not: the input before, the output behind, and the
    residual.
    """
    before = 0.0 if problem.channels_last else relayout(problem.input, problem, device)
    behind = 0.0 if problem.output_channels_last else relayout(problem.output, problem, device)
    return before + behind + (0.0 if device.type == "cpu" else gpu_residual(problem, device))


def channels_last_cost(problem: Convolution, device: Device) -> float | None:
    if device.type == "cpu":
        start = device.fitted("convolution.methods").channels_last_start
        return start + cpu_kernel(problem, device) + around(problem, device)
    kernel = gpu_kernel(problem, device)
    return None if kernel is None else max(3 * launch(device), kernel + around(problem, device))


def one_dnn_cost(problem: Convolution, device: Device) -> float:
    """Channels first, into it and out of it where torch has them last."""
    moved = 0.0 if not problem.channels_last else cpu_relayout(problem.input, problem, device)
    moved += 0.0 if not problem.output_channels_last else cpu_relayout(problem.output, problem, device)
    return cpu_channels_first(problem, device) + moved


def upcast_cost(problem: Convolution, device: Device) -> float:
    single = problem._replace(dtype=torch.float32)
    return (
        cpu_kernel(single, device)
        + cpu_relayout(problem.input, problem, device)
        + cpu_relayout(problem.output, problem, device)
    )


def depth_taps_cost(problem: Convolution, device: Device) -> float | None:
    """The seconds of a 2-D kernel per depth tap; all but the first read and write the sums once more."""
    depth = problem.weight[2]
    added = 3 * (depth - 1) * work(problem).written
    if device.type == "cpu":
        fitted = device.fitted("convolution.methods")
        parts = depth * -(-prod((problem.weight[1], *problem.weight[3:])) // LONGEST_PART)
        kernels = cpu_kernel(problem, device) * (1.0 if device.has_avx512 else fitted.tap_avx2)
        # Slicing the weight is most of the time where pixels are few.
        slices = prod(problem.weight) * fitted.tap_weight / device.cores
        sums = added / fitted.tap_sums / device.cores
        return parts * fitted.tap_start + kernels + slices + sums + around(problem, device)
    flat = problem._replace(weight=(*problem.weight[:2], 1, *problem.weight[3:]))
    peak = device.flops.get("tf32" if problem.float32.conv == "tf32" else "float32")
    if peak is None:
        return None
    arithmetic = depth * max(
        flat.flops / (device.fitted("convolution.torch").flat_tap * peak.value),
        gpu_moving(work(flat).bytes, device),
    )
    return max(
        depth * 3 * launch(device),
        arithmetic + gpu_moving(added, device) + gpu_bias(problem, device) + around(problem, device),
    )


def depth_chunks_cost(problem: Convolution, device: Device) -> float | None:
    """Torch's time and one more copy of the output: it pays where memory is short or a table says so."""
    whole = reference_cost(problem, device)
    return None if whole is None else whole + copying(2 * prod(problem.output), problem, device)


def pointwise_cost(problem: Convolution, device: Device) -> float | None:
    """A matrix product with the bias in it, in the layout that the input has."""
    if device.type == "cpu":
        moved = (
            0.0
            if problem.channels_last == problem.output_channels_last
            else cpu_relayout(problem.output, problem, device)
        )
        return device.fitted("convolution.methods").pointwise_start + cpu_kernel(problem, device) + moved
    kind = "tf32" if problem.float32.matmul == "tf32" else str(problem.dtype).removeprefix("torch.")
    peak = device.flops.get(kind)
    if peak is None:
        return None
    moved = (
        0.0
        if problem.channels_last == problem.output_channels_last
        else gpu_relayout(problem.output, problem, device)
    )
    again = 0.0 if problem.channels_last else gpu_bias(problem, device)
    padded = gpu_moving(3 * work(problem).written, device) if any(problem.padding) else 0.0
    kernel = max(
        problem.flops / (device.fitted("convolution.torch").product * peak.value),
        gpu_moving(work(problem).bytes, device),
    )
    return max(2 * launch(device), kernel + moved + again + padded + gpu_residual(problem, device))


def winograd_cost(problem: Convolution, device: Device) -> float:
    """Products are faster where the filters of one of 16 points stay in the cache; each sum of a part of the
    channels takes as long as 8 products more. Transformed tiles and filters are moved. What small calls take
    beside that is mostly Python and the edges of images."""
    channels, filters, lanes = problem.input[1], problem.weight[0], 16 if problem.output_channels_last else 8
    depth, frames, outputs, pairs = 1, 1, 1, 1
    if problem.spatial == 3:
        depth, frames, outputs = problem.weight[2], problem.input[2], problem.output[2]
        spans = (
            reached(frames, outputs, tap, 1, problem.padding[0], problem.dilation[0]) for tap in range(depth)
        )
        pairs = sum(end - first for first, end, _ in spans)
    tiles, wide = (
        problem.input[0] * prod(-(-n // 2) for n in problem.output[-2:]),
        -(-filters // lanes) * lanes,
    )
    products = 32 * tiles * pairs * wide * (channels + 8 * -(-channels // AT_ONCE))
    fitted, in_cache = device.fitted("convolution.winograd"), 4 * depth * channels * filters <= 2**17
    rate = (fitted.products_in_cache if in_cache else fitted.products) * (
        1.0 if device.has_avx512 else fitted.avx2
    )
    moved = 64 * tiles * (frames * max(channels, 16) + outputs * wide) / fitted.tiles
    moved += 64 * depth * channels * filters / fitted.filters
    before = (
        0.0
        if problem.channels_last == problem.output_channels_last
        else cpu_relayout(problem.input, problem, device)
    )
    start = fitted.start_channels_last if problem.output_channels_last else fitted.start
    return start + (products / rate + moved) / device.cores + before

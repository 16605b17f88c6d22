"""What a convolution costs: the fewest bytes and operations, and the time of torch's kernels and of the methods, in seconds.

GPU shares come from an H200 with torch 2.11 and cuDNN 9.19 (the table in NOTES.md), CPU rates from a 2-core Ice Lake Xeon with torch 2.13.
They are for choosing without a table; `tune` replaces them where it matters.
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
from turnout.routing.op import Work

LAUNCH = 12e-6  # host time of one torch op on a GPU


def work(problem: Convolution) -> Work:
    """Input, weight and residual read once, output written once, a multiplication and an addition for every tap of every output."""
    written = prod(problem.output)
    read = prod(problem.input) + prod(problem.weight) + (0 if problem.residual is None else written)
    return Work((read + written) * problem.dtype.itemsize, problem.flops, written * problem.dtype.itemsize)


def family(problem: Convolution) -> tuple[Any, int]:
    """Problems that differ in their frames, rows and columns only, and how many pixels the output has."""
    if problem.invalid() is not None:
        return problem, 0
    layouts = tuple(map(layout_of, *zip(*_tensors(problem), strict=True)))
    same = problem._replace(input=problem.input[:2], input_strides=(), weight_strides=(), residual=None)
    return (layouts, *same), prod(problem.output[2:])


def _tensors(problem: Convolution) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    found = [(problem.input, problem.input_strides), (problem.weight, problem.weight_strides)]
    return found if problem.residual is None else [*found, problem.residual[:2]]


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
    """cuDNN with channels side by side. Filters fill tiles of 64; at 96 it takes an old kernel, half as fast as the others, and with few
    channels to read it reaches a tenth of the peak."""
    kind = "tf32" if problem.float32.conv == "tf32" else str(problem.dtype).removeprefix("torch.")
    peak = device.flops.get(kind)
    if peak is None:
        return None
    filters = -(-problem.weight[0] // problem.groups // 64) * 64 * problem.groups
    channels = -(-problem.weight[1] // 16) * 16
    wasted = filters * channels / (problem.weight[0] * problem.weight[1])
    share = {"float32": 0.55, "tf32": 0.35 if problem.spatial == 3 else 0.6}.get(kind, 0.45 if problem.weight[0] <= 96 else 0.7)
    share = min(share, 0.1) if channels <= 16 else share
    return problem.flops * wasted / (peak.value * share)


def gpu_moving(bytes: float, device: Device, share: float = 0.7) -> float:
    found = device.seconds(bytes)
    return 0.0 if found is None else found / share


def gpu_relayout(shape: tuple[int, ...], problem: Convolution, device: Device) -> float:
    """From one layout to the other: cuDNN's transposing copies reach half of the bandwidth, ours more."""
    return LAUNCH / 2 + gpu_moving(2 * prod(shape) * problem.dtype.itemsize, device, 0.5)


def gpu_bias(problem: Convolution, device: Device) -> float:
    """cuDNN leaves the bias to a kernel of its own, which reads and writes all of the output."""
    return 0.0 if problem.bias_dtype is None else gpu_moving(2 * work(problem).written, device, 0.4)


def gpu_kernel(problem: Convolution, device: Device) -> float | None:
    """The convolution itself, channels last."""
    arithmetic = gpu_arithmetic(problem, device)
    return None if arithmetic is None else max(arithmetic, gpu_moving(work(problem).bytes, device)) + gpu_bias(problem, device)


def gpu_residual(problem: Convolution, device: Device) -> float:
    return 0.0 if problem.residual is None else gpu_moving(3 * work(problem).written, device)


# CPU


def cpu_kernel(problem: Convolution, device: Device) -> float:
    """oneDNN with channels side by side: 150 GFLOP/s a core in float32, filters in vectors of 16, or with AVX2 60 and 8; bytes at 4 GB/s a
    core."""
    lanes, rate = (16, 150e9) if device.has_avx512 else (8, 60e9)
    filters = -(-problem.weight[0] // problem.groups // lanes) * lanes * problem.groups
    arithmetic = problem.flops * filters / problem.weight[0] / rate
    return 60e-6 + (arithmetic + work(problem).bytes / 6e9) / device.cores * half_factor(problem.dtype, device)


def half_factor(dtype: torch.dtype, device: Device) -> float:
    """How much slower a half type is in oneDNN than float32: 3.4 times where instructions are missing and it works around that."""
    return 1.0 if dtype not in HALVES else (0.6 if dtype in device.native_halves else 3.4)


def cpu_relayout(shape: tuple[int, ...], problem: Convolution, device: Device) -> float:
    return 5e-6 + prod(shape) * 4 / 2e9 / device.cores


def cpu_reference(problem: Convolution, device: Device) -> float:
    if on_torchs_own_loop(problem, device):
        if problem.dtype is not torch.float32:
            return 20e-6 + problem.flops / 0.34e9 * 2 / device.cores
        columns = prod(problem.output[2:]) * prod(problem.weight[1:]) * 4  # unfolded; tiny ones stay in the cache
        return 15e-6 + columns / (1.5e9 if columns > 2**20 else 8e9) + problem.flops / 100e9
    return cpu_kernel(problem, device) * (1.0 if problem.output_channels_last else cpu_first_factor(problem, device))


def cpu_first_factor(problem: Convolution, device: Device) -> float:
    """How much slower oneDNN is with channels first: 1.4 to 1.7 times with up to 96 of them, then hardly, and not at all with AVX2 or for
    half types that have instructions."""
    slower = device.has_avx512 and half_factor(problem.dtype, device) >= 1.0
    return 1.5 if slower and min(problem.input[1], problem.weight[0]) <= 96 else 1.0


# torch as called, and the methods


def copying(elements: float, problem: Convolution, device: Device) -> float:
    """Reading or writing that many elements beside the convolution."""
    bytes = elements * problem.dtype.itemsize
    return 10e-6 + bytes / 4e9 / device.cores if device.type == "cpu" else LAUNCH / 2 + gpu_moving(bytes, device)


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
    return max(2 * LAUNCH, kernel + moved + gpu_residual(problem, device))


def relayout(shape: tuple[int, ...], problem: Convolution, device: Device) -> float:
    return (cpu_relayout if device.type == "cpu" else gpu_relayout)(shape, problem, device)


def around(problem: Convolution, device: Device) -> float:
    """What a channels-last method pays for layouts that are not: the input before, the output behind, and the residual."""
    before = 0.0 if problem.channels_last else relayout(problem.input, problem, device)
    behind = 0.0 if problem.output_channels_last else relayout(problem.output, problem, device)
    return before + behind + (0.0 if device.type == "cpu" else gpu_residual(problem, device))


def channels_last_cost(problem: Convolution, device: Device) -> float | None:
    kernel = cpu_kernel(problem, device) if device.type == "cpu" else gpu_kernel(problem, device)
    return None if kernel is None else max(0.0 if device.type == "cpu" else 3 * LAUNCH, kernel + around(problem, device))


def one_dnn_cost(problem: Convolution, device: Device) -> float:
    """Channels first, into it and out of it where torch has them last."""
    moved = 0.0 if not problem.channels_last else cpu_relayout(problem.input, problem, device)
    moved += 0.0 if not problem.output_channels_last else cpu_relayout(problem.output, problem, device)
    return cpu_kernel(problem, device) * cpu_first_factor(problem, device) + moved


def upcast_cost(problem: Convolution, device: Device) -> float:
    single = problem._replace(dtype=torch.float32)
    return cpu_kernel(single, device) + cpu_relayout(problem.input, problem, device) + cpu_relayout(problem.output, problem, device)


def depth_taps_cost(problem: Convolution, device: Device) -> float | None:
    """2-D kernels, one a depth; the sums of the others are read and written once more each."""
    depth = problem.weight[2]
    added = 3 * (depth - 1) * work(problem).written
    if device.type == "cpu":
        parts = depth * -(-prod((problem.weight[1], *problem.weight[3:])) // LONGEST_PART)
        kernels = cpu_kernel(problem, device) * (1.0 if device.has_avx512 else 1.4)
        slices = prod(problem.weight) * 12e-9 / device.cores  # of the weight, cut out and reordered: most of the time where pixels are few
        return parts * 60e-6 + kernels + slices + added / 12e9 / device.cores + around(problem, device)
    flat = problem._replace(weight=(*problem.weight[:2], 1, *problem.weight[3:]))
    peak = device.flops.get("tf32" if problem.float32.conv == "tf32" else "float32")
    if peak is None:
        return None
    arithmetic = depth * max(flat.flops / (0.6 * peak.value), gpu_moving(work(flat).bytes, device))
    return max(depth * 3 * LAUNCH, arithmetic + gpu_moving(added, device) + gpu_bias(problem, device) + around(problem, device))


def depth_chunks_cost(problem: Convolution, device: Device) -> float | None:
    """Torch's time and one more copy of the output: it pays where memory is short, or where a table says so."""
    whole = reference_cost(problem, device)
    return None if whole is None else whole + copying(2 * prod(problem.output), problem, device)


def pointwise_cost(problem: Convolution, device: Device) -> float | None:
    """A matrix product with the bias in it, in the layout that the input has."""
    if device.type == "cpu":
        moved = 0.0 if problem.channels_last == problem.output_channels_last else cpu_relayout(problem.output, problem, device)
        return 20e-6 + cpu_kernel(problem, device) + moved
    kind = "tf32" if problem.float32.matmul == "tf32" else str(problem.dtype).removeprefix("torch.")
    peak = device.flops.get(kind)
    if peak is None:
        return None
    moved = 0.0 if problem.channels_last == problem.output_channels_last else gpu_relayout(problem.output, problem, device)
    again = 0.0 if problem.channels_last else gpu_bias(problem, device)
    padded = gpu_moving(3 * work(problem).written, device) if any(problem.padding) else 0.0
    kernel = max(problem.flops / (0.7 * peak.value), gpu_moving(work(problem).bytes, device))
    return max(2 * LAUNCH, kernel + moved + again + padded + gpu_residual(problem, device))


def winograd_cost(problem: Convolution, device: Device) -> float:
    """Products at 130 GFLOP/s a core where the filters of one of 16 points stay in the cache, else at 110, and with AVX2 half of that; each
    sum of a part of the channels takes as long as 8 products more. Transformed tiles are moved at 6.5 GB/s a core, filters at 1. What
    small calls take beside that, 200 us channels first and 400 last, is mostly Python and the edges of images."""
    channels, filters, lanes = problem.input[1], problem.weight[0], 16 if problem.output_channels_last else 8
    depth, frames, outputs, pairs = 1, 1, 1, 1
    if problem.spatial == 3:
        depth, frames, outputs = problem.weight[2], problem.input[2], problem.output[2]
        spans = (reached(frames, outputs, tap, 1, problem.padding[0], problem.dilation[0]) for tap in range(depth))
        pairs = sum(end - first for first, end, _ in spans)
    tiles, wide = problem.input[0] * prod(-(-n // 2) for n in problem.output[-2:]), -(-filters // lanes) * lanes
    products = 32 * tiles * pairs * wide * (channels + 8 * -(-channels // AT_ONCE))
    rate = (130e9 if 4 * depth * channels * filters <= 2**17 else 110e9) * (1.0 if device.has_avx512 else 0.5)
    moved = 64 * tiles * (frames * max(channels, 16) + outputs * wide) / 6.5e9 + 64 * depth * channels * filters / 1e9
    before = 0.0 if problem.channels_last == problem.output_channels_last else cpu_relayout(problem.input, problem, device)
    return (400e-6 if problem.output_channels_last else 200e-6) + (products / rate + moved) / device.cores + before

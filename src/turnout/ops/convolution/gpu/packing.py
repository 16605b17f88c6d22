"""Launch the kernels that bring tensors into the layouts that convolutions read."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from turnout.launch import Launch, launch
from turnout.ops.integers import ceil_div, power_of_two
from turnout.ops.layouts import folded
from turnout.ops.needs import HALF_AND_SINGLE
from turnout.routing.prepared import worked_out_once


def transpose(x: Tensor, out: Tensor) -> bool:
    """Copy x from channels first into `out`, channels last, or the other way round.

    False, and nothing done, for other layouts.
    """
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


def pack_weight(weight: Tensor) -> Tensor:
    """Pack a weight `[F, C, KD, KH, KW]` for TMA and the tensor cores.

    Channels come last, without gaps, and float32 is rounded to TF32.
    """
    from turnout.ops.convolution.gpu.gluon_kernels import round_to_tf32

    steps, dense = channels_last_steps(weight.shape, weight.stride())
    if not dense:
        weight = weight.permute(0, 2, 3, 4, 1).contiguous().permute(0, 4, 1, 2, 3)
    if weight.dtype is not torch.float32:
        return weight
    rounded = torch.empty_strided(weight.shape, steps, dtype=weight.dtype, device=weight.device)
    count = weight.numel()
    launch(round_to_tf32, ceil_div(count, 1024), (weight, rounded), (count,), {"BLOCK": 1024}, warps=4)
    return rounded


@worked_out_once
def channels_last_steps(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[tuple[int, ...], bool]:
    """The strides of a dense tensor with channels last, and whether it has these."""
    _, channels, _, height, width = shape
    steps = (prod(shape[1:]), 1, height * width * channels, width * channels, channels)
    return steps, all(n == 1 or have == want for n, have, want in zip(shape, strides, steps, strict=True))


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

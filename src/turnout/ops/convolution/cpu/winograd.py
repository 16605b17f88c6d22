"""Winograd's F(2x2, 3x3) on a CPU: a 3x3 convolution of stride 1 by 16 products where direct summation takes
36.

The transforms are those of S. Winograd, "Arithmetic Complexity of Computations", 1980, as A. Lavin and S.
Gray apply them in "Fast Algorithms for Convolutional Neural Networks", 2016. A tile of 4x4 input pixels, two
apart, gives 2x2 outputs. With several depths of the kernel their products are added up before the last
transform, so the transforms are shared.

Inf would become NaN, and large numbers may overflow in between: where a result is not finite, torch is asked
instead.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from turnout.ops.convolution.layout import FIRST, LAST, in_format, known_strides, torch_format
from turnout.ops.convolution.methods import Window, in_float32, output_frames
from turnout.ops.convolution.problem import ON_TORCHS_OWN_LOOP
from turnout.ops.integers import ceil_div
from turnout.ops.layouts import array, flat

AT_ONCE = 64  # channels added up in one go: more make longer sums, and those lose more digits than torch does
# The same for calls that torch runs by its own loop, which loses fewer digits on some CPUs. Up to 5 % slower.
OF_SMALL = 24
MOST_BYTES = 12 * 2**20  # of a thread's transformed tiles
MOST_FILTERS = 16 * 2**20  # bytes of transformed filters; more are done one part after the other
MOST_FRAMES = 8  # that come out of a block
FEW_PARTS = 64  # of the filters, 2 us each: to wake a thread takes longer than half of so many


class Block(NamedTuple):
    """The block that a thread computes at a time: output frames, tiles down and across, filters."""

    chunk: int
    tall: int
    wide: int
    share: int


@functools.lru_cache(1024)
def block_of(
    plan: tuple[int, int, int, int], tiles: tuple[int, int], clips: int, threads: int, last: bool
) -> Block:
    """Choose blocks with enough tiles to make up for reading all filters, and few enough for the cache.

    Where that makes too few blocks for all threads, tiles or filters are divided, whichever are more. `plan`
    holds channels, filters, depth of the kernel and output frames.

    >>> block_of((96, 96, 3, 4), (30, 52), 1, 2, True), block_of((384, 384, 3, 2), (4, 6), 1, 2, False)
    (Block(chunk=4, tall=2, wide=52, share=96), Block(chunk=2, tall=4, wide=6, share=96))
    """
    (channels, filters, depth, outputs), (down, across) = plan, tiles
    chunk = even(outputs, MOST_FRAMES)
    most = max(32, min(128 if last else 208, MOST_BYTES // (64 * chunk * (channels + filters))))
    wide, unit = even(across, most), 8 if last else 16
    blocks = clips * ceil_div(outputs, chunk) * ceil_div(across, wide)

    def longest(tall: int) -> int:
        """The tiles of the busiest thread, each row of them rounded up to whole units."""
        return ceil_div(blocks * ceil_div(down, tall), threads) * ceil_div(tall * wide, unit) * unit

    highest = max(1, min(down, most // wide))
    tall, share = min(range(highest, highest // 2, -1), key=longest), filters
    more = ceil_div(2 * threads, blocks * ceil_div(down, tall))
    if more > 1 and depth * filters > 2 * chunk * tall * wide:
        share = min(filters, ceil_div(filters, 16 * more) * 16)
    elif more > 1:
        wide = even(wide, max(16, ceil_div(wide * tall, more)))
        tall = even(tall, max(1, ceil_div(wide * tall, more) // wide))
    return Block(chunk, tall, wide, share)


def even(count: int, most: int) -> int:
    """The size of the fewest even shares of at most so many."""
    return ceil_div(count, ceil_div(count, most))


def by_winograd(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Window,
) -> Tensor:
    """A convolution, 2-D or 3-D, with a kernel of 3 x 3 in height and width, stride 1, spatial dilation 1 and
    one group.
    """
    stride, padding, dilation, groups = window
    format = torch_format(input, weight, bias, *window)
    at_once = OF_SMALL if len(input) == 1 and prod(input.shape[:4]) <= ON_TORCHS_OWN_LOOP else AT_ONCE
    if input.dim() == 4:
        y = of_finite(
            input.unsqueeze(2), weight.unsqueeze(2), bias, [0, *padding], [1, *dilation], format, at_once
        )
        y = None if y is None else y.squeeze_(2)
    else:
        y = of_finite(input, weight, bias, padding, dilation, format, at_once)
    if y is None and input.dtype is torch.float32:
        return torch.convolution(
            input, weight, bias, stride, padding, dilation, False, [0] * len(stride), groups
        )
    return in_float32(input, weight, bias, window) if y is None else y


def of_finite(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    padding: Sequence[int],
    dilation: Sequence[int],
    format: torch.memory_format,
    channels_at_once: int,
) -> Tensor | None:
    """Clips, channels first or last as the format says. None if a number that comes out is not finite."""
    import numpy as np

    from turnout.ops.threads import import_uninterrupted, in_shares

    import_uninterrupted("turnout.ops.convolution.cpu.kernels")
    from turnout.ops.convolution.cpu import kernels

    last, format = format != FIRST, FIRST if format == FIRST else LAST[5]
    if input.stride(1 if last else -1) != 1:
        input = in_format(input, format)
    (clips, channels, frames, rows, columns), (filters, _, depth, _, _) = input.shape, weight.shape
    outputs = output_frames(frames, depth, 1, padding[0], dilation[0])
    front, top, left = padding
    height, width = rows + 2 * top - 2, columns + 2 * left - 2
    shape = torch.Size((clips, filters, outputs, height, width))
    y = torch.empty_strided(shape, known_strides(shape, format), dtype=input.dtype, device=input.device)
    odd, shift = np.zeros(1, np.int64), np.zeros(ceil_div(filters, kernels.LANES) * kernels.LANES, np.float32)
    if bias is not None:
        shift[:filters] = array(bias.float())
    down, across = ceil_div(height, 2), ceil_div(width, 2)
    block = block_of(
        (channels, filters, depth, outputs), (down, across), clips, torch.get_num_threads(), last
    )
    at_once = max(1, MOST_FILTERS // (4 * kernels.POINTS * kernels.LANES * depth * channels)) * kernels.LANES
    x, x_steps, y_steps, w_steps = (
        flat(input),
        kernels.Steps(*input.stride()),
        kernels.Steps(*y.stride()),
        kernels.Steps(*weight.stride()),
    )
    for first in range(0, filters, at_once):
        count = min(at_once, filters - first)
        vectors = ceil_div(count, kernels.LANES)
        point = (vectors * channels + 1) * kernels.LANES
        u = array(torch.empty(depth * kernels.POINTS * point, dtype=torch.float32, device=input.device))
        transform = functools.partial(
            kernels.transform_weight,
            flat(weight[first : first + count]),
            w_steps,
            count,
            channels,
            depth,
            u,
            point,
        )
        parts = vectors * ceil_div(channels, kernels.CHANNELS)
        in_shares(transform, parts) if parts * depth > FEW_PARTS else transform(0, parts)
        plan = kernels.Plan(
            channels,
            count,
            depth,
            dilation[0],
            frames,
            rows,
            columns,
            front,
            top,
            left,
            outputs,
            height,
            width,
            block.chunk,
            block.tall,
            block.wide,
            min(block.share, count),
            ceil_div(channels, channels_at_once),
        )
        cuts = ((outputs, plan.chunk), (down, plan.tall), (across, plan.wide), (count, plan.share))
        blocks = clips * prod(ceil_div(n, size) for n, size in cuts)
        operands = (
            x,
            x_steps,
            u,
            point,
            shift[first:],
            flat(y[:, first : first + count]),
            y_steps,
            plan,
            last,
        )
        in_shares(functools.partial(kernels.convolve, *operands, np.zeros(1, np.int64), odd, blocks), blocks)
    return None if odd[0] else y

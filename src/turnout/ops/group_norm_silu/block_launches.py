"""From tensors to the launches of group norms by sums of blocks, on a GPU: the three steps of `blocks`."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from turnout.launch import launch
from turnout.ops.group_norm_silu.launches import block_of
from turnout.ops.integers import ceil_div
from turnout.ops.layouts import folded, misaligned, side_by_side, widest_vector
from turnout.routing.device import Device

COLUMNS, POSITIONS, WARPS = 64, 32, 8  # of a tile, and warps for it: those of `rows_configs`
WALKS = 6  # programs for each multiprocessor that apply the norm
BLOCKS_AT_ONCE = 32


def steps_of(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, tuple[int, ...]] | None:
    """How many frames there are, and the steps from frame to frame, row to row and column to column; None
    where the dimensions before the rows are not one walk.

    >>> steps_of((1, 8, 2, 3, 5), (240, 1, 120, 40, 8)), steps_of((1, 8, 5), (40, 1, 8))
    ((2, (120, 40, 8)), (1, (0, 0, 8)))
    """
    sizes, (steps,) = folded(shape[2:-2], strides[2:-2])
    if len(sizes) > 1:
        return None
    inner = (*[0] * (2 - len(shape[2:])), *strides[2:][-2:])
    return (sizes[0], (steps[0], *inner)) if sizes else (1, (0, *inner))


def launch_sums(x: Tensor, groups: int, block: tuple[int, int], counts: tuple[int, int]) -> Tensor:
    """`blocks.block_sums` of blocks with so many rows and columns, so many downwards and across."""
    from turnout.ops.group_norm_silu.block_kernels import block_sums

    (batch, channels), each = x.shape[:2], x.shape[1] // groups
    together, wide, blocks = block_of(channels, groups, COLUMNS)
    vector = widest_vector(x.element_size(), 0, channels if each == wide else each)
    if widest_vector(x.element_size(), misaligned(x), vector, x.stride(0), *x.stride()[2:]) < vector:
        # The width of loads decides which thread has which values, and so the order of the last sums.
        x = x.movedim(1, -1).clone(memory_format=torch.contiguous_format).movedim(-1, 1)
    walk = steps_of(x.shape, x.stride())
    assert walk is not None
    frames, steps = walk
    height, width = (*[1] * (2 - len(x.shape[2:])), *x.shape[2:][-2:])
    far = (x.stride(0), *steps)
    sums = torch.empty(batch, *counts, 2, groups, dtype=torch.float64, device=x.device)
    tile = {"CG": each, "GB": together, "CB": wide, "BP": POSITIONS, "V": vector}
    numbers = (frames, height, width, groups, *block, *counts, blocks, *far)
    launch(block_sums, batch * counts[0] * counts[1] * blocks, (x, sums), numbers, tile, warps=WARPS)
    return sums


def launch_moments(sums: Tensor, count: int, eps: float) -> Tensor:
    """`blocks.moments_of`."""
    from turnout.ops.group_norm_silu.block_kernels import block_moments

    batch, down, across, _, groups = sums.shape
    moments = torch.empty(batch, 3, groups, dtype=torch.float32, device=sums.device)
    together = 4
    tiles = ceil_div(groups, together)
    numbers = (eps, down * across, count, groups, tiles)
    tile = {"GB": together, "BB": BLOCKS_AT_ONCE}
    launch(block_moments, batch * tiles, (sums.contiguous(), moments), numbers, tile, warps=4)
    return moments


def launch_norm(
    x: Tensor, moments: Tensor, weight: Tensor | None, bias: Tensor | None, silu: bool, out: Tensor
) -> Tensor:
    """`blocks.normalise`."""
    from turnout.ops.group_norm_silu.block_kernels import block_apply

    (batch, channels), groups = x.shape[:2], moments.shape[2]
    each = channels // groups
    together, wide, blocks = block_of(channels, groups, COLUMNS)
    own, other = steps_of(x.shape, x.stride()), steps_of(out.shape, out.stride())
    assert own is not None
    assert other is not None
    height, width = (*[1] * (2 - len(x.shape[2:])), *x.shape[2:][-2:])
    size = prod(x.shape[2:])
    programs = min(ceil_div(size, POSITIONS), max(1, Device.of(x.device).units * WALKS // (batch * blocks)))
    far = (x.stride(0), *own[1], out.stride(0), *other[1])
    vector = widest_vector(x.element_size(), misaligned(x, out), channels if each == wide else each, *far)
    tile = {"CG": each, "GB": together, "CB": wide, "BP": POSITIONS, "V": vector}
    flags = {"WEIGHT": weight is not None, "BIAS": bias is not None, "SILU": silu}
    numbers = (height, width, size, groups, programs, blocks, *far)
    tensors = (x, moments, *side_by_side(weight, bias), out)
    launch(block_apply, batch * programs * blocks, tensors, numbers, {**tile, **flags}, warps=WARPS)
    return out

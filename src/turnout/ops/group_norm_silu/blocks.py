"""Group norms of a picture that lies in parts: sums of each block of rows and columns, their moments, the
norm.

Blocks are those of the whole picture. So its parts, cut where blocks begin, have the sums that the whole has,
and
moments are taken of all of them in one order: the bits do not depend on how many parts there are, nor along
which axis they were cut. The routes "cpu-block-sums" and "block-sums" are these three steps for a picture in
one piece.

    sums = block_sums(part, groups, where)                # [B, down, across, 2, groups], of this part sums =
    ...                                            # those of all parts, side by side along `down` or `across`
    moments = moments_of(sums, values_of_a_group, eps)    # [B, 3, groups] y = normalise(part, groups,
    moments, weight, bias)
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from turnout.ops.group_norm_silu import block_launches
from turnout.ops.group_norm_silu.spatial import modulated, repeats
from turnout.ops.layouts import array, flat, folded, in_format_of

MOST_BLOCKS = 32  # along an axis of a size that is a power of two; fewer than twice as many along others


class Where(NamedTuple):
    """Which rows and columns of a whole picture a tensor has: the sizes of the whole, and where the tensor
    begins.
    """

    height: int
    width: int
    top: int = 0
    left: int = 0

    @staticmethod
    def whole(shape: Sequence[int]) -> Where:
        """A tensor `[B, C, ...]` that is all there is."""
        return Where(*rows_and_columns(shape))


def grain(size: int) -> int:
    """Positions of one block along an axis of so many: pictures are cut at multiples of it. A power of two.

    An axis that is twice as long, or twice as long and one more, has blocks at most twice as large: what is
    cut at a multiple of the grain of latents is so at every size of a decoder and of an encoder.

    >>> [grain(size) for size in (1, 63, 127, 128, 255, 256, 1080)]
    [1, 1, 2, 4, 4, 8, 32]
    """
    return 1 << max(0, (size // MOST_BLOCKS).bit_length() - 1)


def rows_and_columns(shape: Sequence[int]) -> tuple[int, int]:
    """The two last sizes of `[B, C, ...]`, 1 for those that are missing.

    >>> rows_and_columns((1, 8, 5, 6, 7)), rows_and_columns((1, 8, 7)), rows_and_columns((1, 8))
    ((6, 7), (1, 7), (1, 1))
    """
    return (shape[-2] if len(shape) > 3 else 1), (shape[-1] if len(shape) > 2 else 1)


def blocks_of(shape: Sequence[int], where: Where) -> tuple[int, int]:
    """How many blocks a part has, downwards and across. Raises where it is not made of whole ones."""
    counts = []
    names = ("rows", "columns")
    for name, size, first, all_of_them in zip(
        names, rows_and_columns(shape), where[2:], where[:2], strict=True
    ):
        step, end = grain(all_of_them), first + size
        if first < 0 or end > all_of_them or first % step or (end % step and end != all_of_them):
            raise ValueError(
                f"{name} {first} to {end} of {all_of_them}, "
                f"a part needs to begin and to end at multiples of {step} or where the whole ends"
            )
        counts.append(-(-size // step))
    return counts[0], counts[1]


def block_sums(x: Tensor, groups: int, where: Where | None = None) -> Tensor:
    """Sums of the values and of their squares in each block and group: float64 `[B, down, across, 2,
    groups]`.

    x: `[B, C, ...]` with any strides, in a half type or float32; where: which part of the whole it is. It
    needs to begin and to end at multiples of the grain, or where the whole ends. Sums are over all dimensions
    between the channels and the rows, too.

    >>> import torch
    >>> x = torch.randn(1, 4, 6, 130)
    >>> left = block_sums(x[..., :64], 2, Where(6, 130))
    >>> right = block_sums(x[..., 64:], 2, Where(6, 130, left=64))
    >>> torch.equal(torch.cat([left, right], 2), block_sums(x, 2))
    True
    """
    where = Where.whole(x.shape) if where is None else where
    down, across = blocks_of(x.shape, where)
    block = (grain(where.height), grain(where.width))
    if x.device.type != "cpu":
        return block_launches.launch_sums(x, groups, block, (down, across))
    import numpy as np

    kernels, in_shares = _cpu()
    batch, channels, *sizes = x.shape
    height, width = rows_and_columns(x.shape)
    sums = torch.empty(batch, down, across, 2, groups, dtype=torch.float64, device=x.device)
    strides = x.stride()
    xh, xw = (strides[-2] if len(sizes) > 1 else 0), (strides[-1] if sizes else 0)
    frames = np.asarray(_offsets(sizes[:-2], strides[2:-2]), np.int64)
    shape = (batch, height, width, channels)
    into = array(sums.view(-1, 2, groups))
    if strides[1] == 1 or channels == 1:
        work = functools.partial(kernels.row_sums, flat(x), frames, strides[0], xh, xw, shape, block, into)
        in_shares(work, batch * down * across)
    else:
        work = functools.partial(kernels.line_sums, flat(x), frames, *strides[:2], xh, xw, shape, block, into)
        in_shares(work, batch * down * groups)
    return sums


def moments_of(sums: Tensor, count: int, eps: float) -> Tensor:
    """What the norm needs, from the sums of all blocks of the whole: float32 `[B, 3, groups]`, the mean as a
    rough number and what is missing, and the inverse root of the variance.

    sums: `[B, down, across, 2, groups]`; count: how many values a group of one batch entry has in the whole.
    """
    if sums.device.type != "cpu":
        return block_launches.launch_moments(sums, count, eps)
    kernels, _ = _cpu()
    batch, down, across, _, groups = sums.shape
    moments = torch.empty(batch, 3, groups, dtype=torch.float32, device=sums.device)
    kernels.combine(array(sums.reshape(batch, down * across, 2 * groups)), count, eps, array(moments))
    return moments


def normalise(
    x: Tensor,
    moments: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    silu: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """The norm of x with moments of the whole that it is a part of, and SiLU: into `out`, or a new tensor.

    x, out: `[B, C, ...]` with any strides; moments: `[B, 3, groups]`; weight, bias: `[C]` or None.

    >>> import torch
    >>> x = torch.randn(1, 4, 6, 130)
    >>> moments = moments_of(block_sums(x, 2), 2 * 6 * 130, 1e-5)
    >>> y = normalise(x, moments, None, None, silu=False)
    >>> torch.allclose(y, torch.nn.functional.group_norm(x, 2), atol=1e-6)
    True
    """
    out = torch.empty_like(x) if out is None else out
    if x.device.type != "cpu":
        return block_launches.launch_norm(x, moments, weight, bias, silu, out)
    kernels, in_shares = _cpu()
    batch, channels, *sizes = x.shape
    lengths, (x_steps, out_steps) = folded(sizes, x.stride()[2:], out.stride()[2:])
    if len(lengths) > 3:
        raise ValueError(
            f"strides {x.stride()} and {out.stride()} of {list(x.shape)}: positions in {len(lengths)} "
            "dimensions that do not fold, at most 3 can be walked; make x contiguous"
        )
    sizes, x_steps, out_steps = _three(lengths, 1), _three(x_steps, 0), _three(out_steps, 0)
    norm, positions = _norm(moments, channels, weight, bias), prod(sizes)
    if channels == 1 or x.stride(1) == out.stride(1) == 1:
        given = (flat(x), x.stride(0), x_steps, norm, flat(out), out.stride(0), out_steps, sizes, silu)
        in_shares(functools.partial(kernels.apply_rows, *given), batch * positions)
    else:
        given = (
            flat(x),
            *x.stride()[:2],
            x_steps,
            norm,
            flat(out),
            *out.stride()[:2],
            out_steps,
            sizes,
            silu,
        )
        tiles = -(-sizes[2] // kernels.TILE)
        in_shares(
            functools.partial(kernels.apply_lines, *given), batch * channels * sizes[0] * sizes[1] * tiles
        )
    return out


def normalise_scaled(
    x: Tensor,
    moments: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor,
    shift: Tensor,
    *,
    silu: bool = True,
    first_apart: bool = False,
) -> Tensor:
    """`normalise`, then times scale, plus shift, before SiLU: as `spatial_norm_silu`. On a CPU the channels
    of an x that has them apart are put side by side first, and back."""
    if x.device.type != "cpu":
        return scaled(normalise(x, moments, weight, bias, silu=False), scale, shift, silu, first_apart)
    import numpy as np

    kernels, in_shares = _cpu()
    result = torch.empty_like(x)
    batch, channels, *sizes = x.shape
    missing = 3 - len(sizes)
    x, scale, shift, out = map(_with_channels_behind, (x, scale, shift, result))
    places = []
    for small in (scale, shift):
        places.append(np.zeros((3, max(sizes)), np.int64))
        for dim, size in enumerate(sizes):
            apart = int(first_apart and dim == 0)
            share = repeats(size, small.shape[2 + dim], apart)
            index = np.arange(size)
            index[apart:] = apart + (index[apart:] - apart) // share
            places[-1][missing + dim, :size] = index * small.stride(2 + dim)
    steps = [tuple([0] * missing + list(t.stride()[2:])) for t in (x, out)]
    sizes = tuple([1] * missing + sizes)
    work = functools.partial(
        kernels.apply_spatial,
        flat(x),
        x.stride(0),
        steps[0],
        _norm(moments, channels, weight, bias),
        flat(scale),
        places[0],
        scale.stride(0),
        flat(shift),
        places[1],
        shift.stride(0),
        flat(out),
        out.stride(0),
        steps[1],
        sizes,
        silu,
    )
    in_shares(work, batch * prod(sizes))
    return result if out is result else result.copy_(out)


def _with_channels_behind(x: Tensor) -> Tensor:
    """x, or a copy whose channels are side by side."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.movedim(1, -1).contiguous().movedim(-1, 1)


def scaled(y: Tensor, scale: Tensor, shift: Tensor, silu: bool, first_apart: bool) -> Tensor:
    """A norm times scale, plus shift, and SiLU by torch's kernels, which on a GPU take each element alike."""
    found = modulated(y, scale, shift, first_apart)
    return in_format_of(F.silu(found) if silu else found.clone(), y)


def _norm(moments: Tensor, channels: int, weight: Tensor | None, bias: Tensor | None) -> Any:
    """[batch, 4, channels]: the mean in two numbers, scale and shift of each channel."""
    import numpy as np

    kernels, _ = _cpu()
    norm = np.empty((len(moments), 4, channels), np.float32)
    scale = np.ones(channels, np.float32) if weight is None else array(weight.float().contiguous())
    shift = np.zeros(channels, np.float32) if bias is None else array(bias.float().contiguous())
    kernels.spread_over_channels(array(moments), scale, shift, norm)
    return norm


def _offsets(sizes: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Where each of the positions of some dimensions begins, the last dimension fastest."""
    ranges = [
        range(0, size * stride, stride) if stride else [0] * size
        for size, stride in zip(sizes, strides, strict=True)
    ]
    return [sum(place) for place in itertools.product(*ranges)]


def _three(numbers: Sequence[int], missing: int) -> tuple[int, ...]:
    return tuple([missing] * (3 - len(numbers)) + list(numbers))


def _cpu() -> tuple[Any, Any]:
    """The Numba kernels, and what gives them threads."""
    from turnout.ops.threads import import_uninterrupted, in_shares

    import_uninterrupted("turnout.ops.group_norm_silu.cpu_kernels")
    from turnout.ops.group_norm_silu import cpu_kernels

    return cpu_kernels, in_shares

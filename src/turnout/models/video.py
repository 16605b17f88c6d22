"""What video decoders share: frames kept channels-last, and norms that write straight into the input of the
convolution behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from turnout import ops
from turnout.routing.settings import splitting
from turnout.routing.torch_private import functorch_level, in_forward_ad

# Writes its result into the tensor it is given, or returns it where that is None.
Fill = Callable[["Tensor | None"], Tensor]


def may_write(*tensors: Tensor) -> bool:
    """Whether tensors may be written in place: no derivative is wanted, no graph is traced, nothing of
    torch.func is under way.
    """
    if torch.compiler.is_compiling() or functorch_level() is not None or in_forward_ad():
        return False
    return not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors))


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cache: Tensor | None,
    *,
    padding: tuple[int, int],
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """A stride-1 causal convolution of x behind the frames of `cache` (zeros where None), plus `residual`;
    and the frames to keep for the next chunk. x and cache stay two tensors: nothing is concatenated, and a
    chunk of just as many frames becomes the next cache as it is.
    """
    split = splitting()
    if split is not None:
        return split.causal_conv(x, weight, bias, cache, padding, residual)
    y, kept = ops.causal_conv3d(
        x, weight, bias, cache=cache, padding=padding, residual=residual, return_cache=True
    )
    # a view of a few frames would keep all of them alive
    return y, kept.clone() if x.shape[2] > kept.shape[2] and may_write(x) else kept


def pixels_of_frame(x: Tensor) -> int:
    """Of the whole frame, where this rank of a distributed model has a part of it: decisions by size are the
    same everywhere.
    """
    split, pixels = splitting(), x.shape[3] * x.shape[4]
    return pixels if split is None else split.pixels_of_frame(x)


def per_frame(x: Tensor) -> Tensor:
    """`[B, C, T, H, W]` as `[B*T, C, H, W]`; a view where x is channels-last."""
    return x.transpose(1, 2).flatten(0, 1)


def as_video(x: Tensor, batch: int) -> Tensor:
    """`[B*T, C, H, W]` as `[B, C, T, H, W]`, a view."""
    return x.unflatten(0, (batch, -1)).transpose(1, 2)


class Border(NamedTuple):
    """What stands around a video before it is convolved: frames that repeat the first and the last one, and
    pixels at the edges.
    """

    before: int = 0
    after: int = 0
    edges: tuple[int, int] = (0, 0)  # above and below, left and right
    mode: str = "replicate"  # of the edges, as in torch.nn.functional.pad


def bordered(x: Tensor, border: Border, fill: Fill, size: tuple[int, int, int] | None = None) -> Tensor:
    """The result of `fill` inside a border, channels-last. Where tensors may be written, it is written there
    in the first place. size: frames, height and width of that result, where they are not those of x."""
    before, after, (high, wide), mode = border
    split = splitting()
    if not may_write(x):
        inside = F.pad(fill(None), (wide, wide, high, high, 0, 0), mode=mode) if high or wide else fill(None)
        return torch.cat([*[inside[:, :, :1]] * before, inside, *[inside[:, :, -1:]] * after], 2)
    batch, channels = x.shape[:2]
    frames, height, width = x.shape[2:] if size is None else size
    shape = (batch, before + frames + after, height + 2 * high, width + 2 * wide, channels)
    buffer = torch.empty(shape, dtype=x.dtype, device=x.device).permute(0, 4, 1, 2, 3)
    body = buffer[:, :, before : before + frames]
    fill(body[:, :, :, high : high + height, wide : wide + width])
    for axis, edge, length in ((3, high, height), (4, wide, width)):
        if split is not None and split.fill_border(body, axis, edge, mode):
            continue
        for i in range(edge):
            mirrored = (
                (2 * edge - i, edge + length - 2 - i) if mode == "reflect" else (edge, edge + length - 1)
            )
            body.select(axis, i).copy_(body.select(axis, mirrored[0]))
            body.select(axis, edge + length + i).copy_(body.select(axis, mirrored[1]))
    buffer[:, :, :before] = body[:, :, :1]
    buffer[:, :, before + frames :] = body[:, :, -1:]
    if split is not None:
        split.is_bordered(buffer, (high, wide), mode)
    return buffer


def repeat_frames(
    x: Tensor, times: tuple[int, int, int], *, first_apart: bool, out: Tensor | None = None
) -> Tensor:
    """Nearest-neighbour upsampling of `[B, C, T, H, W]`, channels-last: each pixel `times` along time, height
    and width.

    first_apart: the first frame is not repeated in time. out: what to write into, where tensors may be
    written.
    """
    in_space = times[1:]
    parts = [(x[:, :, :1], (1, *in_space)), (x[:, :, 1:], times)] if first_apart else [(x, times)]
    if not may_write(x):
        expanded = [_expanded(frames, repeats) for frames, repeats in parts if frames.shape[2]]
        return expanded[0] if len(expanded) == 1 else torch.cat(expanded, 2)
    batch, channels, _, height, width = x.shape
    if out is None:
        frames = sum(part.shape[2] * repeats[0] for part, repeats in parts)
        out = x.new_empty(batch, frames, height * in_space[0], width * in_space[1], channels).permute(
            0, 4, 1, 2, 3
        )
    begin = 0
    for frames, repeats in parts:
        into = out[:, :, begin : begin + frames.shape[2] * repeats[0]]
        begin += into.shape[2]
        for axis, count in ((4, repeats[2]), (3, repeats[1]), (2, repeats[0])):
            into = into.unflatten(axis, (frames.shape[axis], count))
        into.copy_(frames[:, :, :, None, :, None, :, None])
    return out


def _expanded(x: Tensor, times: Sequence[int]) -> Tensor:
    """As `repeat_frames`, all frames alike and nothing written in place."""
    x = x.permute(0, 2, 3, 4, 1)[:, :, None, :, None, :, None]  # [B, T, 1, H, 1, W, 1, C]
    x = x.expand(-1, -1, times[0], -1, times[1], -1, times[2], -1)
    return x.flatten(5, 6).flatten(3, 4).flatten(1, 2).permute(0, 4, 1, 2, 3)


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last_3d)

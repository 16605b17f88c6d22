"""Methods of convolution in plain torch.

Each gives the values; the layout of the result is whatever came out.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from turnout.ops.convolution.layout import FIRST, LAST, channels_side_by_side, in_format, moved
from turnout.ops.convolution.problem import channels_last
from turnout.routing.device import Device


class Window(NamedTuple):
    """How a kernel goes over its input: numbers for each spatial axis, and the groups of channels."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int = 1

    @property
    def without_depth(self) -> Window:
        """The same for the axes behind the first."""
        stride, padding, dilation, groups = self
        return Window(stride[1:], padding[1:], dilation[1:], groups)


LONGEST_PART = (
    576  # products, 64 channels of 3x3: 1.1 times the error of oneDNN with channels first, torch 2.13
)


def vendor(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Window,
) -> Tensor:
    """Run the vendor's kernel in the layout of the input.

    On a CPU this calls oneDNN directly: torch runs small float32 convolutions by its own loop, which is up to
    nine times slower.
    """
    stride, padding, dilation, groups = window
    if input.device.type == "cpu" and torch.backends.mkldnn.is_available():
        bias = None if bias is None else bias.contiguous()  # oneDNN reads it as if it were (torch 2.13)
        if input.shape[1] == 1:  # one channel has no layout, and oneDNN mistakes it in 3-D (torch 2.13)
            input, weight = in_format(input, FIRST), in_format(weight, FIRST)
        return torch.ops.aten.mkldnn_convolution(input, weight, bias, padding, stride, dilation, groups)
    return torch.convolution(input, weight, bias, stride, padding, dilation, False, [0] * len(stride), groups)


def in_channels_last(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Window,
) -> Tensor:
    """Run the vendor's kernel with channels last."""
    last = LAST[input.dim()]
    return vendor(moved(input, last), moved(weight, last), bias, window)


def in_one_dnn(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Window,
) -> Tensor:
    """Run oneDNN with channels first.

    There it adds up as carefully as torch's own loop does, with AVX-512. Without it sums begin with the bias,
    which is lost in their last digits (1.8 times the error where it is as large as they are).
    """
    first, late = (bias, None) if Device.of(input.device).has_avx512 else (None, bias)
    y = vendor(in_format(input, FIRST), in_format(weight, FIRST), first, window)
    return y if late is None else y.add_(late.view(-1, *[1] * len(window.stride)))


def in_float32(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Window,
) -> Tensor:
    """Convolve half types in float32 and round once.

    Copies have the strides of fresh tensors: with other strides of axes of size one torch 2.13 gets grouped
    convolutions wrong on a CPU.
    """
    wide, taps = (in_format(x.to(torch.float32), LAST[x.dim()]) for x in (input, weight))
    return vendor(wide, taps, None if bias is None else bias.to(torch.float32), window).to(input.dtype)


# Depth: a 3-D convolution by 2-D ones, or by shorter 3-D ones


def reached(
    frames: int, outputs: int, tap: int, stride: int, padding: int, dilation: int
) -> tuple[int, int, int]:
    """The first output that a tap of the kernel's depth reaches, their end, and the frame of the first.

    >>> reached(4, 4, 0, 1, 1, 1), reached(4, 4, 2, 1, 1, 1)
    ((1, 4, 0), (0, 3, 1))
    """
    shift = tap * dilation - padding  # output o sees frame o * stride + shift
    first = max(0, -(shift // stride))
    end = min(outputs, (frames - 1 - shift) // stride + 1)
    return first, max(first, end), first * stride + shift


def output_frames(frames: int, depth: int, stride: int, padding: int, dilation: int) -> int:
    return (frames + 2 * padding - dilation * (depth - 1) - 1) // stride + 1


class Frames(NamedTuple):
    """Frames `[N, D, C, H, W]` and the position of the first: 0 for the input, less for a cache."""

    values: Tensor
    start: int


def by_depth_taps(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Window,
) -> Tensor:
    """Add up 2-D convolutions of all frames, one for each depth of the kernel, in the output's float32."""
    stride, padding, dilation, _ = window
    outputs = output_frames(input.shape[2], weight.shape[2], stride[0], padding[0], dilation[0])
    return of_pieces([Frames(input.transpose(1, 2), 0)], outputs, weight, bias, window)


def of_pieces(
    pieces: list[Frames],
    outputs: int,
    weight: Tensor,
    bias: Tensor | None,
    window: Window,
) -> Tensor:
    """Convolve clips that lie in several pieces by depth taps."""
    stride, padding, dilation = (numbers[0] for numbers in window[:3])  # along the depth
    count, share = len(pieces[0].values), channels_at_once(pieces[0].values, weight, window.groups)
    clips = []
    for n in range(count):
        parts = []  # (first output, end, frames that they use, weight)
        for channel in range(0, weight.shape[1], share):
            for values, start in pieces:
                frames = channels_side_by_side(
                    values[n] if share == weight.shape[1] else values[n, :, channel : channel + share]
                )
                for tap in range(weight.shape[2]):
                    first, end, frame = reached(len(frames), outputs, tap, stride, padding + start, dilation)
                    seen = frames[frame : frame + (end - first - 1) * stride + 1 : stride]
                    if end > first:
                        parts.append((first, end, seen, weight[:, channel : channel + share, tap]))
        # The part that reaches most outputs comes first and adds the bias.
        parts.sort(key=lambda part: part[0] - part[1])
        size = pieces[0].values.shape[3:]
        clips.append(_of_parts(parts, outputs, size, weight, bias, window.without_depth))
    return (clips[0].unsqueeze_(0) if count == 1 else torch.stack(clips)).transpose_(1, 2)


def _of_parts(
    parts: list[tuple[int, int, Tensor, Tensor]],
    outputs: int,
    size: Sequence[int],
    weight: Tensor,
    bias: Tensor | None,
    window: Window,
) -> Tensor:
    """One clip, `[D', Cout, H', W']`."""
    if parts and parts[0][1] - parts[0][0] == outputs:
        (_, _, seen, taps), *parts = parts
        y = vendor(seen, taps, bias, window)
    else:  # some outputs see nothing but padding
        sizes = (output_frames(*numbers) for numbers in zip(size, weight.shape[3:], *window[:3], strict=True))
        y = torch.zeros((outputs, len(weight), *sizes), dtype=weight.dtype, device=weight.device)
        y = channels_side_by_side(y if bias is None else y.add_(bias[:, None, None]))
    for first, end, seen, taps in parts:
        _add(y[first:end], seen, taps, window)
    return y


def _add(
    y: Tensor,
    input: Tensor,
    weight: Tensor,
    window: Window,
) -> None:
    """Add a convolution to what is there.

    oneDNN does so as it writes; one channel has no layout it could rely on.
    """
    if (
        y.device.type == "cpu"
        and min(y.shape[1], input.shape[1]) > 1
        and y.is_contiguous(memory_format=torch.channels_last)
    ):
        input, weight = channels_side_by_side(input), channels_side_by_side(weight)
        stride, padding, dilation, groups = window
        torch.ops.mkldnn._convolution_pointwise_.binary(
            y, input, weight, None, padding, stride, dilation, groups, "add", 1.0, None, [], None
        )
    else:
        y += vendor(input, weight, None, window)


def channels_at_once(frames: Tensor, weight: Tensor, groups: int) -> int:
    """The number of channels that one call adds up.

    The longer a sum, the more digits it loses. So on a CPU it has at most `LONGEST_PART` products, unless
    torch itself would add up channels last by oneDNN.
    """
    _, d, c, h, _ = frames.shape
    as_torch = frames.stride(2) == 1 and d * c * h > 20480
    if frames.device.type != "cpu" or groups > 1 or as_torch:
        return weight.shape[1]
    return max(16, LONGEST_PART // prod(weight.shape[3:]))


def by_depth_chunks(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Window,
    format: torch.memory_format,
    frames: int,
) -> Tensor:
    """Run the vendor's 3-D kernel on `frames` output frames at a time, which needs less workspace."""
    stride, padding, dilation, _ = window
    shape = [
        output_frames(n, *numbers)
        for n, *numbers in zip(input.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    ]
    inside = window._replace(padding=[0, *padding[1:]])  # frames of padding are added here
    out = torch.empty(
        (len(input), len(weight), *shape), dtype=input.dtype, device=input.device, memory_format=format
    )
    reach = dilation[0] * (weight.shape[2] - 1) + 1
    for first in range(0, shape[0], frames):
        end = min(first + frames, shape[0])
        start, stop = first * stride[0] - padding[0], (end - 1) * stride[0] - padding[0] + reach
        seen = input[:, :, max(start, 0) : max(0, min(stop, input.shape[2]))]
        missing = stop - start - seen.shape[2]
        if missing:
            before = min(max(-start, 0), missing)
            seen = F.pad(seen, (0, 0, 0, 0, before, missing - before))
        out[:, :, first:end] = vendor(seen, weight, bias, inside)
    return out


# One pixel: a matrix product


def by_matmul(input: Tensor, weight: Tensor, bias: Tensor | None, window: Window) -> Tensor:
    """Convolve with a kernel of one pixel, which no dilation changes, and one group, by a matrix product.

    Every output is that of one input pixel, or of padding, which leaves the bias.
    """
    stride, padding, *_ = window
    sizes = [output_frames(n, 1, s, p, 1) for n, s, p in zip(input.shape[2:], stride, padding, strict=True)]
    spans = [
        reached(n, o, 0, s, p, 1) for n, o, s, p in zip(input.shape[2:], sizes, stride, padding, strict=True)
    ]
    seen = input[
        (
            ...,
            *(
                slice(at, at + (end - first - 1) * s + 1, s)
                for (first, end, at), s in zip(spans, stride, strict=True)
            ),
        )
    ]
    inside = _product(seen, weight.flatten(1), bias)
    if not any(padding):
        return inside
    shape = (input.shape[0], weight.shape[0], *sizes)
    out = torch.zeros(shape, dtype=input.dtype, device=input.device)
    if inside.stride(1) == 1:
        out = channels_side_by_side(out)
    if bias is not None:
        out += bias.view(-1, *[1] * len(stride))
    out[(..., *(slice(first, end) for first, end, _ in spans))] = inside
    return out


def _product(pixels: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply `[N, Cin, ...]` by `[Cout, Cin]` in the layout of the pixels: rows of channels, or columns."""
    if channels_last(tuple(pixels.shape), pixels.stride()):
        return F.linear(pixels.movedim(1, -1), weight, bias).movedim(-1, 1)
    columns = pixels.flatten(2)
    y = (
        torch.matmul(weight, columns)
        if bias is None
        else torch.baddbmm(bias[:, None], weight.expand(len(columns), -1, -1), columns)
    )
    return y.unflatten(2, pixels.shape[2:])

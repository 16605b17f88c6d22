"""Winograd's F(2x2, 3x3): a 3x3 convolution of stride 1 by 16 products where direct summation takes 36.

The transforms below are those of S. Winograd, "Arithmetic Complexity of Computations", 1980, as A. Lavin and S. Gray apply them in
"Fast Algorithms for Convolutional Neural Networks", 2016. A tile of 4x4 input pixels, two apart, gives 2x2 outputs. With several
depths of the kernel their products are added up before the last transform, so the transforms are shared.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from turnout.ops.convolution.methods import output_frames, reached

AT_ONCE = 64  # channels added up in one go: more make longer sums, and those lose more digits than torch does
MOST_BYTES = 8 * 2**20  # of transformed tiles at a time: they stay in a CPU's cache


def transformed_weight(weight: Tensor) -> Tensor:
    """`[Cout, Cin, KD, 3, 3]` to `[KD, 4 * 4, Cin, Cout]`, columns before rows, as the tiles have them."""
    g = weight.permute(2, 4, 3, 1, 0)  # [KD, KW, KH, Cin, Cout]
    for axis in (1, 2):
        first, middle, last = g.unbind(axis)
        outer = first + last
        g = torch.stack((first, (outer + middle) / 2, (outer - middle) / 2, last), axis)
    return g.flatten(1, 2)


def to_tiles(x: Tensor, axis: int) -> Tensor:
    """Tiles of 4 pixels, two apart, along an axis, transformed: the four results in front, `[4, ..., tiles, ...]`."""
    tiles = x.shape[axis] // 2 - 1
    a, b, c, d = (x[(slice(None),) * axis + (slice(k, k + 2 * tiles - 1, 2),)] for k in range(4))
    out = torch.empty((4, *a.shape), dtype=x.dtype, device=x.device)
    torch.sub(a, c, out=out[0])
    torch.add(b, c, out=out[1])
    torch.sub(c, b, out=out[2])
    torch.sub(b, d, out=out[3])
    return out


def from_tiles(m: Tensor) -> tuple[Tensor, Tensor]:
    """The four results in front to the tile's two outputs."""
    return (m[1] + m[2]).add_(m[0]), (m[1] - m[2]).sub_(m[3])


def by_winograd(input: Tensor, weight: Tensor, bias: Tensor | None, padding: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """A convolution with a kernel of KD x 3 x 3, stride 1, spatial dilation 1, one group."""
    filters = transformed_weight(weight)
    (_, cin, frames, *size), cout = input.shape, weight.shape[0]
    outputs = output_frames(frames, weight.shape[2], 1, padding[0], dilation[0])
    height, width = (n + 2 * p - 2 for n, p in zip(size, padding[1:], strict=True))
    out = torch.empty((len(input), outputs, height, width, cout), dtype=input.dtype, device=input.device)
    down, across = -(-height // 2), -(-width // 2)
    margins = (padding[2], 2 * across + 2 - input.shape[4] - padding[2], padding[1], 2 * down + 2 - input.shape[3] - padding[1])
    row = 16 * input.element_size() * across * (cin * frames + cout * outputs)
    rows = max(1, min(down, MOST_BYTES // row))
    spans = [reached(frames, outputs, tap, 1, padding[0], dilation[0]) for tap in range(weight.shape[2])]
    for clip, into in zip(input, out, strict=True):  # [Cin, D, H, W] and [D', H', W', Cout]
        image = F.pad(clip.movedim(0, -1), (0, 0, *margins))
        for top in range(0, down, rows):
            count = min(rows, down - top)
            tiles = to_tiles(to_tiles(image[:, 2 * top : 2 * (top + count) + 2], 1), 3)  # [4, 4, D, rows, columns, Cin]
            products = _multiplied(tiles.view(16, frames, -1, cin), filters, spans, outputs).view(4, 4, outputs, count, across, cout)
            for x, columns in enumerate(from_tiles(products)):
                for y, values in enumerate(from_tiles(columns)):
                    place = into[:, 2 * top + y : 2 * (top + count) : 2, x::2]
                    values = values[:, : place.shape[1], : place.shape[2]]
                    place.copy_(values) if bias is None else torch.add(values, bias, out=place)
    return out.movedim(-1, 1)


def _multiplied(tiles: Tensor, filters: Tensor, spans: list[tuple[int, int, int]], outputs: int) -> Tensor:
    """`[16, frames, tiles, Cin]` times `[KD, 16, Cin, Cout]`, added up over what each output sees: `[16, outputs, tiles, Cout]`."""
    _, _, count, cin = tiles.shape
    products = torch.zeros((16, outputs * count, filters.shape[3]), dtype=tiles.dtype, device=tiles.device)
    flat = tiles.view(16, -1, cin)
    for filter, (first, end, frame) in zip(filters, spans, strict=True):
        into, seen = products[:, first * count : end * count], flat[:, frame * count : (frame + end - first) * count]
        for part in range(0, cin, AT_ONCE):
            into.baddbmm_(seen[..., part : part + AT_ONCE], filter[:, part : part + AT_ONCE])
    return products

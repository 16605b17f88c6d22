"""Nearest upsampling and a convolution, as one convolution of the small image.

With scale s, output row o = s * i + a sees row floor((a + k - padding) / s) + i of the small image for each
row k of the kernel. Rows of
the kernel that see the same row of the image become one, the sum of their weights: for every phase a there is
a shorter kernel. All phases are filters of one convolution, their windows started so that they have one
length; then output pixels are picked from it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from turnout.ops.convolution.layout import FIRST, channels_side_by_side, in_format
from turnout.ops.convolution.methods import Window, vendor
from turnout.ops.convolution.problem import channels_last


class Axis(NamedTuple):
    """One axis of the image."""

    # For each phase the first row of its window, counted from the row of its output.
    starts: tuple[int, ...]
    length: int  # of the longest window
    # [phase][row of the window]: the rows of the kernel that fall on it.
    sums: tuple[tuple[tuple[int, ...], ...], ...]

    @staticmethod
    @functools.lru_cache(256)
    def of(scale: int, kernel: int, padding: int) -> Axis:
        """
        >>> Axis.of(2, 3, 1).sums
        (((0,), (1, 2)), ((0, 1), (2,)))
        """
        rows = [[(a + k - padding) // scale for k in range(kernel)] for a in range(scale)]
        length = max(max(row) - min(row) for row in rows) + 1
        sums = tuple(
            tuple(tuple(k for k in range(kernel) if row[k] == row[0] + u) for u in range(length))
            for row in rows
        )
        return Axis(tuple(row[0] for row in rows), length, sums)

    @property
    def even(self) -> bool:
        """Whether every phase fills its window, and windows start one step apart: then one convolution and
        one copy do for all. A place without a weight would multiply what it sees by zero, and make NaN of
        Inf."""
        steps = {b - a for a, b in itertools.pairwise(self.starts)}
        return len(steps) <= 1 and all(all(phase) for phase in self.sums)

    @property
    def step(self) -> int:
        """The rows from the start of one phase's window to that of the next."""
        return self.starts[1] - self.starts[0] if len(self.starts) > 1 else 0

    def padding(self, size: int, outputs: int) -> int:
        """Rows of zeros around the image so that all windows of `outputs` rows a phase find something."""
        return max(0, -min(self.starts), outputs + max(self.starts) + self.length - 1 - size)


def phase_weights(weight: Tensor, axes: Sequence[Axis]) -> Tensor:
    """Add up the weights that meet the same pixel, in a wider type.

    `[Cout, Cin, KH, KW]` becomes `[phases of rows, phases of columns, Cout, Cin, rows, columns]`.
    """
    high, wide = axes
    # A matrix of zeros and ones: halves are exact in float32, TF32 included, and their sums are rounded once.
    # On a CPU torch may be told to multiply float32 as bfloat16, in which float16 is not exact.
    in_float64 = weight.dtype in (torch.float32, torch.float64) or weight.is_cpu
    exact = torch.float64 if in_float64 else torch.float32
    place = _places(high, wide, weight.shape[2], weight.shape[3], exact, weight.device)
    cout, cin = weight.shape[:2]
    flat = weight.permute(0, 2, 3, 1).reshape(cout, -1, cin).to(exact)  # [Cout, KH * KW, Cin]
    summed = torch.matmul(place, flat)  # [Cout, phases * phases * rows * columns, Cin]
    parts = (len(high.starts), len(wide.starts), high.length, wide.length)
    # In memory: phases, Cout, rows, columns, Cin, so that all phases are filters of one channels-last weight.
    ordered = summed.unflatten(1, parts).permute(1, 2, 0, 3, 4, 5)
    packed = torch.empty(ordered.shape, dtype=weight.dtype, device=weight.device).copy_(ordered)
    return packed.permute(0, 1, 2, 5, 3, 4)


@functools.lru_cache(maxsize=32)
def _places(
    high: Axis, wide: Axis, rows: int, columns: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Ones where a weight of the kernel belongs to a place in a phase's window: `[phases * phases * rows *
    columns, KH * KW]`.
    """
    values = [
        float(y in high.sums[a][u] and x in wide.sums[b][v])
        for a in range(len(high.starts))
        for b in range(len(wide.starts))
        for u in range(high.length)
        for v in range(wide.length)
        for y in range(rows)
        for x in range(columns)
    ]
    return torch.tensor(values, dtype=dtype, device="cpu").reshape(-1, rows * columns).to(device)


def by_phases(
    input: Tensor, weight: Tensor, bias: Tensor | None, scale: int, padding: Sequence[int], out: Tensor
) -> Tensor:
    """All phases by one convolution with `scale**2` times the filters, picked apart into `out` by one copy.

    Windows must be even.
    """
    axes = [Axis.of(scale, k, p) for k, p in zip(weight.shape[2:], padding, strict=True)]
    counts = [size // scale for size in out.shape[2:]]
    pads = [
        axis.padding(size, count) for axis, size, count in zip(axes, input.shape[2:], counts, strict=True)
    ]
    filters = phase_weights(weight, axes).flatten(0, 2)
    biases = None if bias is None else bias.repeat(scale * scale)
    # On a CPU sums lose fewer digits with channels first.
    first = input.is_cpu and not channels_last(tuple(input.shape), input.stride())
    pixels, filters = (in_format(x, FIRST) if first else channels_side_by_side(x) for x in (input, filters))
    z = vendor(pixels, filters, biases, Window([1, 1], pads, [1, 1]))
    # z holds phase (a, b) of output block (i, j) at pixel (i + starts[a] + pad, j + starts[b] + pad).
    cout, (n, c, y, x) = out.shape[1], z.stride()
    first_y, first_x = (axis.starts[0] + pad for axis, pad in zip(axes, pads, strict=True))
    picked = z.as_strided(
        (out.shape[0], cout, counts[0], scale, counts[1], scale),
        (n, c, y, axes[0].step * y + scale * cout * c, x, axes[1].step * x + cout * c),
        z.storage_offset() + first_y * y + first_x * x,
    )
    out.unflatten(3, (counts[1], scale)).unflatten(2, (counts[0], scale)).copy_(picked)
    return out

"""From tensors to launches of rms_norm_silu's kernels.

All but the addresses follows from sizes and strides, so each `Prepared` works it out once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from turnout.launch import Launch, unspecialized
from turnout.ops.integers import ceil_div
from turnout.ops.layouts import misaligned, side_by_side, widest_vector
from turnout.ops.rms_norm_silu import Positions
from turnout.routing.prepared import worked_out_once


class Plan(NamedTuple):
    kernel: Any
    programs: int
    numbers: tuple[int, ...]
    constants: dict[str, Any]


def fill(sizes: tuple[int, ...], missing: int) -> tuple[int, ...]:
    """Three numbers, the innermost last."""
    return (missing,) * (3 - len(sizes)) + sizes


class Norm(NamedTuple):
    """All that a plan follows from besides its tile."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    out_strides: tuple[int, ...]
    dim: int  # of the channels
    itemsize: int
    off: int  # bits in which addresses are off a multiple of a vector's bytes

    @property
    def positions(self) -> Positions:
        return Positions.of(self.shape, self.dim, self.strides, self.out_strides)


class RowTile(NamedTuple):
    """Channels side by side: `rows` rows are one program's, in tiles of `channels` channels."""

    rows: int = 32
    channels: int = 64
    warps: int = 4


class PlaneTile(NamedTuple):
    """Positions side by side: `positions` of them with all channels are one program's, in tiles of `channels`
    channels."""

    positions: int = 64
    channels: int = 64
    warps: int = 8


@worked_out_once
def rows_plan(norm: Norm, tile: RowTile) -> Plan:
    from turnout.ops.rms_norm_silu.kernels import rows

    size, positions = norm.shape[norm.dim], norm.positions
    count = functools.reduce(int.__mul__, positions.sizes)
    if count == 1:  # nobody takes a step
        positions = positions._replace(x=(0,), out=(0,))
    vector = widest_vector(norm.itemsize, norm.off, size, *positions.x, *positions.out)
    numbers = (count, size, *fill(positions.sizes, 1)[1:], *fill(positions.x, 0), *fill(positions.out, 0))
    constants = {
        "V": vector,
        "BM": tile.rows,
        "BC": tile.channels,
        "N": ceil_div(size, tile.channels),
        "FLAT": len(positions.sizes) == 1,
    }
    kernel = unspecialized(rows, "M", "n1", "n2")
    return Plan(kernel, ceil_div(count, tile.rows), numbers, constants)


@worked_out_once
def planes_plan(norm: Norm, tile: PlaneTile) -> Plan:
    from turnout.ops.rms_norm_silu.kernels import planes

    size, positions = norm.shape[norm.dim], norm.positions
    sizes, x, out = fill(positions.sizes, 1), fill(positions.x, 0), fill(positions.out, 0)
    steps = (*x[:2], norm.strides[norm.dim], *out[:2], norm.out_strides[norm.dim])
    vector = widest_vector(norm.itemsize, norm.off, sizes[2], *steps)
    blocks = ceil_div(size, tile.channels)
    constants = {"V": vector, "BP": tile.positions, "BC": tile.channels, "N": blocks}
    programs = sizes[0] * sizes[1] * ceil_div(sizes[2], tile.positions)
    kernel = unspecialized(planes, "n1", "n2")
    return Plan(kernel, programs, (size, *sizes[1:], *steps), constants)


def plan_launch(
    plan: Callable[[Norm, Any], Plan],
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    eps: float,
    dim: int,
    style: str,
    silu: bool,
    tile: RowTile | PlaneTile,
) -> Launch:
    """The launch that one of the plans gives for these tensors."""
    norm = Norm(x.shape, x.stride(), out.stride(), dim, x.element_size(), misaligned(x, out))
    kernel, programs, numbers, constants = plan(norm, tile)
    flags = {
        "CLAMP": style == "normalize",
        "WEIGHT": weight is not None,
        "BIAS": bias is not None,
        "SILU": silu,
    }
    tensors = (x, *side_by_side(weight, bias), out)
    return Launch(kernel, programs, tensors, (eps, *numbers), {**constants, **flags}, tile.warps)

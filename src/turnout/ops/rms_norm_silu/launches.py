"""From tensors to launches of rms_norm_silu's kernels.

All but the addresses follows from sizes and strides, so each `Prepared` works it out once.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from torch import Tensor

from turnout.launch import Launch, LaunchPlan
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


@worked_out_once
def rows_plan(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    out_strides: tuple[int, ...],
    dim: int,
    itemsize: int,
    off: int,
    rows: int,
    channels: int,
) -> Plan:
    """Channels side by side: `rows` rows are one program's, in tiles of `channels` channels."""
    from turnout.ops.rms_norm_silu.kernels import rows as kernel

    size, where = shape[dim], Positions.of(shape, dim, strides, out_strides)
    count = functools.reduce(int.__mul__, where.sizes)
    vector = widest_vector(itemsize, off, size, *where.x, *where.out)
    numbers = (count, size, *fill(where.sizes, 1)[1:], *fill(where.x, 0), *fill(where.out, 0))
    constants = {
        "V": vector,
        "BM": rows,
        "BC": channels,
        "N": ceil_div(size, channels),
        "FLAT": len(where.sizes) == 1,
    }
    return Plan(kernel, ceil_div(count, rows), numbers, constants)


@worked_out_once
def planes_plan(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    out_strides: tuple[int, ...],
    dim: int,
    itemsize: int,
    off: int,
    positions: int,
    channels: int,
) -> Plan:
    """Positions side by side: `positions` of them with all channels are one program's, in tiles of `channels`
    channels.
    """
    from turnout.ops.rms_norm_silu.kernels import planes as kernel

    size, where = shape[dim], Positions.of(shape, dim, strides, out_strides)
    sizes, x, out = fill(where.sizes, 1), fill(where.x, 0), fill(where.out, 0)
    vector = widest_vector(itemsize, off, sizes[2], *x[:2], strides[dim], *out[:2], out_strides[dim])
    numbers = (size, *sizes[1:], *x[:2], strides[dim], *out[:2], out_strides[dim])
    constants = {"V": vector, "BP": positions, "BC": channels, "N": ceil_div(size, channels)}
    return Plan(kernel, sizes[0] * sizes[1] * ceil_div(sizes[2], positions), numbers, constants)


def along(
    plan: Any,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    eps: float,
    dim: int,
    style: str,
    silu: bool,
    *tile: int,
    warps: int,
    outputs: Tensor | None,
) -> LaunchPlan:
    """The launch that one of the plans says."""
    kernel, programs, numbers, constants = plan(
        x.shape, x.stride(), out.stride(), dim, x.element_size(), misaligned(x, out), *tile
    )
    flags = {
        "CLAMP": style == "normalize",
        "WEIGHT": weight is not None,
        "BIAS": bias is not None,
        "SILU": silu,
    }
    tensors = (x, *side_by_side(weight, bias), out)
    return LaunchPlan(
        (Launch(kernel, programs, tensors, (eps, *numbers), {**constants, **flags}, warps),), outputs
    )

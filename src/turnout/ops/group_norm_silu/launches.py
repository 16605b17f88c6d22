"""From tensors to the two launches of group_norm_silu.

All but the addresses follows from sizes and strides, so each `Prepared` works it out once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from turnout.launch import Launch, LaunchPlan, Workspace
from turnout.ops.group_norm_silu import MOST_AXES, Axis, axes, positions
from turnout.ops.group_norm_silu.spatial import repeats
from turnout.ops.integers import ceil_div, power_of_two
from turnout.ops.layouts import misaligned, side_by_side, widest_vector
from turnout.routing.device import Device
from turnout.routing.prepared import worked_out_once

MOMENTS = 3  # numbers that a part leaves for each group


class Plan(NamedTuple):
    """Two kernels: how many programs, which numbers, which constants each has; and how many moments lie
    between them.
    """

    partial: int
    moments: tuple[Any, int, tuple[int, ...], dict[str, Any]]
    apply: tuple[Any, int, tuple[int, ...], dict[str, Any]]


def parts_of(work: int, programs: int) -> int:
    """How many parts to make of so many pieces of work: a power of two, since every program of the second
    kernel reads them all.
    """
    return 1 << (max(1, min(work, programs)).bit_length() - 1)


def block_of(channels: int, groups: int, columns: int) -> tuple[int, int, int]:
    """Groups of one program that has about so many columns, columns of one group (a power of two), and how
    many such blocks there are.
    """
    each = power_of_two(channels // groups)
    together = max(1, min(power_of_two(groups), columns // each))
    return together, each, ceil_div(groups, together)


@worked_out_once
def rows_plan(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    out_strides: tuple[int, ...],
    groups: int,
    itemsize: int,
    off: int,
    units: int,
    columns: int,
    rows: int,
    unroll: int,
    waves: int,
    walks: int,
) -> Plan:
    """Channels side by side: `waves` and `walks` programs for each multiprocessor take moments and apply
    them, `unroll` tiles of `rows` rows and about `columns` channels at a time."""
    from turnout.ops.group_norm_silu.kernels import row_apply, row_moments

    where = positions(shape, strides, out_strides)
    assert where is not None
    (batch, channels), each = shape[:2], shape[1] // groups
    together, wide, blocks = block_of(channels, groups, columns)
    steps = ceil_div(where.size, rows * unroll)
    parts = parts_of(steps, units * waves // (batch * blocks))
    programs = min(steps, max(1, units * walks // (batch * blocks)))
    far = (strides[0], where.x_step, out_strides[0], where.out_step)
    vector = widest_vector(itemsize, off, channels if each == wide else each, *far)
    tile = {"CG": each, "GB": together, "CB": wide, "BP": rows, "U": unroll, "V": vector}
    return Plan(
        batch * parts * MOMENTS * groups,
        (row_moments, batch * parts * blocks, (where.size, groups, parts, blocks, *far[:2]), tile),
        (
            row_apply,
            batch * programs * blocks,
            (where.size, groups, parts, blocks, programs, *far),
            {**tile, "PARTS": parts},
        ),
    )


@worked_out_once
def planes_plan(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    out_strides: tuple[int, ...],
    groups: int,
    itemsize: int,
    off: int,
    units: int,
    lanes: int,
    unroll: int,
    waves: int,
) -> Plan:
    """Positions side by side: `waves` programs for each multiprocessor take moments, `unroll` tiles of
    `lanes` positions at a time; then every program applies them to as many of one channel."""
    from turnout.ops.group_norm_silu.kernels import plane_apply, plane_moments

    where = positions(shape, strides, out_strides)
    assert where is not None
    (batch, width), each, span = shape[:2], shape[1] // groups, lanes * unroll
    one_line = strides[1] == where.size
    steps = ceil_div(where.size * each, span) if one_line else each * ceil_div(where.size, span)
    parts = parts_of(steps, units * waves // (batch * groups))
    far = (*strides[:2], *out_strides[:2])
    tile = {"BP": lanes, "U": unroll, "V": widest_vector(itemsize, off, where.size, *far), "DENSE": one_line}
    programs = batch * width * ceil_div(where.size, span)
    return Plan(
        batch * groups * parts * MOMENTS,
        (plane_moments, batch * groups * parts, (where.size, groups, each, parts, *far[:2]), tile),
        (
            plane_apply,
            programs,
            (where.size, width, groups, each, parts, *far),
            {**tile, "PARTS": parts, "STAT_TILE": span},
        ),
    )


class Reciprocal(NamedTuple):
    """What a number is multiplied with and shifted by to divide it; see `gapped_kernels.quotient`."""

    magic: int
    shift: int


def reciprocal(divisor: int) -> Reciprocal:
    """For dividing numbers from 0 to 2**31 - 1 by a divisor from 1 to 2**31 - 1, rounding down.

    With 2**31 <= magic < 2**32 and magic * divisor - 2**(31 + shift) < 2**shift the product is off by less
    than 1 / divisor, so that it has the right whole part (Granlund and Montgomery, 1994).

    >>> magic, shift = reciprocal(962)
    >>> [(2 * n * magic >> 32) >> shift for n in (0, 961, 962, 2**31 - 1)]
    [0, 0, 1, 2232311]
    """
    shift = (divisor - 1).bit_length()
    return Reciprocal(-(-(1 << (31 + shift)) // divisor), shift)


def walk_of(sizes: Sequence[int]) -> tuple[int, ...]:
    """Sizes of the two inner of three axes, each with its reciprocal, as kernels take them."""
    return tuple([number for size in sizes[1:] for number in (size, *reciprocal(size))])


def is_one_walk(steps: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether positions of these axes are one step apart from the first to the last."""
    pairs = zip(steps, steps[1:], sizes, sizes[1:], strict=False)
    return all(outer == inner * size or before == 1 for outer, inner, before, size in pairs)


@worked_out_once
def gapped_plan(
    padding: tuple[int, ...],
    mode: str,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    out_strides: tuple[int, ...],
    groups: int,
    itemsize: int,
    off: int,
    units: int,
    columns: int,
    rows: int,
    unroll: int,
    waves: int,
    walks: int,
) -> Plan:
    """Channels side by side, positions with gaps in x, in the output or in both; or a border around x, whose
    mode is as in `torch.nn.functional.pad`. The numbers of a tile are as in `rows_plan`."""
    from turnout.ops.group_norm_silu import gapped_kernels as kernels
    from turnout.ops.group_norm_silu.kernels import row_moments

    (batch, channels), each = shape[:2], shape[1] // groups
    together, wide, blocks = block_of(channels, groups, columns)
    walk, own = axes(shape, strides, out_strides, padding), axes(shape, strides, strides)
    assert walk is not None
    assert own is not None
    size, walked = math.prod(shape[2:]), math.prod(axis.size for axis in walk)
    parts = parts_of(ceil_div(size, rows * unroll), units * waves // (batch * blocks))
    programs = min(ceil_div(walked, rows * unroll), max(1, units * walks // (batch * blocks)))
    x_steps, out_steps = (
        [axis[i] for axis in walk] for i in (Axis._fields.index("x_step"), Axis._fields.index("out_step"))
    )
    far = (strides[0], *x_steps, out_strides[0], *out_steps)
    vector = widest_vector(
        itemsize, off, channels if each == wide else each, *far, *[axis.x_step for axis in own]
    )
    tile = {"CG": each, "GB": together, "CB": wide, "BP": rows, "U": unroll, "V": vector}
    first = (batch * parts * blocks, (size, groups, parts, blocks, strides[0]))
    one = positions(shape, strides, strides)
    if one is not None:
        moments = (row_moments, first[0], (*first[1], one.x_step), tile)
    else:
        steps = tuple([axis.x_step for axis in own])
        moments = (
            kernels.gapped_moments,
            first[0],
            (*first[1], *steps, *walk_of([axis.size for axis in own])),
            tile,
        )
    sizes, padded = [axis.size for axis in walk], any(padding)
    x_sizes, befores = tuple([axis.x_size for axis in walk]), tuple([axis.before for axis in walk])
    constants = {
        **tile,
        "PARTS": parts,
        "X_ROWS": not padded and is_one_walk(x_steps, sizes),
        "Y_ROWS": is_one_walk(out_steps, sizes),
        "PAD": getattr(kernels, mode.upper()).value if padded else kernels.NOTHING.value,
    }
    numbers = (size, walked, groups, parts, blocks, programs, *far, *walk_of(sizes), *x_sizes, *befores)
    apply = (kernels.gapped_apply, batch * programs * blocks, numbers, constants)
    return Plan(batch * parts * MOMENTS * groups, moments, apply)


@worked_out_once
def spatial_plan(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    out_strides: tuple[int, ...],
    groups: int,
    itemsize: int,
    off: int,
    scale_shape: tuple[int, ...],
    scale_strides: tuple[int, ...],
    shift_strides: tuple[int, ...],
    first_apart: bool,
    units: int,
    columns: int,
    rows: int,
    unroll: int,
    waves: int,
    walks: int,
) -> Plan:
    """Channels side by side in all tensors, and a scale and a shift for each block of positions. itemsize: of
    the widest elements. The numbers of a tile are as in `rows_plan`."""
    from turnout.ops.group_norm_silu.gapped_kernels import spatial_apply

    # Moments are taken of x alone: four tiles of it at a time.
    partial, moments, _ = gapped_plan(
        (),
        "constant",
        shape,
        strides,
        out_strides,
        groups,
        itemsize,
        off,
        units,
        columns,
        rows,
        max(4, unroll),
        waves,
        walks,
    )
    size, _, parts, blocks, *_ = moments[2]
    programs = min(ceil_div(size, rows * unroll), max(1, units * walks // (shape[0] * blocks)))
    ones, dims = MOST_AXES - (len(shape) - 2), range(2, len(shape))
    # Of a picture or a line too, the first dimension is the deep axis, along which the first may be apart.
    steps = [
        (step[0], step[2], *[0] * ones, *step[3:])
        for step in (strides, out_strides, scale_strides, shift_strides)
    ]
    shares = [repeats(shape[dim], scale_shape[dim], int(first_apart and dim == 2)) for dim in dims]
    divisors = [number for share in (shares[0], *[1] * ones, *shares[1:]) for number in reciprocal(share)]
    vector = widest_vector(itemsize, off, moments[3]["V"], *[number for step in steps for number in step])
    numbers = (
        size,
        groups,
        parts,
        blocks,
        programs,
        *[number for step in steps for number in step],
        *walk_of((shape[2], *[1] * ones, *shape[3:])),
        int(first_apart),
        *divisors,
    )
    constants = {**moments[3], "U": unroll, "V": vector, "PARTS": parts}
    return Plan(partial, moments, (spatial_apply, shape[0] * programs * blocks, numbers, constants))


def plan_spatial(
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor,
    shift: Tensor,
    out: Tensor,
    eps: float,
    silu: bool,
    first_apart: bool,
    *tile: int,
    warps: int,
) -> LaunchPlan:
    """The launches that `spatial_plan` says.

    Where the channels of scale or shift are not side by side, copies are taken.
    """
    scale, shift = (
        t if t.stride(1) == 1 else t.movedim(1, -1).contiguous().movedim(-1, 1) for t in (scale, shift)
    )
    units, off = Device.of(x.device).units, misaligned(x, out, scale, shift)
    itemsize = max(x.element_size(), scale.element_size(), shift.element_size())
    plan = spatial_plan(
        x.shape,
        x.stride(),
        out.stride(),
        groups,
        itemsize,
        off,
        scale.shape,
        scale.stride(),
        shift.stride(),
        first_apart,
        units,
        *tile,
    )
    return _two_launches(plan, x, weight, bias, (scale, shift), out, eps, silu, warps, out)


def plan_two(
    plan: Any,
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    eps: float,
    silu: bool,
    *tile: int,
    warps: int,
    outputs: Tensor | None,
) -> LaunchPlan:
    """The launches that one of the other plans says."""
    units, off = Device.of(x.device).units, misaligned(x, out)
    two = plan(x.shape, x.stride(), out.stride(), groups, x.element_size(), off, units, *tile)
    return _two_launches(two, x, weight, bias, (), out, eps, silu, warps, outputs)


def _two_launches(
    plan: Plan,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    modulation: tuple[Tensor, ...],
    out: Tensor,
    eps: float,
    silu: bool,
    warps: int,
    outputs: Tensor | None,
) -> LaunchPlan:
    """Moments go into a workspace, from which the second launch reads them."""
    partial = torch.empty(plan.partial, dtype=torch.float32, device=x.device)
    kernel, programs, numbers, constants = plan.moments
    moments = Launch(kernel, programs, (x, partial), numbers, constants, warps)
    kernel, programs, numbers, constants = plan.apply
    flags = {"WEIGHT": weight is not None, "BIAS": bias is not None, "SILU": silu}
    tensors = (x, partial, *side_by_side(weight, bias), *modulation, out)
    apply = Launch(kernel, programs, tensors, (eps, *numbers), {**constants, **flags}, warps)
    return LaunchPlan((moments, apply), outputs, (Workspace(partial),))

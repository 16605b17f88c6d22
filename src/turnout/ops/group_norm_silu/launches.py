"""From tensors to the two launches of group_norm_silu.

All but the addresses follows from sizes and strides, so each `Prepared` works it out once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from turnout.launch import Launch, LaunchPlan, Workspace, unspecialized
from turnout.ops.group_norm_silu import MOST_AXES, axes, positions
from turnout.ops.group_norm_silu.spatial import repeats
from turnout.ops.integers import ceil_div, power_of_two
from turnout.ops.layouts import batch_steps, misaligned, side_by_side, widest_vector
from turnout.routing.device import Device
from turnout.routing.prepared import worked_out_once

MOMENTS = 3  # numbers that a part leaves for each group
# Numbers that differ from picture to picture and only bound loops and masks: see NOTES.md.
SUMMED = ("P", "parts")


class Norm(NamedTuple):
    """All that a plan follows from besides its tile: sizes and strides `[B, C, ...]`, and the device. The
    stride of a single picture is 0."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    out_strides: tuple[int, ...]
    groups: int
    itemsize: int  # of the widest elements
    off: int  # bits in which addresses are off a multiple of a vector's bytes
    units: int  # multiprocessors

    @property
    def group_channels(self) -> int:
        return self.shape[1] // self.groups


class RowTile(NamedTuple):
    """Channels side by side: `unroll` tiles of `rows` rows and about `columns` channels at a time; `waves`
    and `walks` programs for each multiprocessor take moments and apply them."""

    columns: int = 64
    rows: int = 32
    unroll: int = 4
    waves: int = 2
    walks: int = 4
    warps: int = 8


class PlaneTile(NamedTuple):
    """Positions side by side: `unroll` tiles of `lanes` positions at a time; `waves` programs for each
    multiprocessor take moments."""

    lanes: int = 1024
    unroll: int = 4
    waves: int = 4
    warps: int = 4


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


def most_parts(programs: int) -> int:
    """The parts of one picture that is large enough, of which `parts_of` makes no more.

    The second kernel is compiled for so many, and leaves out those that a batch or a small picture has not:
    it is the same for any batch, and no program reads more moments than one of a single picture does.
    """
    return parts_of(programs, programs)


def block_of(channels: int, groups: int, columns: int) -> tuple[int, int, int]:
    """Groups of one program that has about so many columns, columns of one group (a power of two), and how
    many such blocks there are.
    """
    each = power_of_two(channels // groups)
    together = max(1, min(power_of_two(groups), columns // each))
    return together, each, ceil_div(groups, together)


@worked_out_once
def rows_plan(norm: Norm, tile: RowTile) -> Plan:
    """Channels side by side, at positions that are one walk."""
    from turnout.ops.group_norm_silu.kernels import row_apply, row_moments

    all_positions = positions(norm.shape, norm.strides, norm.out_strides)
    assert all_positions is not None
    (batch, channels), groups, each = norm.shape[:2], norm.groups, norm.group_channels
    together, wide, blocks = block_of(channels, groups, tile.columns)
    steps = ceil_div(all_positions.size, tile.rows * tile.unroll)
    parts = parts_of(steps, norm.units * tile.waves // (batch * blocks))
    programs = min(steps, max(1, norm.units * tile.walks // (batch * blocks)))
    far = (norm.strides[0], all_positions.x_step, norm.out_strides[0], all_positions.out_step)
    vector = widest_vector(norm.itemsize, norm.off, channels if each == wide else each, *far)
    constants = {"CG": each, "GB": together, "CB": wide, "BP": tile.rows, "U": tile.unroll, "V": vector}
    return Plan(
        batch * parts * MOMENTS * groups,
        (
            unspecialized(row_moments, *SUMMED),
            batch * parts * blocks,
            (all_positions.size, groups, parts, blocks, *far[:2]),
            constants,
        ),
        (
            unspecialized(row_apply, *SUMMED, "programs"),
            batch * programs * blocks,
            (all_positions.size, groups, parts, blocks, programs, *far),
            {**constants, "PARTS": most_parts(norm.units * tile.waves // blocks)},
        ),
    )


@worked_out_once
def planes_plan(norm: Norm, tile: PlaneTile) -> Plan:
    """Positions side by side: every program of the second kernel applies moments to as many positions of one
    channel as one of the first reads at a time."""
    from turnout.ops.group_norm_silu.kernels import plane_apply, plane_moments

    all_positions = positions(norm.shape, norm.strides, norm.out_strides)
    assert all_positions is not None
    (batch, width), groups, each = norm.shape[:2], norm.groups, norm.group_channels
    span = tile.lanes * tile.unroll
    one_line = norm.strides[1] == all_positions.size
    steps = (
        ceil_div(all_positions.size * each, span) if one_line else each * ceil_div(all_positions.size, span)
    )
    parts = parts_of(steps, norm.units * tile.waves // (batch * groups))
    far = (*norm.strides[:2], *norm.out_strides[:2])
    vector = widest_vector(norm.itemsize, norm.off, all_positions.size, *far)
    constants = {"BP": tile.lanes, "U": tile.unroll, "V": vector, "DENSE": one_line}
    programs = batch * width * ceil_div(all_positions.size, span)
    return Plan(
        batch * groups * parts * MOMENTS,
        (
            unspecialized(plane_moments, "parts"),
            batch * groups * parts,
            (all_positions.size, groups, each, parts, *far[:2]),
            constants,
        ),
        (
            unspecialized(plane_apply, *SUMMED),
            programs,
            (all_positions.size, width, groups, each, parts, *far),
            {**constants, "PARTS": most_parts(norm.units * tile.waves // groups), "STAT_TILE": span},
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
def gapped_plan(norm: Norm, tile: RowTile, padding: tuple[int, ...] = (), mode: str = "constant") -> Plan:
    """Channels side by side, positions with gaps in x, in the output or in both; or a border around x, whose
    mode is as in `torch.nn.functional.pad`."""
    from turnout.ops.group_norm_silu import gapped_kernels as kernels
    from turnout.ops.group_norm_silu.kernels import row_moments

    shape, strides, out_strides, groups, itemsize, off, units = norm
    (batch, channels), each = shape[:2], norm.group_channels
    together, wide, blocks = block_of(channels, groups, tile.columns)
    walk, own = axes(shape, strides, out_strides, padding), axes(shape, strides, strides)
    assert walk is not None
    assert own is not None
    size, walked = math.prod(shape[2:]), math.prod(axis.size for axis in walk)
    span = tile.rows * tile.unroll
    parts = parts_of(ceil_div(size, span), units * tile.waves // (batch * blocks))
    programs = min(ceil_div(walked, span), max(1, units * tile.walks // (batch * blocks)))
    x_steps, out_steps = [axis.x_step for axis in walk], [axis.out_step for axis in walk]
    own_steps = tuple([axis.x_step for axis in own])
    far = (strides[0], *x_steps, out_strides[0], *out_steps)
    vector = widest_vector(itemsize, off, channels if each == wide else each, *far, *own_steps)
    constants = {"CG": each, "GB": together, "CB": wide, "BP": tile.rows, "U": tile.unroll, "V": vector}

    first_programs, first_numbers = batch * parts * blocks, (size, groups, parts, blocks, strides[0])
    one = positions(shape, strides, strides)
    if one is not None:
        kernel = unspecialized(row_moments, *SUMMED)
        moments = (kernel, first_programs, (*first_numbers, one.x_step), constants)
    else:
        numbers = (*first_numbers, *own_steps, *walk_of([axis.size for axis in own]))
        moments = (kernels.gapped_moments, first_programs, numbers, constants)

    sizes, padded = [axis.size for axis in walk], any(padding)
    x_sizes, befores = tuple([axis.x_size for axis in walk]), tuple([axis.before for axis in walk])
    numbers = (size, walked, groups, parts, blocks, programs, *far, *walk_of(sizes), *x_sizes, *befores)
    flags = {
        "PARTS": most_parts(units * tile.waves // blocks),
        "X_ROWS": not padded and is_one_walk(x_steps, sizes),
        "Y_ROWS": is_one_walk(out_steps, sizes),
        "PAD": getattr(kernels, mode.upper()).value if padded else kernels.NOTHING.value,
    }
    apply = (kernels.gapped_apply, batch * programs * blocks, numbers, {**constants, **flags})
    return Plan(batch * parts * MOMENTS * groups, moments, apply)


class Modulation(NamedTuple):
    """Sizes and strides of a scale and a shift at a lower resolution."""

    shape: tuple[int, ...]
    scale_strides: tuple[int, ...]
    shift_strides: tuple[int, ...]
    first_apart: bool


@worked_out_once
def spatial_plan(norm: Norm, modulation: Modulation, tile: RowTile) -> Plan:
    """Channels side by side in all tensors, and a scale and a shift for each block of positions."""
    from turnout.ops.group_norm_silu.gapped_kernels import spatial_apply

    # Moments are taken of x alone: four tiles of it at a time.
    partial, moments, _ = gapped_plan(norm, tile._replace(unroll=max(4, tile.unroll)))
    size, _, parts, blocks, *_ = moments[2]
    most = most_parts(norm.units * tile.waves // blocks)
    shape, first_apart = norm.shape, modulation.first_apart
    programs = min(
        ceil_div(size, tile.rows * tile.unroll), max(1, norm.units * tile.walks // (shape[0] * blocks))
    )
    ones, dims = MOST_AXES - (len(shape) - 2), range(2, len(shape))
    # Of a picture or a line too, the first dimension is the deep axis, along which the first may be apart.
    strides = (norm.strides, norm.out_strides, modulation.scale_strides, modulation.shift_strides)
    steps = [step for own in strides for step in (own[0], own[2], *[0] * ones, *own[3:])]
    shares = [repeats(shape[dim], modulation.shape[dim], int(first_apart and dim == 2)) for dim in dims]
    divisors = [number for share in (shares[0], *[1] * ones, *shares[1:]) for number in reciprocal(share)]
    vector = widest_vector(norm.itemsize, norm.off, moments[3]["V"], *steps)
    walk = walk_of((shape[2], *[1] * ones, *shape[3:]))
    numbers = (size, norm.groups, parts, blocks, programs, *steps, *walk, int(first_apart), *divisors)
    constants = {**moments[3], "U": tile.unroll, "V": vector, "PARTS": most}
    return Plan(partial, moments, (spatial_apply, shape[0] * programs * blocks, numbers, constants))


def norm_of(x: Tensor, groups: int, out: Tensor, *modulation: Tensor) -> Norm:
    """What a plan follows from, for these tensors."""
    itemsize = max(x.element_size(), *(t.element_size() for t in modulation), 0)
    off, units = misaligned(x, out, *modulation), Device.of(x.device).units
    return Norm(x.shape, batch_steps(x), batch_steps(out), groups, itemsize, off, units)


def two_launches(
    plan: Plan,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    eps: float,
    silu: bool,
    warps: int,
    *,
    modulation: tuple[Tensor, ...] = (),
    outputs: Tensor | None,
) -> LaunchPlan:
    """The launches of a plan: moments go into a workspace, from which the second launch reads them."""
    partial = torch.empty(plan.partial, dtype=torch.float32, device=x.device)
    kernel, programs, numbers, constants = plan.moments
    moments = Launch(kernel, programs, (x, partial), numbers, constants, warps)
    kernel, programs, numbers, constants = plan.apply
    flags = {"WEIGHT": weight is not None, "BIAS": bias is not None, "SILU": silu}
    tensors = (x, partial, *side_by_side(weight, bias), *modulation, out)
    apply = Launch(kernel, programs, tensors, (eps, *numbers), {**constants, **flags}, warps)
    return LaunchPlan((moments, apply), outputs, (Workspace(partial),))

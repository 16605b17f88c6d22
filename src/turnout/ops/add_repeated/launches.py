"""From tensors to the launch of add_repeated's kernel.

All but the addresses follows from sizes and strides, so each `Prepared` works it out once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from turnout.launch import Launch
from turnout.ops.add_repeated import picks_of
from turnout.ops.integers import ceil_div
from turnout.ops.layouts import misaligned, widest_vector
from turnout.routing.prepared import worked_out_once

Sizes = tuple[int, ...]


class Plan(NamedTuple):
    kernel: Any
    programs: int
    numbers: Sizes
    constants: dict[str, Any]


@worked_out_once
def plan(
    shapes: tuple[Sizes, Sizes],
    strides: tuple[Sizes, Sizes, Sizes],
    times: Sizes,
    itemsize: int,
    off: int,
    pixels: int,
    channels: int,
) -> Plan:
    """shapes: of y and x. strides: of y, x and the output. off: of their addresses, see `misaligned`."""
    from turnout.ops.add_repeated.kernels import add_repeated as kernel

    (batch, size, frames, *_), (_, before, own_frames, height, width) = shapes
    picks, kept = picks_of(before, size, times), frames // own_frames
    assert picks is not None
    steps = [stride for operand_strides in strides for stride in (operand_strides[0], *operand_strides[2:])]
    constants = {
        "V": widest_vector(itemsize, off, size, *steps),
        "BP": pixels,
        "BC": channels,
        **dict(zip(("KT", "KH", "KW"), (kept, *times[1:]), strict=True)),
        "SKIP": times[0] - kept,
        **dict(zip(("PT", "PH", "PW"), picks, strict=True)),
    }
    programs = batch * own_frames * height * ceil_div(width, pixels) * ceil_div(size, channels)
    return Plan(kernel, programs, (size, own_frames, height, width, *steps), constants)


def launch_of(
    y: Tensor, x: Tensor, out: Tensor, times: list[int], pixels: int, channels: int, warps: int
) -> Launch:
    kernel, programs, numbers, constants = plan(
        (tuple(y.shape), tuple(x.shape)),
        (y.stride(), x.stride(), out.stride()),
        tuple(times),
        y.element_size(),
        misaligned(y, x, out),
        pixels,
        channels,
    )
    return Launch(kernel, programs, (y, x, out), numbers, constants, warps)

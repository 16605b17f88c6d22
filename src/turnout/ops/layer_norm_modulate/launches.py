"""From tensors to the launch of layer_norm_modulate's kernel.

All but the addresses follows from sizes and strides, so each `Prepared` works it out once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from turnout.launch import Launch, LaunchPlan, unspecialized
from turnout.ops.integers import ceil_div
from turnout.ops.layouts import VECTOR_BYTES, misaligned, side_by_side, widest_vector
from turnout.routing.prepared import worked_out_once

Sizes = tuple[int, ...]


class Plan(NamedTuple):
    kernel: Any
    programs: int
    numbers: Sizes
    constants: dict[str, Any]


def steps(sizes: Sizes | None, strides: Sizes | None) -> tuple[int, int]:
    """Strides by batch and token; 0 where all share one, or where there is nothing."""
    if sizes is None or strides is None:
        return 0, 0
    return 0 if sizes[0] == 1 else strides[0], 0 if sizes[1] == 1 else strides[1]


@worked_out_once
def plan(
    shapes: tuple[Sizes | None, ...],
    strides: tuple[Sizes | None, ...],
    itemsize: int,
    widest: int,
    off: int,
    modulation_off: int,
    tokens: int,
    channels: int,
    warps: int,
) -> Plan:
    """Of x, residual, gate, scale and shift. `tokens` tokens are one program's, in tiles of `channels`
    channels; `widest` are the bytes of the widest modulation."""
    from turnout.ops.layer_norm_modulate.kernels import layer_norm_modulate

    assert shapes[0] is not None
    batch, length, size = shapes[0]
    streams = [steps(*tensor) for tensor in zip(shapes[:2], strides[:2], strict=True)]
    modulations = [steps(*tensor) for tensor in zip(shapes[2:], strides[2:], strict=True)]
    numbers = [step for pair in (*streams, *modulations) for step in pair]
    # Read once for several tokens, they come in x's layout only if they are as wide as x and a token's tile
    # is a vector for each thread.
    own_layout = widest > itemsize or channels * itemsize < 32 * warps * VECTOR_BYTES
    by_token = any(pair[1] for pair in modulations) or (tokens > 1 and own_layout)
    constants = {
        "C": size,
        "V": widest_vector(itemsize, off, size, *(step for pair in streams for step in pair)),
        "MV": widest_vector(widest, modulation_off, size, *(step for pair in modulations for step in pair)),
        "BM": tokens,
        "BC": channels,
        "N": ceil_div(size, channels),
        "TOKENS": by_token,
    }
    kernel = unspecialized(layer_norm_modulate, "S")
    return Plan(kernel, batch * ceil_div(length, tokens), (length, *numbers), constants)


def planned(
    x: Tensor,
    residual: Tensor | None,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    y: Tensor | None,
    h: Tensor | None,
    eps: float,
    tokens: int,
    channels: int,
    warps: int,
    outputs: Tensor | tuple[Tensor, ...],
) -> LaunchPlan:
    weight, bias = side_by_side(weight, bias)
    placed = (x, residual, gate, scale, shift)
    modulations = (gate, weight, bias, scale, shift)
    kernel, programs, numbers, constants = plan(
        tuple([None if t is None else t.shape for t in placed]),
        tuple([None if t is None else t.stride() for t in placed]),
        x.element_size(),
        max([2, *(t.element_size() for t in modulations if t is not None)]),
        misaligned(x, residual, y, h),
        misaligned(*modulations),
        tokens,
        channels,
        warps,
    )
    launch = Launch(kernel, programs, (x, residual, *modulations, y, h), (eps, *numbers), constants, warps)
    return LaunchPlan((launch,), outputs)

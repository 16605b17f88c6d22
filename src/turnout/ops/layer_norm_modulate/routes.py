"""The route of layer_norm_modulate and of gated_add: one kernel, a program for each token or for a few."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from turnout.launch import LaunchPlan, prepare_from_plan, runs_plan
from turnout.ops import needs
from turnout.ops.integers import power_of_two
from turnout.ops.layer_norm_modulate import GATED_ADD, LAYER_NORM_MODULATE, LayerNormModulate, work
from turnout.ops.layer_norm_modulate.launches import planned
from turnout.ops.layouts import VECTOR_BYTES
from turnout.routing.device import Device
from turnout.routing.route import Config

MOST_CHANNELS = 8192  # a program keeps all channels of its tokens in registers
THREADS = 128
LARGE = 2**20  # elements from which on a second configuration is worth trying


def refuses_rows(problem: LayerNormModulate, device: Device) -> Iterator[str]:
    yield from needs.needs_triton(device)
    if 0 in problem.shape:
        yield "nothing to do, this route needs at least one element"
    dtypes = {
        name: getattr(problem, f"{name}_dtype") for name in ("gate", "scale", "shift", "weight", "bias")
    }
    yield from needs.needs_half_or_single(x=problem.dtype, **dtypes)
    if problem.channels > MOST_CHANNELS:
        yield f"{problem.channels} channels, this route needs at most {MOST_CHANNELS}"
    placed = {"x": problem.strides} | {
        name: getattr(problem, f"{name}_strides") for name in ("residual", "gate", "scale", "shift")
    }
    for name, strides in placed.items():
        if strides is not None and strides[2] != 1 and problem.channels > 1:
            yield f"channels of {name} {strides[2]} apart, this route needs them side by side"


def gpu_cost(problem: LayerNormModulate, device: Device) -> float | None:
    """Share of the bandwidth and time of the host: measured on an H200, see NOTES.md."""
    moving = device.seconds(work(problem).bytes)
    fitted = device.fitted("layer_norm_modulate.rows")
    return (
        None
        if moving is None or device.type != "cuda"
        else max(fitted.host, fitted.start + moving / fitted.share)
    )


def rows_configs(problem: LayerNormModulate, device: Device) -> list[Config]:
    """Tiles of a vector for each of 128 threads at most, if the channels divide into eight of them or fewer;
    else one for all channels.
    """
    vector = VECTOR_BYTES // problem.dtype.itemsize
    channels = min(problem.channels & -problem.channels, THREADS * vector)  # a power of two that divides them
    if channels < vector or 8 * channels < problem.channels:
        channels = power_of_two(max(problem.channels, 2))
    least = max(1, THREADS * vector // channels)
    tries = 2 if problem.elements >= LARGE else 1
    return [{"tokens": tokens, "channels": channels, "warps": 4} for tokens in (least, 2 * least)[:tries]]


ROWS: Any = {
    "refuses": refuses_rows,
    "cost": gpu_cost,
    "configs": rows_configs,
    "prepare": prepare_from_plan,
    "numerics": "close",
    "version": 1,
    "kernels": ("turnout.ops.layer_norm_modulate.kernels:layer_norm_modulate",),
}


@LAYER_NORM_MODULATE.route("rows", **ROWS)
@runs_plan
def rows(
    x: Tensor,
    residual: Tensor | None,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    eps: float,
    *,
    tokens: int = 1,
    channels: int = 1024,
    warps: int = 4,
) -> LaunchPlan:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    h = None if residual is None else torch.empty_like(y)
    outputs = y, x.new_empty(0) if h is None else h
    return planned(x, residual, gate, weight, bias, scale, shift, y, h, eps, tokens, channels, warps, outputs)


@GATED_ADD.route("rows", **ROWS)
@runs_plan
def rows_added(
    x: Tensor, residual: Tensor, gate: Tensor | None, *, tokens: int = 1, channels: int = 1024, warps: int = 4
) -> LaunchPlan:
    h = torch.empty_like(x, memory_format=torch.contiguous_format)
    return planned(x, residual, gate, None, None, None, None, None, h, 0.0, tokens, channels, warps, h)

"""The routes of causal_conv1d_update: one launch on a GPU, one pass on a CPU."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from turnout.launch import Launch, LaunchPlan, prepare_from_plan, runs_plan
from turnout.ops import needs
from turnout.ops.causal_conv1d import channel_last
from turnout.ops.causal_conv1d.launches import empty_dense, widest
from turnout.ops.causal_conv1d.routes import LONGEST, WIDEST
from turnout.ops.causal_conv1d_update import CAUSAL_CONV1D_UPDATE, CausalConv1dUpdate, work
from turnout.ops.integers import ceil_div
from turnout.ops.layouts import VECTOR_BYTES, array, flat
from turnout.routing.device import Device
from turnout.routing.route import Config


def refuses_anywhere(problem: CausalConv1dUpdate) -> Iterator[str]:
    if problem.elements == 0:
        yield "nothing to convolve, this route needs at least one element"
    if problem.state_length == 0:
        yield "a state of length 0, this route needs at least 1"
    named = {
        "x": problem.dtype,
        "weight": problem.weight_dtype,
        "bias": problem.bias_dtype,
        "conv_state": problem.state_dtype,
    }
    yield from needs.needs_half_or_single(**named)


def refuses_on_gpu(problem: CausalConv1dUpdate, device: Device) -> Iterator[str]:
    yield from needs.needs_triton(device)
    yield from refuses_anywhere(problem)
    if max(problem.width, problem.state_length) > WIDEST:
        yield (
            f"width {problem.width} and a state of length {problem.state_length}, "
            f"this route needs at most {WIDEST}"
        )
    if problem.length > LONGEST:
        yield f"length {problem.length}, this route needs at most {LONGEST}"


def refuses_on_cpu(problem: CausalConv1dUpdate, device: Device) -> Iterator[str]:
    yield from needs.needs_numba(device)
    yield from refuses_anywhere(problem)


def gpu_cost(problem: CausalConv1dUpdate, device: Device) -> float | None:
    moving = device.seconds(work(problem).bytes)
    fitted = device.fitted("causal_conv1d_update.kernels")
    return (
        None
        if moving is None or device.type != "cuda"
        else max(fitted.host, fitted.start + moving / fitted.share)
    )


def cpu_cost(problem: CausalConv1dUpdate, device: Device) -> float | None:
    if device.type != "cpu":
        return None
    fitted = device.fitted("causal_conv1d_update.kernels")
    per_element = fitted.element_state * problem.state_length + fitted.element_tap * problem.width * max(
        problem.length, 1
    )
    return fitted.start + problem.batch * problem.dim * per_element / device.cores


def one_launch_configs(problem: CausalConv1dUpdate, device: Device) -> list[Config]:
    """Few sequences need small blocks to reach every multiprocessor."""
    sizes = (128, 256) if problem.batch * problem.dim >= 256 * device.units else (64, 128)
    return [{"channels": channels, "warps": max(1, channels // 32)} for channels in sizes]


@CAUSAL_CONV1D_UPDATE.route(
    "one-launch",
    refuses=refuses_on_gpu,
    cost=gpu_cost,
    configs=one_launch_configs,
    prepare=prepare_from_plan,
    numerics="close",
    version=1,
    kernels=("turnout.ops.causal_conv1d_update.kernels:update",),
    fails_before_writing=True,
)
@runs_plan
def on_gpu(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    cache_seqlens: Tensor | None,
    conv_state_indices: Tensor | None,
    *,
    channels: int = 128,
    warps: int = 4,
) -> LaunchPlan:
    from turnout.ops.causal_conv1d_update.kernels import update

    new, y, out = with_axis(x)
    (batch, dim, length), size = new.shape, conv_state.shape[2]
    whole = (
        length == 1
        and cache_seqlens is None
        and size & (size - 1) == 0
        and size * conv_state.element_size() <= VECTOR_BYTES
        and conv_state.stride(2) == 1
        and widest(size, (conv_state, conv_state.stride()[:2])) == size
    )
    constants = {
        "W": weight.shape[1],
        "S": size,
        "BD": channels,
        "BIAS": bias is not None,
        "SILU": activation == "silu",
        "RING": cache_seqlens is not None,
        "SLOTS": conv_state_indices is not None,
        "WHOLE": whole,
    }
    numbers = (dim, length, *new.stride(), *conv_state.stride(), *weight.stride(), *y.stride())
    shift, lengths, slots = (
        None if t is None else t.contiguous() for t in (bias, cache_seqlens, conv_state_indices)
    )
    tensors = (new, conv_state, weight, shift, y, lengths, slots)
    launch = Launch(update, batch * ceil_div(dim, channels), tensors, numbers, constants, warps)
    return LaunchPlan((launch,), out)


def with_axis(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x and a fresh output with an axis of positions, and the output as the caller knows it."""
    if x.dim() == 3:
        y = empty_dense(x, channel_last(x))
        return x, y, y
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return x[..., None], y[..., None], y


@CAUSAL_CONV1D_UPDATE.route(
    "cpu-channels",
    refuses=refuses_on_cpu,
    cost=cpu_cost,
    numerics="close",
    version=1,
    kernels=("turnout.ops.causal_conv1d_update.cpu_kernels:update",),
)
def cpu_channels(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    cache_seqlens: Tensor | None,
    conv_state_indices: Tensor | None,
) -> Tensor:
    import numpy as np

    from turnout.ops.threads import import_uninterrupted, in_shares

    import_uninterrupted("turnout.ops.causal_conv1d_update.cpu_kernels")
    from turnout.ops.causal_conv1d_update.cpu_kernels import tiles_of, update

    new, y, out = with_axis(x.detach())
    batch, dim, length = new.shape
    slots = np.arange(batch) if conv_state_indices is None else array(conv_state_indices).astype(np.int64)
    if slots.max() >= conv_state.shape[0]:
        raise IndexError(f"conv_state_indices has {slots.max()}, conv_state has {conv_state.shape[0]} slots")
    at = (
        np.empty(0, np.int64)
        if cache_seqlens is None
        else array(cache_seqlens).astype(np.int64) % conv_state.shape[2]
    )
    taps = array(weight.to(torch.float32).t().contiguous())
    shift = np.zeros(dim, np.float32) if bias is None else array(bias.to(torch.float32).contiguous())
    strides = (*new.stride(), *conv_state.stride(), *y.stride())
    arguments = (
        flat(new),
        flat(conv_state),
        taps,
        shift,
        flat(y),
        slots,
        at,
        length,
        conv_state.shape[2],
        strides,
        activation == "silu",
    )
    run = functools.partial(update, *arguments)
    run(0, 0)  # compiles: an interruption of that must not leave some of the states updated
    in_shares(run, tiles_of(batch, dim))
    return out

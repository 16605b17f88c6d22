"""The routes of causal_conv3d.

Guards and costs are those of the convolution over cache, padding and input in one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

from torch import Tensor

from turnout.launch import LaunchPlan
from turnout.ops.causal_conv3d import CAUSAL_CONV3D, CausalConv3d, with_frames_before
from turnout.ops.convolution import costs, guards
from turnout.ops.convolution.cpu.winograd import by_winograd
from turnout.ops.convolution.gpu.declared import KERNELS, Kernel, kernel_strides, task_of
from turnout.ops.convolution.gpu.launching import empty_output, known_output, launch_into, one_launch
from turnout.ops.convolution.gpu.lowering import Lowering
from turnout.ops.convolution.gpu.operands import Geometry, Operands
from turnout.ops.convolution.gpu.routes import declare
from turnout.ops.convolution.gpu.task import Task
from turnout.ops.convolution.layout import LAST, known_format, output_in, plain_format
from turnout.ops.convolution.methods import (
    Frames,
    Window,
    in_channels_last,
    in_float32,
    of_pieces,
    output_frames,
)
from turnout.ops.convolution.routes import IN_TORCH, WINOGRAD_KERNELS, finished
from turnout.routing.device import Device
from turnout.routing.route import Config, Cost, Guard


def of_padded(guard: Guard) -> Guard:
    """Apply a guard of conv3d to the padded convolution."""

    def refuses(problem: CausalConv3d, device: Device) -> Iterator[str]:
        why = problem.invalid()
        if why is None:
            yield from guard(problem.padded, device)
        else:
            yield why

    return refuses


def refuses_depth_taps(problem: CausalConv3d, device: Device) -> Iterator[str]:
    why = problem.invalid()
    if why is not None:
        yield why
        return
    of_cache = 0 if problem.cache is None else problem.cache.shape[2]
    frames = problem.convolution.input[2] + of_cache if problem.pad_mode == "zeros" else None
    yield from guards.refuses_depth_taps(problem.padded, device, frames)


def cost_of_joined(cost: Cost) -> Cost:
    """Add to a cost of conv3d that of the copy that joins all frames."""

    def seconds(problem: CausalConv3d, device: Device) -> float | None:
        convolution_seconds = cost(problem.padded, device)
        if convolution_seconds is None:
            return None
        return convolution_seconds + costs.copying(
            2 * prod(problem.padded.input), problem.convolution, device
        )

    return seconds


def depth_taps_cost(problem: CausalConv3d, device: Device) -> float | None:
    """The cost of conv3d's route and of more calls: frames of the cache are convolved by their own."""
    seconds = costs.depth_taps_cost(problem.padded, device)
    on_cpu = device.type == "cpu"
    per_call = device.fitted("convolution.methods").tap_start if on_cpu else costs.launch(device)
    return None if seconds is None else seconds + 2 * problem.convolution.weight[2] * per_call


def of_joined(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A route that joins all frames, then convolves them by a method of conv3d."""

    def route(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        cache: Tensor | None,
        stride: list[int],
        padding: list[int],
        dilation: list[int],
        groups: int,
        pad_mode: str,
        residual: Tensor | None,
    ) -> Tensor:
        whole = with_frames_before(input, cache, (weight.shape[2] - 1) * dilation[0], pad_mode)
        y = method(whole, weight, bias, Window(stride, [0, *padding], dilation, groups))
        return finished(y, residual, plain_format(input, weight))

    return route


CAUSAL_CONV3D.route(
    "channels-last",
    refuses=of_padded(guards.refuses_channels_last),
    cost=cost_of_joined(costs.channels_last_cost),
    **IN_TORCH,
)(of_joined(in_channels_last))
CAUSAL_CONV3D.route(
    "upcast", refuses=of_padded(guards.refuses_upcast), cost=cost_of_joined(costs.upcast_cost), **IN_TORCH
)(of_joined(in_float32))
CAUSAL_CONV3D.route(
    "winograd",
    refuses=of_padded(guards.refuses_winograd),
    cost=cost_of_joined(costs.winograd_cost),
    numerics="close",
    version=1,
    kernels=WINOGRAD_KERNELS,
)(of_joined(by_winograd))


@CAUSAL_CONV3D.route("depth-taps", refuses=refuses_depth_taps, cost=depth_taps_cost, **IN_TORCH)
def depth_taps(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cache: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    pad_mode: str,
    residual: Tensor | None,
) -> Tensor:
    before = (weight.shape[2] - 1) * dilation[0]
    outputs = output_frames(input.shape[2] + before, weight.shape[2], stride[0], 0, dilation[0])
    pieces = [Frames(input.transpose(1, 2), 0)]
    cached = 0 if cache is None else min(cache.shape[2], before)
    if cache is not None and cached:
        pieces.append(Frames(cache[:, :, cache.shape[2] - cached :].transpose(1, 2), -cached))
    if pad_mode == "replicate" and cached < before:
        first = pieces[-1].values[:, :1]
        pieces.append(Frames(first.expand(-1, before - cached, -1, -1, -1), -before))
    window = Window(stride, [before, *padding], dilation, groups)
    y = of_pieces(pieces, outputs, weight, bias, window)
    return finished(y, residual, plain_format(input, weight))


# Routes by our own kernels, which read cache and input in place and pad as they read


def causal_task(problem: CausalConv3d) -> Task:
    """A valid call as the kernels see it."""
    convolution, cache, before = problem.convolution, problem.cache, problem.before
    cached = 0 if cache is None else min(cache.shape[2], before)
    return task_of(problem.padded)._replace(
        x=convolution.input,
        x_strides=kernel_strides(convolution.input, convolution.input_strides),
        padding=(before, *convolution.padding[1:]),
        cache=cached,
        cache_strides=kernel_strides(cache.shape, cache.strides) if cache is not None and cached else None,
        pad_mode=problem.pad_mode,
    )


def guard_and_cost(kernel: Kernel) -> dict[str, Any]:
    """What a route by this kernel refuses, costs and offers."""

    def refuses(problem: CausalConv3d, device: Device) -> Iterator[str]:
        why = problem.invalid()
        if why is None:
            yield from guards.refuses_anywhere(problem.padded, *guards.HALF_AND_SINGLE)
            yield from kernel.refuses_on(kernel.widened(causal_task(problem)), device)
        else:
            yield why

    def cost(problem: CausalConv3d, device: Device) -> float | None:
        padded = problem.convolution._replace(residual=None, padding=problem.padded.padding)
        return kernel.cost(causal_task(problem), costs.around(padded, device), device)

    def configs(problem: CausalConv3d, device: Device) -> list[Config]:
        return kernel.configs(kernel.widened(causal_task(problem)), device)

    return {"refuses": refuses, "cost": cost, "configs": configs}


def convolved(
    lowering: Lowering,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cache: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    pad_mode: str,
    residual: Tensor | None,
    **config: Any,
) -> Tensor:
    """A causal convolution by one launch."""
    before = (weight.shape[2] - 1) * dilation[0]
    cached = 0 if cache is None else min(cache.shape[2], before)
    if cache is not None and cached != cache.shape[2]:
        cache = cache[:, :, cache.shape[2] - cached :]
    out = empty_output(causal_shape(input.shape, weight.shape, stride, padding, dilation), input)
    operands = Operands(input, weight, bias, out, residual, cache if cached else None)
    geometry = Geometry(stride, (before, *padding), dilation, pad_mode, streams=before > 0)
    launch_into(lowering, operands, geometry, config)
    return output_in(out, known_format(input, weight))


def plan_causal(
    lowering: Lowering,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cache: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    pad_mode: str,
    residual: Tensor | None,
    **config: Any,
) -> LaunchPlan | None:
    """The plan of `convolved` where all of it is one launch on tensors as they are; else None.

    A cache with more frames than the call uses would have to be cut first, so it has no plan.
    """
    before = (weight.shape[2] - 1) * dilation[0]
    if (cache is not None and not 0 < cache.shape[2] <= before) or known_format(input, weight) != LAST[5]:
        return None
    out = empty_output(causal_shape(input.shape, weight.shape, stride, padding, dilation), input)
    operands = Operands(input, weight, bias, out, residual, cache)
    geometry = Geometry(stride, (before, *padding), dilation, pad_mode, streams=before > 0)
    launch = one_launch(lowering, operands, geometry, config)
    return None if launch is None else LaunchPlan((launch,), out)


def causal_shape(
    input: Sequence[int],
    weight: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> tuple[int, ...]:
    """The output's shape, for an input `[N, C, D, H, W]` and a weight `[F, C, KD, KH, KW]`."""
    frames = input[2] + (weight[2] - 1) * dilation[0]  # with those before the first
    whole = (*input[:2], frames, *input[3:])
    return known_output(whole, weight, tuple(stride), (0, *padding), tuple(dilation))


for name, kernel in KERNELS.items():
    declare(CAUSAL_CONV3D, name, kernel, convolved, plan_causal, **guard_and_cost(kernel))

"""The routes of upsample_conv2d."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from turnout.launch import Launch, LaunchPlan, Workspace, start
from turnout.ops.convolution import costs, guards
from turnout.ops.convolution.gpu.declared import GEMMS, Kernel, kernel_strides
from turnout.ops.convolution.gpu.launching import (
    as_channels_last,
    empty_output,
    launch_into,
    one_launch,
    precision_of,
)
from turnout.ops.convolution.gpu.lowering import Lowering
from turnout.ops.convolution.gpu.operands import Geometry, Operands, clip_shape
from turnout.ops.convolution.gpu.packing import phase_filters
from turnout.ops.convolution.gpu.routes import declare
from turnout.ops.convolution.gpu.task import Task
from turnout.ops.convolution.layout import LAST, dense_strides, known_format, output_in, plain_format
from turnout.ops.convolution.methods import Window, in_channels_last, in_float32
from turnout.ops.convolution.phases import Axis, by_phases
from turnout.ops.convolution.routes import IN_TORCH, finished
from turnout.ops.upsample_conv2d import UPSAMPLE_CONV2D, UpsampleConv2d, upsampled
from turnout.routing.device import Device
from turnout.routing.route import Config

PHASE_FILTERS = "turnout.ops.convolution.gpu.kernels:phase_filters"

MOST = 16  # beyond it 1 / scale in float32, as torch has it, need not pick the pixel that whole numbers would


def refuses_phases(problem: UpsampleConv2d, device: Device) -> Iterator[str]:
    why = problem.invalid()
    if why is not None:
        yield why
        return
    yield from guards.refuses_anywhere(problem.small, *guards.HALF_AND_SINGLE)
    yield from guards.needs_one_dnn(problem.small._replace(padding=()), device)
    if not 2 <= problem.scale <= MOST:
        yield f"scale {problem.scale}, this route needs 2 to {MOST}"


def refuses_even_phases(problem: UpsampleConv2d, device: Device) -> Iterator[str]:
    yield from refuses_phases(problem, device)
    if problem.invalid() is not None or problem.scale > MOST:
        return
    at_once = problem.small.weight[1] * prod(axis.length for axis in axes_of(problem))
    if prod(problem.small.weight[2:]) == 1:
        yield from guards.needs_sums_as_exact(problem.large, device, at_once, 16)
    elif problem.small.channels_last or not device.has_avx512:
        yield from guards.needs_sums_as_exact(problem.large, device, at_once)
    for size, kernel, padding, axis in zip(
        problem.large.output[2:],
        problem.small.weight[2:],
        problem.small.padding,
        axes_of(problem),
        strict=True,
    ):
        if size % problem.scale or not axis.even:
            yield (
                f"{kernel} taps, padding {padding} and {size} outputs, "
                "this route needs phases of equal windows and outputs"
            )


def axes_of(problem: UpsampleConv2d) -> list[Axis]:
    return [
        Axis.of(problem.scale, k, p)
        for k, p in zip(problem.small.weight[2:], problem.small.padding, strict=True)
    ]


def refuses_vendor_phases(problem: UpsampleConv2d, device: Device) -> Iterator[str]:
    yield from refuses_even_phases(problem, device)
    small = problem.small
    yield from guards.needs_even_channels(small, device)
    if problem.invalid() is None and device.type == "cuda":
        filters, channels, *_ = small.weight
        if precision_of(small.float32, channels, filters) != precision_of(
            small.float32, channels, problem.scale**2 * filters
        ):
            yield (
                f"{filters} filters, in float32 for cuDNN, whose phases it would multiply in TF32, "
                "this route needs a multiple of 4"
            )


def phases_cost(problem: UpsampleConv2d, device: Device) -> float | None:
    """One convolution on the small image with `scale**2` times the filters, then a copy of its output."""
    small, scale = problem.small, problem.scale
    filters = small._replace(
        weight=(scale**2 * small.weight[0], small.weight[1], *(axis.length for axis in axes_of(problem)))
    )
    seconds = costs.channels_last_cost(filters, device)
    if device.type == "cpu":
        fitted = device.fitted("convolution.methods")
        prepared = fitted.phases_start + prod(filters.weight) * fitted.phases_weight
    else:
        prepared = 5 * costs.launch(device)
    return (
        None
        if seconds is None
        else prepared + seconds + costs.copying(2 * prod(problem.large.output), small, device)
    )


@UPSAMPLE_CONV2D.route("phases", refuses=refuses_vendor_phases, cost=phases_cost, numerics="close", version=1)
def phases(input: Tensor, weight: Tensor, bias: Tensor | None, scale: int, padding: list[int]) -> Tensor:
    format = plain_format(input, weight)
    out = torch.empty(
        output_size(input, weight, scale, padding),
        dtype=input.dtype,
        device=input.device,
        memory_format=format,
    )
    return by_phases(input, weight, bias, scale, padding, out)


def refuses_channels_last(problem: UpsampleConv2d, device: Device) -> Iterator[str]:
    yield from guards.refuses_channels_last(problem.large, device)


def channels_last_cost(problem: UpsampleConv2d, device: Device) -> float | None:
    seconds = costs.channels_last_cost(problem.large, device)
    return (
        None if seconds is None else seconds + costs.copying(prod(problem.large.input), problem.small, device)
    )


@UPSAMPLE_CONV2D.route("channels-last", refuses=refuses_channels_last, cost=channels_last_cost, **IN_TORCH)
def with_channels_last(
    input: Tensor, weight: Tensor, bias: Tensor | None, scale: int, padding: list[int]
) -> Tensor:
    y = in_channels_last(upsampled(input, scale), weight, bias, Window([1, 1], padding, [1, 1]))
    return finished(y, None, plain_format(input, weight))


def refuses_upcast(problem: UpsampleConv2d, device: Device) -> Iterator[str]:
    yield from guards.refuses_upcast(problem.large, device)


def upcast_cost(problem: UpsampleConv2d, device: Device) -> float | None:
    return costs.upcast_cost(problem.large, device) + costs.copying(
        prod(problem.large.input), problem.small, device
    )


@UPSAMPLE_CONV2D.route("upcast", refuses=refuses_upcast, cost=upcast_cost, **IN_TORCH)
def with_float32(
    input: Tensor, weight: Tensor, bias: Tensor | None, scale: int, padding: list[int]
) -> Tensor:
    y = in_float32(upsampled(input, scale), weight, bias, Window([1, 1], padding, [1, 1]))
    return finished(y, None, plain_format(input, weight))


# Our own kernels write each phase where it belongs


def phase_tasks(problem: UpsampleConv2d) -> list[Task]:
    """A valid call with even phases as the kernels see it: one task a phase, all of one shape."""
    (high, wide), small, scale = axes_of(problem), problem.small, problem.scale
    out = clip_shape(problem.large.output)
    n, c, d, h, w = dense_strides(out, LAST[5])
    weight = (*small.weight[:2], 1, high.length, wide.length)
    return [
        Task(
            clip_shape(small.input),
            weight,
            (*out[:3], out[3] // scale, out[4] // scale),
            kernel_strides(small.input, small.input_strides),
            (n, c, d, scale * h, scale * w),
            small.dtype,
            padding=(0, -top, -left),
            precision=precision_of(small.float32, small.weight[1], small.weight[0]),
        )
        for top in high.starts
        for left in wide.starts
    ]


def guard_and_cost(kernel: Kernel) -> dict[str, Any]:
    """What a route by this kernel refuses, costs and offers."""

    def refuses(problem: UpsampleConv2d, device: Device) -> Iterator[str]:
        reasons = list(refuses_even_phases(problem, device))
        yield from reasons or kernel.refuses_on(phase_tasks(problem)[0], device)

    def cost(problem: UpsampleConv2d, device: Device) -> float | None:
        seconds = [kernel.seconds(task, device) for task in phase_tasks(problem)]
        layouts = (
            0.0
            if problem.small.channels_last
            else costs.gpu_relayout(problem.small.input, problem.small, device)
        )
        if not problem.small.output_channels_last:
            layouts += costs.gpu_relayout(problem.large.output, problem.small, device)
        estimates = [each for each in seconds if each is not None]
        if len(estimates) < len(seconds):
            return None
        launch = costs.launch(device)
        return 5 * launch + sum(max(launch, each) for each in estimates) + layouts

    def configs(problem: UpsampleConv2d, device: Device) -> list[Config]:
        return kernel.configs(phase_tasks(problem)[0], device)

    return {"refuses": refuses, "cost": cost, "configs": configs}


def output_size(input: Tensor, weight: Tensor, scale: int, padding: Sequence[int]) -> tuple[int, ...]:
    sizes = (
        scale * n + 2 * p - k + 1 for n, p, k in zip(input.shape[2:], padding, weight.shape[2:], strict=True)
    )
    return (len(input), len(weight), *sizes)


def phase_by_phase(
    lowering: Lowering,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: int,
    padding: list[int],
    **config: Any,
) -> Tensor:
    """Each phase by a launch of its own, straight into its pixels."""
    out = empty_output(output_size(input, weight, scale, padding), input)
    pixels = as_channels_last(input)
    fill, filters, phases = prepared_phases(weight, scale, padding)
    start(fill)
    for phase in phases:
        operands = Operands(pixels, phase.of(filters), bias, out[phase.pixels])
        launch_into(lowering, operands, phase.geometry, config)
    return output_in(out, known_format(input, weight))


def plan_phases(
    lowering: Lowering,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: int,
    padding: list[int],
    **config: Any,
) -> LaunchPlan | None:
    """`phase_by_phase` on tensors as they are."""
    if known_format(input, weight) != LAST[4]:
        return None
    out = empty_output(output_size(input, weight, scale, padding), input)
    fill, filters, phases = prepared_phases(weight, scale, padding)
    launches = [
        one_launch(
            lowering,
            Operands(input, phase.of(filters), bias, out[phase.pixels]),
            phase.geometry,
            config,
        )
        for phase in phases
    ]
    filled = [launch for launch in launches if launch is not None]
    return LaunchPlan((fill, *filled), out, (Workspace(filters),)) if len(filled) == len(launches) else None


class Phase(NamedTuple):
    """The pixels of the output that lie alike between those of the input."""

    scale: int
    row: int  # of the first one, 0 to scale - 1
    column: int
    top: int  # the first row and column of the input that it sees
    left: int

    @property
    def geometry(self) -> Geometry:
        return Geometry((1, 1), (-self.top, -self.left), (1, 1))

    @property
    def pixels(self) -> tuple[Any, ...]:
        """Its pixels of the output, as an index."""
        return (..., slice(self.row, None, self.scale), slice(self.column, None, self.scale))

    def of(self, filters: Tensor) -> Tensor:
        """Its filters `[Cout, Cin, rows, columns]`, of all `[scale**2, Cout, rows, columns, Cin]`."""
        return filters[self.row * self.scale + self.column].permute(0, 3, 1, 2)


def prepared_phases(weight: Tensor, scale: int, padding: Sequence[int]) -> tuple[Launch, Tensor, list[Phase]]:
    """The launch that computes the filters of all phases, those filters, and the phases."""
    high, wide = (Axis.of(scale, k, p) for k, p in zip(weight.shape[2:], padding, strict=True))
    fill, filters = phase_filters(weight, scale, padding, high.length, wide.length)
    phases = [
        Phase(scale, row, column, top, left)
        for row, top in enumerate(high.starts)
        for column, left in enumerate(wide.starts)
    ]
    return fill, filters, phases


for name, kernel in GEMMS.items():
    declare(
        UPSAMPLE_CONV2D,
        name,
        kernel,
        phase_by_phase,
        plan_phases,
        **guard_and_cost(kernel),
        more_kernels=(PHASE_FILTERS,),
    )

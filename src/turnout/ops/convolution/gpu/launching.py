"""From the tensors of a call, 2-D or 3-D and in any layout, to one launch.

The kernels work channels last. What is not so is copied before, and the output is copied behind where torch's
has channels first. Few channels of half precision, such as the three of a picture, are copied with zeros
behind them where TMA could not read them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from turnout.launch import Launch, LaunchPlan, start
from turnout.launch import descriptors as tma
from turnout.ops.convolution.gpu.lowering import Hopper, HopperCall, HopperPlan, Lowering, Portable
from turnout.ops.convolution.gpu.operands import (
    Geometry,
    Layout,
    Operands,
    clip_layout,
    layout_of,
    triple,
)
from turnout.ops.convolution.gpu.packing import channels_last_steps, pack_weight
from turnout.ops.convolution.layout import LAST, known_last, moved, output_in, torch_format
from turnout.ops.convolution.methods import output_frames
from turnout.ops.convolution.problem import Float32, channels_last
from turnout.routing.device import Device
from turnout.routing.prepared import worked_out_once
from turnout.routing.route import Config


@worked_out_once
def known_output(input: Sequence[int], weight: Sequence[int], *numbers: tuple[int, ...]) -> tuple[int, ...]:
    """The output shape of a convolution; `numbers` are its stride, padding and dilation."""
    sizes = itertools.starmap(output_frames, zip(input[2:], weight[2:], *numbers, strict=True))
    return (input[0], weight[0], *sizes)


def empty_output(shape: Sequence[int], input: Tensor) -> Tensor:
    """A new tensor of this shape, channels last, like the input in all else."""
    return torch.empty(shape, dtype=input.dtype, device=input.device, memory_format=LAST[input.dim()])


def convolved(
    lowering: Lowering,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    residual: Tensor | None,
    **config: Any,
) -> Tensor:
    """A 2-D or 3-D convolution by one launch."""
    shape = known_output(input.shape, weight.shape, tuple(stride), tuple(padding), tuple(dilation))
    out = empty_output(shape, input)
    operands = Operands(input, weight, bias, out, residual)
    launch_into(lowering, operands, Geometry(stride, padding, dilation), config)
    return output_in(out, torch_format(input, weight, bias, stride, padding, dilation, groups))


def plan_convolution(
    lowering: Lowering,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    residual: Tensor | None,
    **config: Any,
) -> LaunchPlan | None:
    """The plan of `convolved` where all of it is one launch on tensors as they are; else None."""
    if torch_format(input, weight, bias, stride, padding, dilation, groups) != LAST[input.dim()]:
        return None
    shape = known_output(input.shape, weight.shape, tuple(stride), tuple(padding), tuple(dilation))
    out = empty_output(shape, input)
    operands = Operands(input, weight, bias, out, residual)
    launch = one_launch(lowering, operands, Geometry(stride, padding, dilation), config)
    return None if launch is None else LaunchPlan((launch,), out)


def extra_channels(lowering: Lowering, channels: int, dtype: torch.dtype) -> int:
    """How many channels of zeros a launch adds to those of the input.

    TF32 needs none: only channels in fours are multiplied in TF32.
    """
    padded = isinstance(lowering, Hopper) and lowering.pads_channels
    if not padded or dtype not in (torch.float16, torch.bfloat16):
        return 0
    return -channels % (tma.ALIGNMENT // dtype.itemsize)


def one_launch(lowering: Lowering, operands: Operands, geometry: Geometry, config: Config) -> Launch | None:
    """The launch that fills `out` (see `launch_into`) from tensors as they are.

    None where one of the tensors has to be copied to another layout first.
    """
    if isinstance(lowering, Hopper):
        return direct_launch(lowering, operands, geometry, config)
    x, weight, bias, _, residual, cache = operands
    channels_last = all(t is None or known_last(t.shape, t.stride()) for t in (x, weight, residual, cache))
    if not channels_last or (bias is not None and not bias.is_contiguous()):
        return None
    clip = geometry.as_clip(precision_in(x, weight))
    return lowering.launch(operands.as_clips(), clip, lowering.tile(**config))


def launch_into(lowering: Lowering, operands: Operands, geometry: Geometry, config: Config) -> None:
    """Convolve into `out`, `[N, Cout, D', H', W']` or without D', channels last.

    Tensors that the kernel cannot read are copied first.
    """
    x, weight, bias, _, residual, cache = operands
    extra = extra_channels(lowering, x.shape[1], x.dtype)
    if extra:
        behind = (0, 0) * (x.dim() - 2) + (0, extra)
        x, weight = (as_channels_last(pad(t, behind)) for t in (x, weight))
        cache = None if cache is None else as_channels_last(pad(cache, behind))
        operands = operands._replace(x=x, weight=weight, cache=cache)
    launch = one_launch(lowering, operands, geometry, config)
    if launch is not None:
        start(launch)
        return
    clip = geometry.as_clip(precision_in(x, weight))
    operands = operands._replace(
        x=as_channels_last(x),
        weight=as_channels_last(weight),
        bias=None if bias is None else bias.contiguous(),
        residual=None if residual is None else as_channels_last(residual),
        cache=None if cache is None else as_channels_last(cache),
    )
    run(lowering, operands.as_clips(), clip, lowering.tile(**config))


def run(lowering: Lowering, operands: Operands, geometry: Geometry, tile: Any) -> None:
    """Launch a kernel on tensors with three spatial axes.

    Hopper kernels need channels last, and may copy the weight first; where TMA cannot take an address, the
    portable kernel is launched, in its default configuration.
    """
    if isinstance(lowering, Portable):
        start(lowering.launch(operands, geometry, tile))
        return
    if not tma.aligned(*(getattr(operands, name) for name in lowering.by_tma)):
        run(lowering.portable, operands, geometry, lowering.portable.tile())
        return
    operands = operands._replace(weight=pack_weight(operands.weight))
    call = HopperCall(
        layout_of(operands.x),
        operands.weight.shape,
        layout_of(operands.out),
        layout_of(operands.residual),
        layout_of(operands.cache),
        operands.x.dtype,
        tuple(geometry.padding),
        tuple(geometry.dilation),
        geometry.pad_mode == "replicate",
        geometry.streams,
        Device.of(operands.x.device),
    )
    start(lowering.launch(lowering.plan(call, tile), operands))


def direct_launch(lowering: Hopper, operands: Operands, geometry: Geometry, config: Config) -> Launch | None:
    """The launch of a Hopper kernel on tensors as they are, 2-D or 3-D, stride 1.

    None where a tensor has to be copied or rounded first or starts at an address that TMA cannot take.
    """
    x, weight, bias, out, residual, cache = operands
    if not tma.aligned(x, weight, out, residual, cache):
        return None
    plan = _direct_plan(
        lowering,
        tuple(map(layout_of, (x, weight, out, residual, cache))),
        None if bias is None else bias.stride(),
        x.dtype,
        tuple(geometry.padding),
        tuple(geometry.dilation),
        geometry.pad_mode == "replicate",
        geometry.streams,
        tuple(config.items()),
        Device.of(x.device),
    )
    return None if plan is None else lowering.launch(plan, operands)


@worked_out_once
def _direct_plan(
    lowering: Hopper,
    layouts: tuple[Layout, ...],
    bias_strides: tuple[int, ...] | None,
    dtype: torch.dtype,
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    replicates: bool,
    streams: bool,
    config: tuple[tuple[str, Any], ...],
    device: Device,
) -> HopperPlan | None:
    """The plan of `direct_launch`. `layouts` are those of x, weight, out, residual and cache."""
    x, weight, out, residual, cache = layouts
    if dtype is torch.float32 or bias_strides not in (None, (1,)):
        return None
    in_place = all(channels_last(*layout) for layout in (x, cache, residual) if layout)
    if not in_place or x[0][1] * dtype.itemsize % tma.ALIGNMENT:
        return None
    filters, steps = clip_layout(weight)
    if not channels_last_steps(filters, steps)[1]:
        return None
    call = HopperCall(
        clip_layout(x),
        filters,
        clip_layout(out),
        clip_layout(residual),
        clip_layout(cache),
        dtype,
        triple(padding, 0),
        triple(dilation, 1),
        replicates,
        streams,
        device,
    )
    return lowering.plan(call, lowering.tile(**dict(config)))


def as_channels_last(x: Tensor) -> Tensor:
    """A tensor with channels side by side, as it is or copied."""
    return x if known_last(x.shape, x.stride()) else moved(x, LAST[x.dim()])


def precision_in(input: Tensor, weight: Tensor) -> str:
    """How a call multiplies float32: "tf32" or "ieee". Half types ignore it."""
    if input.dtype is not torch.float32:
        return "tf32"
    return precision_of(Float32.of(input), input.shape[1], weight.shape[0])


def precision_of(float32: Float32, channels: int, filters: int) -> str:
    """How float32 is multiplied: "tf32" where torch allows it and cuDNN would use it, else "ieee".

    cuDNN uses TF32 only for channels and filters in fours.
    """
    return "tf32" if float32.conv == "tf32" and channels % 4 == 0 and filters % 4 == 0 else "ieee"

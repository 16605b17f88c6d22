"""The routes that conv2d and conv3d have in common, and how a route ends."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from turnout.ops.convolution import costs, guards
from turnout.ops.convolution.cpu.winograd import by_winograd
from turnout.ops.convolution.layout import FIRST, in_format, output_in, torch_format
from turnout.ops.convolution.methods import by_matmul, in_channels_last, in_float32, vendor
from turnout.routing.device import Device
from turnout.routing.outputs import returns_own

# Torch's kernels do the work; on a GPU ours copies from one memory format to the other.
TRANSPOSE = "turnout.ops.convolution.gpu.kernels:transpose"
WINOGRAD_KERNELS = [
    f"turnout.ops.convolution.cpu.kernels:{name}" for name in ("transform_weight", "convolve")
]
IN_TORCH: Any = {"numerics": "close", "version": 1, "kernels": (TRANSPOSE,)}
CHANNELS_LAST: Any = {"refuses": guards.refuses_channels_last, "cost": costs.channels_last_cost, **IN_TORCH}
ONE_DNN: Any = {
    "refuses": guards.refuses_one_dnn,
    "cost": costs.one_dnn_cost,
    "numerics": "close",
    "version": 1,
}
UPCAST: Any = {"refuses": guards.refuses_upcast, "cost": costs.upcast_cost, **IN_TORCH}
POINTWISE: Any = {"refuses": guards.refuses_pointwise, "cost": costs.pointwise_cost, **IN_TORCH}
WINOGRAD: Any = {
    "refuses": guards.refuses_winograd,
    "cost": costs.winograd_cost,
    "numerics": "close",
    "version": 2,
    "kernels": WINOGRAD_KERNELS,
}
DEPTH_TAPS: Any = {"refuses": guards.refuses_depth_taps, "cost": costs.depth_taps_cost, **IN_TORCH}


def finished(y: Tensor, residual: Tensor | None, format: torch.memory_format) -> Tensor:
    """A method's result with the strides of the reference's, and the residual added."""
    y = output_in(y, format)
    return y if residual is None else y.add_(residual.to(y.dtype))


def with_channels_last(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    residual: Tensor | None,
) -> Tensor:
    call = (input, weight, bias, stride, padding, dilation, groups)
    return finished(in_channels_last(*call), residual, torch_format(*call))


def with_one_dnn(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    residual: Tensor | None,
) -> Tensor:
    """Channels first: there oneDNN adds up as carefully as torch's own loop does, with AVX-512. Without it
    sums begin with the bias, which is lost in their last digits (1.8 times the error where it is as large as
    they are)."""
    first, late = (bias, None) if Device.of(input.device).has_avx512 else (None, bias)
    y = vendor(in_format(input, FIRST), in_format(weight, FIRST), first, stride, padding, dilation, groups)
    if late is not None:
        y = y.add_(late.view(-1, *[1] * len(stride)))
    return finished(y, residual, torch_format(input, weight, bias, stride, padding, dilation, groups))


def with_float32(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    residual: Tensor | None,
) -> Tensor:
    call = (input, weight, bias, stride, padding, dilation, groups)
    return finished(in_float32(*call), residual, torch_format(*call))


@returns_own
def with_matmul(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    residual: Tensor | None,
) -> Tensor:
    format = torch_format(input, weight, bias, stride, padding, dilation, groups)
    return finished(by_matmul(input, weight, bias, stride, padding), residual, format)


def with_winograd(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    residual: Tensor | None,
) -> Tensor:
    call = (input, weight, bias, stride, padding, dilation, groups)
    return finished(by_winograd(*call), residual, torch_format(*call))

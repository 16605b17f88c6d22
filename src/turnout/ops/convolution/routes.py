"""The routes that conv2d and conv3d have in common, and how a route ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from turnout.ops.convolution import costs, guards
from turnout.ops.convolution.cpu.winograd import by_winograd
from turnout.ops.convolution.layout import output_in, torch_format
from turnout.ops.convolution.methods import Window, by_matmul, in_channels_last, in_float32, in_one_dnn
from turnout.routing.op import Op
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


def by(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A route of conv2d or conv3d by a method, which gives the values in whatever layout."""

    def route(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: list[int],
        padding: list[int],
        dilation: list[int],
        groups: int,
        residual: Tensor | None,
    ) -> Tensor:
        window = Window(stride, padding, dilation, groups)
        y = method(input, weight, bias, window)
        return finished(y, residual, torch_format(input, weight, bias, *window))

    return route


def declare_shared(op: Op) -> None:
    """Declare the routes that conv2d and conv3d have in common, but for those by our own GPU kernels."""
    op.route("channels-last", **CHANNELS_LAST)(by(in_channels_last))
    op.route("pointwise", **POINTWISE)(returns_own(by(by_matmul)))
    op.route("one-dnn", **ONE_DNN)(by(in_one_dnn))
    op.route("upcast", **UPCAST)(by(in_float32))
    op.route("winograd", **WINOGRAD)(by(by_winograd))

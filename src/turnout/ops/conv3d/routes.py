"""The routes of conv3d."""

from __future__ import annotations

from torch import Tensor

from turnout.ops.conv3d import CONV3D
from turnout.ops.convolution import costs, guards
from turnout.ops.convolution.gpu.routes import declare_kernels
from turnout.ops.convolution.layout import torch_format
from turnout.ops.convolution.methods import Window, by_depth_chunks, by_depth_taps
from turnout.ops.convolution.problem import Conv3d
from turnout.ops.convolution.routes import DEPTH_TAPS, IN_TORCH, by, declare_shared, finished
from turnout.routing.device import Device
from turnout.routing.route import Config

declare_shared(CONV3D)
declare_kernels(CONV3D)
CONV3D.route("depth-taps", **DEPTH_TAPS)(by(by_depth_taps))


def groups_of_frames(problem: Conv3d, device: Device) -> list[Config]:
    """Eight frames at a time, or half of them."""
    return [{"frames": min(8, -(-problem.output[2] // 2))}]


@CONV3D.route(
    "depth-chunks",
    refuses=guards.refuses_depth_chunks,
    cost=costs.depth_chunks_cost,
    configs=groups_of_frames,
    **IN_TORCH,
)
def depth_chunks(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    residual: Tensor | None,
    *,
    frames: int = 8,
) -> Tensor:
    window = Window(stride, padding, dilation, groups)
    format = torch_format(input, weight, bias, *window)
    return finished(by_depth_chunks(input, weight, bias, window, format, frames), residual, format)

"""The routes of conv3d."""

from __future__ import annotations

from torch import Tensor

from turnout.ops.conv3d import CONV3D
from turnout.ops.convolution import costs, guards
from turnout.ops.convolution import routes as shared
from turnout.ops.convolution.gpu import routes as kernels
from turnout.ops.convolution.layout import torch_format
from turnout.ops.convolution.methods import by_depth_chunks, by_depth_taps
from turnout.ops.convolution.problem import Conv3d
from turnout.routing.device import Device
from turnout.routing.op import Config

CONV3D.route("channels-last", **shared.CHANNELS_LAST)(shared.with_channels_last)
CONV3D.route("pointwise", **shared.POINTWISE)(shared.with_matmul)
CONV3D.route("one-dnn", **shared.ONE_DNN)(shared.with_one_dnn)
CONV3D.route("upcast", **shared.UPCAST)(shared.with_float32)
CONV3D.route("winograd", **shared.WINOGRAD)(shared.with_winograd)
CONV3D.route("implicit-gemm", **kernels.declaration(kernels.IMPLICIT_GEMM))(kernels.with_implicit_gemm)
CONV3D.route("implicit-gemm-hopper", **kernels.declaration(kernels.IMPLICIT_GEMM_HOPPER))(
    kernels.with_implicit_gemm_hopper
)
CONV3D.route("narrow-out", **kernels.declaration(kernels.NARROW_OUT))(kernels.with_narrow_out)
CONV3D.route("narrow-out-hopper", **kernels.declaration(kernels.NARROW_OUT_HOPPER))(
    kernels.with_narrow_out_hopper
)


@CONV3D.route("depth-taps", **shared.DEPTH_TAPS)
def depth_taps(
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
    return shared.finished(by_depth_taps(*call), residual, torch_format(*call))


def groups_of_frames(problem: Conv3d, device: Device) -> list[Config]:
    """Eight frames at a time, or half of them."""
    return [{"frames": min(8, -(-problem.output[2] // 2))}]


@CONV3D.route(
    "depth-chunks",
    refuses=guards.refuses_depth_chunks,
    cost=costs.depth_chunks_cost,
    configs=groups_of_frames,
    **shared.IN_TORCH,
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
    call = (input, weight, bias, stride, padding, dilation, groups)
    return shared.finished(by_depth_chunks(*call, torch_format(*call), frames), residual, torch_format(*call))

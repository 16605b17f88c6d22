"""The routes of conv2d."""

from __future__ import annotations

from turnout.ops.conv2d import CONV2D
from turnout.ops.convolution import routes as shared
from turnout.ops.convolution.gpu import routes as kernels

CONV2D.route("channels-last", **shared.CHANNELS_LAST)(shared.with_channels_last)
CONV2D.route("pointwise", **shared.POINTWISE)(shared.with_matmul)
CONV2D.route("one-dnn", **shared.ONE_DNN)(shared.with_one_dnn)
CONV2D.route("upcast", **shared.UPCAST)(shared.with_float32)
CONV2D.route("winograd", **shared.WINOGRAD)(shared.with_winograd)
CONV2D.route("implicit-gemm", **kernels.declaration(kernels.IMPLICIT_GEMM))(kernels.with_implicit_gemm)
CONV2D.route("implicit-gemm-hopper", **kernels.declaration(kernels.IMPLICIT_GEMM_HOPPER))(
    kernels.with_implicit_gemm_hopper
)
CONV2D.route("narrow-out", **kernels.declaration(kernels.NARROW_OUT))(kernels.with_narrow_out)
CONV2D.route("narrow-out-hopper", **kernels.declaration(kernels.NARROW_OUT_HOPPER))(
    kernels.with_narrow_out_hopper
)

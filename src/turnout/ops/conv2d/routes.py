"""The routes of conv2d."""

from __future__ import annotations

from turnout.ops.conv2d import CONV2D
from turnout.ops.convolution.gpu.routes import declare_kernels
from turnout.ops.convolution.routes import declare_shared

declare_shared(CONV2D)
declare_kernels(CONV2D)

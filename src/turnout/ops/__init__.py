"""One folder per op.

Importing this package declares all of them; nothing is compiled, and neither Triton nor Numba is imported.
"""

import turnout.ops.add_repeated.routes
import turnout.ops.attention.routes
import turnout.ops.causal_conv1d.routes
import turnout.ops.causal_conv1d_backward.routes
import turnout.ops.causal_conv1d_update.routes
import turnout.ops.causal_conv3d.routes
import turnout.ops.conv2d.routes
import turnout.ops.conv3d.routes
import turnout.ops.dot.routes
import turnout.ops.group_norm_silu.block_routes
import turnout.ops.group_norm_silu.routes
import turnout.ops.inner.routes
import turnout.ops.layer_norm_modulate.routes
import turnout.ops.matmul.routes
import turnout.ops.norm_rope.routes
import turnout.ops.rms_norm_silu.routes
import turnout.ops.selective_scan.routes
import turnout.ops.selective_scan_update.routes
import turnout.ops.upsample_conv2d.routes  # noqa: F401
from turnout.ops.add_repeated import add_repeated
from turnout.ops.attention import attention
from turnout.ops.causal_conv1d import causal_conv1d
from turnout.ops.causal_conv1d_update import causal_conv1d_update
from turnout.ops.causal_conv3d import causal_conv3d
from turnout.ops.conv2d import conv2d
from turnout.ops.conv3d import conv3d
from turnout.ops.dot import dot
from turnout.ops.group_norm_silu import group_norm_silu
from turnout.ops.group_norm_silu.padded import group_norm_silu_pad
from turnout.ops.group_norm_silu.spatial import spatial_norm_silu
from turnout.ops.inner import inner
from turnout.ops.layer_norm_modulate import gated_add, layer_norm_modulate
from turnout.ops.matmul import matmul
from turnout.ops.norm_rope import norm_rope, norm_rope_qk
from turnout.ops.rms_norm_silu import rms_norm_silu
from turnout.ops.selective_scan import selective_scan
from turnout.ops.selective_scan_update import selective_scan_update
from turnout.ops.upsample_conv2d import upsample_conv2d

__all__ = [
    "add_repeated",
    "attention",
    "causal_conv1d",
    "causal_conv1d_update",
    "causal_conv3d",
    "conv2d",
    "conv3d",
    "dot",
    "gated_add",
    "group_norm_silu",
    "group_norm_silu_pad",
    "inner",
    "layer_norm_modulate",
    "matmul",
    "norm_rope",
    "norm_rope_qk",
    "rms_norm_silu",
    "selective_scan",
    "selective_scan_update",
    "spatial_norm_silu",
    "upsample_conv2d",
]

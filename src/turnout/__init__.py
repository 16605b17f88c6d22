"""turnout: every op down the fastest route that is right for its shape, dtype, layout and device."""

from turnout._version import __version__
from turnout.routing.versions import refuse_unsupported

refuse_unsupported()  # before anything of a version that is too old can fail in a less helpful way

# ruff: noqa: E402
from turnout.asking import explain, routes
from turnout.measure.tune import tune
from turnout.models.accelerate import accelerate, accelerated, restore
from turnout.ops import (
    attention,
    causal_conv1d,
    causal_conv1d_update,
    causal_conv3d,
    conv2d,
    conv3d,
    dot,
    gated_add,
    group_norm_silu,
    group_norm_silu_pad,
    inner,
    layer_norm_modulate,
    matmul,
    norm_rope,
    norm_rope_qk,
    rms_norm_silu,
    selective_scan,
    selective_scan_update,
    spatial_norm_silu,
    upsample_conv2d,
)
from turnout.parallel import distribute
from turnout.routing.choose import Refused, Verdict
from turnout.routing.op import TurnoutWarning
from turnout.routing.settings import numerics, pin
from turnout.warming.warmed import warm

__all__ = [
    "Refused",
    "TurnoutWarning",
    "Verdict",
    "__version__",
    "accelerate",
    "accelerated",
    "attention",
    "causal_conv1d",
    "causal_conv1d_update",
    "causal_conv3d",
    "conv2d",
    "conv3d",
    "distribute",
    "dot",
    "explain",
    "gated_add",
    "group_norm_silu",
    "group_norm_silu_pad",
    "inner",
    "layer_norm_modulate",
    "matmul",
    "norm_rope",
    "norm_rope_qk",
    "numerics",
    "pin",
    "restore",
    "rms_norm_silu",
    "routes",
    "selective_scan",
    "selective_scan_update",
    "spatial_norm_silu",
    "tune",
    "upsample_conv2d",
    "warm",
]

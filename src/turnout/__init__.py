"""turnout: every op down the fastest route that is right for its shape, dtype, layout and device.

Importing it loads the ops. The functions on whole models (`accelerate`, `distribute`, `warm`, `tune`) load
their code when they are first used: a program that only calls ops does not pay for it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from turnout._version import __version__
from turnout.routing.versions import refuse_unsupported

refuse_unsupported()  # before anything of a version that is too old can fail in a less helpful way

# ruff: noqa: E402
from turnout.asking import explain, routes
from turnout.ops import (
    add_repeated,
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
from turnout.routing.choose import Refused, Verdict
from turnout.routing.op import TurnoutWarning
from turnout.routing.settings import numerics, pin

if TYPE_CHECKING:
    from turnout import models as models
    from turnout import parallel as parallel
    from turnout.measure.tune import tune
    from turnout.models.accelerate import accelerate, accelerated, restore
    from turnout.models.warm import warm
    from turnout.parallel.distribute import distribute

__all__ = [
    "Refused",
    "TurnoutWarning",
    "Verdict",
    "__version__",
    "accelerate",
    "accelerated",
    "add_repeated",
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

_DEFINED_IN = {  # public name: the module that is loaded when the name is first used
    "accelerate": "turnout.models.accelerate",
    "accelerated": "turnout.models.accelerate",
    "distribute": "turnout.parallel.distribute",
    "restore": "turnout.models.accelerate",
    "tune": "turnout.measure.tune",
    "warm": "turnout.models.warm",
}
_SUBPACKAGES = ("models", "parallel")  # public too, and importing them binds their names here

if not TYPE_CHECKING:  # a type checker that saw __getattr__ would accept every misspelled name

    def __getattr__(name: str) -> Any:
        """Load a public name at its first use (PEP 562)."""
        if name in _SUBPACKAGES:
            return importlib.import_module(f"turnout.{name}")
        if name not in _DEFINED_IN:
            raise AttributeError(f"module 'turnout' has no attribute {name!r}")
        value = getattr(importlib.import_module(_DEFINED_IN[name]), name)
        globals()[name] = value  # from now on a plain attribute
        return value


def __dir__() -> list[str]:
    """All names, including those that are not loaded yet."""
    return sorted({*globals(), *_DEFINED_IN, *_SUBPACKAGES})

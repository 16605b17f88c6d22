"""turnout: every op down the fastest track that is right for its shape, dtype, layout and device."""

from turnout.asking import explain, routes
from turnout.ops import causal_conv1d, causal_conv1d_update, dot, inner, matmul
from turnout.routing.choose import Refused, Verdict
from turnout.routing.op import TurnoutWarning
from turnout.routing.settings import numerics, pin
from turnout.routing.tune import tune

__version__ = "0.1.0"

__all__ = [
    "Refused",
    "TurnoutWarning",
    "Verdict",
    "causal_conv1d",
    "causal_conv1d_update",
    "dot",
    "explain",
    "inner",
    "matmul",
    "numerics",
    "pin",
    "routes",
    "tune",
]

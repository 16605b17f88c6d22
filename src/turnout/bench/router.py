"""What the router adds to a call: microseconds in eager mode, and under torch.compile; on a GPU what the host
takes to launch, too.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from turnout import ops
from turnout.measure.timer import host_us
from turnout.routing.op import OPS

_CALLS, _ROUNDS = 1000, 25
_LAUNCHES = 200  # in a row: fewer than a card queues
_SMALL = {  # calls which take a card less time than its host takes to launch them
    "norm_rope": "text 1x512x24x128 bfloat16",
    "conv2d": "128x128 16->512 3x3 channels-last bfloat16",
    "causal_conv1d_update": "step 1x5120 state 4 bfloat16",
}


def measure_router() -> dict[str, dict[str, float]]:
    """For each way of calling: microseconds of torch's own call, of turnout's, and what was added (the median
    of paired differences).
    """
    a, b = torch.randn(16), torch.randn(16)
    x, y = torch.randn(1, 16), torch.randn(16, 1)
    p, q = torch.randn(16, requires_grad=True), torch.randn(16, requires_grad=True)
    compiled = torch.compile(torch.dot, fullgraph=True), torch.compile(ops.dot, fullgraph=True)
    return {
        "dot": _compare(torch.dot, ops.dot, a, b),
        "inner": _compare(torch.inner, ops.inner, a, b),
        "matmul": _compare(torch.matmul, ops.matmul, x, y),
        "dot, gradients wanted": _compare(torch.dot, ops.dot, p, q),
        "dot, torch.compile": _compare(*compiled, a, b),
    } | (_launches(torch.device("cuda")) if torch.cuda.is_available() else {})


@torch.no_grad()
def _launches(device: torch.device) -> dict[str, dict[str, float]]:
    """What the host takes for small calls on a GPU: those of the reference in plain PyTorch, and the routed
    ones.
    """
    found = {}
    for name, wanted in _SMALL.items():
        op = OPS[name]
        case = next(case for case in op.cases() if str(case) == wanted)
        args = op.arguments(*case.make(device, 0))
        found[f"{name} {wanted}, host"] = _compare(op.reference, op.call, *args, calls=_LAUNCHES)
    return found


def _compare(
    theirs: Callable[..., Any], ours: Callable[..., Any], *args: Any, calls: int = _CALLS
) -> dict[str, float]:
    device = args[0].device
    pairs = (
        (host_us(theirs, args, calls, device), host_us(ours, args, calls, device)) for _ in range(_ROUNDS + 2)
    )
    samples = list(pairs)[2:]
    added = statistics.median(mine - their for their, mine in samples)
    return {
        "torch_us": round(statistics.median(s[0] for s in samples), 3),
        "turnout_us": round(statistics.median(s[1] for s in samples), 3),
        "added_us": round(added, 3),
    }

"""Measure what the router adds to a call: in eager mode, under torch.compile, and when a GPU is launched."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from turnout import ops
from turnout.measure.timer import host_us
from turnout.routing.op import OPS

_CALLS, _ROUNDS = 1000, 25
_LAUNCHES = 200  # in a row: fewer than a card can queue
_SMALL = {  # cases, by op, that take a card less time than its host takes to launch them
    "norm_rope": "text 1x512x24x128 bfloat16",
    "conv2d": "128x128 16->512 3x3 channels-last bfloat16",
    "causal_conv1d_update": "step 1x5120 state 4 bfloat16",
}


def measure_router() -> dict[str, dict[str, float]]:
    """For each kind of call: microseconds of torch's, of turnout's, and the median of what was added."""
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
    """The host's time of small calls on a GPU: the reference in plain PyTorch, and the routed call."""
    times = {}
    for name, case_name in _SMALL.items():
        op = OPS[name]
        case = next(case for case in op.cases() if str(case) == case_name)
        args = op.arguments(*case.make(device, 0))
        times[f"{name} {case_name}, host"] = _compare(op.reference, op.call, *args, calls=_LAUNCHES)
    return times


def _compare(
    torch_call: Callable[..., Any], turnout_call: Callable[..., Any], *args: Any, calls: int = _CALLS
) -> dict[str, float]:
    """Time both in turns; the difference is taken in each round. The first two rounds warm up."""
    device = args[0].device
    samples = [
        (host_us(torch_call, args, calls, device), host_us(turnout_call, args, calls, device))
        for _ in range(_ROUNDS + 2)
    ][2:]
    return {
        "torch_us": round(statistics.median(torch_us for torch_us, _ in samples), 3),
        "turnout_us": round(statistics.median(turnout_us for _, turnout_us in samples), 3),
        "added_us": round(statistics.median(ours - torchs for torchs, ours in samples), 3),
    }

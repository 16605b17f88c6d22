"""What the router adds to a call: microseconds in eager mode, and under torch.compile."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import turnout

_CALLS, _ROUNDS = 1000, 25


def measure_router() -> dict[str, dict[str, float]]:
    """For each way of calling: microseconds of torch's own call, of turnout's, and what was added (the median of paired differences)."""
    a, b = torch.randn(16), torch.randn(16)
    x, y = torch.randn(1, 16), torch.randn(16, 1)
    p, q = torch.randn(16, requires_grad=True), torch.randn(16, requires_grad=True)
    compiled = torch.compile(torch.dot, fullgraph=True), torch.compile(turnout.dot, fullgraph=True)
    return {
        "dot": _compare(torch.dot, turnout.dot, a, b),
        "inner": _compare(torch.inner, turnout.inner, a, b),
        "matmul": _compare(torch.matmul, turnout.matmul, x, y),
        "dot, gradients wanted": _compare(torch.dot, turnout.dot, p, q),
        "dot, torch.compile": _compare(*compiled, a, b),
    }


def _compare(theirs: Callable[..., Any], ours: Callable[..., Any], *args: Any) -> dict[str, float]:
    samples = [(_per_call(theirs, args), _per_call(ours, args)) for _ in range(_ROUNDS + 2)][2:]
    added = statistics.median(mine - their for their, mine in samples)
    return {
        "torch_us": round(statistics.median(s[0] for s in samples), 3),
        "turnout_us": round(statistics.median(s[1] for s in samples), 3),
        "added_us": round(added, 3),
    }


def _per_call(run: Callable[..., Any], args: tuple) -> float:
    before = time.perf_counter()
    for _ in range(_CALLS):
        run(*args)
    return 1e6 * (time.perf_counter() - before) / _CALLS

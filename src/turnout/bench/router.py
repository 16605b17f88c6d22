"""Measure what the router adds to a call: in eager mode, under torch.compile, to the host's time on a GPU."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from turnout import ops
from turnout.bench.sweep import commit, timed, versions
from turnout.measure.machine import machine, now
from turnout.measure.timer import host_us, host_us_of_a_call, time_call
from turnout.routing.case import Case
from turnout.routing.device import Device
from turnout.routing.op import OPS, Op

_CALLS, _ROUNDS = 1000, 25
_ROUNDS_OF_A_CASE = 9
FILE = "router.jsonl"
KEY = ("op", "case", "dtype")  # fields that tell rows apart
# Ops by kind, of which a model makes so many calls that the host's time of each matters.
KINDS = {
    "norm": ("rms_norm_silu", "group_norm_silu", "layer_norm_modulate", "gated_add"),
    "rotation": ("norm_rope",),
    "update": ("causal_conv1d_update", "selective_scan_update"),
    "convolution": ("conv2d", "conv3d", "causal_conv3d", "upsample_conv2d"),
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
    }


def _compare(
    torch_call: Callable[..., Any], turnout_call: Callable[..., Any], *args: Any
) -> dict[str, float]:
    """Time both in turns; the difference is taken in each round. The first two rounds warm up."""
    device = args[0].device
    samples = [
        (host_us(torch_call, args, _CALLS, device), host_us(turnout_call, args, _CALLS, device))
        for _ in range(_ROUNDS + 2)
    ]
    return _summary(samples[2:])


def _summary(samples: list[tuple[float, float]]) -> dict[str, float]:
    """The medians of (torch's, turnout's) microseconds, and of their differences."""
    return {
        "torch_us": round(statistics.median(torch_us for torch_us, _ in samples), 3),
        "turnout_us": round(statistics.median(turnout_us for _, turnout_us in samples), 3),
        "added_us": round(statistics.median(ours - torchs for torchs, ours in samples), 3),
    }


def cases_of(device: torch.device, only: str = "") -> Iterator[tuple[str, Op, Case]]:
    """The cases whose host time is worth knowing on a device, as (kind, op, case)."""
    for kind, names in KINDS.items():
        for op in map(OPS.__getitem__, names):
            named = [case for case in timed(op, device) if only in str(case)]
            yield from ((kind, op, case) for case in named)


@torch.no_grad()
def measure_hosts(
    device: torch.device, only: str = "", done: Collection[tuple] = ()
) -> Iterator[dict[str, Any]]:
    """Yield a row for each case: the host's microseconds for the reference and for the routed call.

    done: op, case and dtype of cases to leave out.
    """
    for kind, op, case in cases_of(device, only):
        dtype = str(case.dtype).removeprefix("torch.")
        if (op.name, case.name, dtype) in done:
            continue
        args = op.arguments(*case.make(device, 0))
        both = (op.reference, op.call)
        [run(*args) for run in both for _ in range(2)]  # the first calls compile and choose
        device_us = [1e3 * time_call(functools.partial(run, *args), device).ms for run in both]
        samples = []
        for _ in range(_ROUNDS_OF_A_CASE):
            torch_us, turnout_us = (
                host_us_of_a_call(run, args, us, device) for run, us in zip(both, device_us, strict=True)
            )
            samples.append((torch_us, turnout_us))
        yield {
            "op": op.name,
            "case": case.name,
            "dtype": dtype,
            "kind": kind,
            "chosen": op.verdict(op.key(args)).chosen,
            **_summary(samples),
            "device": Device.of(device).name,
            "machine": machine(device),
            "versions": versions(device.type),
            "date": now(),
            "commit": commit(),
        }

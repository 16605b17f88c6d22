"""Calls with ever new shapes: `python -m tests.faults.many_shapes 100000 rss` prints a line of JSON every few
calls.

Each line has the calls made so far and MiB: with `rss` of the process, with `traced` what Python has
allocated. Not both
at once: tracemalloc has memory of its own, which grows.
"""

import gc
import json
import random
import sys
import tracemalloc
from pathlib import Path

import torch

import turnout
from turnout.ops.causal_conv1d_update import causal_conv1d_update
from turnout.ops.selective_scan_update import selective_scan_update

MIB = 2**20
LINES = 20


def new_call(draw):
    """A call of a random op with random, mostly new sizes, and the route that is pinned for it, if any."""

    def size(most=400):
        return draw.randint(1, most)

    def some(*shape):
        return torch.randn(shape)

    a, b, c = size(), 1 + size(40), size(12)
    x = some(c, b, size(9), 3)
    calls = {
        "dot": (lambda: turnout.dot(some(a * b), some(a * b)), "cpu-chunks"),
        "matmul": (lambda: turnout.matmul(some(b, a), some(a, c)), None),
        "rms_norm_silu": (lambda: turnout.rms_norm_silu(x, some(b), eps=1e-6), "cpu-planes"),
        "rms_norm_silu_into": (
            lambda: turnout.rms_norm_silu(x, eps=1e-6, out=torch.empty_like(x)),
            "cpu-planes",
        ),
        "group_norm_silu_into": (
            lambda: turnout.group_norm_silu(x, b, eps=1e-6, out=torch.empty_like(x)),
            None,
        ),
        "causal_conv1d": (lambda: turnout.causal_conv1d(some(c, b, a), some(b, 4), activation="silu"), None),
        "causal_conv1d_update": (
            lambda: causal_conv1d_update(some(c, a), some(c, a, b + 3), some(a, 4)),
            "cpu-channels",
        ),
        "selective_scan_update": (
            lambda: selective_scan_update(
                some(c, a), some(c, a, b), some(c, a), some(a, b), some(c, b), some(c, b)
            ),
            None,
        ),
    }
    name = draw.choice(list(calls))
    run, route = calls[name]
    return run, {name: route} if route is not None and draw.random() < 0.5 else {}


def rss():
    """Bytes of memory that the process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def main(count, kind):
    draw = random.Random(0)
    torch.manual_seed(0)
    if kind == "traced":
        tracemalloc.start()
    for i in range(1, count + 1):
        run, pins = new_call(draw)
        with torch.no_grad(), turnout.pin(**pins):
            run()
        if i % (count // LINES) == 0:
            gc.collect()
            size = tracemalloc.get_traced_memory()[0] if kind == "traced" else rss()
            print(json.dumps({"calls": i, "mib": round(size / MIB, 2)}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])

"""From tensors to launches of the kernels of attention."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from turnout.launch import Launch, LaunchPlan, Workspace, runs_plan, unspecialized
from turnout.launch import descriptors as tma
from turnout.ops.attention import heads_inside, strides_like_queries
from turnout.ops.integers import ceil_div, power_of_two
from turnout.ops.layouts import batch_steps
from turnout.routing.device import is_planning

LOG2E = math.log2(math.e)


def empty_like_queries(q: Tensor, dim_v: int) -> Tensor:
    """A fresh output: dense, [B, S, H, D] in memory where q is, else [B, H, S, D]."""
    shape = (*q.shape[:3], dim_v)
    if not heads_inside(q.shape, q.stride()):
        return torch.empty(shape, dtype=q.dtype, device=q.device)
    return torch.empty_strided(shape, strides_like_queries(shape, q), dtype=q.dtype, device=q.device)


def plan_flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    causal: bool,
    scale: float,
    lengths: Tensor | None,
    rows: int,
    keys: int,
    warps: int,
    stages: int,
    *,
    so_far: tuple[Tensor, Tensor] | None = None,
) -> LaunchPlan:
    """Plain Triton, any head dim that fits: `rows` queries and `keys` keys at a time. lengths: [B, 2];
    key_mask: [B, keys], bool.
    `so_far`: an output over other keys and the logarithms of its sums, [B, H, S]; these keys are added, in
    place."""
    from turnout.ops.attention.kernels import flash_kernel

    (batch, heads, length, dim), dim_v = q.shape, v.shape[3]
    out, sums = (empty_like_queries(q, dim_v), None) if so_far is None else so_far
    mask = None if key_mask is None else key_mask.view(torch.uint8)
    numbers = (
        heads,
        heads // k.shape[1],
        length,
        k.shape[2],
        dim,
        dim_v,
        scale * LOG2E,
        *batch_steps(q),
        *batch_steps(k),
        *batch_steps(v),
        *batch_steps(out)[:3],
        *((0, 0) if mask is None else batch_steps(mask)),
    )
    constants = {
        "BM": rows,
        "BN": keys,
        "BD": max(16, power_of_two(dim)),
        "BV": max(16, power_of_two(dim_v)),
        "CAUSAL": causal,
        "LENGTHS": lengths is not None,
        "MASK": mask is not None,
        "GO_ON": sums is not None,
    }
    programs = batch * heads * ceil_div(length, rows)
    tensors = (q, k, v, lengths, mask, sums, out)
    return LaunchPlan(
        (Launch(flash_kernel, programs, tensors, numbers, constants, warps, {"num_stages": stages}),), out
    )


run_flash = runs_plan(plan_flash)


class _Beside(threading.local):
    """Streams of this thread alone: another thread's capture must not draw them in."""

    def __init__(self) -> None:
        self.streams: dict[torch.device, torch.cuda.Stream] = {}

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self.streams:
            self.streams[device] = torch.cuda.Stream(device)
        return self.streams[device]


_beside = _Beside()


def take_turns(jobs: Iterable[Callable[[], None]], device: torch.device) -> None:
    """Run jobs on the current stream and on one beside it in turns: the last blocks of one leave room for the
    first of the next.

    The current stream waits for all of them, so what was allocated on it may be freed as usual, and a capture
    has everything.
    """
    if is_planning():
        for job in jobs:
            job()
        return
    current, beside = torch.cuda.current_stream(device), _beside.stream(device)
    beside.wait_stream(current)
    try:
        for i, job in enumerate(jobs):
            with torch.cuda.stream(beside if i % 2 else current):
                job()
    finally:
        current.wait_stream(beside)


QUERIES, KEYS, CHUNK, HALF, PART, SLOTS = 64, 128, 128, 256, 64, 4


def plan_wide_hopper(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, splits: int) -> LaunchPlan:
    """The Gluon kernel for heads of 257 to 512; with `splits`, that many parts of the keys, joined by a
    second kernel.
    """
    from turnout.ops.attention.hopper_kernels import WARPS, wide_kernel

    (batch, heads, rows, dim), keys = q.shape, k.shape[2]
    out = empty_like_queries(q, dim)
    if scale <= 0:  # the kernel looks for maxima before it multiplies
        q, scale = (-q, -scale) if scale < 0 else (torch.zeros_like(q), 1.0)
    into, maxima, sums, workspaces = out, None, None, ()
    if splits > 1:
        into = torch.empty(splits, batch * heads, rows, dim, dtype=torch.float32, device=q.device)
        maxima, sums = both = torch.empty(
            2, splits, batch * heads, rows, dtype=torch.float32, device=q.device
        )
        workspaces = (Workspace(into), Workspace(both))
    rest = max(64, power_of_two(dim - HALF))
    q, k, v = (x if tma.aligned(x) else x.clone() for x in (q, k, v))
    boxes = ((q, QUERIES, CHUNK), (k, KEYS, CHUNK), (v, PART, HALF), (v, PART, rest))
    descriptors = [
        tma.described(x, tma.pattern(x.shape, x.stride(), x.dtype, (1, 1, *box))) for x, *box in boxes
    ]
    tensors = (*descriptors[:3], None if rest == HALF else descriptors[3], into, maxima, sums)
    blocks = ceil_div(ceil_div(keys, KEYS), splits)
    strides = batch_steps(out if splits == 1 else into)[:3]
    numbers = (heads, heads // k.shape[1], rows, keys, dim, blocks, scale * LOG2E, *strides)
    constants = {
        "BM": QUERIES,
        "BN": KEYS,
        "CHUNKS": ceil_div(dim, CHUNK),
        "DC": CHUNK,
        "W0": HALF,
        "W1": rest,
        "BK": PART,
        "SLOTS": SLOTS,
        "CAUSAL": causal,
        "SPLITS": splits,
    }
    programs = batch * heads * ceil_div(rows, QUERIES) * splits
    kernel = unspecialized(wide_kernel, "blocks_each")
    launch = Launch(kernel, programs, tensors, numbers, constants, WARPS)
    if maxima is None or sums is None:
        return LaunchPlan((launch,), out)
    return LaunchPlan((launch, combine_launch(into, maxima, sums, out)), out, workspaces)


run_wide_hopper = runs_plan(plan_wide_hopper)


def combine_launch(parts: Tensor, maxima: Tensor, sums: Tensor, out: Tensor) -> Launch:
    from turnout.ops.attention.kernels import combine_kernel

    (splits, _, rows, dim), (batch, heads) = parts.shape, out.shape[:2]
    numbers = (batch * heads * rows, rows, heads, dim, *batch_steps(out)[:3])
    constants = {"SPLITS": splits, "BM": 4, "BD": power_of_two(dim)}
    return Launch(
        combine_kernel, ceil_div(batch * heads * rows, 4), (parts, maxima, sums, out), numbers, constants, 4
    )

"""The routes of norm_rope: one launch on a GPU, one pass on a CPU."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from turnout.launch import prepare_from_plan, runs_plan
from turnout.ops import needs
from turnout.ops.integers import ceil_div, power_of_two
from turnout.ops.layouts import array, flat
from turnout.ops.norm_rope import NORM_ROPE, NormRope, work
from turnout.ops.norm_rope.checks import Call, table_kind
from turnout.ops.norm_rope.launches import out_steps, planned, table_steps
from turnout.routing.configured import configured, of_call
from turnout.routing.device import Device
from turnout.routing.route import Config

WIDEST = 512  # columns of one head
WIDEST_ON_CPU = 1024  # as wide as the buffer of cpu_kernels
LARGE = 2**20  # elements from which on a second configuration is worth trying
MOST_ACROSS = 16384  # columns of all heads, which a program keeps in registers to normalise across them


def refuses_anywhere(problem: NormRope) -> Iterator[str]:
    if problem.elements == 0:
        yield "nothing to do, this route needs at least one element"
    yield from needs.needs_dtype(problem.dtype, *needs.HALF_AND_SINGLE)
    if problem.weight_dtype is not None:
        yield from (
            f"weight of {reason}"
            for reason in needs.needs_dtype(problem.weight_dtype, *needs.HALF_AND_SINGLE)
        )
    if problem.table_dtype is not None:
        yield from (
            f"table of {reason}"
            for reason in needs.needs_dtype(problem.table_dtype, *needs.HALF_AND_SINGLE, torch.complex64)
        )
    for tensors, strides in (
        ("x", [s[-1] for s in problem.strides]),
        ("the table", [s[-1] for s in problem.table_strides]),
    ):
        if any(stride != 1 for stride in strides):
            yield f"columns of {tensors} {max(strides)} apart, this route needs them side by side"
    if len(set(problem.table_strides)) > 1:
        yield "cos and sin of different strides, this route needs the same"


def refuses_on_gpu(problem: NormRope, device: Device) -> Iterator[str]:
    yield from needs.needs_triton(device)
    yield from refuses_anywhere(problem)
    if problem.dim > WIDEST:
        yield f"{problem.dim} columns a head, this route needs at most {WIDEST}"
    if problem.norm == "all" and max(problem.heads) * power_of_two(problem.dim) > MOST_ACROSS:
        together = f"{max(problem.heads)} heads of {problem.dim} columns normalised together"
        yield f"{together}, this route needs at most {MOST_ACROSS}"


def refuses_exact(problem: NormRope, device: Device) -> Iterator[str]:
    yield from refuses_on_gpu(problem, device)
    if problem.norm != "none":
        yield "a norm, whose sum has an order of its own, this route needs none"
    if problem.table == "complex":
        yield "a complex table, whose product PyTorch may fuse, this route needs cos and sin"


def gpu_cost(problem: NormRope, device: Device) -> float | None:
    """Share of the bandwidth and time of the host: measured on an H200, see NOTES.md."""
    moving = device.seconds(work(problem).bytes)
    if moving is None or device.type != "cuda":
        return None
    fitted = device.fitted("norm_rope.one-pass")
    return max(fitted.host + fitted.host_each * len(problem.heads), fitted.start + moving / fitted.share)


def one_pass_configs(problem: NormRope, device: Device) -> list[Config]:
    """Tiles of 1024 elements, 8 for each of 128 threads: several tokens of one head, and as many heads one
    after the other as divide evenly and leave enough programs for the card. Across heads: all heads of one or
    a few tokens. Without tables heads have nothing in
    common: then the order of the output is tried too."""
    parts = (
        problem.rotary // 2 if problem.pairing == "half" else problem.rotary,
        problem.dim - problem.rotary,
    )
    width = power_of_two(max(2, *parts))
    tries = 2 if problem.elements >= LARGE else 1
    candidates: list[Config]
    if problem.norm == "all":
        most = max(problem.heads)
        even = most & -most  # the largest power of two that divides them
        most_at_once = min(8, even if even >= 4 else power_of_two(most))
        # Eight warps hold half as much each: from Triton 3.7 on four need 88 registers a thread, not 72, and
        # fewer fit.
        shapes = dict.fromkeys(((most_at_once, 4), (most_at_once, 8), (min(4, most_at_once), 4)))
        candidates = [
            {"tokens": max(1, 1024 // (n * width)), "heads": n, "chunks": ceil_div(most, n), "warps": w}
            for n, w in shapes
        ]
        return candidates if tries > 1 else candidates[:1]
    tokens = max(1, 1024 // width)
    tiles = problem.batch * sum(ceil_div(length, tokens) for length in problem.lengths)
    whole = [
        n
        for n in range(1, 9)
        if problem.heads[0] % n == 0 and tiles * sum(problem.heads) // n >= 6 * device.units
    ] or [1]
    candidates = [
        {"tokens": tokens, "heads": 1, "chunks": n, "warps": 4}
        for n in dict.fromkeys((whole[-1], max(1, whole[-1] // 2)))
    ]
    in_order: Config = {"tokens": tokens, "heads": 1, "chunks": 1, "warps": 4, "by_head": True}
    return (
        [in_order, *candidates[:tries]]
        if problem.table == "none" and problem.out_layout == "bhsd"
        else candidates[:tries]
    )


ONE_PASS: Any = {
    "cost": gpu_cost,
    "configs": one_pass_configs,
    "prepare": prepare_from_plan,
    "version": 1,
    "kernels": ("turnout.ops.norm_rope.kernels:norm_rope",),
}


one_pass = runs_plan(
    configured(of_call(Call, planned), {"tokens": 8, "heads": 1, "chunks": 8, "warps": 4, "by_head": False})
)
NORM_ROPE.route("one-pass", refuses=refuses_on_gpu, numerics="close", **ONE_PASS)(one_pass)
NORM_ROPE.route("rotate", refuses=refuses_exact, numerics="exact", **ONE_PASS)(one_pass)


# On a CPU


def refuses_on_cpu(problem: NormRope, device: Device) -> Iterator[str]:
    yield from needs.needs_numba(device)
    yield from refuses_anywhere(problem)
    if problem.dim > WIDEST_ON_CPU:
        yield f"{problem.dim} columns a head, this route needs at most {WIDEST_ON_CPU}"
    if problem.norm == "none" and problem.table == "none":
        yield "nothing to compute, this route needs a norm or a rotation: PyTorch permutes as fast"


def cpu_cost(problem: NormRope, device: Device) -> float | None:
    """Measured on two cores, see NOTES.md."""
    if device.type != "cpu":
        return None
    fitted, has_head_tables = (
        device.fitted("norm_rope.cpu-rows"),
        len(problem.table_shape) == 4 and problem.table_shape[2] > 1,
    )
    each = fitted.element + (fitted.element_table if has_head_tables else 0)
    return fitted.start * len(problem.strides) + problem.elements * each / device.cores


def on_cpu(call: Call) -> tuple[Tensor, Tensor]:
    import numpy as np

    from turnout.ops.threads import import_uninterrupted, in_shares

    import_uninterrupted("turnout.ops.norm_rope.cpu_kernels")
    from turnout.ops.norm_rope.cpu_kernels import norm_rope as kernel

    kind = {"none": 0, "pair": 1, "element": 2, "complex": 3}[table_kind(call.cos, call.rotary)]
    cos, sin = call.cos, call.sin
    if kind == 3 and cos is not None:
        cos = torch.view_as_real(cos).flatten(-2)
    cos, sin = (None if t is None else t.float() for t in (cos, sin))
    table_sizes, table_strides = ((), ()) if cos is None else (cos.shape, cos.stride())
    nothing = np.empty(0, np.float32)
    tables = (
        nothing if cos is None else flat(cos),
        nothing if sin is None else flat(sin),
        *table_steps(table_sizes, table_strides),
    )
    norm = {"none": 0, "head": 1, "all": 2}[call.norm]
    turning = (call.round_before_weight, *tables, kind, call.rotary, call.pairing == "half")
    total = call.q.shape[1] + (0 if call.q2 is None else call.q2.shape[1])
    outputs = []
    for x, x2, weight, weight2 in call.of_q_and_k:
        shape, y_steps = out_steps(x.shape, total, call.out_layout)
        y = torch.empty(shape, dtype=x.dtype, device=x.device)
        outputs.append(y)
        for part, scale, before in ((x, weight, 0), (x2, weight2, x.shape[1])):
            if part is None or not part.numel():
                continue
            w = nothing if scale is None else array(scale.float().contiguous())
            batch, tokens, heads, dim = part.shape
            read = (flat(part), *part.stride()[:3], tokens, before, heads, dim)
            arguments = (*read, w, np.float32(call.eps), norm, *turning, flat(y), *y_steps)
            in_shares(functools.partial(kernel, *arguments), batch * tokens)
    return outputs[0], outputs[1] if len(outputs) == 2 else call.q.new_empty(0)


NORM_ROPE.route(
    "cpu-rows",
    refuses=refuses_on_cpu,
    cost=cpu_cost,
    numerics="close",
    version=1,
    kernels=("turnout.ops.norm_rope.cpu_kernels:norm_rope",),
)(of_call(Call, on_cpu))

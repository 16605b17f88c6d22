"""From tensors to the launch of norm_rope's kernel.

All but the addresses follows from sizes and strides, so each `Prepared` works it out once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from turnout.launch import Launch, LaunchPlan, unspecialized
from turnout.ops.integers import ceil_div, power_of_two
from turnout.ops.layouts import batch_steps, misaligned, side_by_side, widest_vector
from turnout.ops.norm_rope.checks import Call, table_kind
from turnout.routing.prepared import worked_out_once

Sizes = tuple[int, ...]


class Plan(NamedTuple):
    kernel: Any
    programs: int
    q_out: Sizes
    k_out: Sizes | None
    numbers: Sizes
    constants: dict[str, Any]


def out_steps(shape: Sizes, tokens: int, out_layout: str) -> tuple[Sizes, Sizes]:
    """The shape of the output for a tensor [B, S, H, D], and its strides by batch, token and head."""
    batch, _, heads, dim = shape
    if out_layout == "bhsd":
        return (batch, heads, tokens, dim), (heads * tokens * dim, dim, tokens * dim)
    return (batch, tokens, heads, dim), (tokens * heads * dim, heads * dim, dim)


def table_steps(shape: Sizes, strides: Sizes) -> Sizes:
    """Strides of a table by batch, token and head; 0 where it is the same for all."""
    if not shape:
        return 0, 0, 0
    if len(shape) == 2:
        return 0, strides[0], 0
    batch = strides[0] if shape[0] > 1 else 0
    return (
        (batch, strides[1], 0) if len(shape) == 3 else (batch, strides[1], strides[2] if shape[2] > 1 else 0)
    )


@worked_out_once
def plan(
    shapes: tuple[Sizes | None, ...],
    strides: tuple[Sizes | None, ...],
    table_shape: Sizes,
    table_strides: Sizes,
    kind: str,
    itemsize: int,
    table_itemsize: int,
    off: int,
    table_off: int,
    rotary: int,
    pairing: str,
    out_layout: str,
    tokens: int,
    heads: int,
    chunks: int,
    by_head: bool,
) -> Plan:
    """`tokens` tokens and `chunks` times `heads` heads are one program's; next come other heads, or with
    `by_head` other tokens.
    """
    from turnout.ops.norm_rope.kernels import norm_rope

    q, q2, k, _ = shapes
    assert q is not None
    batch, length, q_heads, dim = q
    length2, k_heads, half = 0 if q2 is None else q2[1], 0 if k is None else k[2], pairing == "half"
    q_out, q_steps = out_steps(q, length + length2, out_layout)
    k_out, k_steps = (None, (0, 0, 0)) if k is None else out_steps(k, length + length2, out_layout)
    table = table_steps(table_shape, table_strides)
    rows: list[int] = []
    far: Sizes = ()
    for shape, steps in zip(shapes, strides, strict=True):
        rows += (
            []
            if shape is None or steps is None
            else [step for size, step in zip(shape[:3], steps[:3], strict=True) if size > 1]
        )
        far += (0, 0, 0) if steps is None else steps[:3]
    vector = widest_vector(itemsize, off, *rows, dim, rotary, rotary // 2 if half else 0)
    table_vector = widest_vector(
        max(4, table_itemsize), table_off, *table, rotary // 2 if half or kind == "pair" else rotary
    )
    constants = {
        "D": dim,
        "RD": rotary,
        "RW": power_of_two(max(rotary, 2)),
        "EW": power_of_two(max(dim - rotary, 2)),
        "V": vector,
        "TV": table_vector,
        "T": tokens,
        "BH": heads,
        "N": chunks,
        "HALF": half,
        "TABLE": kind,
        "TABLE_HEADS": table[2] != 0,
        "STREAMS": 1 if q2 is None else 2,
        "KEYS": k is not None,
        "BY_HEAD": by_head,
    }
    groups = ceil_div(q_heads, heads * chunks) + ceil_div(k_heads, heads * chunks)
    tiles = ceil_div(length, tokens) + ceil_div(length2, tokens)
    numbers = (length, length2, q_heads, k_heads, *far, *table, *q_steps, *k_steps)
    kernel = unspecialized(norm_rope, "S", "S2")
    return Plan(kernel, groups * tiles * batch, q_out, k_out, numbers, constants)


def planned(call: Call, *, tokens: int, heads: int, chunks: int, warps: int, by_head: bool) -> LaunchPlan:
    streams, weights, q = call.streams, side_by_side(*call.weights), call.q
    cos, sin, kind = call.cos, call.sin, table_kind(call.cos, call.rotary)
    if kind == "complex" and cos is not None:
        cos = torch.view_as_real(cos).flatten(-2)
    kernel, programs, q_shape, k_shape, numbers, constants = plan(
        tuple([None if x is None else x.shape for x in streams]),
        tuple([None if x is None else batch_steps(x) for x in streams]),
        () if cos is None else cos.shape,
        () if cos is None else cos.stride(),
        kind,
        q.element_size(),
        0 if cos is None else cos.element_size(),
        misaligned(*streams, *weights),
        misaligned(cos, sin),
        call.rotary,
        call.pairing,
        call.out_layout,
        tokens,
        heads,
        chunks,
        by_head,
    )
    q_out = torch.empty(q_shape, dtype=q.dtype, device=q.device)
    k_out = None if k_shape is None else torch.empty(k_shape, dtype=q.dtype, device=q.device)
    flags = {"NORM": call.norm, "WEIGHT": weights[0] is not None, "TWICE": call.round_before_weight}
    # Eager PyTorch rounds a product before it adds: with multiplications and additions apart, so does the
    # kernel.
    launch = Launch(
        kernel,
        programs,
        (*streams, *weights, cos, sin, q_out, k_out),
        (call.eps, *numbers),
        {**constants, **flags},
        warps,
        {"enable_fp_fusion": False},
    )
    return LaunchPlan((launch,), (q_out, q.new_empty(0) if k_out is None else k_out))

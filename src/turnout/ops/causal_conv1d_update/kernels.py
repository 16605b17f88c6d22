"""Triton kernel of causal_conv1d_update: a few more positions of each sequence, the state moved on in place."""

# Triton adds tuples with + only, and a branch on a constexpr needs its else. l is the position, as in the formula.
# ruff: noqa: RUF005
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from turnout.ops.causal_conv1d.kernels import join_last, split_last
from turnout.ops.common_kernels import sigmoid


@triton.jit
def update(
    x, state, w, bias, y, lengths, slots, D, L, xb, xd, xl, sb, sd, sl, wd, wk, yb, yd, yl,
    W: tl.constexpr, S: tl.constexpr, BD: tl.constexpr,
    BIAS: tl.constexpr, SILU: tl.constexpr, RING: tl.constexpr, SLOTS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """L more positions of one sequence, BD channels; state [slot, D, S] moves on in place.

    RING: state is a ring that is written at lengths[b] % S. SLOTS: sequence b keeps its state in slots[b]; a negative slot is
    padding, its output 0. WHOLE: L is 1, S a power of two, and S values side by side start at a multiple of their size, so a
    thread moves them at once.
    """
    xl, yl = tl.cast(xl, tl.int64), tl.cast(yl, tl.int64)
    blocks = tl.cdiv(D, BD)
    pid = tl.program_id(0)
    b = (pid // blocks).to(tl.int64)
    d = (pid % blocks * BD + tl.arange(0, BD)).to(tl.int64)
    dm = d < D
    slot = b
    live = True
    if SLOTS:
        slot = tl.load(slots + b).to(tl.int64)
        live = slot >= 0
        slot = tl.maximum(slot, 0)
    sm = dm & live
    ps = state + slot * sb + d * sd
    px = x + b * xb + d * xd
    py = y + b * yb + d * yd

    at = 0
    if RING:
        at = tl.load(lengths + b).to(tl.int32) % S
    if WHOLE:
        j = tl.arange(0, S)
        tile = tl.multiple_of(ps[:, None] + j[None, :], (1, S * state.dtype.element_ty.primitive_bitwidth // 8))  # [BD, S]
        held = split_last(tl.load(tile, mask=sm[:, None], other=0.0), S)
        line = held[S - (W - 1) :]
        held = held[1:] + (tl.load(px, mask=dm, other=0.0).to(state.dtype.element_ty),)
    else:
        line = ()
        for k in tl.static_range(W - 1):
            line = line + (tl.load(ps + (at + (S - (W - 1) + k)) % S * sl, mask=sm, other=0.0),)
        held = ()
        if not RING:
            for k in tl.static_range(S):
                old = tl.load(ps + (L + k) * sl, mask=sm & (L + k < S), other=0.0)
                new = tl.load(px + (L + k - S) * xl, mask=dm & (L + k >= S), other=0.0).to(old.dtype)
                held = held + (tl.where(L + k < S, old, new),)

    taps = ()
    for k in tl.static_range(W):
        taps = taps + (tl.load(w + d * wd + k * wk, mask=dm, other=0.0).to(tl.float32),)
    zero = tl.zeros((BD,), tl.float32)
    if BIAS:
        zero += tl.load(bias + d, mask=dm, other=0.0).to(tl.float32)
    window = ()
    for k in tl.static_range(W - 1):
        window = window + (line[k].to(tl.float32),)
    for i in range(L):
        t = tl.load(px, mask=dm, other=0.0)
        if RING:
            tl.store(ps + (at + i) % S * sl, t.to(state.dtype.element_ty), mask=sm)
        window = window + (t.to(tl.float32),)
        acc = zero
        for k in tl.static_range(W):
            acc += window[k] * taps[k]
        window = window[1:]
        if SILU:
            acc *= sigmoid(acc, y.dtype.element_ty == tl.float32)
        tl.store(py, tl.where(live, acc, 0.0).to(y.dtype.element_ty), mask=dm)
        px += xl
        py += yl

    if WHOLE:
        tl.store(tile, join_last(held, S), mask=sm[:, None])
    else:
        for k in tl.static_range(0 if RING else S):
            tl.store(ps + k * sl, held[k], mask=sm)

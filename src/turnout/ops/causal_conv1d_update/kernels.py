"""Triton kernel of causal_conv1d_update: a few more positions of each sequence, state in place."""

# Triton adds tuples with + only.
# ruff: noqa: RUF005
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from turnout.ops.causal_conv1d.kernels import join_last, split_last
from turnout.ops.common_kernels import sigmoid


@triton.jit
def update(
    x, state,  # [batch, D, L], [slot, D, S]
    w, bias, y,  # [D, W], [D], [batch, D, L]
    lengths, slots,  # [batch] positions seen so far, with RING; [batch] with SLOTS
    D, L,  # channels, new positions
    xb, xd, xl, sb, sd, sl,  # strides in elements: by batch or slot (b), channel (d), position (l)
    wd, wk, yb, yd, yl,  # and by tap (k)
    W: tl.constexpr, S: tl.constexpr,  # taps, positions of the state (S >= W - 1)
    BD: tl.constexpr,  # channels of a program
    BIAS: tl.constexpr, SILU: tl.constexpr,
    RING: tl.constexpr,  # the state is a ring that is written at lengths[b] % S
    SLOTS: tl.constexpr,  # sequence b keeps its state in slots[b]; a negative one is padding, its output 0
    WHOLE: tl.constexpr,  # a thread reads and writes the S values of a channel's state at once
):  # fmt: skip
    """Convolve L more positions of one sequence and move its state on in place. A program: BD channels of
    one.

    WHOLE needs L = 1, S a power of two, and S values side by side that start at a multiple of their size.
    """
    xl, yl = tl.cast(xl, tl.int64), tl.cast(yl, tl.int64)
    blocks = tl.cdiv(D, BD)
    pid = tl.program_id(0)
    b = (pid // blocks).to(tl.int64)
    d = (pid % blocks * BD + tl.arange(0, BD)).to(tl.int64)  # [BD]
    dm = d < D  # [BD]
    slot = b
    live = True
    if SLOTS:
        slot = tl.load(slots + b).to(tl.int64)
        live = slot >= 0
        slot = tl.maximum(slot, 0)
    sm = dm & live  # [BD]
    ps = state + slot * sb + d * sd  # [BD]
    px = x + b * xb + d * xd  # [BD]
    py = y + b * yb + d * yd  # [BD]

    at = 0
    if RING:
        at = tl.load(lengths + b).to(tl.int32) % S
    if WHOLE:
        j = tl.arange(0, S)  # [S]
        tile = tl.multiple_of(
            ps[:, None] + j[None, :],  # [BD, S]
            (1, S * state.dtype.element_ty.primitive_bitwidth // 8),  # bytes of a vector
        )
        next_state = split_last(tl.load(tile, mask=sm[:, None], other=0.0), S)  # S of [BD]
        previous = next_state[S - (W - 1) :]  # W - 1 of [BD]
        next_state = next_state[1:] + (tl.load(px, mask=dm, other=0.0).to(state.dtype.element_ty),)
    else:
        previous = ()  # W - 1 of [BD]: the positions before the first new one
        for k in tl.static_range(W - 1):
            previous = previous + (tl.load(ps + (at + (S - (W - 1) + k)) % S * sl, mask=sm, other=0.0),)
        next_state = ()  # S of [BD]: the state that is left behind, read before it is written
        if not RING:
            for k in tl.static_range(S):
                old = tl.load(ps + (L + k) * sl, mask=sm & (L + k < S), other=0.0)  # [BD]
                new = tl.load(px + (L + k - S) * xl, mask=dm & (L + k >= S), other=0.0).to(old.dtype)  # [BD]
                next_state = next_state + (tl.where(L + k < S, old, new),)

    taps = ()  # W of [BD]
    for k in tl.static_range(W):
        taps = taps + (tl.load(w + d * wd + k * wk, mask=dm, other=0.0).to(tl.float32),)
    start = tl.zeros((BD,), tl.float32)  # [BD] what a sum of taps begins with
    if BIAS:
        start += tl.load(bias + d, mask=dm, other=0.0).to(tl.float32)  # [BD]
    window = ()  # W - 1 of [BD]: the positions before the one at hand
    for k in tl.static_range(W - 1):
        window = window + (previous[k].to(tl.float32),)
    for i in range(L):
        t = tl.load(px, mask=dm, other=0.0)  # [BD]
        if RING:
            tl.store(ps + (at + i) % S * sl, t.to(state.dtype.element_ty), mask=sm)
        window = window + (t.to(tl.float32),)
        acc = start  # [BD]
        for k in tl.static_range(W):
            acc += window[k] * taps[k]
        window = window[1:]
        if SILU:
            acc *= sigmoid(acc, y.dtype.element_ty == tl.float32)
        tl.store(py, tl.where(live, acc, 0.0).to(y.dtype.element_ty), mask=dm)
        px += xl
        py += yl

    if WHOLE:
        tl.store(tile, join_last(next_state, S), mask=sm[:, None])  # [BD, S]
    else:
        for k in tl.static_range(0 if RING else S):
            tl.store(ps + k * sl, next_state[k], mask=sm)

"""Triton kernels of causal_conv1d: y[b, d, l] = act(bias[d] + sum_k w[d, k] * x[b, d, l - (W-1) + k]).

Two forward kernels, one per layout, read every element of x from DRAM once, with 16-byte loads:

`rows`   positions are contiguous (channel-first). A thread owns V neighbouring positions and takes the W-1
         before them from the aligned vectors to its left (L1 hits), so no load is ever misaligned. With V = 1
         it serves any strides.
`cols`   channels are contiguous (channel-last, any row pitch). A thread owns a vector of channels and T rows
         below each other.

States live at the ends of a sequence, so `edges` handles them in a launch of its own and the big kernels stay
lean. Sequences inside a batch row are told apart by `seg`, int32 [B, L]: a tap counts only where seg equals
the output's, and a negative seg is padding (output 0). Taps that do not count are selected away, never
multiplied by zero: NaN stays at home.
"""

# Triton adds tuples with + only, and a branch on a constexpr needs its else. l is the position, as in the
# formula.
# ruff: noqa: E741, RET505, RUF005
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from turnout.ops.common_kernels import sigmoid


@triton.jit
def split_last(t, N: tl.constexpr):
    """[R, N] -> N tensors [R]. Free when a thread holds whole rows: only names change."""
    if N == 1:
        return (tl.reshape(t, (t.shape[0],)),)
    else:
        a, b = tl.split(tl.permute(tl.reshape(t, (t.shape[0], 2, N // 2)), (0, 2, 1)))
        return split_last(a, N // 2) + split_last(b, N // 2)


@triton.jit
def join_last(ts, N: tl.constexpr):
    """N tensors [R] -> [R, N], the inverse of split_last."""
    if N == 1:
        return tl.reshape(ts[0], (ts[0].shape[0], 1))
    else:
        a = join_last(ts[: N // 2], N // 2)
        b = join_last(ts[N // 2 :], N // 2)
        return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (a.shape[0], N))


@triton.jit
def rows(
    x, w, bias,  # [B, D, L], [D, W], [D]
    seg, y,  # [B, L] int32 with SEG, contiguous; [B, D, L]
    D, L,  # channels, positions
    xb, xd, xl, wd, wk, yb, yd, yl,  # strides in elements: batch, channel, position, tap (k)
    W: tl.constexpr, V: tl.constexpr,  # taps; positions of one vector
    BR: tl.constexpr, BV: tl.constexpr,  # channels, and vectors of positions, of a program
    BIAS: tl.constexpr, SILU: tl.constexpr, SEG: tl.constexpr,
):  # fmt: skip
    """One program: BR channels x BV vectors of V positions. V divides L, and every address the vectors start
    at."""
    xl, yl = tl.cast(xl, tl.int64), tl.cast(yl, tl.int64)
    P: tl.constexpr = (W + V - 2) // V  # vectors to the left that hold the W-1 earlier positions
    tiles = tl.cdiv(L, BV * V)
    pid = tl.program_id(0).to(tl.int64)
    tile, block = pid % tiles, pid // tiles
    blocks = tl.cdiv(D, BR)
    b, d0, l0 = block // blocks, block % blocks * BR, tile * (BV * V)

    i = tl.arange(0, BR * BV)  # [BR*BV]
    r = i // BV  # [BR*BV] channel within the tile
    v = (i % BV) * V  # [BR*BV] first position within the tile
    j = tl.arange(0, V)  # [V]
    d = d0 + r  # [BR*BV]
    l = (l0 + v).to(tl.int32)  # [BR*BV]
    inside = (d < D) & (l < L)  # [BR*BV]

    px = x + b * xb + d0 * xd + l0 * xl
    ox = (r.to(tl.int64) * xd)[:, None] + (v[:, None] + j[None, :]).to(tl.int64) * xl  # [BR*BV, V]
    xs = ()  # (P + 1) * V of [BR*BV]: the positions at hand and those to their left
    for p in tl.static_range(P + 1):
        q = tl.multiple_of(px + (ox - (P - p) * V * xl), (1, V * x.dtype.element_ty.primitive_bitwidth // 8))
        ok = inside if p == P else inside & (l >= (P - p) * V)
        xs = xs + split_last(tl.load(q, mask=ok[:, None], other=0.0).to(tl.float32), V)
    if SEG:
        ps = seg + b * L + l0
        ss = ()  # (P + 1) * V of [BR*BV]: seg of the same positions
        for p in tl.static_range(P + 1):
            q = tl.multiple_of(ps + (v[:, None] + j[None, :] - (P - p) * V), (1, V * 4))
            ok = inside if p == P else inside & (l >= (P - p) * V)
            ss = ss + split_last(tl.load(q, mask=ok[:, None], other=-1), V)

    if BR == 1:  # one channel: its taps are scalars
        c = d0
        cm = d0 < D
    else:
        c = d
        cm = inside
    taps = ()
    for k in tl.static_range(W):
        taps = taps + (tl.load(w + c * wd + k * wk, mask=cm, other=0.0).to(tl.float32),)
    zero = tl.zeros((BR * BV,), tl.float32)
    if BIAS:
        zero += tl.load(bias + c, mask=cm, other=0.0).to(tl.float32)

    out = ()  # V of [BR*BV]
    for e in tl.static_range(V):
        acc = zero  # [BR*BV]
        for k in tl.static_range(W):
            t = xs[P * V + e - (W - 1) + k]
            if SEG:
                t = tl.where(ss[P * V + e - (W - 1) + k] == ss[P * V + e], t, 0.0)
            acc += t * taps[k]
        if SILU:
            acc *= sigmoid(acc, y.dtype.element_ty == tl.float32)
        if SEG:
            acc = tl.where(ss[P * V + e] >= 0, acc, 0.0)
        out = out + (acc.to(y.dtype.element_ty),)
    oy = (r.to(tl.int64) * yd)[:, None] + (v[:, None] + j[None, :]).to(tl.int64) * yl
    q = tl.multiple_of(
        y + b * yb + d0 * yd + l0 * yl + oy, (1, V * y.dtype.element_ty.primitive_bitwidth // 8)
    )
    tl.store(q, join_last(out, V), mask=inside[:, None])


@triton.jit
def cols(
    x, w, bias, seg, y,  # as in `rows`, channels side by side
    D, L,  # channels, positions
    xb, xl, wd, wk, yb, yl,  # strides in elements: batch, position; wd, wk: channel, tap
    W: tl.constexpr, V: tl.constexpr,  # taps; channels of one vector
    G: tl.constexpr, T: tl.constexpr, STEPS: tl.constexpr,  # groups; rows of a step; steps of a group
    BD: tl.constexpr,  # channels of a program
    BIAS: tl.constexpr, SILU: tl.constexpr, SEG: tl.constexpr,
):  # fmt: skip
    """One program: BD channels of G groups of rows; a group walks down STEPS times T rows and keeps the last
    W-1 at hand.

    V divides D and every address a row starts at.
    """
    xl, yl = tl.cast(xl, tl.int64), tl.cast(yl, tl.int64)
    R: tl.constexpr = T * STEPS  # rows of a group
    blocks = tl.cdiv(D, BD)
    tiles = tl.cdiv(L, G * R)
    pid = tl.program_id(0).to(tl.int64)
    d0 = pid % blocks * BD
    b, l0 = pid // blocks // tiles, pid // blocks % tiles * (G * R)

    c = tl.arange(0, BD)  # [BD]
    g = tl.arange(0, G) * R  # [G]
    d = (d0 + c).to(tl.int32)  # [BD]
    l = (l0 + g).to(tl.int32)  # [G] first row of each group
    dm = (d // V < D // V)[None, :]  # as d < D, but constant over a vector

    # The loads of taps stand before the first use: moving them to the layout of x takes barriers, and no load
    # crosses one.
    raw = ()  # W taps [BD], then the bias
    for k in tl.static_range(W):
        raw = raw + (tl.load(w + d.to(tl.int64) * wd + k * wk, mask=d < D, other=0.0),)
    if BIAS:
        raw = raw + (tl.load(bias + d, mask=d < D, other=0.0),)

    px = x + b * xb + l0 * xl + d0 + ((g.to(tl.int64) * xl)[:, None] + c[None, :])  # [G, BD]
    py = y + b * yb + l0 * yl + d0 + ((g.to(tl.int64) * yl)[:, None] + c[None, :])  # [G, BD]
    xs = ()  # rows [G, BD]: the W-1 before those at hand, then the T at hand
    ss = ()  # seg of the same rows, [G, 1] each
    if SEG:
        ps = seg + b * L + l0 + g  # [G]
    for i in tl.static_range(W - 1):
        n = i - (W - 1)
        ok = (l + n >= 0) & (l + n < L)
        q = tl.multiple_of(px + n * xl, (1, V * x.dtype.element_ty.primitive_bitwidth // 8))
        xs = xs + (tl.load(q, mask=ok[:, None] & dm, other=0.0),)
        if SEG:
            ss = ss + (tl.load(ps + n, mask=ok, other=-1)[:, None],)
    for step in range(STEPS):
        for i in tl.static_range(T):
            ok = l + step * T + i < L
            q = tl.multiple_of(px + i * xl, (1, V * x.dtype.element_ty.primitive_bitwidth // 8))
            xs = xs + (tl.load(q, mask=ok[:, None] & dm, other=0.0),)
            if SEG:
                ss = ss + (tl.load(ps + i, mask=ok, other=-1)[:, None],)
        for i in tl.static_range(T):
            acc = tl.zeros((G, BD), tl.float32)
            if BIAS:
                acc += raw[W].to(tl.float32)[None, :]
            for k in tl.static_range(W):
                t = xs[i + k].to(tl.float32)  # [G, BD]
                if SEG:
                    t = tl.where(ss[i + k] == ss[i + W - 1], t, 0.0)
                acc += t * raw[k].to(tl.float32)[None, :]
            if SILU:
                acc *= sigmoid(acc, y.dtype.element_ty == tl.float32)
            if SEG:
                acc = tl.where(ss[i + W - 1] >= 0, acc, 0.0)
            q = tl.multiple_of(py + i * yl, (1, V * y.dtype.element_ty.primitive_bitwidth // 8))
            tl.store(q, acc.to(y.dtype.element_ty), mask=(l + step * T + i < L)[:, None] & dm)
        px += T * xl
        py += T * yl
        xs = xs[T:]
        if SEG:
            ps += T
            ss = ss[T:]


@triton.jit
def segments(cu, seg, N, total, steps, BL: tl.constexpr):
    """seg[i] = the n with cu[n] <= i < cu[n + 1], by bisection. A program: BL positions.

    cu: [N + 1] starts of N sequences and the end; seg: [total] int32; steps >= log2(N + 1).
    """
    i = tl.program_id(0) * BL + tl.arange(0, BL)  # [BL]
    lo = tl.zeros((BL,), tl.int32)
    hi = lo + tl.cast(N, tl.int32)
    for _ in range(steps):
        mid = (lo + hi) // 2
        right = (tl.load(cu + mid) <= i) & (hi - lo > 1)
        lo = tl.where(right, mid, lo)
        hi = tl.where(right, hi, tl.maximum(mid, lo + 1))
    tl.store(seg + i, lo, mask=i < total)


@triton.jit
def span(cu, n, L):
    """Start and size of packed sequence n, inside of L positions whatever cu holds."""
    first = tl.minimum(tl.maximum(tl.load(cu + n).to(tl.int64), 0), L)
    end = tl.minimum(tl.maximum(tl.load(cu + n + 1).to(tl.int64), first), L)
    return first, (end - first).to(tl.int32)


@triton.jit
def edges(
    x, w, bias, seg,  # as in `rows`
    cu,  # [sequences + 1] with PACKED: where sequences begin and end
    init, y, final,  # [sequences, D, W - 1] with INIT, [B, D, L], [sequences, D, W - 1] with FINAL
    D, L,  # channels, positions
    xb, xd, xl, wd, wk, yb, yd, yl,  # strides in elements, as in `rows`
    ib, id, il, fb, fd, fl,  # of init (i) and final (f)
    W: tl.constexpr, BD: tl.constexpr,  # taps, channels of a program
    BIAS: tl.constexpr, SILU: tl.constexpr, SEG: tl.constexpr,
    PACKED: tl.constexpr, INIT: tl.constexpr, FINAL: tl.constexpr,
):  # fmt: skip
    """Both ends of one sequence, BD channels: its first W-1 outputs again, now with `init`, and the state it
    leaves in `final`.

    PACKED: sequence n is x[0, :, cu[n]:cu[n+1]]. Otherwise it is x[n], and with SEG the states belong to the
    segments of its first and last position.
    """
    xl, yl = tl.cast(xl, tl.int64), tl.cast(yl, tl.int64)
    blocks = tl.cdiv(D, BD)
    pid = tl.program_id(0)
    n = (pid // blocks).to(tl.int64)
    d = (pid % blocks * BD + tl.arange(0, BD)).to(tl.int64)  # [BD], as are all pointers and values below
    dm = d < D
    if PACKED:
        first, size = span(cu, n, L)
        px = x + first * xl + d * xd
        py = y + first * yl + d * yd
    else:
        size = tl.cast(L, tl.int32)
        px = x + n * xb + d * xd
        py = y + n * yb + d * yd
        if SEG:
            ps = seg + n * L
    if INIT:
        pi = init + n * ib + d * id
        before = ()
        own = ()
        for k in tl.static_range(W - 1):
            before = before + (tl.load(pi + k * il, mask=dm, other=0.0).to(tl.float32),)
            own = own + (tl.load(px + k * xl, mask=dm & (k < size), other=0.0).to(tl.float32),)
        line = before + own  # positions -(W-1) .. W-2
        for o in tl.static_range(W - 1):
            acc = tl.zeros((BD,), tl.float32)
            if BIAS:
                acc += tl.load(bias + d, mask=dm, other=0.0).to(tl.float32)
            if SEG:
                here = tl.load(ps + o, mask=o < size, other=-1)
            for k in tl.static_range(W):
                t = line[o + k]
                if SEG:
                    there = tl.load(ps + max(o + k - (W - 1), 0), mask=o < size, other=-1)
                    t = tl.where(there == here, t, 0.0)
                acc += t * tl.load(w + d * wd + k * wk, mask=dm, other=0.0).to(tl.float32)
            if SILU:
                acc *= sigmoid(acc, y.dtype.element_ty == tl.float32)
            if SEG:
                acc = tl.where(here >= 0, acc, 0.0)
            tl.store(py + o * yl, acc.to(y.dtype.element_ty), mask=dm & (o < size))

    if FINAL:
        for k in tl.static_range(W - 1):
            p = size - (W - 1) + k
            t = tl.load(px + p.to(tl.int64) * xl, mask=dm & (p >= 0), other=0.0)
            if INIT:
                t = tl.where(
                    p < 0, tl.load(pi + (p + (W - 1)) * il, mask=dm & (p < 0), other=0.0).to(t.dtype), t
                )
            if SEG:
                there = tl.load(ps + tl.maximum(p, 0), mask=size > 0, other=-1)
                here = tl.load(ps + size - 1, mask=size > 0, other=-1)
                t = tl.where(there == here, t, 0.0)
            tl.store(final + n * fb + d * fd + k * fl, t.to(final.dtype.element_ty), mask=dm)

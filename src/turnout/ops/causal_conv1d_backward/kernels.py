"""Triton kernels of causal_conv1d's backward. With a = the value before the activation and g = dy * act'(a):

dx[p] = sum_e w[W-1-e] * g[p + e],   dw[k] = sum_l g[l] * x[l - (W-1) + k],   dbias = sum_l g[l].

a is computed again from x. Every program leaves its W + 1 sums per channel in part [parts, W + 1, D],
float32, and `fold` adds them up in a fixed order: no atomics, the same bits every time. HEADS: outputs that
see initial states (1: the first W-1 of a batch row, 2: of each segment) are left to `edges_back`.
"""

# Triton adds tuples with + only, and a branch on a constexpr needs its else. l is the position, as in the
# formula.
# ruff: noqa: E741, RUF005
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from turnout.ops.causal_conv1d.kernels import join_last, span, split_last
from turnout.ops.common_kernels import sigmoid


@triton.jit
def slope(a, PRECISE: tl.constexpr):  # float32 of any shape; as in `sigmoid`
    """d silu(a) / da"""
    s = sigmoid(a, PRECISE)  # in a's shape
    return s * (1.0 + a * (1.0 - s))


@triton.jit
def rows_back(
    x, w, bias,  # [B, D, L], [D, W], [D]
    seg, dy, dx,  # [B, L] int32 with SEG, contiguous; [B, D, L] each
    part,  # [B * tiles, W + 1, D] float32
    D, L,  # channels, positions
    xb, xd, xl, wd, wk,  # strides in elements: batch, channel, position; channel, tap (k)
    gb, gd, gl, ob, od, ol,  # of dy (g) and dx (o)
    W: tl.constexpr, V: tl.constexpr,  # taps; positions of one vector
    BR: tl.constexpr, BV: tl.constexpr,  # channels, and vectors of positions, of a program
    BIAS: tl.constexpr, SILU: tl.constexpr, SEG: tl.constexpr,  # which of bias, activation, seg there are
    HEADS: tl.constexpr,  # 0, 1 or 2: which outputs are left to `edges_back`, see the top
):  # fmt: skip
    """The tile of `rows`, with vectors of x on both sides and vectors of dy on the right."""
    xl, gl, ol = tl.cast(xl, tl.int64), tl.cast(gl, tl.int64), tl.cast(ol, tl.int64)
    P: tl.constexpr = (W + V - 2) // V  # vectors on a side that hold W-1 positions
    tiles = tl.cdiv(L, BV * V)
    pid = tl.program_id(0).to(tl.int64)
    tile, block = pid % tiles, pid // tiles
    blocks = tl.cdiv(D, BR)
    b, d0, l0 = block // blocks, block % blocks * BR, tile * (BV * V)

    i = tl.arange(0, BR * BV)  # [BR*BV]
    r = i // BV  # [BR*BV] channel within the tile
    v = (i % BV) * V  # [BR*BV] first position within the tile
    lanes = v[:, None] + tl.arange(0, V)[None, :]  # [BR*BV, V]
    d = d0 + r  # [BR*BV]
    l = (l0 + v).to(tl.int32)  # [BR*BV]
    inside = (d < D) & (l < L)  # [BR*BV]

    px = (
        x + b * xb + d0 * xd + l0 * xl + ((r.to(tl.int64) * xd)[:, None] + lanes.to(tl.int64) * xl)
    )  # [BR*BV, V]
    # [BR*BV, V]
    pg = dy + b * gb + d0 * gd + l0 * gl + ((r.to(tl.int64) * gd)[:, None] + lanes.to(tl.int64) * gl)
    if SEG:
        ps = seg + b * L + l0 + lanes  # [BR*BV, V]
    xs = ()  # (2P + 1) * V of [BR*BV]: x at positions l - P * V .. l + (P + 1) * V - 1
    gs = ()  # (P + 1) * V of [BR*BV]: dy from position l on
    ss = ()  # (2P + 1) * V of [BR*BV]: seg at the positions of xs
    for p in tl.static_range(2 * P + 1):
        n = (p - P) * V
        ok = (inside & (l + n >= 0) & (l + n < L))[:, None]  # [BR*BV, 1]
        q = tl.multiple_of(px + n * xl, (1, V * x.dtype.element_ty.primitive_bitwidth // 8))  # [BR*BV, V]
        xs = xs + split_last(tl.load(q, mask=ok, other=0.0).to(tl.float32), V)
        if p >= P:
            # [BR*BV, V]
            q = tl.multiple_of(pg + n * gl, (1, V * dy.dtype.element_ty.primitive_bitwidth // 8))
            gs = gs + split_last(tl.load(q, mask=ok, other=0.0).to(tl.float32), V)
        if SEG:
            q = tl.multiple_of(ps + n, (1, V * 4))  # [BR*BV, V]
            ss = ss + split_last(tl.load(q, mask=ok, other=-1), V)

    if BR == 1:
        c = d0  # a number
        cm = d0 < D  # a number
    else:
        c = d  # [BR*BV]
        cm = inside  # [BR*BV]
    taps = ()  # W of [BR*BV], or numbers where BR is 1
    for k in tl.static_range(W):
        taps = taps + (tl.load(w + c * wd + k * wk, mask=cm, other=0.0).to(tl.float32),)
    zero = tl.zeros((BR * BV,), tl.float32)  # [BR*BV]
    if BIAS:
        zero += tl.load(bias + c, mask=cm, other=0.0).to(tl.float32)  # [BR*BV]

    grads = ()  # V + W - 1 of [BR*BV]: g at positions l .. l + V + W - 2
    sums = ()  # W + 1 of [BR*BV]: of g * x for each tap, and of g
    for _ in tl.static_range(W + 1):
        sums = sums + (tl.zeros((BR * BV,), tl.float32),)
    for e in tl.static_range(V + W - 1):
        seen = ()  # W of [BR*BV]: x under each tap of output l + e
        for k in tl.static_range(W):
            t = xs[P * V + e - (W - 1) + k]  # [BR*BV]
            if SEG:
                t = tl.where(ss[P * V + e - (W - 1) + k] == ss[P * V + e], t, 0.0)  # [BR*BV]
            seen = seen + (t,)
        g = gs[e]  # [BR*BV], here and below
        if SILU:
            a = zero  # [BR*BV]
            for k in tl.static_range(W):
                a += seen[k] * taps[k]
            g = tl.where(inside & (l + e < L), g * slope(a, dx.dtype.element_ty == tl.float32), 0.0)
        if SEG:
            g = tl.where(ss[P * V + e] >= 0, g, 0.0)
        grads = grads + (g,)
        if e < V:
            if HEADS == 1:
                g = tl.where(l + e < W - 1, 0.0, g)
            if HEADS == 2:
                g = tl.where((l + e < W - 1) | (ss[P * V + e - (W - 1)] != ss[P * V + e]), 0.0, g)
            more = ()  # W of [BR*BV]
            for k in tl.static_range(W):
                more = more + (sums[k] + g * seen[k],)
            sums = more + (sums[W] + g,)

    out = ()  # V of [BR*BV]: dx
    for e in tl.static_range(V):
        acc = tl.zeros((BR * BV,), tl.float32)  # [BR*BV]
        for k in tl.static_range(W):
            g = grads[e + k]  # [BR*BV]
            if SEG:
                g = tl.where(ss[P * V + e + k] == ss[P * V + e], g, 0.0)  # [BR*BV]
            acc += g * taps[W - 1 - k]
        out = out + (acc.to(dx.dtype.element_ty),)
    # [BR*BV, V]
    po = dx + b * ob + d0 * od + l0 * ol + ((r.to(tl.int64) * od)[:, None] + lanes.to(tl.int64) * ol)
    q = tl.multiple_of(po, (1, V * dx.dtype.element_ty.primitive_bitwidth // 8))  # [BR*BV, V]
    tl.store(q, join_last(out, V), mask=inside[:, None])

    pp = part + (b * tiles + tile) * (W + 1) * D + d0 + tl.arange(0, BR)  # [BR]
    for k in tl.static_range(W + 1):
        total = tl.sum(tl.reshape(sums[k], (BR, BV)), 1)  # [BR]
        tl.store(pp + k * D, total, mask=d0 + tl.arange(0, BR) < D)


@triton.jit
def cols_back(
    x, w, bias, seg, dy, dx, part,  # as in `rows_back`, channels side by side
    D, L,  # channels, positions
    xb, xl, wd, wk, gb, gl, ob, ol,  # strides in elements, as in `rows_back`
    W: tl.constexpr, V: tl.constexpr,  # taps; channels of one vector
    G: tl.constexpr, T: tl.constexpr, STEPS: tl.constexpr,  # groups; rows of a step; steps of a group
    BD: tl.constexpr,  # channels of a program
    BIAS: tl.constexpr, SILU: tl.constexpr, SEG: tl.constexpr, HEADS: tl.constexpr,  # as in `rows_back`
):  # fmt: skip
    """The walk of `cols`: row q completes dx of row q - (W-1), so a group of R rows walks W-1 rows
    further."""
    xl, gl, ol = tl.cast(xl, tl.int64), tl.cast(gl, tl.int64), tl.cast(ol, tl.int64)
    R: tl.constexpr = T * STEPS - (W - 1)  # rows of a group
    blocks = tl.cdiv(D, BD)
    tiles = tl.cdiv(L, G * R)
    pid = tl.program_id(0).to(tl.int64)
    d0 = pid % blocks * BD
    b, tile = pid // blocks // tiles, pid // blocks % tiles
    l0 = tile * (G * R)

    c = tl.arange(0, BD)  # [BD]
    g0 = tl.arange(0, G) * R  # [G]
    d = (d0 + c).to(tl.int32)  # [BD]
    l = (l0 + g0).to(tl.int32)  # [G] first row of each group
    end = tl.minimum(l + R, L)  # [G]
    dm = (d // V < D // V)[None, :]  # [1, BD] as d < D, but constant over a vector

    raw = ()  # W taps [BD], then the bias
    for k in tl.static_range(W):
        raw = raw + (tl.load(w + d.to(tl.int64) * wd + k * wk, mask=d < D, other=0.0),)
    if BIAS:
        raw = raw + (tl.load(bias + d, mask=d < D, other=0.0),)

    px = x + b * xb + l0 * xl + d0 + ((g0.to(tl.int64) * xl)[:, None] + c[None, :])  # [G, BD]
    pg = dy + b * gb + l0 * gl + d0 + ((g0.to(tl.int64) * gl)[:, None] + c[None, :])  # [G, BD]
    po = dx + b * ob + l0 * ol + d0 + ((g0.to(tl.int64) * ol)[:, None] + c[None, :])  # [G, BD]
    if SEG:
        ps = seg + b * L + l0 + g0  # [G]
    xs = ()  # [G, BD] each: x of the last W-1 rows, then of the T rows at hand
    gs = ()  # [G, BD] each: g of the same rows
    ss = ()  # seg of the same rows, [G, 1] each
    for i in tl.static_range(W - 1):
        n = i - (W - 1)
        ok = (l + n >= 0) & (l + n < L)  # [G]
        q = tl.multiple_of(px + n * xl, (1, V * x.dtype.element_ty.primitive_bitwidth // 8))  # [G, BD]
        xs = xs + (tl.load(q, mask=ok[:, None] & dm, other=0.0),)
        gs = gs + (tl.zeros((G, BD), tl.float32),)
        if SEG:
            ss = ss + (tl.load(ps + n, mask=ok, other=-1)[:, None],)
    sums = ()  # W + 1 of [G, BD]: of g * x for each tap, and of g
    for _ in tl.static_range(W + 1):
        sums = sums + (tl.zeros((G, BD), tl.float32),)

    for step in range(STEPS):
        ds = ()  # T rows [G, BD] of dy
        for i in tl.static_range(T):
            ok = l + step * T + i < L  # [G]
            q = tl.multiple_of(px + i * xl, (1, V * x.dtype.element_ty.primitive_bitwidth // 8))  # [G, BD]
            xs = xs + (tl.load(q, mask=ok[:, None] & dm, other=0.0),)
            q = tl.multiple_of(pg + i * gl, (1, V * dy.dtype.element_ty.primitive_bitwidth // 8))  # [G, BD]
            ds = ds + (tl.load(q, mask=ok[:, None] & dm, other=0.0),)
            if SEG:
                ss = ss + (tl.load(ps + i, mask=ok, other=-1)[:, None],)
        for i in tl.static_range(T):
            here = (l + step * T + i)[:, None]  # [G, 1] the row
            seen = ()  # W of [G, BD]: x under each tap
            for k in tl.static_range(W):
                t = xs[i + k].to(tl.float32)  # [G, BD]
                if SEG:
                    t = tl.where(ss[i + k] == ss[i + W - 1], t, 0.0)  # [G, BD]
                seen = seen + (t,)
            g = ds[i].to(tl.float32)  # [G, BD], here and below
            if SILU:
                a = tl.zeros((G, BD), tl.float32)  # [G, BD]
                if BIAS:
                    a += raw[W].to(tl.float32)[None, :]
                for k in tl.static_range(W):
                    a += seen[k] * raw[k].to(tl.float32)[None, :]
                g = tl.where(here < L, g * slope(a, dx.dtype.element_ty == tl.float32), 0.0)
            if SEG:
                g = tl.where(ss[i + W - 1] >= 0, g, 0.0)
            gs = gs + (g,)

            g = tl.where(here < end[:, None], g, 0.0)  # rows past the end belong to the next group
            if HEADS == 1:
                g = tl.where(here < W - 1, 0.0, g)
            if HEADS == 2:
                g = tl.where((here < W - 1) | (ss[i] != ss[i + W - 1]), 0.0, g)
            more = ()  # W of [G, BD]
            for k in tl.static_range(W):
                more = more + (sums[k] + g * seen[k],)
            sums = more + (sums[W] + g,)

            acc = tl.zeros((G, BD), tl.float32)  # [G, BD]: dx of row `here` - (W-1)
            for k in tl.static_range(W):
                g = gs[i + k]  # [G, BD]
                if SEG:
                    g = tl.where(ss[i + k] == ss[i], g, 0.0)  # [G, BD]
                acc += g * raw[W - 1 - k].to(tl.float32)[None, :]
            # [G, BD]
            q = tl.multiple_of(po + (i - (W - 1)) * ol, (1, V * dx.dtype.element_ty.primitive_bitwidth // 8))
            own = (here - (W - 1) >= l[:, None]) & (here - (W - 1) < end[:, None])  # [G, 1]
            tl.store(q, acc.to(dx.dtype.element_ty), mask=own & dm)
        px += T * xl
        pg += T * gl
        po += T * ol
        xs = xs[T:]
        gs = gs[T:]
        if SEG:
            ps += T
            ss = ss[T:]

    pp = part + (b * tiles + tile) * (W + 1) * D + d  # [BD]
    for k in tl.static_range(W + 1):
        tl.store(pp + k * D, tl.sum(sums[k], 0), mask=d < D)  # [BD]


@triton.jit
def edges_back(
    x, w, bias, seg,  # as in `rows_back`
    cu,  # [sequences + 1] with PACKED: where sequences begin and end
    init, dy, dfinal,  # [sequences, D, W - 1] with INIT; [B, D, L]; [sequences, D, W - 1] with FINAL
    dx, dinit, part,  # as dy; as init; [sequences, W + 1, D] float32
    D, L,  # channels, positions
    xb, xd, xl, wd, wk,  # strides in elements, as in `rows_back`
    ib, id, il, gb, gd, gl, fb, fd, fl,  # of init (i), dy (g), dfinal (f),
    ob, od, ol, jb, jd, jl,  # dx (o) and dinit (j)
    W: tl.constexpr, BD: tl.constexpr,  # taps, channels of a program
    BIAS: tl.constexpr, SILU: tl.constexpr, SEG: tl.constexpr,  # which of bias, activation, seg there are
    PACKED: tl.constexpr, INIT: tl.constexpr, FINAL: tl.constexpr,  # which of cu, init and dfinal there are
):  # fmt: skip
    """Backward of `edges`: dinit, dx of the first W-1 positions again, the sums of the first W-1 outputs, and
    dfinal's share.

    part points at the first of N rows of its own, one per sequence.
    """
    xl, gl, ol = tl.cast(xl, tl.int64), tl.cast(gl, tl.int64), tl.cast(ol, tl.int64)
    blocks = tl.cdiv(D, BD)
    pid = tl.program_id(0)
    n = (pid // blocks).to(tl.int64)
    d = (pid % blocks * BD + tl.arange(0, BD)).to(tl.int64)  # [BD], as are all pointers and values below
    dm = d < D  # [BD]
    if PACKED:
        first, size = span(cu, n, L)  # numbers
        px = x + first * xl + d * xd
        pg = dy + first * gl + d * gd
        po = dx + first * ol + d * od
    else:
        size = tl.cast(L, tl.int32)  # a number
        px = x + n * xb + d * xd
        pg = dy + n * gb + d * gd
        po = dx + n * ob + d * od
        if SEG:
            ps = seg + n * L  # one pointer
    if INIT:
        pi = init + n * ib + d * id
        pj = dinit + n * jb + d * jd
        taps = ()  # W of [BD]
        for k in tl.static_range(W):
            taps = taps + (tl.load(w + d * wd + k * wk, mask=dm, other=0.0).to(tl.float32),)
        line = ()  # 3 * (W - 1) of [BD]: init, then x, at positions -(W-1) .. 2W-3
        ss = ()  # 3 * (W - 1) numbers: seg at the positions of `line`
        for k in tl.static_range(3 * (W - 1)):
            if k < W - 1:
                line = line + (tl.load(pi + k * il, mask=dm, other=0.0).to(tl.float32),)
            else:
                t = tl.load(px + (k - (W - 1)) * xl, mask=dm & (k - (W - 1) < size), other=0.0)  # [BD]
                line = line + (t.to(tl.float32),)
            if SEG:
                ss = ss + (tl.load(ps + max(k - (W - 1), 0), mask=max(k - (W - 1), 0) < size, other=-1),)
        gs = ()  # 2 * (W - 1) of [BD]: g at positions 0 .. 2W-3
        sums = ()  # W + 1 of [BD]: of g * x for each tap, and of g
        for _ in tl.static_range(W + 1):
            sums = sums + (tl.zeros((BD,), tl.float32),)
        for o in tl.static_range(2 * (W - 1)):
            seen = ()  # W of [BD]: x under each tap of output o
            for k in tl.static_range(W):
                t = line[o + k]  # [BD]
                if SEG:
                    t = tl.where(ss[o + k] == ss[o + W - 1], t, 0.0)  # [BD]
                seen = seen + (t,)
            g = tl.load(pg + o * gl, mask=dm & (o < size), other=0.0).to(tl.float32)  # [BD]
            if SILU:
                a = tl.zeros((BD,), tl.float32)  # [BD]
                if BIAS:
                    a += tl.load(bias + d, mask=dm, other=0.0).to(tl.float32)
                for k in tl.static_range(W):
                    a += seen[k] * taps[k]
                g = tl.where(o < size, g * slope(a, dx.dtype.element_ty == tl.float32), 0.0)
            if SEG:
                g = tl.where(ss[o + W - 1] >= 0, g, 0.0)
            gs = gs + (g,)
            if o < W - 1:
                more = ()  # W of [BD]
                for k in tl.static_range(W):
                    more = more + (sums[k] + tl.where(o < size, g * seen[k], 0.0),)
                sums = more + (sums[W] + g,)
        for k in tl.static_range(W + 1):
            tl.store(part + (n * (W + 1) + k) * D + d, sums[k], mask=dm)

        for p in tl.static_range(2 * (W - 1)):  # position p - (W-1)
            acc = tl.zeros((BD,), tl.float32)  # [BD]
            for k in tl.static_range(W):
                if p + k >= W - 1:
                    g = gs[p + k - (W - 1)]  # [BD]
                    if SEG:
                        g = tl.where(ss[p + k] == ss[p], g, 0.0)  # [BD]
                    acc += g * taps[W - 1 - k]
            if p < W - 1:
                tl.store(pj + p * jl, acc.to(dinit.dtype.element_ty), mask=dm)
            else:
                tl.store(po + (p - (W - 1)) * ol, acc.to(dx.dtype.element_ty), mask=dm & (p - (W - 1) < size))

    if FINAL:
        for k in tl.static_range(W - 1):
            p = size - (W - 1) + k  # a number
            f = tl.load(dfinal + n * fb + d * fd + k * fl, mask=dm, other=0.0).to(tl.float32)  # [BD]
            if SEG:
                there = tl.load(ps + tl.maximum(p, 0), mask=size > 0, other=-1)  # a number
                here = tl.load(ps + size - 1, mask=size > 0, other=-1)  # a number
                f = tl.where(there == here, f, 0.0)  # [BD]
            q = po + p.to(tl.int64) * ol  # [BD]
            t = tl.load(q, mask=dm & (p >= 0), other=0.0).to(tl.float32)  # [BD]
            tl.store(q, (t + f).to(dx.dtype.element_ty), mask=dm & (p >= 0))
            if INIT:
                q = pj + (p + (W - 1)) * jl  # [BD]
                t = tl.load(q, mask=dm & (p < 0), other=0.0).to(tl.float32)  # [BD]
                tl.store(q, (t + f).to(dinit.dtype.element_ty), mask=dm & (p < 0))


@triton.jit
def fold(
    part, dw, db,  # [N, W + 1, D] float32; [D, W]; [D] with BIAS
    N, D, W: tl.constexpr,  # rows of part, channels, taps
    BN: tl.constexpr, BM: tl.constexpr,  # rows of a step, sums of a program
    BIAS: tl.constexpr,  # whether there is a db
):  # fmt: skip
    """part [N, W + 1, D] -> dw [D, W] and db [D], always added in the same order."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)  # [BM] of the W + 1 sums of D channels
    M = (W + 1) * D  # a number: sums of all channels
    acc = tl.zeros((BN, BM), tl.float32)  # [BN, BM]
    for n in range(0, N, BN):
        row = n + tl.arange(0, BN)  # [BN]
        q = part + row.to(tl.int64)[:, None] * M + m[None, :]  # [BN, BM]
        acc += tl.load(q, mask=(row < N)[:, None] & (m < M)[None, :], other=0.0)
    total = tl.sum(acc, 0)  # [BM]
    k, d = m // D, m % D  # [BM] each: tap (W: the bias), channel
    tl.store(dw + d.to(tl.int64) * W + k, total.to(dw.dtype.element_ty), mask=(m < M) & (k < W))
    if BIAS:
        tl.store(db + d, total.to(db.dtype.element_ty), mask=(m < M) & (k == W))

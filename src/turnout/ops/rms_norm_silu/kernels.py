"""Triton kernels of rms_norm_silu, one per layout; both read every element once and keep it in registers until it is written.

`rows`    channels are side by side (NHWC, NDHWC, a last dimension). A program takes BM rows as N tiles [BM, BC]: 96 channels are three
          tiles of 32, without an idle lane.
`planes`  positions are side by side (NCHW, NCDHW). A program takes BP positions of all channels as N tiles [BC, BP].

Positions are counted over up to three dimensions with strides of their own, so that an output may lie inside a larger buffer.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# ruff: noqa: RET505, RUF005

import triton
import triton.language as tl

from turnout.ops.common_kernels import silu


@triton.jit
def inverse_of(squares, C, eps, CLAMP: tl.constexpr):
    """What x is multiplied with: 1 / sqrt(mean + eps), or with CLAMP sqrt(C) / max(norm, eps)."""
    if CLAMP:
        return tl.div_rn(tl.sqrt_rn(C * 1.0), tl.maximum(tl.sqrt_rn(squares), eps, propagate_nan=tl.PropagateNan.ALL))
    else:
        return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares, C * 1.0) + eps))


@triton.jit
def finished(x, inverse, w, shift, WEIGHT: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, dtype: tl.constexpr):
    y = x * inverse
    if WEIGHT:
        y *= w
    if BIAS:
        y += shift
    if SILU:
        y = silu(y, dtype == tl.float32)
    return y.to(dtype)


@triton.jit
def places(r, n1, n2, s0, s1, s2):
    """Offsets of positions counted over [n0, n1, n2]."""
    return r // n2 // n1 * s0 + r // n2 % n1 * s1 + r % n2 * s2


@triton.jit
def rows(
    x, w, bias, y, eps, M, C, n1, n2, x0, x1, x2, y0, y1, y2,
    V: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, N: tl.constexpr, FLAT: tl.constexpr,
    CLAMP: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """M rows of C channels, V of which are one vector. FLAT: rows are one dimension, with strides x2 and y2."""
    r = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    c = tl.arange(0, BC)
    if FLAT:
        px, py = x + r * x2, y + r * y2
    else:
        px, py = x + places(r, n1, n2, x0, x1, x2), y + places(r, n1, n2, y0, y1, y2)
    nothing = tl.zeros((BM,), tl.int32)
    tiles = ()
    for n in tl.static_range(N):
        ok = (r < M)[:, None] & ((n * BC + c) // V < C // V)[None, :]
        at = tl.multiple_of(px[:, None] + (n * BC + c)[None, :], (1, V * x.dtype.element_ty.primitive_bitwidth // 8))
        tiles = tiles + (tl.load(at, mask=ok, other=0.0),)
    squares = tl.zeros((BM, BC), tl.float32)
    for n in tl.static_range(N):
        v = tiles[n].to(tl.float32)
        squares += v * v
    inverse = inverse_of(tl.sum(squares, 1), C, eps, CLAMP)[:, None]
    for n in tl.static_range(N):
        ok = (r < M)[:, None] & ((n * BC + c) // V < C // V)[None, :]
        at = nothing[:, None] + (n * BC + c)[None, :]  # every row reads the weights itself: no exchange between threads
        scale, shift = 1.0, 0.0
        if WEIGHT:
            scale = tl.load(w + at, mask=ok, other=0.0).to(tl.float32)
        if BIAS:
            shift = tl.load(bias + at, mask=ok, other=0.0).to(tl.float32)
        out = finished(tiles[n].to(tl.float32), inverse, scale, shift, WEIGHT, BIAS, SILU, y.dtype.element_ty)
        into = tl.multiple_of(py[:, None] + (n * BC + c)[None, :], (1, V * y.dtype.element_ty.primitive_bitwidth // 8))
        tl.store(into, out, mask=ok)


@triton.jit
def planes(
    x, w, bias, y, eps, C, n1, n2, x0, x1, xc, y0, y1, yc,
    V: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, N: tl.constexpr,
    CLAMP: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """n2 positions are side by side, V of them one vector. Channels are xc and yc apart."""
    xc, yc = tl.cast(xc, tl.int64), tl.cast(yc, tl.int64)
    tiles_of_line = tl.cdiv(n2, BP)
    pid = tl.program_id(0).to(tl.int64)
    line, p = pid // tiles_of_line, (pid % tiles_of_line * BP + tl.arange(0, BP)).to(tl.int32)
    px = x + line // n1 * x0 + line % n1 * x1
    py = y + line // n1 * y0 + line % n1 * y1
    c = tl.arange(0, BC)
    inside = (p // V < n2 // V)[None, :]
    tiles = ()
    for n in tl.static_range(N):
        ok = (n * BC + c < C)[:, None] & inside
        at = tl.multiple_of(px + ((n * BC + c) * xc)[:, None] + p[None, :], (1, V * x.dtype.element_ty.primitive_bitwidth // 8))
        tiles = tiles + (tl.load(at, mask=ok, other=0.0),)
    squares = tl.zeros((BC, BP), tl.float32)
    for n in tl.static_range(N):
        v = tiles[n].to(tl.float32)
        squares += v * v
    inverse = inverse_of(tl.sum(squares, 0), C, eps, CLAMP)[None, :]
    for n in tl.static_range(N):
        channel = n * BC + c
        ok = (channel < C)[:, None] & inside
        scale, shift = 1.0, 0.0
        if WEIGHT:
            scale = tl.load(w + channel, mask=channel < C, other=0.0).to(tl.float32)[:, None]
        if BIAS:
            shift = tl.load(bias + channel, mask=channel < C, other=0.0).to(tl.float32)[:, None]
        out = finished(tiles[n].to(tl.float32), inverse, scale, shift, WEIGHT, BIAS, SILU, y.dtype.element_ty)
        into = tl.multiple_of(py + (channel * yc)[:, None] + p[None, :], (1, V * y.dtype.element_ty.primitive_bitwidth // 8))
        tl.store(into, out, mask=ok)

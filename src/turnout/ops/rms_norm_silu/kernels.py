"""Triton kernels of rms_norm_silu, one per layout. Both read every element once and keep it in registers.

`rows`    channels are side by side (NHWC, NDHWC, a last dimension). A program takes BM rows as N tiles
          [BM, BC]: 96 channels are three tiles of 32, without an idle lane.
`planes`  positions are side by side (NCHW, NCDHW). A program takes BP positions of all channels as N tiles
          [BC, BP].

Positions are counted over up to three dimensions [n0, n1, n2] with strides of their own, so that an output
may lie inside a larger buffer. All strides are in elements.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# ruff: noqa: RET505, RUF005

import triton
import triton.language as tl

from turnout.ops.common_kernels import silu


@triton.jit
def inverse_norm(squares, C, eps, CLAMP: tl.constexpr):
    """What x is multiplied with, from the sum of squares over C channels; same shape as `squares`.

    1 / sqrt(mean + eps), or with CLAMP sqrt(C) / max(norm, eps).
    """
    if CLAMP:
        return tl.div_rn(
            tl.sqrt_rn(C * 1.0), tl.maximum(tl.sqrt_rn(squares), eps, propagate_nan=tl.PropagateNan.ALL)
        )  # fmt: skip
    else:
        return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares, C * 1.0) + eps))


@triton.jit
def normalize(
    x,  # a tile, float32
    inverse,  # one number for each position, as a row or a column that broadcasts over the tile
    w, shift,  # weight and bias that broadcast over the tile
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,  # which steps there are
    dtype: tl.constexpr,  # of the result
):  # fmt: skip
    """One tile of the output: silu(x * inverse * w + shift), of the tile's shape."""
    y = x * inverse
    if WEIGHT:
        y *= w
    if BIAS:
        y += shift
    if SILU:
        y = silu(y, dtype == tl.float32)
    return y.to(dtype)


@triton.jit
def position_offsets(r, n1, n2, s0, s1, s2):
    """Offsets [BM] of positions r [BM], counted over [n0, n1, n2] with strides s0, s1, s2."""
    return r // n2 // n1 * s0 + r // n2 % n1 * s1 + r % n2 * s2


@triton.jit
def rows(
    x, w, bias, y,  # [n0, n1, n2, C], [C], [C], [n0, n1, n2, C]
    eps, M, C,  # M = n0 * n1 * n2 positions
    n1, n2,  # sizes of the two inner position dimensions
    x0, x1, x2, y0, y1, y2,  # strides of the positions
    V: tl.constexpr,  # channels of one vector; divides C and all strides
    BM: tl.constexpr, BC: tl.constexpr, N: tl.constexpr,  # rows, channels of a tile, tiles: N * BC >= C
    FLAT: tl.constexpr,  # positions are one dimension, with strides x2 and y2
    CLAMP: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Normalize rows of C channels that are side by side. A program: BM rows, all channels."""
    r = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)  # [BM]
    c = tl.arange(0, BC)  # [BC]
    if FLAT:
        px, py = x + r * x2, y + r * y2  # [BM]
    else:
        px, py = (
            x + position_offsets(r, n1, n2, x0, x1, x2),  # [BM]
            y + position_offsets(r, n1, n2, y0, y1, y2),  # [BM]
        )
    zeros = tl.zeros((BM,), tl.int32)
    tiles = ()  # N tiles [BM, BC]
    for n in tl.static_range(N):
        ok = (r < M)[:, None] & ((n * BC + c) // V < C // V)[None, :]  # [BM, BC]
        at = tl.multiple_of(
            px[:, None] + (n * BC + c)[None, :],  # [BM, BC]
            (1, V * x.dtype.element_ty.primitive_bitwidth // 8),  # bytes of a vector
        )
        tiles = tiles + (tl.load(at, mask=ok, other=0.0),)
    squares = tl.zeros((BM, BC), tl.float32)
    for n in tl.static_range(N):
        v = tiles[n].to(tl.float32)  # [BM, BC]
        squares += v * v
    inverse = inverse_norm(tl.sum(squares, 1), C, eps, CLAMP)[:, None]  # [BM, 1]
    for n in tl.static_range(N):
        ok = (r < M)[:, None] & ((n * BC + c) // V < C // V)[None, :]  # [BM, BC]
        # [BM, BC]: every row reads the weights itself, so threads exchange nothing
        at = zeros[:, None] + (n * BC + c)[None, :]
        scale, shift = 1.0, 0.0
        if WEIGHT:
            scale = tl.load(w + at, mask=ok, other=0.0).to(tl.float32)  # [BM, BC]
        if BIAS:
            shift = tl.load(bias + at, mask=ok, other=0.0).to(tl.float32)  # [BM, BC]
        out = normalize(
            tiles[n].to(tl.float32), inverse, scale, shift, WEIGHT, BIAS, SILU, y.dtype.element_ty
        )  # fmt: skip
        into = tl.multiple_of(
            py[:, None] + (n * BC + c)[None, :],  # [BM, BC]
            (1, V * y.dtype.element_ty.primitive_bitwidth // 8),
        )
        tl.store(into, out, mask=ok)


@triton.jit
def planes(
    x, w, bias, y,  # [n0, n1, C, n2], [C], [C], [n0, n1, C, n2], in any order of n0, n1 and C
    eps, C, n1, n2,  # channels, sizes of the two inner position dimensions
    x0, x1, xc, y0, y1, yc,  # strides of the outer positions (0, 1) and of the channels (c)
    V: tl.constexpr,  # positions of one vector; divides n2 and all strides
    BP: tl.constexpr, BC: tl.constexpr, N: tl.constexpr,  # positions, channels of a tile, tiles: N * BC >= C
    CLAMP: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Normalize over channels where n2 positions are side by side. A program: BP positions of one line of
    n2."""
    xc, yc = tl.cast(xc, tl.int64), tl.cast(yc, tl.int64)
    tiles_of_line = tl.cdiv(n2, BP)
    pid = tl.program_id(0).to(tl.int64)
    line, p = (
        pid // tiles_of_line,
        (pid % tiles_of_line * BP + tl.arange(0, BP)).to(tl.int32),  # [BP]
    )
    px = x + line // n1 * x0 + line % n1 * x1
    py = y + line // n1 * y0 + line % n1 * y1
    c = tl.arange(0, BC)  # [BC]
    inside = (p // V < n2 // V)[None, :]  # [1, BP]
    tiles = ()  # N tiles [BC, BP]
    for n in tl.static_range(N):
        ok = (n * BC + c < C)[:, None] & inside  # [BC, BP]
        at = tl.multiple_of(
            px + ((n * BC + c) * xc)[:, None] + p[None, :],  # [BC, BP]
            (1, V * x.dtype.element_ty.primitive_bitwidth // 8),  # bytes of a vector
        )
        tiles = tiles + (tl.load(at, mask=ok, other=0.0),)
    squares = tl.zeros((BC, BP), tl.float32)
    for n in tl.static_range(N):
        v = tiles[n].to(tl.float32)  # [BC, BP]
        squares += v * v
    inverse = inverse_norm(tl.sum(squares, 0), C, eps, CLAMP)[None, :]  # [1, BP]
    for n in tl.static_range(N):
        channel = n * BC + c  # [BC]
        ok = (channel < C)[:, None] & inside  # [BC, BP]
        scale, shift = 1.0, 0.0
        if WEIGHT:
            # [BC, 1]
            scale = tl.load(w + channel, mask=channel < C, other=0.0).to(tl.float32)[:, None]
        if BIAS:
            # [BC, 1]
            shift = tl.load(bias + channel, mask=channel < C, other=0.0).to(tl.float32)[:, None]
        out = normalize(
            tiles[n].to(tl.float32), inverse, scale, shift, WEIGHT, BIAS, SILU, y.dtype.element_ty
        )  # fmt: skip
        into = tl.multiple_of(
            py + (channel * yc)[:, None] + p[None, :],  # [BC, BP]
            (1, V * y.dtype.element_ty.primitive_bitwidth // 8),
        )
        tl.store(into, out, mask=ok)

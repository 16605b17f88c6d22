"""The Triton kernel of add_repeated.

A program takes BP pixels of one row of x, BC channels of y, reads x once and adds it to all of its repeats.
Every element of y is read once and written once; all are asked for before the first is written.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# ruff: noqa: RUF005

import triton
import triton.language as tl


@triton.jit
def tile_at(
    p, first, w, wide, c,  # a tensor, offset of a row, its pixels [BP] and their stride, channels [BC]
    V: tl.constexpr,  # channels of one vector
):  # fmt: skip
    """Pointers [BP, BC] to channels of pixels that are side by side."""
    at = p + (first + w * wide)[:, None] + c[None, :]
    return tl.multiple_of(at, (1, V * p.dtype.element_ty.primitive_bitwidth // 8))  # bytes of a vector


@triton.jit(do_not_specialize=("C", "T", "H", "W"))
def add_repeated(
    y, x, out,  # [B, C, T * KT, H * KH, W * KW], [B, C * PT * PH * PW, T, H, W], as y
    C, T, H, W,
    yb, yt, yh, yw, xb, xt, xh, xw, ob, ot, oh, ow,  # strides by batch, frame, row and column
    V: tl.constexpr,  # channels of one vector; divides C and all strides
    BP: tl.constexpr, BC: tl.constexpr,  # pixels and channels of a program
    KT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,  # repeats along each axis
    SKIP: tl.constexpr,  # repeats in time that there would be before the KT
    PT: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,  # channels that the repeats are taken from in turn
):  # fmt: skip
    """out = y + x repeated. Numbers of programs: rows of x, times blocks of its columns, times blocks of y's
    channels, the last side by side."""
    blocks, across = tl.cdiv(C, BC), tl.cdiv(W, BP)
    pid = tl.program_id(0).to(tl.int64)
    block, pid = pid % blocks, pid // blocks
    piece, row = pid % across, pid // across
    b, t, h = row // H // T, row // H % T, row % H
    w = piece * BP + tl.arange(0, BP)  # [BP]
    c = (block * BC).to(tl.int32) + tl.arange(0, BC)  # [BC]
    inside = (w < W)[:, None] & (c // V < C // V)[None, :]  # [BP, BC]

    px = b * xb + t * xt + h * xh
    taken = ()  # PT * PH * PW tiles [BP, BC] of x
    if PT * PH * PW == 1:
        taken = taken + (tl.load(tile_at(x, px, w, xw, c, V), mask=inside, other=0.0),)
    else:  # pairs of neighbours
        both = (block * 2 * BC).to(tl.int32) + tl.arange(0, 2 * BC)  # [2 * BC]
        ok = (w < W)[:, None] & (both // V < 2 * C // V)[None, :]  # [BP, 2 * BC]
        pairs = tl.load(tile_at(x, px, w, xw, both, V), mask=ok, other=0.0)
        first, second = tl.split(tl.reshape(pairs, (BP, BC, 2)))
        taken = taken + (first, second)

    tiles = ()  # KT * KH * KW tiles [BP, BC] of y
    for i in tl.static_range(KT * KH * KW):
        py = b * yb + (t * KT + i // (KH * KW)) * yt + (h * KH + i // KW % KH) * yh + i % KW * yw
        tiles = tiles + (tl.load(tile_at(y, py, w * KW, yw, c, V), mask=inside, other=0.0),)
    for i in tl.static_range(KT * KH * KW):
        repeat = taken[((SKIP + i // (KH * KW)) % PT * PH + i // KW % KH % PH) * PW + i % KW % PW]
        total = tiles[i].to(tl.float32) + repeat.to(tl.float32)
        po = b * ob + (t * KT + i // (KH * KW)) * ot + (h * KH + i // KW % KH) * oh + i % KW * ow
        tl.store(tile_at(out, po, w * KW, ow, c, V), total.to(out.dtype.element_ty), mask=inside)

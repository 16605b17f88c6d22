"""The Triton kernel of layer_norm_modulate and gated_add. A program takes BM tokens of one batch as N tiles [BM, BC]: 3072 channels are
three tiles of 1024, without an idle lane. Every element is read once and stays in registers until it is written.

What is the same for all tokens of a batch is read as [1, BC], in the layout of a tile: nothing is exchanged between threads.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# ruff: noqa: RUF005

import triton
import triton.language as tl


@triton.jit
def tile(p, rows, c, inside, C: tl.constexpr, V: tl.constexpr):
    """Pointers to columns c of some rows, V of which are one vector, and which of them are inside. `rows` are offsets, [BM, 1]."""
    at = tl.multiple_of(p + rows + c[None, :], (1, V * p.dtype.element_ty.primitive_bitwidth // 8))
    return at, inside & (c // V < C // V)[None, :]


@triton.jit
def read(p, rows, c, inside, C: tl.constexpr, V: tl.constexpr):
    at, ok = tile(p, rows, c, inside, C, V)
    return tl.load(at, mask=ok, other=0.0)


@triton.jit
def layer_norm_modulate(
    x, residual, gate, weight, bias, scale, shift, y, h,
    eps, S, xb, xs, rb, rs, gb, gs, ab, at, bb, bt,
    C: tl.constexpr, V: tl.constexpr, MV: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, N: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """S tokens of C channels in each batch; strides by batch and token of x, residual, gate (g), scale (a) and shift (b). V and MV
    channels are one vector of x and of the modulations; TOKENS: each token reads its own of these. What is None is left out."""
    tiles = tl.cdiv(S, BM)
    pid = tl.program_id(0).to(tl.int64)
    b, s = pid // tiles, (pid % tiles * BM + tl.arange(0, BM))[:, None]
    c = tl.arange(0, BC)
    inside = s < S
    if TOKENS:
        there, m = inside, s
    else:
        there, m = tl.full((1, 1), 1, tl.int1), tl.full((1, 1), 0, tl.int64)
    w_rows, g_rows, a_rows, b_rows = m * 0, b * gb + m * gs, b * ab + m * at, b * bb + m * bt

    kept = ()
    for n in tl.static_range(N):
        kept = kept + (read(x, b * xb + s * xs, n * BC + c, inside, C, V),)
    if residual is not None:
        olds = ()
        for n in tl.static_range(N):
            olds = olds + (read(residual, b * rb + s * rs, n * BC + c, inside, C, V),)
        sums = ()
        for n in tl.static_range(N):
            new = kept[n].to(tl.float32)
            if gate is not None:
                new *= read(gate, g_rows, n * BC + c, there, C, MV).to(tl.float32)
            new = (olds[n].to(tl.float32) + new).to(x.dtype.element_ty)
            into, ok = tile(h, (b * S + s) * C, n * BC + c, inside, C, V)
            tl.store(into, new, mask=ok)
            sums = sums + (new,)
        kept = sums

    if y is not None:
        total = tl.zeros((BM, BC), tl.float32)
        for n in tl.static_range(N):
            total += kept[n].to(tl.float32)
        mean = tl.div_rn(tl.sum(total, 1), C * 1.0)[:, None]
        squares = tl.zeros((BM, BC), tl.float32)
        for n in tl.static_range(N):
            off = kept[n].to(tl.float32) - mean
            if N * BC != C:
                off = tl.where((n * BC + c < C)[None, :], off, 0.0)
            squares += off * off
        inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(squares, 1), C * 1.0) + eps))[:, None]
        for n in tl.static_range(N):
            out = (kept[n].to(tl.float32) - mean) * inverse
            if weight is not None:
                out *= read(weight, w_rows, n * BC + c, there, C, MV).to(tl.float32)
            if bias is not None:
                out += read(bias, w_rows, n * BC + c, there, C, MV).to(tl.float32)
            if scale is not None:
                out *= 1.0 + read(scale, a_rows, n * BC + c, there, C, MV).to(tl.float32)
            if shift is not None:
                out += read(shift, b_rows, n * BC + c, there, C, MV).to(tl.float32)
            into, ok = tile(y, (b * S + s) * C, n * BC + c, inside, C, V)
            tl.store(into, out.to(y.dtype.element_ty), mask=ok)

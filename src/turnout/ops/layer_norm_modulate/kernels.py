"""The Triton kernel of layer_norm_modulate and gated_add.

A program takes BM tokens of one batch as N tiles [BM, BC]: 3072 channels are three tiles of 1024, without an
idle lane. Every element is read once and stays in registers until it is written. What is the same for all
tokens of a batch is read as [1, BC], in the layout of a tile: nothing is exchanged between threads.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# ruff: noqa: RUF005

import triton
import triton.language as tl


@triton.jit
def tile_pointers(
    p, rows,  # first element of a tensor, and offsets of rows [BM, 1]
    c,  # [BC] columns
    inside,  # [BM, 1] which rows are inside
    C: tl.constexpr, V: tl.constexpr,  # columns of a row, and those of one vector
):  # fmt: skip
    """Pointers to a tile [BM, BC], and its mask [BM, BC]. For what all tokens share, BM is 1."""
    at = tl.multiple_of(
        p + rows + c[None, :],  # [BM, BC]
        (1, V * p.dtype.element_ty.primitive_bitwidth // 8),  # bytes of a vector
    )
    return at, inside & (c // V < C // V)[None, :]


@triton.jit
def load_tile(p, rows, c, inside, C: tl.constexpr, V: tl.constexpr):
    """The tile [BM, BC] that `tile_pointers` points to, with zeros outside."""
    at, ok = tile_pointers(p, rows, c, inside, C, V)  # [BM, BC] each
    return tl.load(at, mask=ok, other=0.0)


@triton.jit
def layer_norm_modulate(
    x, residual,  # [batch, S, C]
    gate,  # [batch, S or 1, C], scales x before it is added to the residual
    weight, bias,  # [C] each
    scale, shift,  # [batch, S or 1, C]
    y, h,  # [batch, S, C], contiguous: the norm, and the new residual
    eps, S,  # tokens of a batch
    xb, xs, rb, rs,  # strides by batch and token of x and residual, in elements
    gb, gs, ab, at, bb, bt,  # those of gate (g), scale (a) and shift (b); 0 where one serves all
    C: tl.constexpr,  # channels
    V: tl.constexpr, MV: tl.constexpr,  # channels of one vector, of x and of the modulations
    BM: tl.constexpr, BC: tl.constexpr, N: tl.constexpr,  # tokens, channels of a tile, tiles
    TOKENS: tl.constexpr,  # each token reads its own modulations
):  # fmt: skip
    """h = residual + gate * x, then y = norm(h) * weight + bias, times 1 + scale, plus shift.

    A program: BM tokens of one batch, all channels. What is None is left out: without a residual the norm is
    of x, without y there is no norm.
    """
    token_tiles = tl.cdiv(S, BM)
    pid = tl.program_id(0).to(tl.int64)
    b, s = pid // token_tiles, (pid % token_tiles * BM + tl.arange(0, BM))[:, None]  # s [BM, 1]
    c = tl.arange(0, BC)  # [BC]
    inside = s < S  # [BM, 1]
    if TOKENS:
        m_inside, m = inside, s  # [BM, 1] each
    else:
        m_inside, m = tl.full((1, 1), 1, tl.int1), tl.full((1, 1), 0, tl.int64)
    # Offsets of the modulations' rows, [BM, 1] with TOKENS, else [1, 1].
    w_rows, g_rows, a_rows, b_rows = m * 0, b * gb + m * gs, b * ab + m * at, b * bb + m * bt

    tiles = ()  # N tiles [BM, BC]: x, then the new residual
    for n in tl.static_range(N):
        tiles = tiles + (load_tile(x, b * xb + s * xs, n * BC + c, inside, C, V),)
    if residual is not None:
        residuals = ()  # N tiles [BM, BC]
        for n in tl.static_range(N):
            residuals = residuals + (load_tile(residual, b * rb + s * rs, n * BC + c, inside, C, V),)
        sums = ()  # N tiles [BM, BC]
        for n in tl.static_range(N):
            new = tiles[n].to(tl.float32)  # [BM, BC]
            if gate is not None:
                new *= load_tile(gate, g_rows, n * BC + c, m_inside, C, MV).to(tl.float32)  # [BM or 1, BC]
            new = (residuals[n].to(tl.float32) + new).to(x.dtype.element_ty)
            into, ok = tile_pointers(h, (b * S + s) * C, n * BC + c, inside, C, V)  # [BM, BC] each
            tl.store(into, new, mask=ok)
            sums = sums + (new,)
        tiles = sums

    if y is not None:
        total = tl.zeros((BM, BC), tl.float32)
        for n in tl.static_range(N):
            total += tiles[n].to(tl.float32)
        mean = tl.div_rn(tl.sum(total, 1), C * 1.0)[:, None]  # [BM, 1]
        squares = tl.zeros((BM, BC), tl.float32)
        for n in tl.static_range(N):
            off = tiles[n].to(tl.float32) - mean  # [BM, BC]
            if N * BC != C:
                off = tl.where((n * BC + c < C)[None, :], off, 0.0)
            squares += off * off
        # [BM, 1]
        inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(squares, 1), C * 1.0) + eps))[:, None]
        for n in tl.static_range(N):
            out = (tiles[n].to(tl.float32) - mean) * inverse  # [BM, BC]
            # The modulations' tiles are [BM, BC] with TOKENS, else [1, BC].
            if weight is not None:
                out *= load_tile(weight, w_rows, n * BC + c, m_inside, C, MV).to(tl.float32)
            if bias is not None:
                out += load_tile(bias, w_rows, n * BC + c, m_inside, C, MV).to(tl.float32)
            if scale is not None:
                out *= 1.0 + load_tile(scale, a_rows, n * BC + c, m_inside, C, MV).to(tl.float32)
            if shift is not None:
                out += load_tile(shift, b_rows, n * BC + c, m_inside, C, MV).to(tl.float32)
            into, ok = tile_pointers(y, (b * S + s) * C, n * BC + c, inside, C, V)  # [BM, BC] each
            tl.store(into, out.to(y.dtype.element_ty), mask=ok)

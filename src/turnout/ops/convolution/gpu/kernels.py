"""Triton kernels of convolutions, for any GPU: implicit GEMM over pixels and taps, and one for few filters that reads the input once."""
# pyright: basic, reportAssignmentType=false
# ruff: noqa: RUF005 (Triton compiles no starred expressions)

import triton
import triton.language as tl


@triton.jit
def product(a, b, acc, PRECISION: tl.constexpr):
    """acc + a b. TF32 is rounded to: the tensor cores would cut bits off."""
    if PRECISION == "tf32" and a.dtype == tl.float32:
        a, b = nearest_tf32(a), nearest_tf32(b)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def nearest_tf32(x):
    bits = x.to(tl.int32, bitcast=True)
    finite = (bits & 0x7F800000) != 0x7F800000
    return tl.where(finite, (bits + 0x1000) & -0x2000, bits).to(tl.float32, bitcast=True)


@triton.jit
def implicit_gemm(
    x, weight, bias, residual, cache, out,
    pixels, OD, OH, OW, C, D, H, W, filters, frames, pd, ph, pw,
    xn, xc, xd, xh, xw, wf, wc, wd, wh, ww, rn, rc, rd, rh, rw, cn, cd, ch, cw, on, oc, od, oh, ow,
    KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SD: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    DD: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr, FLAT: tl.constexpr, REPLICATE: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[pixel, filter] = sum over taps and channels. FLAT: taps and channels are one axis, for channels fewer than a block of them."""
    column_blocks = tl.cdiv(filters, BN)
    pid = tl.program_id(0).to(tl.int64)
    pixel = (pid // column_blocks) * BM + tl.arange(0, BM)
    filter = (pid % column_blocks) * BN + tl.arange(0, BN)
    w_at = pixel % OW
    h_at = pixel // OW % OH
    d_at = pixel // (OW * OH) % OD
    n_at = pixel // (OW * OH * OD)
    real, wanted = pixel < pixels, filter < filters
    d_first, h_first, w_first = d_at * SD - pd, h_at * SH - ph, w_at * SW - pw

    channel_blocks = tl.cdiv(C, BK)
    depth = KD * KH * KW * C
    steps = tl.cdiv(depth, BK) if FLAT else KD * KH * KW * channel_blocks
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(steps):
        # [BK] each, or numbers, where a block of channels has one tap
        if FLAT:
            k = step * BK + tl.arange(0, BK)
            tap, channel, inside = k // C, k % C, k < depth
        else:
            tap = step // channel_blocks
            channel = (step % channel_blocks) * BK + tl.arange(0, BK)
            inside = channel < C
        kd, kh, kw = tap // (KH * KW), tap // KW % KH, tap % KW
        if FLAT:
            dx, hx, wx = d_first[:, None] + kd[None] * DD, h_first[:, None] + kh[None] * DH, w_first[:, None] + kw[None] * DW
            n, row = n_at[:, None], real[:, None]
        else:
            dx, hx, wx, n, row = d_first + kd * DD, h_first + kh * DH, w_first + kw * DW, n_at, real
        seen = row & (hx >= 0) & (hx < H) & (wx >= 0) & (wx < W) & (dx < D)
        if REPLICATE:
            dx = tl.maximum(dx, -frames)
        seen = seen & (dx >= -frames)
        at = x + (n * xn + dx * xd + hx * xh + wx * xw)
        if cache is not None:
            before = cache + (n * cn + (dx + frames) * cd + hx * ch + wx * cw)
            at = tl.where(dx < 0, before, at)
        if FLAT:
            a = tl.load(at + (channel * xc)[None], mask=seen & inside[None], other=0.0)
        else:
            a = tl.load(at[:, None] + (channel * xc)[None], mask=seen[:, None] & inside[None], other=0.0)
        row_of_weight = kd * wd + kh * wh + kw * ww + channel * wc
        b = tl.load(weight + (row_of_weight[:, None] + (filter * wf)[None]), mask=inside[:, None] & wanted[None], other=0.0)
        acc = product(a, b, acc, PRECISION)

    if bias is not None:
        acc += tl.load(bias + filter, mask=wanted, other=0.0).to(tl.float32)[None]
    keep = real[:, None] & wanted[None]
    if residual is not None:
        at = n_at * rn + d_at * rd + h_at * rh + w_at * rw
        acc += tl.load(residual + (at[:, None] + (filter * rc)[None]), mask=keep, other=0.0).to(tl.float32)
    at = n_at * on + d_at * od + h_at * oh + w_at * ow
    tl.store(out + (at[:, None] + (filter * oc)[None]), acc.to(out.dtype.element_ty), mask=keep)


@triton.jit
def narrow_out(
    x, weight, bias, residual, cache, out,
    strips, OD, OH, OW, C, D, H, W, filters, frames, pd, ph, pw,
    xn, xc, xd, xh, xw, wf, wc, wd, wh, ww, rn, rc, rd, rh, rw, cn, cd, ch, cw, on, oc, od, oh, ow,
    KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, REPLICATE: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, BW: tl.constexpr, BC: tl.constexpr, BLOCKS: tl.constexpr, BK: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """A strip of ROWS output rows, BW - KW + 1 pixels wide. Every input row is read once, and multiplied with the taps of all KW columns
    of the kernel side by side: [BW, C] x [C, KW * filters]. What belongs to one output pixel then stands in KW neighbouring rows of the
    product, and is gathered from there once a row of outputs is complete."""
    WIDE: tl.constexpr = BW - KW + 1
    column_tiles = tl.cdiv(OW, WIDE)
    pid = tl.program_id(0).to(tl.int64)
    w_first = pid % column_tiles * WIDE
    h_first = pid // column_tiles % strips * ROWS
    d_at = pid // (column_tiles * strips) % OD
    n_at = pid // (column_tiles * strips * OD)

    tap = tl.arange(0, BK * BF)  # a column of the product: column of the kernel, then filter
    kw, f = tap // BF, tap % BF
    taken = (kw < KW) & (f < filters)
    at_tap = kw * ww + f * wf
    pixel = w_first - pw + tl.arange(0, BW)
    on_row = (pixel >= 0) & (pixel < W)
    w_at = w_first + tl.arange(0, BW)
    filter = tl.arange(0, BF)
    keep = ((tl.arange(0, BW) < WIDE) & (w_at < OW))[:, None] & (filter < filters)[None]
    added = tl.zeros((1, BF), tl.float32)
    if bias is not None:
        added += tl.load(bias + filter, mask=filter < filters, other=0.0).to(tl.float32)[None]
    shifted = tl.minimum(tl.arange(0, BW)[:, None] + kw[None], BW - 1)

    weights = ()
    for step in tl.static_range(KD * BLOCKS):
        channel = step % BLOCKS * BC + tl.arange(0, BC)
        for kh in tl.static_range(KH):
            from_weight = weight + (step // BLOCKS * wd + kh * wh + (channel * wc)[:, None] + at_tap[None])
            weights = weights + (tl.load(from_weight, mask=(channel < C)[:, None] & taken[None], other=0.0),)

    none = tl.zeros((BW, BK * BF), tl.float32)
    sums = ()  # of output rows i, i - 1, ... at input row i
    for _ in tl.static_range(KH):
        sums = sums + (none,)
    for i in range(ROWS + KH - 1):
        row = h_first - ph + i
        for step in tl.static_range(KD * BLOCKS):
            channel = step % BLOCKS * BC + tl.arange(0, BC)
            frame = d_at - pd + step // BLOCKS
            if REPLICATE:
                frame = tl.maximum(frame, -frames)
            seen = (row >= 0) & (row < H) & (frame >= -frames) & (frame < D)
            if cache is None:
                at = x + (n_at * xn + frame * xd + row * xh + pixel * xw)
            else:
                base = tl.where(frame < 0, cache + (n_at * cn + (frame + frames) * cd + row * ch), x + (n_at * xn + frame * xd + row * xh))
                at = base + pixel * tl.where(frame < 0, cw, xw)
            a = tl.load(at[:, None] + (channel * xc)[None], mask=(on_row & seen)[:, None] & (channel < C)[None], other=0.0)
            added_to = ()
            for kh in tl.static_range(KH):
                added_to = added_to + (product(a, weights[step * KH + kh], sums[kh], PRECISION),)
            sums = added_to
        h_at = h_first + i - (KH - 1)
        if (i >= KH - 1) & (h_at < OH):
            gathered = tl.gather(sums[KH - 1], shifted, 0)
            if BK > KW:  # columns without a tap hold zeros, but NaN beside a pixel that is not finite
                gathered = tl.where((kw < KW)[None], gathered, 0.0)
            total = tl.sum(tl.reshape(gathered, (BW, BK, BF)), 1) + added
            if residual is not None:
                beside = n_at * rn + d_at * rd + h_at * rh + (w_at * rw)[:, None] + (filter * rc)[None]
                total += tl.load(residual + beside, mask=keep, other=0.0).to(tl.float32)
            to = n_at * on + d_at * od + h_at * oh + (w_at * ow)[:, None] + (filter * oc)[None]
            tl.store(out + to, total.to(out.dtype.element_ty), mask=keep)
        sums = (none,) + sums[: KH - 1]


@triton.jit
def transpose(
    x, out, channels, pixels, xn, xc, xp, on, oc, op, LAST: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """[N, C, P] copied from channels side by side (LAST) to pixels side by side, or back: read along the one, written along the other."""
    pid = tl.program_id(0).to(tl.int64)
    column_blocks, row_blocks = tl.cdiv(channels, BC), tl.cdiv(pixels, BP)
    c = pid % column_blocks * BC + tl.arange(0, BC)
    p = pid // column_blocks % row_blocks * BP + tl.arange(0, BP)
    n = pid // (column_blocks * row_blocks)
    if LAST:
        inside = (p < pixels)[:, None] & (c < channels)[None]
        values = tl.load(x + (n * xn + (p * xp)[:, None] + (c * xc)[None]), mask=inside)
        tl.store(out + (n * on + (c * oc)[:, None] + (p * op)[None]), tl.trans(values), mask=tl.trans(inside))
    else:
        inside = (c < channels)[:, None] & (p < pixels)[None]
        values = tl.load(x + (n * xn + (c * xc)[:, None] + (p * xp)[None]), mask=inside)
        tl.store(out + (n * on + (p * op)[:, None] + (c * oc)[None]), tl.trans(values), mask=tl.trans(inside))


@triton.jit
def phase_filters(
    weight, out, count, channels, wf, wc, wh, ww, SCALE: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row u and column v in the window of one phase (a, b) of an upsampled image: the sum of the rows y and columns x of the kernel
    that fall on it. `count` is filters times channels."""
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(count, BLOCK)
    at = pid % blocks * BLOCK + tl.arange(0, BLOCK)
    v = pid // blocks % COLUMNS
    u = pid // (blocks * COLUMNS) % ROWS
    phase = pid // (blocks * COLUMNS * ROWS)
    # Counted from a row above the image, so that nothing negative is divided.
    a, b = phase // SCALE + PH * (SCALE - 1), phase % SCALE + PW * (SCALE - 1)
    filter, channel = at // channels, at % channels
    wide: tl.constexpr = tl.float64 if weight.dtype.element_ty == tl.float32 else tl.float32
    total = tl.zeros((BLOCK,), wide)
    for y in range(KH):
        for x in range(KW):
            falls = ((a + y) // SCALE - a // SCALE == u) & ((b + x) // SCALE - b // SCALE == v)
            seen = weight + (filter * wf + channel * wc + y * wh + x * ww)
            total += tl.load(seen, mask=(at < count) & falls, other=0.0).to(wide)
    place = ((phase * (count // channels) + filter) * ROWS + u) * COLUMNS + v
    tl.store(out + (place * channels + channel), total.to(out.dtype.element_ty), mask=at < count)

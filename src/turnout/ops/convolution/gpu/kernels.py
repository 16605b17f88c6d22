"""Triton kernels of convolutions, for any GPU. All strides are in elements.

`implicit_gemm`  over pixels and taps
`narrow_out`     for few filters; reads the input once
`transpose`      from channels side by side to pixels side by side, or back
`phase_filters`  the filters of a convolution of an upsampled image, one set for each phase
"""

# pyright: basic, reportAssignmentType=false
# ruff: noqa: RUF005 (Triton compiles no starred expressions)

import triton
import triton.language as tl


@triton.jit
def product(a, b, acc, PRECISION: tl.constexpr):
    """acc + a b, of [M, K], [K, N] and [M, N]. TF32 is rounded to: the tensor cores would cut bits off."""
    if PRECISION == "tf32" and a.dtype == tl.float32:
        a, b = nearest_tf32(a), nearest_tf32(b)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def nearest_tf32(x):
    """float32 of any shape, rounded to the nearest TF32; ties away from zero."""
    bits = x.to(tl.int32, bitcast=True)
    finite = (bits & 0x7F800000) != 0x7F800000
    return tl.where(finite, (bits + 0x1000) & -0x2000, bits).to(tl.float32, bitcast=True)


@triton.jit
def offset(n, d, h, w, stride):
    """Elements from the first one of a tensor to position (n, d, h, w): integers, or blocks of one shape."""
    return n * stride.n + d * stride.d + h * stride.h + w * stride.w


@triton.jit
def implicit_gemm(
    x, weight,  # [N, C, D, H, W], [filters, C, KD, KH, KW]
    bias, residual,  # [filters], [N, filters, OD, OH, OW]; either may be None
    cache,  # [N, C, frames, H, W] frames before the first of x, or None; channels as far apart as in x
    out,  # [N, filters, OD, OH, OW]
    pixels, out_size,  # pixels = N * OD * OH * OW; (OD, OH, OW)
    C, in_size, filters, frames,  # (D, H, W); frames of cache
    padding,  # (d, h, w) before the first element
    x_stride, weight_stride, residual_stride, cache_stride, out_stride,  # in elements, by axis
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, DILATION: tl.constexpr,  # (d, h, w) each
    FLAT: tl.constexpr,  # taps and channels are one axis, for channels fewer than BK
    REPLICATE: tl.constexpr,  # the first frame stands for those before it
    PRECISION: tl.constexpr,  # of float32 products, as `tl.dot` takes it
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,  # pixels, filters, channels of a block
):  # fmt: skip
    """out[pixel, filter] = sum over taps and channels. A program: BM pixels, BN filters."""
    KD: tl.constexpr = KERNEL[0]
    KH: tl.constexpr = KERNEL[1]
    KW: tl.constexpr = KERNEL[2]
    column_blocks = tl.cdiv(filters, BN)
    pid = tl.program_id(0).to(tl.int64)
    pixel = (pid // column_blocks) * BM + tl.arange(0, BM)  # [BM]
    filter = (pid % column_blocks) * BN + tl.arange(0, BN)  # [BN]
    # Where each pixel is in the output, and the first element of x that it sees: [BM] each.
    w_at = pixel % out_size.w
    h_at = pixel // out_size.w % out_size.h
    d_at = pixel // (out_size.w * out_size.h) % out_size.d
    n_at = pixel // (out_size.w * out_size.h * out_size.d)
    real, wanted = pixel < pixels, filter < filters  # [BM], [BN]
    d_first = d_at * STRIDE[0] - padding.d
    h_first = h_at * STRIDE[1] - padding.h
    w_first = w_at * STRIDE[2] - padding.w

    channel_blocks = tl.cdiv(C, BK)
    depth = KD * KH * KW * C  # terms of a sum
    steps = tl.cdiv(depth, BK) if FLAT else KD * KH * KW * channel_blocks
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(steps):
        if FLAT:  # [BK] each
            k = step * BK + tl.arange(0, BK)
            tap, channel, inside = k // C, k % C, k < depth
        else:  # one tap, a number, for the whole block of channels
            tap = step // channel_blocks
            channel = (step % channel_blocks) * BK + tl.arange(0, BK)  # [BK]
            inside = channel < C  # [BK]
        kd, kh, kw = tap // (KH * KW), tap // KW % KH, tap % KW
        if FLAT:  # [BM, BK] each, n and row [BM, 1]
            dx = d_first[:, None] + kd[None] * DILATION[0]
            hx = h_first[:, None] + kh[None] * DILATION[1]
            wx = w_first[:, None] + kw[None] * DILATION[2]
            n, row = n_at[:, None], real[:, None]
        else:  # [BM] each
            dx = d_first + kd * DILATION[0]
            hx = h_first + kh * DILATION[1]
            wx = w_first + kw * DILATION[2]
            n, row = n_at, real
        seen = row & (hx >= 0) & (hx < in_size.h) & (wx >= 0) & (wx < in_size.w) & (dx < in_size.d)
        if REPLICATE:
            dx = tl.maximum(dx, -frames)
        seen = seen & (dx >= -frames)
        at = x + offset(n, dx, hx, wx, x_stride)
        if cache is not None:
            before = n * cache_stride.n + (dx + frames) * cache_stride.d
            before = cache + (before + hx * cache_stride.h + wx * cache_stride.w)
            at = tl.where(dx < 0, before, at)
        if FLAT:
            a = tl.load(at + (channel * x_stride.c)[None], mask=seen & inside[None], other=0.0)  # [BM, BK]
        else:
            a = tl.load(
                at[:, None] + (channel * x_stride.c)[None],  # [BM, BK]
                mask=seen[:, None] & inside[None],
                other=0.0,
            )
        # [BK]
        row_of_weight = (
            kd * weight_stride.d + kh * weight_stride.h + kw * weight_stride.w + channel * weight_stride.c
        )
        b = tl.load(
            weight + (row_of_weight[:, None] + (filter * weight_stride.f)[None]),  # [BK, BN]
            mask=inside[:, None] & wanted[None],
            other=0.0,
        )
        acc = product(a, b, acc, PRECISION)

    if bias is not None:
        acc += tl.load(bias + filter, mask=wanted, other=0.0).to(tl.float32)[None]
    keep = real[:, None] & wanted[None]  # [BM, BN]
    if residual is not None:
        at = offset(n_at, d_at, h_at, w_at, residual_stride)  # [BM]
        beside = residual + (at[:, None] + (filter * residual_stride.c)[None])  # [BM, BN]
        acc += tl.load(beside, mask=keep, other=0.0).to(tl.float32)
    at = offset(n_at, d_at, h_at, w_at, out_stride)  # [BM]
    tl.store(out + (at[:, None] + (filter * out_stride.c)[None]), acc.to(out.dtype.element_ty), mask=keep)


@triton.jit
def narrow_out(
    x, weight, bias, residual, cache, out,  # as in `implicit_gemm`
    strips, out_size,  # strips: along the height of the output, ROWS rows each
    C, in_size, filters, frames, padding,  # these and all below as in `implicit_gemm`
    x_stride, weight_stride, residual_stride, cache_stride, out_stride,
    KERNEL: tl.constexpr, REPLICATE: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, BW: tl.constexpr,  # output rows and input pixels of a program
    BC: tl.constexpr, BLOCKS: tl.constexpr,  # channels of a block, blocks: BC * BLOCKS >= C
    BK: tl.constexpr, BF: tl.constexpr,  # KW and filters, rounded up to powers of two
):  # fmt: skip
    """A strip of ROWS output rows, BW - KW + 1 pixels wide. Every input row is read once, and multiplied with
    the taps of all KW columns of the kernel side by side: [BW, C] x [C, KW * filters]. What belongs to one
    output pixel then stands in KW neighbouring rows of the product, and is gathered from there once a row of
    outputs is complete."""
    KD: tl.constexpr = KERNEL[0]
    KH: tl.constexpr = KERNEL[1]
    KW: tl.constexpr = KERNEL[2]
    WIDE: tl.constexpr = BW - KW + 1  # output pixels of a row
    column_tiles = tl.cdiv(out_size.w, WIDE)
    pid = tl.program_id(0).to(tl.int64)
    w_first = pid % column_tiles * WIDE
    h_first = pid // column_tiles % strips * ROWS
    d_at = pid // (column_tiles * strips) % out_size.d
    n_at = pid // (column_tiles * strips * out_size.d)

    tap = tl.arange(0, BK * BF)  # [BK * BF] columns of the product: column of the kernel, then filter
    kw, f = tap // BF, tap % BF  # [BK * BF] each
    taken = (kw < KW) & (f < filters)  # [BK * BF]
    at_tap = kw * weight_stride.w + f * weight_stride.f  # [BK * BF]
    pixel = w_first - padding.w + tl.arange(0, BW)  # [BW] of the input
    on_row = (pixel >= 0) & (pixel < in_size.w)  # [BW]
    w_at = w_first + tl.arange(0, BW)  # [BW] of the output
    filter = tl.arange(0, BF)  # [BF]
    keep = ((tl.arange(0, BW) < WIDE) & (w_at < out_size.w))[:, None] & (filter < filters)[None]  # [BW, BF]
    added = tl.zeros((1, BF), tl.float32)
    if bias is not None:
        added += tl.load(bias + filter, mask=filter < filters, other=0.0).to(tl.float32)[None]
    # [BW, BK * BF]: output pixel i finds its sum over column kw of the kernel in row i + kw of the product.
    shifted = tl.minimum(tl.arange(0, BW)[:, None] + kw[None], BW - 1)

    weights = ()  # KD * BLOCKS * KH tiles [BC, BK * BF]
    for step in tl.static_range(KD * BLOCKS):
        channel = step % BLOCKS * BC + tl.arange(0, BC)  # [BC]
        for kh in tl.static_range(KH):
            row_of_weight = step // BLOCKS * weight_stride.d + kh * weight_stride.h
            # [BC, BK * BF]
            from_weight = weight + (row_of_weight + (channel * weight_stride.c)[:, None] + at_tap[None])
            weights = weights + (tl.load(from_weight, mask=(channel < C)[:, None] & taken[None], other=0.0),)

    none = tl.zeros((BW, BK * BF), tl.float32)
    sums = ()  # KH tiles [BW, BK * BF]: of output rows i, i - 1, ... at input row i
    for _ in tl.static_range(KH):
        sums = sums + (none,)
    for i in range(ROWS + KH - 1):
        row = h_first - padding.h + i
        for step in tl.static_range(KD * BLOCKS):
            channel = step % BLOCKS * BC + tl.arange(0, BC)  # [BC]
            frame = d_at - padding.d + step // BLOCKS
            if REPLICATE:
                frame = tl.maximum(frame, -frames)
            seen = (row >= 0) & (row < in_size.h) & (frame >= -frames) & (frame < in_size.d)
            if cache is None:
                at = x + offset(n_at, frame, row, pixel, x_stride)  # [BW]
            else:
                base = tl.where(
                    frame < 0,
                    cache
                    + (n_at * cache_stride.n + (frame + frames) * cache_stride.d + row * cache_stride.h),
                    x + (n_at * x_stride.n + frame * x_stride.d + row * x_stride.h),
                )
                at = base + pixel * tl.where(frame < 0, cache_stride.w, x_stride.w)  # [BW]
            a = tl.load(
                at[:, None] + (channel * x_stride.c)[None],  # [BW, BC]
                mask=(on_row & seen)[:, None] & (channel < C)[None],
                other=0.0,
            )
            added_to = ()
            for kh in tl.static_range(KH):
                added_to = added_to + (product(a, weights[step * KH + kh], sums[kh], PRECISION),)
            sums = added_to
        h_at = h_first + i - (KH - 1)
        if (i >= KH - 1) & (h_at < out_size.h):
            gathered = tl.gather(sums[KH - 1], shifted, 0)  # [BW, BK * BF]
            if BK > KW:  # columns without a tap hold zeros, but NaN beside a pixel that is not finite
                gathered = tl.where((kw < KW)[None], gathered, 0.0)
            total = tl.sum(tl.reshape(gathered, (BW, BK, BF)), 1) + added  # [BW, BF]
            if residual is not None:
                beside = offset(n_at, d_at, h_at, w_at[:, None], residual_stride)  # [BW, 1]
                beside += (filter * residual_stride.c)[None]  # [BW, BF]
                total += tl.load(residual + beside, mask=keep, other=0.0).to(tl.float32)
            to = offset(n_at, d_at, h_at, w_at[:, None], out_stride)  # [BW, 1]
            to += (filter * out_stride.c)[None]  # [BW, BF]
            tl.store(out + to, total.to(out.dtype.element_ty), mask=keep)
        sums = (none,) + sums[: KH - 1]


@triton.jit
def transpose(
    x, out,  # [N, channels, pixels] each, by their strides
    channels, pixels, xn, xc, xp, on, oc, op,  # strides by image (n), channel (c), pixel (p)
    LAST: tl.constexpr,  # the channels of x are side by side; else its pixels
    BC: tl.constexpr, BP: tl.constexpr,  # channels and pixels of a program
):  # fmt: skip
    """[N, C, P] copied from channels side by side (LAST) to pixels side by side, or back: read along the one,
    written along the other."""
    pid = tl.program_id(0).to(tl.int64)
    column_blocks, row_blocks = tl.cdiv(channels, BC), tl.cdiv(pixels, BP)
    c = pid % column_blocks * BC + tl.arange(0, BC)  # [BC]
    p = pid // column_blocks % row_blocks * BP + tl.arange(0, BP)  # [BP]
    n = pid // (column_blocks * row_blocks)
    if LAST:
        inside = (p < pixels)[:, None] & (c < channels)[None]
        values = tl.load(x + (n * xn + (p * xp)[:, None] + (c * xc)[None]), mask=inside)  # [BP, BC]
        tl.store(out + (n * on + (c * oc)[:, None] + (p * op)[None]), tl.trans(values), mask=tl.trans(inside))
    else:
        inside = (c < channels)[:, None] & (p < pixels)[None]
        values = tl.load(x + (n * xn + (c * xc)[:, None] + (p * xp)[None]), mask=inside)  # [BC, BP]
        tl.store(out + (n * on + (p * op)[:, None] + (c * oc)[None]), tl.trans(values), mask=tl.trans(inside))


@triton.jit
def phase_filters(
    weight, out,  # [filters, channels, KH, KW], [SCALE * SCALE, filters, ROWS, COLUMNS, channels]
    count, channels, wf, wc, wh, ww,  # count = filters * channels; strides of weight
    SCALE: tl.constexpr,  # of the image; a phase is a place (a, b) in the SCALE x SCALE copies of a pixel
    PH: tl.constexpr, PW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,  # padding, taps
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,  # of the window of pixels that a phase sees
    BLOCK: tl.constexpr,  # (filter, channel) pairs of a program
):  # fmt: skip
    """One row u and column v in the window of one phase (a, b) of an upsampled image: the sum of the rows y
    and columns x of the kernel that fall on it. `count` is filters times channels."""
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(count, BLOCK)
    at = pid % blocks * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    v = pid // blocks % COLUMNS
    u = pid // (blocks * COLUMNS) % ROWS
    phase = pid // (blocks * COLUMNS * ROWS)
    # Counted from a row above the image, so that nothing negative is divided.
    a, b = phase // SCALE + PH * (SCALE - 1), phase % SCALE + PW * (SCALE - 1)
    filter, channel = at // channels, at % channels  # [BLOCK] each
    wide: tl.constexpr = tl.float64 if weight.dtype.element_ty == tl.float32 else tl.float32
    total = tl.zeros((BLOCK,), wide)
    for y in range(KH):
        for x in range(KW):
            falls = ((a + y) // SCALE - a // SCALE == u) & ((b + x) // SCALE - b // SCALE == v)
            seen = weight + (filter * wf + channel * wc + y * wh + x * ww)  # [BLOCK]
            total += tl.load(seen, mask=(at < count) & falls, other=0.0).to(wide)
    place = ((phase * (count // channels) + filter) * ROWS + u) * COLUMNS + v  # [BLOCK]
    tl.store(out + (place * channels + channel), total.to(out.dtype.element_ty), mask=at < count)

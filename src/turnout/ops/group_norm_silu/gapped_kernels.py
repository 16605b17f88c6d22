"""Triton kernels of group_norm_silu for channels that are side by side at positions with gaps between them.

`gapped_moments`  moments of parts of each group, as `row_moments` leaves them, of an x whose positions have
                  gaps
`gapped_apply`    the norm of x into the inside of a larger tensor, or with a border of its own around it
`spatial_apply`   the norm of x with a scale and a shift that blocks of positions share

Positions are walked in the order of the output, [deep, high, wide]. A thread takes one position and a vector
of its channels, so the indices of a position are worked out for each vector: by multiplication, since a
division by a number that the compiler does not know takes as long as all the rest of the norm.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportIndexIssue=false
# ruff: noqa: RET505, RUF005

import triton
import triton.language as tl

from turnout.ops.common_kernels import silu
from turnout.ops.group_norm_silu.kernels import (
    activated,
    channels_of,
    combined,
    inverse_root,
    lane_moments,
    part_of,
    spread,
)

# How what is outside of x is made, as in torch.nn.functional.pad.
NOTHING = tl.constexpr(0)
CONSTANT = tl.constexpr(1)
REPLICATE = tl.constexpr(2)
REFLECT = tl.constexpr(3)

# Numbers that differ between the stages of one model: no code of its own for each. Not the number of groups:
# that 16 divides it lets the compiler see that a mask of channels is the same for a whole vector.
_WALK = ("high", "high_magic", "high_shift", "wide", "wide_magic", "wide_shift")
_MOMENTS = ("P", "parts", "blocks", "xb", "xd", "xh", "xw", *_WALK)
_APPLY = (
    "size", "P", "parts", "blocks", "programs", "xb", "xd", "xh", "xw", "yb", "yd", "yh", "yw", *_WALK,
    "x_deep", "x_high", "x_wide", "before_deep", "before_high", "before_wide",
)  # fmt: skip
_SPATIAL = (
    "P", "parts", "blocks", "programs", "xb", "xd", "xh", "xw", "yb", "yd", "yh", "yw",
    "sb", "sd", "sh", "sw", "tb", "td", "th", "tw", *_WALK,
    "apart", "d_magic", "d_shift", "h_magic", "h_shift", "w_magic", "w_shift",
)  # fmt: skip


@triton.jit
def quotient(n, magic, shift):
    """n // divisor for 0 <= n < 2**31 of any shape, from what `launches.reciprocal` says of the divisor."""
    return (tl.umulhi(n.to(tl.uint32) * 2, magic.to(tl.uint32)) >> shift.to(tl.uint32)).to(tl.int32)


@triton.jit
def indices(p, high, high_magic, high_shift, wide, wide_magic, wide_shift):
    """Positions p of [deep, high, wide] as indices along each, in p's shape. magic, shift: see `quotient`."""
    line = quotient(p, wide_magic, wide_shift)  # in p's shape, as is d
    d = quotient(line, high_magic, high_shift)
    return d, line - d * high, p - line * wide


@triton.jit
def offsets(d, h, w, step_d, step_h, step_w):
    """Where positions begin, in 64 bits and in the shape of the indices d, h and w."""
    at = d.to(tl.int64) * tl.cast(step_d, tl.int64) + h.to(tl.int64) * tl.cast(step_h, tl.int64)
    return at + w.to(tl.int64) * tl.cast(step_w, tl.int64)


@triton.jit
def source(i, before, size, PAD: tl.constexpr):
    """Which of `size` values stands at index i of an axis with `before` values in front of the first."""
    i = i - before  # any shape
    if PAD == REFLECT:
        i = tl.where(i < 0, -i, i)
        return tl.where(i >= size, 2 * (size - 1) - i, i)
    else:
        return tl.minimum(tl.maximum(i, 0), size - 1)


@triton.jit
def is_inside(i, before, size):  # as in `source`; i of any shape
    return (i >= before) & (i < before + size)


@triton.jit
def group_moments(
    partial,  # [batch, parts, 3, G], as `gapped_moments` leaves it
    w, bias,  # [G * CG] each, with WEIGHT and BIAS
    eps, b, block,  # which batch entry and which block of GB groups
    size, G, parts,  # positions of x, groups, parts of the positions
    CG: tl.constexpr, GB: tl.constexpr, CB: tl.constexpr,  # as in `gapped_moments`
    PARTS: tl.constexpr,  # `parts`, rounded up to a power of two
    WEIGHT: tl.constexpr, BIAS: tl.constexpr,  # which of w and bias there are
):  # fmt: skip
    """Mean (rough and rest), scale and shift of each column of GB groups [1, GB * CB], from the moments of
    all parts of `size` positions."""
    part = tl.arange(0, PARTS)  # [PARTS]
    g = block * GB + tl.arange(0, GB)  # [GB]
    first, last = part_of(size, part, parts)  # [PARTS] each
    # [PARTS, GB]: values of each part of each group
    counts = tl.where((part < parts)[:, None] & (g < G)[None, :], ((last - first) * CG)[:, None], 0).to(
        tl.float32
    )
    found = partial + (b * parts + part)[:, None] * 3 * G + g[None, :]  # [PARTS, GB]
    rough = tl.load(found, mask=counts > 0, other=0.0)  # [PARTS, GB], as are the next two
    rest = tl.load(found + G, mask=counts > 0, other=0.0)
    squares = tl.load(found + 2 * G, mask=counts > 0, other=0.0)
    rough, rest, squares, count = combined(rough, rest, squares, counts, 0, True)  # [1, GB]

    c, real = channels_of(block, G, CG, GB, CB)  # [GB * CB] each
    scale = spread(inverse_root(squares, count, eps), GB, CB)  # [GB * CB]
    shift = tl.zeros((GB * CB,), tl.float32)  # [GB * CB]
    if WEIGHT:
        scale *= tl.load(w + c, mask=real, other=0.0).to(tl.float32)  # [GB * CB]
    if BIAS:
        shift += tl.load(bias + c, mask=real, other=0.0).to(tl.float32)  # [GB * CB]
    # [1, GB * CB] each
    return spread(rough, GB, CB)[None, :], spread(rest, GB, CB)[None, :], scale[None, :], shift[None, :]


@triton.jit(do_not_specialize=_MOMENTS)
def gapped_moments(
    x,  # [batch, deep, high, wide, G * CG], channels side by side
    partial,  # [batch, parts, 3, G] float32: rough mean, rest of the mean, sum of squares about it
    P, G, parts, blocks,  # positions, groups, parts of the positions, blocks of GB groups
    xb, xd, xh, xw,  # strides of x in elements
    high, high_magic, high_shift, wide, wide_magic, wide_shift,  # as in `indices`
    CG: tl.constexpr, GB: tl.constexpr,  # channels of a group, groups of a program
    CB: tl.constexpr,  # CG, rounded up to a power of two
    BP: tl.constexpr, U: tl.constexpr, V: tl.constexpr,  # positions of a tile, tiles at a time, vector
):  # fmt: skip
    """partial [batch, parts, 3, G].

    A program: one part of the P positions, GB groups; U tiles [BP, GB * CB] at a time.
    """
    pid = tl.program_id(0)
    block, part, b = pid % blocks, pid // blocks % parts, (pid // blocks // parts).to(tl.int64)
    first, last = part_of(P, part, parts)  # numbers
    c, real = channels_of(block, G, CG, GB, CB)  # [GB * CB] each
    lane = tl.arange(0, BP)  # [BP]
    rows = last - first  # a number: positions of the part
    px = x + b * xb  # one pointer, to batch entry b
    d, h, w = indices(first + lane, high, high_magic, high_shift, wide, wide_magic, wide_shift)  # [BP] each
    pivot_at = px + offsets(d, h, w, xd, xh, xw)[:, None] + c[None, :]  # [BP, GB * CB]
    pivot_at = tl.multiple_of(pivot_at, (1, V * x.dtype.element_ty.primitive_bitwidth // 8))  # [BP, GB * CB]
    # [BP, GB * CB]: the first value of each lane
    pivot = tl.load(pivot_at, mask=(lane < rows)[:, None] & real[None, :], other=0.0).to(tl.float32)
    total = tl.zeros((BP, GB * CB), tl.float32)  # [BP, GB * CB], as are the sums of squares
    squares = tl.zeros((BP, GB * CB), tl.float32)
    for start in range(0, rows, BP * U):
        tiles = ()  # U tiles [BP, GB * CB]
        for u in tl.static_range(U):
            row = start + u * BP + lane  # [BP]
            # [BP] each
            d, h, w = indices(first + row, high, high_magic, high_shift, wide, wide_magic, wide_shift)
            at = px + offsets(d, h, w, xd, xh, xw)[:, None] + c[None, :]  # [BP, GB * CB]
            at = tl.multiple_of(at, (1, V * x.dtype.element_ty.primitive_bitwidth // 8))  # [BP, GB * CB]
            tiles = tiles + (tl.load(at, mask=(row < rows)[:, None] & real[None, :], other=0.0),)
        for u in tl.static_range(U):
            ok = (start + u * BP + lane < rows)[:, None] & real[None, :]  # [BP, GB * CB]
            away = tl.where(ok, tiles[u].to(tl.float32) - pivot, 0.0)  # [BP, GB * CB]
            total += away
            squares += away * away

    count = ((rows - lane + BP - 1) // BP)[:, None]  # [BP, 1] rows of each lane
    rest, squares = lane_moments(total, squares, count)  # [BP, GB * CB] each
    counts = tl.where(real[None, :] & (count > 0), count, 0).to(tl.float32)  # [BP, GB * CB]
    rough, rest, squares, counts = combined(pivot, rest, squares, counts, 0, True)  # [1, GB * CB]
    rough, rest = tl.reshape(rough, (GB, CB)), tl.reshape(rest, (GB, CB))  # [GB, CB] each
    squares, counts = tl.reshape(squares, (GB, CB)), tl.reshape(counts, (GB, CB))  # [GB, CB] each
    rough, rest, squares, _ = combined(rough, rest, squares, counts, 1, True)  # [GB, 1] each
    g = (block * GB + tl.arange(0, GB))[:, None]  # [GB, 1]
    into = partial + (b * parts + part) * 3 * G + g  # [GB, 1]
    tl.store(into, rough, mask=g < G)
    tl.store(into + G, rest, mask=g < G)
    tl.store(into + 2 * G, squares, mask=g < G)


@triton.jit(do_not_specialize=_APPLY)
def gapped_apply(
    x, partial,  # [batch, x_deep, x_high, x_wide, G * CG]; as in `gapped_moments`
    w, bias, y,  # [G * CG] each; [batch, deep, high, wide, G * CG], channels side by side
    eps, size, P, G, parts,  # positions of x, positions of the output, groups, parts of the positions of x
    blocks, programs,  # blocks of GB groups; programs that share the positions of one block
    xb, xd, xh, xw, yb, yd, yh, yw,  # strides in elements
    high, high_magic, high_shift, wide, wide_magic, wide_shift,  # of the output, as in `indices`
    x_deep, x_high, x_wide, before_deep, before_high, before_wide,  # as in `source`, for each axis
    CG: tl.constexpr, GB: tl.constexpr, CB: tl.constexpr,  # as in `gapped_moments`
    BP: tl.constexpr, U: tl.constexpr, V: tl.constexpr,  # positions of a tile, tiles at a time, vector
    PARTS: tl.constexpr,  # `parts`, rounded up to a power of two
    X_ROWS: tl.constexpr, Y_ROWS: tl.constexpr, PAD: tl.constexpr,  # steps xw, yw alone; NOTHING to REFLECT
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,  # which steps there are
):  # fmt: skip
    """A program combines the moments of GB groups once and takes every `programs`-th U tiles of the output's
    P positions.

    size: positions of x, [x_deep, x_high, x_wide]. PAD: how the positions of the output come from them.
    X_ROWS, Y_ROWS: positions are `xw` or `yw` apart, without gaps.
    """
    pid = tl.program_id(0)
    block, walk, b = pid % blocks, pid // blocks % programs, (pid // blocks // programs).to(tl.int64)
    rough, rest, scale, shift = group_moments(  # [1, GB * CB] each
        partial, w, bias, eps, b, block, size, G, parts, CG, GB, CB, PARTS, WEIGHT, BIAS
    )  # fmt: skip
    c, real = channels_of(block, G, CG, GB, CB)  # [GB * CB] each
    lane = tl.arange(0, BP)  # [BP]
    px, py = x + b * xb, y + b * yb  # one pointer each, to batch entry b
    for start in range(walk * (BP * U), P, programs * (BP * U)):
        tiles = ()  # U tiles [BP, GB * CB]
        for u in tl.static_range(U):
            p = start + u * BP + lane  # [BP]: positions of the output
            if X_ROWS:
                at = p.to(tl.int64) * tl.cast(xw, tl.int64)  # [BP]
            else:
                d, h, i = indices(p, high, high_magic, high_shift, wide, wide_magic, wide_shift)  # [BP] each
                if PAD != NOTHING:
                    d = source(d, before_deep, x_deep, PAD)  # [BP]
                    h = source(h, before_high, x_high, PAD)  # [BP]
                    i = source(i, before_wide, x_wide, PAD)  # [BP]
                at = offsets(d, h, i, xd, xh, xw)  # [BP]
            here = px + at[:, None] + c[None, :]  # [BP, GB * CB]
            here = tl.multiple_of(here, (1, V * x.dtype.element_ty.primitive_bitwidth // 8))  # [BP, GB * CB]
            tiles = tiles + (tl.load(here, mask=(p < P)[:, None] & real[None, :], other=0.0),)
        for u in tl.static_range(U):
            p = start + u * BP + lane  # [BP]
            # [BP, GB * CB]
            value = activated(tiles[u].to(tl.float32), rough, rest, scale, shift, SILU, y.dtype.element_ty)
            if Y_ROWS and PAD != CONSTANT:
                at = p.to(tl.int64) * tl.cast(yw, tl.int64)  # [BP]
            else:
                d, h, i = indices(p, high, high_magic, high_shift, wide, wide_magic, wide_shift)  # [BP] each
                at = offsets(d, h, i, yd, yh, yw)  # [BP]
                if PAD == CONSTANT:
                    inside = is_inside(d, before_deep, x_deep) & is_inside(h, before_high, x_high)  # [BP]
                    inside = inside & is_inside(i, before_wide, x_wide)  # [BP]
                    value = tl.where(inside[:, None], value, 0.0).to(y.dtype.element_ty)  # [BP, GB * CB]
            into = py + at[:, None] + c[None, :]  # [BP, GB * CB]
            into = tl.multiple_of(into, (1, V * y.dtype.element_ty.primitive_bitwidth // 8))  # [BP, GB * CB]
            tl.store(into, value, mask=(p < P)[:, None] & real[None, :])


@triton.jit(do_not_specialize=_SPATIAL)
def spatial_apply(
    x, partial, w, bias,  # as in `gapped_apply`
    scale, shift,  # [batch, fewer deep, high and wide, G * CG], channels side by side
    y,  # as x
    eps, P, G, parts, blocks, programs,  # as in `gapped_apply`; P positions of x and of the output
    xb, xd, xh, xw, yb, yd, yh, yw,  # strides in elements: of x, y,
    sb, sd, sh, sw, tb, td, th, tw,  # of scale (s) and shift (t)
    high, high_magic, high_shift, wide, wide_magic, wide_shift,  # as in `indices`
    apart, d_magic, d_shift, h_magic, h_shift, w_magic, w_shift,  # 0 or 1; as in `quotient`
    CG: tl.constexpr, GB: tl.constexpr, CB: tl.constexpr,  # as in `gapped_moments`
    BP: tl.constexpr, U: tl.constexpr, V: tl.constexpr,  # positions of a tile, tiles at a time, vector
    PARTS: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,  # as in `gapped_apply`
):  # fmt: skip
    """As `gapped_apply` without a border, and with a scale and a shift for each block of positions and each
    channel.

    scale, shift: steps s and t, channels side by side. apart: 1 where the first along the deep axis has
    values of its own. The other magics and shifts divide by the number of positions that share a value along
    each axis.
    """
    pid = tl.program_id(0)
    block, walk, b = pid % blocks, pid // blocks % programs, (pid // blocks // programs).to(tl.int64)
    rough, rest, factor, offset = group_moments(  # [1, GB * CB] each
        partial, w, bias, eps, b, block, P, G, parts, CG, GB, CB, PARTS, WEIGHT, BIAS
    )  # fmt: skip
    c, real = channels_of(block, G, CG, GB, CB)  # [GB * CB] each
    lane = tl.arange(0, BP)  # [BP]
    px, py, ps, pt = x + b * xb, y + b * yb, scale + b * sb, shift + b * tb  # one pointer each, to entry b
    for start in range(walk * (BP * U), P, programs * (BP * U)):
        tiles, scales, shifts = (), (), ()  # U tiles [BP, GB * CB] each
        for u in tl.static_range(U):
            p = start + u * BP + lane  # [BP]
            ok = (p < P)[:, None] & real[None, :]  # [BP, GB * CB]
            d, h, i = indices(p, high, high_magic, high_shift, wide, wide_magic, wide_shift)  # [BP] each
            here = px + offsets(d, h, i, xd, xh, xw)[:, None] + c[None, :]  # [BP, GB * CB]
            here = tl.multiple_of(here, (1, V * x.dtype.element_ty.primitive_bitwidth // 8))  # [BP, GB * CB]
            tiles = tiles + (tl.load(here, mask=ok, other=0.0),)
            # [BP], of scale and shift
            d = quotient(tl.maximum(d - apart, 0), d_magic, d_shift) + tl.minimum(d, apart)
            h, i = quotient(h, h_magic, h_shift), quotient(i, w_magic, w_shift)  # [BP] each
            here = ps + offsets(d, h, i, sd, sh, sw)[:, None] + c[None, :]  # [BP, GB * CB]
            # [BP, GB * CB]
            here = tl.multiple_of(here, (1, V * scale.dtype.element_ty.primitive_bitwidth // 8))
            scales = scales + (tl.load(here, mask=ok, other=0.0),)
            here = pt + offsets(d, h, i, td, th, tw)[:, None] + c[None, :]  # [BP, GB * CB]
            # [BP, GB * CB]
            here = tl.multiple_of(here, (1, V * shift.dtype.element_ty.primitive_bitwidth // 8))
            shifts = shifts + (tl.load(here, mask=ok, other=0.0),)
        for u in tl.static_range(U):
            p = start + u * BP + lane  # [BP]
            d, h, i = indices(p, high, high_magic, high_shift, wide, wide_magic, wide_shift)  # [BP] each
            value = ((tiles[u].to(tl.float32) - rough) - rest) * factor + offset  # [BP, GB * CB]
            value = value * scales[u].to(tl.float32) + shifts[u].to(tl.float32)  # [BP, GB * CB]
            if SILU:
                value = silu(value, y.dtype.element_ty == tl.float32)  # [BP, GB * CB]
            into = py + offsets(d, h, i, yd, yh, yw)[:, None] + c[None, :]  # [BP, GB * CB]
            into = tl.multiple_of(into, (1, V * y.dtype.element_ty.primitive_bitwidth // 8))  # [BP, GB * CB]
            tl.store(into, value.to(y.dtype.element_ty), mask=(p < P)[:, None] & real[None, :])

"""Triton kernels of group_norm_silu: one launch takes moments of parts of each group, the next combines them and applies the norm.

`row_moments`, `row_apply`      channels are side by side (NHWC, NDHWC)
`plane_moments`, `plane_apply`  positions are side by side (NCHW, NCDHW)

A lane sums differences to the first value it sees. That value is one of its own sample, so however far from zero the mean is, the sums
of a lane lose at most as many bits as it has values. Lanes, channels and parts are then combined as moments: a mean in two numbers (a
rough one and what is missing, so that its last bits do not drown in a large mean), and the sum of squares about it. The order is fixed:
results do not change from run to run.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# ruff: noqa: RET505, RUF005

import triton
import triton.language as tl

from turnout.ops.common_kernels import silu


@triton.jit
def lane_moments(total, squares, count):
    """Mean of `count` differences to a pivot and the sum of squares about it, from their sums."""
    n = tl.maximum(count, 1).to(tl.float32)
    return total / n, squares - total * (total / n)


@triton.jit
def part_of(size, part, parts):
    """First and last of `size` things that are this part's."""
    each = tl.cdiv(size, parts)
    first = tl.minimum(part * each, size)
    return first, tl.minimum(first + each, size)


@triton.jit
def combined(rough, rest, squares, counts, AXIS: tl.constexpr, KEEP: tl.constexpr):
    """The moments of all parts along an axis from those of each: mean (rough + rest), sum of squares about it, count.

    KEEP: the axis stays, with size 1. The sums of a vector are numbers instead: a vector of size 1 costs exchanges between threads.
    """
    size = tl.sum(counts, AXIS, keep_dims=KEEP)
    n = tl.maximum(size, 1.0)
    middle = tl.sum(rough * counts, AXIS, keep_dims=KEEP) / n
    away = (rough - middle) + rest
    missing = tl.sum(away * counts, AXIS, keep_dims=KEEP) / n
    away -= missing
    return middle, missing, tl.sum(tl.where(counts > 0, squares + counts * away * away, 0.0), AXIS, keep_dims=KEEP), size


@triton.jit
def inverse_root(squares, size, eps):
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares, tl.maximum(size, 1.0)) + eps))


@triton.jit
def activated(x, rough, rest, scale, shift, SILU: tl.constexpr, dtype: tl.constexpr):
    y = ((x - rough) - rest) * scale + shift
    if SILU:
        y = silu(y, dtype == tl.float32)
    return y.to(dtype)


@triton.jit
def channels_of(block, G, CG: tl.constexpr, GB: tl.constexpr, CB: tl.constexpr):
    """The channels of GB groups as GB * CB columns (CB is a power of two that holds CG), and which columns there are."""
    j = tl.arange(0, GB * CB)
    if CG == CB:
        c = block * GB * CB + j
        return c, c < G * CG
    else:
        g = block * GB + j // CB
        return g * CG + j % CB, (g < G) & (j % CB < CG)


@triton.jit
def row_moments(
    x, partial, P, G, parts, blocks, xb, xp,
    CG: tl.constexpr, GB: tl.constexpr, CB: tl.constexpr, BP: tl.constexpr, U: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """partial [batch, parts, 3, G]. A program: one part of the rows, GB groups; U tiles [BP, GB * CB] at a time."""
    xp = tl.cast(xp, tl.int64)
    pid = tl.program_id(0).to(tl.int64)
    block, part, b = pid % blocks, pid // blocks % parts, pid // blocks // parts
    first, last = part_of(P, part, parts)
    c, real = channels_of(block.to(tl.int32), G, CG, GB, CB)
    lane = tl.arange(0, BP)
    px = x + b * xb + (first + lane)[:, None] * xp + c[None, :]
    px = tl.multiple_of(px, (1, V * x.dtype.element_ty.primitive_bitwidth // 8))
    rows = (last - first).to(tl.int32)
    pivot = tl.load(px, mask=(lane < rows)[:, None] & real[None, :], other=0.0).to(tl.float32)
    total = tl.zeros((BP, GB * CB), tl.float32)
    squares = tl.zeros((BP, GB * CB), tl.float32)
    whole = rows // (BP * U) * (BP * U)
    for start in range(0, whole, BP * U):
        tiles = ()
        for u in tl.static_range(U):
            at = tl.multiple_of(px + (start + u * BP) * xp, (1, V * x.dtype.element_ty.primitive_bitwidth // 8))
            tiles = tiles + (tl.load(at, mask=real[None, :], other=0.0),)
        for u in tl.static_range(U):
            away = tiles[u].to(tl.float32) - pivot
            total += away
            squares += away * away
    for start in range(whole, rows, BP):
        ok = (lane + start < rows)[:, None] & real[None, :]
        at = tl.multiple_of(px + start * xp, (1, V * x.dtype.element_ty.primitive_bitwidth // 8))
        away = tl.where(ok, tl.load(at, mask=ok, other=0.0).to(tl.float32) - pivot, 0.0)
        total += away
        squares += away * away

    count = ((rows - lane + BP - 1) // BP)[:, None]  # rows of each lane
    rest, squares = lane_moments(total, squares, count)
    counts = tl.where(real[None, :] & (count > 0), count, 0).to(tl.float32)
    rough, rest, squares, counts = combined(pivot, rest, squares, counts, 0, True)  # [1, GB * CB]
    rough, rest, squares, _ = combined(
        tl.reshape(rough, (GB, CB)), tl.reshape(rest, (GB, CB)), tl.reshape(squares, (GB, CB)), tl.reshape(counts, (GB, CB)), 1, True
    )
    g = (block * GB + tl.arange(0, GB))[:, None]
    into = partial + (b * parts + part) * 3 * G + g
    tl.store(into, rough, mask=g < G)
    tl.store(into + G, rest, mask=g < G)
    tl.store(into + 2 * G, squares, mask=g < G)


@triton.jit
def spread(x, GB: tl.constexpr, CB: tl.constexpr):
    """[1, GB] -> [GB * CB], a value for each column of a group."""
    return tl.reshape(tl.broadcast_to(tl.reshape(x, (GB, 1)), (GB, CB)), (GB * CB,))


@triton.jit
def row_apply(
    x, partial, w, bias, y, eps, P, G, parts, blocks, programs, xb, xp, yb, yp,
    CG: tl.constexpr, GB: tl.constexpr, CB: tl.constexpr, BP: tl.constexpr, U: tl.constexpr, V: tl.constexpr, PARTS: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """A program combines the moments of GB groups once and takes every `programs`-th U tiles of rows."""
    xp, yp = tl.cast(xp, tl.int64), tl.cast(yp, tl.int64)
    pid = tl.program_id(0).to(tl.int64)
    block, walk, b = pid % blocks, pid // blocks % programs, pid // blocks // programs
    part = tl.arange(0, PARTS)
    g = block.to(tl.int32) * GB + tl.arange(0, GB)
    first, last = part_of(P, part, parts)
    counts = tl.where((part < parts)[:, None] & (g < G)[None, :], ((last - first) * CG)[:, None], 0).to(tl.float32)
    found = partial + (b * parts + part)[:, None] * 3 * G + g[None, :]
    rough = tl.load(found, mask=counts > 0, other=0.0)
    rest = tl.load(found + G, mask=counts > 0, other=0.0)
    squares = tl.load(found + 2 * G, mask=counts > 0, other=0.0)
    rough, rest, squares, size = combined(rough, rest, squares, counts, 0, True)  # [1, GB]

    c, real = channels_of(block.to(tl.int32), G, CG, GB, CB)
    rough, rest = spread(rough, GB, CB)[None, :], spread(rest, GB, CB)[None, :]
    scale = spread(inverse_root(squares, size, eps), GB, CB)
    shift = tl.zeros((GB * CB,), tl.float32)
    if WEIGHT:
        scale *= tl.load(w + c, mask=real, other=0.0).to(tl.float32)
    if BIAS:
        shift += tl.load(bias + c, mask=real, other=0.0).to(tl.float32)
    scale = scale[None, :]
    shift = shift[None, :]
    lane = tl.arange(0, BP)
    for start in range(walk * (BP * U), P, programs * (BP * U)):
        px = x + b * xb + (start + lane)[:, None] * xp + c[None, :]
        py = y + b * yb + (start + lane)[:, None] * yp + c[None, :]
        tiles = ()
        for u in tl.static_range(U):
            ok = (start + u * BP + lane < P)[:, None] & real[None, :]
            at = tl.multiple_of(px + u * BP * xp, (1, V * x.dtype.element_ty.primitive_bitwidth // 8))
            tiles = tiles + (tl.load(at, mask=ok, other=0.0),)
        for u in tl.static_range(U):
            ok = (start + u * BP + lane < P)[:, None] & real[None, :]
            into = tl.multiple_of(py + u * BP * yp, (1, V * y.dtype.element_ty.primitive_bitwidth // 8))
            tl.store(into, activated(tiles[u].to(tl.float32), rough, rest, scale, shift, SILU, y.dtype.element_ty), mask=ok)


@triton.jit
def plane_moments(
    x, partial, P, G, CG, parts, xb, xc,
    BP: tl.constexpr, U: tl.constexpr, V: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """partial [batch, G, parts, 3]. A program: one part of a group's tiles of BP * U positions. DENSE: a group is one line."""
    xc = tl.cast(xc, tl.int64)
    pid = tl.program_id(0).to(tl.int64)
    part, group = pid % parts, pid // parts
    b, g = group // G, group % G
    length = P
    lines = CG
    if DENSE:
        length = P * CG
        lines = 1
    tiles_of_line = tl.cdiv(length, BP * U)
    first, last = part_of(lines * tiles_of_line, part, parts)
    lane = tl.arange(0, BP)
    base = x + b * xb + g * CG * xc
    head = base + first // tiles_of_line * xc + first % tiles_of_line * (BP * U) + lane
    head = tl.multiple_of(head, V * x.dtype.element_ty.primitive_bitwidth // 8)
    inside = ((first % tiles_of_line * (BP * U) + lane) // V < length // V) & (first < last)
    pivot = tl.load(head, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BP,), tl.float32)
    squares = tl.zeros((BP,), tl.float32)
    count = tl.zeros((BP,), tl.int32)
    for tile in range(first, last):
        start = tile % tiles_of_line * (BP * U)
        at = base + tile // tiles_of_line * xc + start + lane
        tiles = ()
        for u in tl.static_range(U):
            here = tl.multiple_of(at + u * BP, V * x.dtype.element_ty.primitive_bitwidth // 8)
            tiles = tiles + (tl.load(here, mask=(start + u * BP + lane) // V < length // V, other=0.0),)
        for u in tl.static_range(U):
            ok = start + u * BP + lane < length
            away = tl.where(ok, tiles[u].to(tl.float32) - pivot, 0.0)
            total += away
            squares += away * away
            count += ok.to(tl.int32)
    rest, squares = lane_moments(total, squares, count)
    rough, rest, squares, _ = combined(pivot, rest, squares, count.to(tl.float32), 0, False)
    into = partial + pid * 3
    tl.store(into, rough)
    tl.store(into + 1, rest)
    tl.store(into + 2, squares)


@triton.jit
def part_values(part, parts, tiles, tiles_of_line, length, TILE: tl.constexpr):
    """How many values a part of a group's tiles has: the last tile of a line may be short."""
    first, last = part_of(tiles, part, parts)
    short = tiles_of_line * TILE - length
    ends = last // tiles_of_line - first // tiles_of_line  # lines that end in this part
    return (last - first) * TILE - ends * short


@triton.jit
def plane_apply(
    x, partial, w, bias, y, eps, P, C, G, CG, parts, xb, xc, yb, yc,
    BP: tl.constexpr, U: tl.constexpr, V: tl.constexpr, DENSE: tl.constexpr, PARTS: tl.constexpr, STAT_TILE: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """A program: BP * U positions of one channel."""
    pid = tl.program_id(0).to(tl.int64)
    tiles = tl.cdiv(P, BP * U)
    tile, b, c = pid % tiles, pid // tiles // C, pid // tiles % C
    lane = tl.arange(0, BP)
    part = tl.arange(0, PARTS)
    start = tile * (BP * U)
    px = x + b * xb + start + c * xc + lane
    py = y + b * yb + start + c * yc + lane
    values = ()
    for u in tl.static_range(U):
        at = tl.multiple_of(px + u * BP, V * x.dtype.element_ty.primitive_bitwidth // 8)
        values = values + (tl.load(at, mask=(start + u * BP + lane) // V < P // V, other=0.0),)

    length = P
    lines = CG
    if DENSE:
        length = P * CG
        lines = 1
    line_tiles = tl.cdiv(length, STAT_TILE)
    counts = part_values(part, parts, lines * line_tiles, line_tiles, length, STAT_TILE).to(tl.float32)
    counts = tl.where(part < parts, counts, 0.0)
    found = partial + (b * G + c // CG) * (3 * parts) + part * 3
    rough = tl.load(found, mask=counts > 0, other=0.0)
    rest = tl.load(found + 1, mask=counts > 0, other=0.0)
    squares = tl.load(found + 2, mask=counts > 0, other=0.0)
    rough, rest, squares, size = combined(rough, rest, squares, counts, 0, False)
    scale = inverse_root(squares, size, eps)
    shift = 0.0
    if WEIGHT:
        scale *= tl.load(w + c).to(tl.float32)
    if BIAS:
        shift = tl.load(bias + c).to(tl.float32)
    for u in tl.static_range(U):
        into = tl.multiple_of(py + u * BP, V * y.dtype.element_ty.primitive_bitwidth // 8)
        out = activated(values[u].to(tl.float32), rough, rest, scale, shift, SILU, y.dtype.element_ty)
        tl.store(into, out, mask=(start + u * BP + lane) // V < P // V)

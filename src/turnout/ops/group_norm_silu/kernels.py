"""Triton kernels of group_norm_silu: one launch takes moments of parts of each group, the next combines them
and applies the norm.

`row_moments`, `row_apply`      channels are side by side (NHWC, NDHWC)
`plane_moments`, `plane_apply`  positions are side by side (NCHW, NCDHW)

A lane sums differences to the first value it sees. That value is one of its own sample, so however far from
zero the mean is, the sums of a lane lose at most as many bits as it has values. Lanes, channels and parts are
then combined as moments: a mean in two numbers (a rough one and what is missing, so that its last bits do not
drown in a large mean), and the sum of squares about it. The order is fixed: results do not change from run to
run.
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
    """First and end of the items that are this part's, when `parts` parts share `size` of them."""
    each = tl.cdiv(size, parts)
    first = tl.minimum(part * each, size)
    return first, tl.minimum(first + each, size)


@triton.jit
def combined(rough, rest, squares, counts, AXIS: tl.constexpr, KEEP: tl.constexpr):
    """The moments of all parts along an axis from those of each: mean (rough + rest), sum of squares about
    it, count.

    KEEP: the axis stays, with size 1. The sums of a vector are numbers instead: a vector of size 1 costs
    exchanges between threads.
    """
    size = tl.sum(counts, AXIS, keep_dims=KEEP)
    n = tl.maximum(size, 1.0)
    middle = tl.sum(rough * counts, AXIS, keep_dims=KEEP) / n
    away = (rough - middle) + rest
    missing = tl.sum(away * counts, AXIS, keep_dims=KEEP) / n
    away -= missing
    return (
        middle,
        missing,
        tl.sum(tl.where(counts > 0, squares + counts * away * away, 0.0), AXIS, keep_dims=KEEP),
        size,
    )


@triton.jit
def inverse_root(squares, size, eps):
    """1 / sqrt(variance + eps) of `size` values, from the sum of squares about their mean; of any shape."""
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares, tl.maximum(size, 1.0)) + eps))


@triton.jit
def activated(x, rough, rest, scale, shift, SILU: tl.constexpr, dtype: tl.constexpr):
    """silu((x - mean) * scale + shift) in the shape of the tile x, float32, with mean = rough + rest.

    rough, rest, scale and shift broadcast over x. SILU: else there is no activation. dtype: of the result.
    """
    y = ((x - rough) - rest) * scale + shift
    if SILU:
        y = silu(y, dtype == tl.float32)
    return y.to(dtype)


@triton.jit
def channels_of(block, G, CG: tl.constexpr, GB: tl.constexpr, CB: tl.constexpr):
    """The channels of GB groups as GB * CB columns (CB is a power of two that holds CG), and which columns
    there are."""
    j = tl.arange(0, GB * CB)  # [GB * CB]
    if CG == CB:
        c = block * GB * CB + j  # [GB * CB]
        return c, c < G * CG
    else:
        g = block * GB + j // CB  # [GB * CB]
        return g * CG + j % CB, (g < G) & (j % CB < CG)


@triton.jit
def row_moments(
    x,  # [batch, P, G * CG], channels side by side
    partial,  # [batch, parts, 3, G] float32: rough mean, rest of the mean, sum of squares about it
    P, G, parts, blocks,  # positions, groups, parts of the positions, blocks of GB groups
    xb, xp,  # strides of x by batch and position, in elements
    CG: tl.constexpr, GB: tl.constexpr,  # channels of a group, groups of a program
    CB: tl.constexpr,  # CG, rounded up to a power of two
    BP: tl.constexpr, U: tl.constexpr,  # positions of a tile, tiles at a time
    V: tl.constexpr,  # channels of one vector
):  # fmt: skip
    """Write the moments of each part of each group.

    A program: one part of the rows, GB groups; U tiles [BP, GB * CB] at a time.
    """
    xp = tl.cast(xp, tl.int64)
    pid = tl.program_id(0).to(tl.int64)
    block, part, b = pid % blocks, pid // blocks % parts, pid // blocks // parts
    first, last = part_of(P, part, parts)
    c, real = channels_of(block.to(tl.int32), G, CG, GB, CB)  # [GB * CB] each
    lane = tl.arange(0, BP)  # [BP]
    px = x + b * xb + (first + lane)[:, None] * xp + c[None, :]  # [BP, GB * CB]
    px = tl.multiple_of(px, (1, V * x.dtype.element_ty.primitive_bitwidth // 8))
    rows = (last - first).to(tl.int32)
    # [BP, GB * CB]: the first value of each lane
    pivot = tl.load(px, mask=(lane < rows)[:, None] & real[None, :], other=0.0).to(tl.float32)
    total = tl.zeros((BP, GB * CB), tl.float32)
    squares = tl.zeros((BP, GB * CB), tl.float32)
    whole = rows // (BP * U) * (BP * U)  # rows in whole tiles, which need no mask of rows
    for start in range(0, whole, BP * U):
        tiles = ()  # U tiles [BP, GB * CB]
        for u in tl.static_range(U):
            at = tl.multiple_of(
                px + (start + u * BP) * xp,  # [BP, GB * CB]
                (1, V * x.dtype.element_ty.primitive_bitwidth // 8),  # bytes of a vector
            )
            tiles = tiles + (tl.load(at, mask=real[None, :], other=0.0),)
        for u in tl.static_range(U):
            away = tiles[u].to(tl.float32) - pivot  # [BP, GB * CB]
            total += away
            squares += away * away
    for start in range(whole, rows, BP):
        ok = (lane + start < rows)[:, None] & real[None, :]  # [BP, GB * CB]
        at = tl.multiple_of(px + start * xp, (1, V * x.dtype.element_ty.primitive_bitwidth // 8))
        away = tl.where(ok, tl.load(at, mask=ok, other=0.0).to(tl.float32) - pivot, 0.0)
        total += away
        squares += away * away

    count = ((rows - lane + BP - 1) // BP)[:, None]  # [BP, 1] rows of each lane
    rest, squares = lane_moments(total, squares, count)  # [BP, GB * CB] each
    counts = tl.where(real[None, :] & (count > 0), count, 0).to(tl.float32)  # [BP, GB * CB]
    rough, rest, squares, counts = combined(pivot, rest, squares, counts, 0, True)  # [1, GB * CB] each
    rough, rest, squares, _ = combined(  # [GB, 1] each
        tl.reshape(rough, (GB, CB)), tl.reshape(rest, (GB, CB)),
        tl.reshape(squares, (GB, CB)), tl.reshape(counts, (GB, CB)), 1, True,
    )  # fmt: skip
    g = (block * GB + tl.arange(0, GB))[:, None]  # [GB, 1]
    into = partial + (b * parts + part) * 3 * G + g  # [GB, 1]
    tl.store(into, rough, mask=g < G)
    tl.store(into + G, rest, mask=g < G)
    tl.store(into + 2 * G, squares, mask=g < G)


@triton.jit
def spread(x, GB: tl.constexpr, CB: tl.constexpr):
    """[1, GB] -> [GB * CB], a value for each column of a group."""
    return tl.reshape(tl.broadcast_to(tl.reshape(x, (GB, 1)), (GB, CB)), (GB * CB,))


@triton.jit
def row_apply(
    x, partial, w, bias, y,  # x and partial as in `row_moments`; [G * CG] each; y as x
    eps, P, G, parts, blocks, programs,  # programs: that share the positions of a batch and a block of groups
    xb, xp, yb, yp,  # strides by batch and position, in elements
    CG: tl.constexpr, GB: tl.constexpr, CB: tl.constexpr,  # as in `row_moments`
    BP: tl.constexpr, U: tl.constexpr, V: tl.constexpr,
    PARTS: tl.constexpr,  # `parts`, rounded up to a power of two
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Apply the norm and the activation.

    A program combines the moments of GB groups once and takes every `programs`-th U tiles of rows.
    """
    xp, yp = tl.cast(xp, tl.int64), tl.cast(yp, tl.int64)
    pid = tl.program_id(0).to(tl.int64)
    block, walk, b = pid % blocks, pid // blocks % programs, pid // blocks // programs
    part = tl.arange(0, PARTS)  # [PARTS]
    g = block.to(tl.int32) * GB + tl.arange(0, GB)  # [GB]
    first, last = part_of(P, part, parts)  # [PARTS] each
    # [PARTS, GB]
    counts = tl.where(
        (part < parts)[:, None] & (g < G)[None, :], ((last - first) * CG)[:, None], 0
    ).to(tl.float32)  # fmt: skip
    found = partial + (b * parts + part)[:, None] * 3 * G + g[None, :]  # [PARTS, GB]
    rough = tl.load(found, mask=counts > 0, other=0.0)
    rest = tl.load(found + G, mask=counts > 0, other=0.0)
    squares = tl.load(found + 2 * G, mask=counts > 0, other=0.0)
    rough, rest, squares, size = combined(rough, rest, squares, counts, 0, True)  # [1, GB] each

    c, real = channels_of(block.to(tl.int32), G, CG, GB, CB)  # [GB * CB] each
    rough, rest = spread(rough, GB, CB)[None, :], spread(rest, GB, CB)[None, :]  # [1, GB * CB] each
    scale = spread(inverse_root(squares, size, eps), GB, CB)  # [GB * CB]
    shift = tl.zeros((GB * CB,), tl.float32)
    if WEIGHT:
        scale *= tl.load(w + c, mask=real, other=0.0).to(tl.float32)
    if BIAS:
        shift += tl.load(bias + c, mask=real, other=0.0).to(tl.float32)
    scale = scale[None, :]  # [1, GB * CB]
    shift = shift[None, :]  # [1, GB * CB]
    lane = tl.arange(0, BP)  # [BP]
    for start in range(walk * (BP * U), P, programs * (BP * U)):
        px = x + b * xb + (start + lane)[:, None] * xp + c[None, :]  # [BP, GB * CB]
        py = y + b * yb + (start + lane)[:, None] * yp + c[None, :]  # [BP, GB * CB]
        tiles = ()  # U tiles [BP, GB * CB]
        for u in tl.static_range(U):
            ok = (start + u * BP + lane < P)[:, None] & real[None, :]  # [BP, GB * CB]
            at = tl.multiple_of(px + u * BP * xp, (1, V * x.dtype.element_ty.primitive_bitwidth // 8))
            tiles = tiles + (tl.load(at, mask=ok, other=0.0),)
        for u in tl.static_range(U):
            ok = (start + u * BP + lane < P)[:, None] & real[None, :]  # [BP, GB * CB]
            into = tl.multiple_of(py + u * BP * yp, (1, V * y.dtype.element_ty.primitive_bitwidth // 8))
            tl.store(
                into,
                activated(tiles[u].to(tl.float32), rough, rest, scale, shift, SILU, y.dtype.element_ty),
                mask=ok,
            )


@triton.jit
def plane_moments(
    x,  # [batch, G * CG, P], positions side by side
    partial,  # [batch, G, parts, 3] float32: rough mean, rest of the mean, sum of squares about it
    P, G, CG, parts,  # positions, groups, channels of a group, parts of a group
    xb, xc,  # strides of x by batch and channel, in elements
    BP: tl.constexpr, U: tl.constexpr, V: tl.constexpr,  # positions of a tile, tiles at a time, vector
    DENSE: tl.constexpr,  # the channels of a group follow each other without gaps: it is one line
):  # fmt: skip
    """Write the moments of each part of each group. A program: one part of the tiles of one group."""
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
    lane = tl.arange(0, BP)  # [BP]
    base = x + b * xb + g * CG * xc
    head = base + first // tiles_of_line * xc + first % tiles_of_line * (BP * U) + lane  # [BP]
    head = tl.multiple_of(head, V * x.dtype.element_ty.primitive_bitwidth // 8)
    inside = ((first % tiles_of_line * (BP * U) + lane) // V < length // V) & (first < last)  # [BP]
    pivot = tl.load(head, mask=inside, other=0.0).to(tl.float32)  # [BP], the first value of each lane
    total = tl.zeros((BP,), tl.float32)
    squares = tl.zeros((BP,), tl.float32)
    count = tl.zeros((BP,), tl.int32)
    for tile in range(first, last):
        start = tile % tiles_of_line * (BP * U)
        at = base + tile // tiles_of_line * xc + start + lane  # [BP]
        tiles = ()  # U of [BP]
        for u in tl.static_range(U):
            here = tl.multiple_of(at + u * BP, V * x.dtype.element_ty.primitive_bitwidth // 8)  # [BP]
            tiles = tiles + (tl.load(here, mask=(start + u * BP + lane) // V < length // V, other=0.0),)
        for u in tl.static_range(U):
            ok = start + u * BP + lane < length  # [BP]
            away = tl.where(ok, tiles[u].to(tl.float32) - pivot, 0.0)  # [BP]
            total += away
            squares += away * away
            count += ok.to(tl.int32)
    rest, squares = lane_moments(total, squares, count)  # [BP] each
    rough, rest, squares, _ = combined(pivot, rest, squares, count.to(tl.float32), 0, False)  # numbers
    into = partial + pid * 3
    tl.store(into, rough)
    tl.store(into + 1, rest)
    tl.store(into + 2, squares)


@triton.jit
def part_values(part, parts, tiles, tiles_of_line, length, TILE: tl.constexpr):
    """How many values a part of a group's tiles has, in the shape of `part`: a line's last tile may be short.

    tiles, tiles_of_line: tiles of the group, of one line; length: of a line; TILE: positions of a whole tile.
    """
    first, last = part_of(tiles, part, parts)
    short = tiles_of_line * TILE - length
    ends = last // tiles_of_line - first // tiles_of_line  # lines that end in this part
    return (last - first) * TILE - ends * short


@triton.jit
def plane_apply(
    x, partial, w, bias, y,  # x and partial as in `plane_moments`; [C] each; y as x
    eps, P, C, G, CG, parts,  # C = G * CG
    xb, xc, yb, yc,  # strides by batch and channel, in elements
    BP: tl.constexpr, U: tl.constexpr, V: tl.constexpr, DENSE: tl.constexpr,  # as in `plane_moments`
    PARTS: tl.constexpr,  # `parts`, rounded up to a power of two
    STAT_TILE: tl.constexpr,  # BP * U of `plane_moments`
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Apply the norm and the activation. A program: BP * U positions of one channel."""
    pid = tl.program_id(0).to(tl.int64)
    tiles = tl.cdiv(P, BP * U)
    tile, b, c = pid % tiles, pid // tiles // C, pid // tiles % C
    lane = tl.arange(0, BP)  # [BP]
    part = tl.arange(0, PARTS)  # [PARTS]
    start = tile * (BP * U)
    px = x + b * xb + start + c * xc + lane  # [BP]
    py = y + b * yb + start + c * yc + lane  # [BP]
    values = ()  # U of [BP]
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
    counts = tl.where(part < parts, counts, 0.0)  # [PARTS]
    found = partial + (b * G + c // CG) * (3 * parts) + part * 3  # [PARTS]
    rough = tl.load(found, mask=counts > 0, other=0.0)
    rest = tl.load(found + 1, mask=counts > 0, other=0.0)
    squares = tl.load(found + 2, mask=counts > 0, other=0.0)
    rough, rest, squares, size = combined(rough, rest, squares, counts, 0, False)  # numbers
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

"""Numba kernels of Winograd's F(2x2, 3x3) on a CPU. Half types arrive as their bits, as in
`common_cpu_kernels`.

A thread takes blocks of tiles one by one, and a block goes all the way from pixels to pixels in buffers that
stay in the cache: its tiles are transformed, multiplied at each of 16 points, added up over depths and
channels, and transformed back. Whichever the layout, vectors lie
along what memory has side by side, so nothing is transposed: channels last, they are channels and filters,
and the numbers of a tile are spread over lanes; channels first, they are tiles of a row, and the numbers of a
filter are spread.
"""

# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false

from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from turnout.ops.common_cpu_kernels import (
    LANES,
    every_second,
    fused,
    in_turns,
    narrowed,
    prefer_wide_vectors,
    put_vector,
    spread,
    sum_of_lanes,
    vector_at,
    vector_minus,
    vector_plus,
    vector_times,
    widened,
)
from turnout.ops.convolution.cpu.product_kernels import ROWS, multiply
from turnout.ops.numba_cache import inlined, kernel

CHANNELS = 8  # of a filter that are transformed together
POINTS = 16  # numbers that a tile of 4x4 pixels is transformed to


class Steps(NamedTuple):
    """Elements from one of each to the next."""

    clip: int
    channel: int
    frame: int
    row: int
    column: int


class Plan(NamedTuple):
    """One convolution of N clips, and the blocks that it is cut into."""

    channels: int
    filters: int
    depth: int  # of the kernel
    dilation: int
    frames: int
    height: int
    width: int
    front: int  # padding
    top: int
    left: int
    outputs: int  # frames that come out
    out_height: int
    out_width: int
    chunk: int  # frames that come out of a block, at most
    tall: int  # tiles of a block, down and across, at most
    wide: int
    share: int  # filters of a block, at most
    parts: int  # channels are added up in so many parts


@intrinsic
def take(typing_context, taken):
    """The next number, counted in the first element of an array that all threads share: one that is slowed
    down gets fewer.
    """

    def emit(context, builder, signature, args):
        where = context.make_array(taken)(context, builder, args[0]).data
        return builder.atomic_rmw("add", where, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(taken), emit


@kernel
def aligned(count):
    """Room that begins with a cache line: vectors across two lines take a third longer."""
    room = np.empty(count + LANES, np.float32)
    first = -(room.ctypes.data // 4) % LANES
    return room[first : first + count]


@inlined
def up(n, step):
    return -(-n // step) * step


@inlined
def copy_row(x, at, y, to, count):
    """Widened or rounded where types differ. The last vector overlaps the one before."""
    if count < LANES:
        for i in range(count):
            y[to + i] = narrowed(widened(x[at + i]), y[to])
    else:
        for i in range(0, count - LANES, LANES):
            put_vector(vector_at(x, at + i), y, to + i)
        put_vector(vector_at(x, at + count - LANES), y, to + count - LANES)


# Transforms along one axis: four pixels to four points, four points to two pixels, three taps of a filter to
# four points


@inlined
def to_points(a, b, c, d):
    return vector_minus(a, c), vector_plus(b, c), vector_minus(c, b), vector_minus(b, d)


@inlined
def to_pixels(a, b, c, d):
    return vector_plus(vector_plus(b, c), a), vector_minus(vector_minus(b, c), d)


@inlined
def taps_to_points(a, b, c):
    outer, half = vector_plus(a, c), spread(np.float32(0.5))
    return a, vector_times(vector_plus(outer, b), half), vector_times(vector_minus(outer, b), half), c


@inlined
def put_four(four, into, at, step):
    put_vector(four[0], into, at)
    put_vector(four[1], into, at + 4 * step)
    put_vector(four[2], into, at + 8 * step)
    put_vector(four[3], into, at + 12 * step)


@inlined
def pixels_down(m, at, step):
    return to_pixels(
        vector_at(m, at),
        vector_at(m, at + 4 * step),
        vector_at(m, at + 8 * step),
        vector_at(m, at + 12 * step),
    )


@inlined
def pixels_of(m, at, step, shift):
    """The 2x2 outputs of 16 points: upper left, upper right, lower left, lower right."""
    p, q, r, s = (
        pixels_down(m, at, step),
        pixels_down(m, at + step, step),
        pixels_down(m, at + 2 * step, step),
        pixels_down(m, at + 3 * step, step),
    )
    upper, lower = to_pixels(p[0], q[0], r[0], s[0]), to_pixels(p[1], q[1], r[1], s[1])
    return (
        vector_plus(upper[0], shift),
        vector_plus(upper[1], shift),
        vector_plus(lower[0], shift),
        vector_plus(lower[1], shift),
    )


@inlined
def zero_if_finite(four, found):
    """What was found so far, plus nothing: NaN once a pixel is NaN or infinite."""
    zero = spread(np.float32(0))
    return fused(four[0], zero, fused(four[1], zero, fused(four[2], zero, fused(four[3], zero, found))))


@inlined
def row_of_filter(taps, at):
    return taps_to_points(vector_at(taps, at), vector_at(taps, at + LANES), vector_at(taps, at + 2 * LANES))


@kernel
def transform_weight(w, steps, filters, channels, depth, u, point, first, last):
    """To `[depth, 16, filters / LANES, channels, LANES]`, points `point` apart. A part is CHANNELS channels
    of LANES filters; they are laid side by side first, so that memory is read and written in longer
    pieces."""
    prefer_wide_vectors()
    taps, pieces = np.zeros(CHANNELS * depth * 9 * LANES, np.float32), -(-channels // CHANNELS)
    for part in range(first, last):
        block, start = part // pieces, part % pieces * CHANNELS
        count, lanes = min(CHANNELS, channels - start), min(LANES, filters - block * LANES)
        if lanes < LANES:
            taps[:] = 0
        for lane in range(lanes):
            for c in range(count):
                at, to = (
                    (block * LANES + lane) * steps.clip + (start + c) * steps.channel,
                    c * depth * 9 * LANES + lane,
                )
                for z in range(depth):
                    for y in range(3):
                        for x in range(3):
                            taps[to + ((z * 3 + y) * 3 + x) * LANES] = widened(
                                w[at + z * steps.frame + y * steps.row + x * steps.column]
                            )
        for z in range(depth):
            for c in range(count):
                at, to = (
                    (c * depth + z) * 9 * LANES,
                    z * POINTS * point + (block * channels + start + c) * LANES,
                )
                p, q, r = (
                    row_of_filter(taps, at),
                    row_of_filter(taps, at + 3 * LANES),
                    row_of_filter(taps, at + 6 * LANES),
                )
                put_four(taps_to_points(p[0], q[0], r[0]), u, to, point)
                put_four(taps_to_points(p[1], q[1], r[1]), u, to + point, point)
                put_four(taps_to_points(p[2], q[2], r[2]), u, to + 2 * point, point)
                put_four(taps_to_points(p[3], q[3], r[3]), u, to + 3 * point, point)


# Channels last: a tile's channels are vectors


@inlined
def row_of_tile(x, at, step):
    return to_points(
        vector_at(x, at), vector_at(x, at + step), vector_at(x, at + 2 * step), vector_at(x, at + 3 * step)
    )


@kernel
def transform_tile(x, at, row, column, channels, v, into, point):
    """All channels of one tile, `[16, channels]`. Channels beyond the last are never looked at again."""
    prefer_wide_vectors()
    for c in range(0, channels, LANES):
        p, q = row_of_tile(x, at + c, column), row_of_tile(x, at + row + c, column)
        r, s = row_of_tile(x, at + 2 * row + c, column), row_of_tile(x, at + 3 * row + c, column)
        put_four(to_points(p[0], q[0], r[0], s[0]), v, into + c, point)
        put_four(to_points(p[1], q[1], r[1], s[1]), v, into + point + c, point)
        put_four(to_points(p[2], q[2], r[2], s[2]), v, into + 2 * point + c, point)
        put_four(to_points(p[3], q[3], r[3], s[3]), v, into + 3 * point + c, point)


@kernel
def tiles_of_channels(x, frame, steps, plan, y0, x0, tall, wide, v, v_at, v_tile, point, edge):
    """A block of one frame, tiles `v_tile` apart.

    A tile that sees padding, or lies at the end of memory, is copied to `edge` before.
    """
    row, column = steps.row, steps.column
    reach = 3 * (row + column) + v_tile
    for i in range(tall):
        top = 2 * (y0 + i) - plan.top
        for j in range(wide):
            left, into = 2 * (x0 + j) - plan.left, v_at + (i * wide + j) * v_tile
            at = frame + top * row + left * column
            if (
                top >= 0
                and left >= 0
                and top + 4 <= plan.height
                and left + 4 <= plan.width
                and at + reach <= x.size
            ):
                transform_tile(x, at, row, column, plan.channels, v, into, point)
                continue
            for pixel in range(16):
                y, z, to = top + pixel // 4, left + pixel % 4, pixel * v_tile
                if 0 <= y < plan.height and 0 <= z < plan.width:
                    copy_row(x, frame + y * row + z * column, edge, to, plan.channels)
                else:
                    edge[to : to + plan.channels] = 0
            transform_tile(edge, 0, 4 * v_tile, v_tile, plan.channels, v, into, point)


@inlined
def put_filters(values, y, at, count, rest):
    """As many of a vector's lanes as there are filters left."""
    if count >= LANES:
        put_vector(values, y, at)
    else:
        put_vector(values, rest, 0)
        for lane in range(count):
            y[at + lane] = narrowed(rest[lane], y[at])


@kernel
def pixels_of_filters(
    m, m_at, m_tile, point, shift, filters, y, frame, steps, plan, y0, x0, tall, wide, rest
):
    """A block of one frame back to pixels, channels last. Whether all of them are finite."""
    prefer_wide_vectors()
    row, column, found = steps.row, steps.column, spread(np.float32(0))
    for i in range(tall):
        for j in range(wide):
            below, beside = 2 * (y0 + i) + 1 < plan.out_height, 2 * (x0 + j) + 1 < plan.out_width
            at, of = frame + 2 * (y0 + i) * row + 2 * (x0 + j) * column, m_at + (i * wide + j) * m_tile
            for f in range(0, filters, LANES):
                four, count = pixels_of(m, of + f, point, vector_at(shift, f)), filters - f
                found = zero_if_finite(four, found)
                put_filters(four[0], y, at + f, count, rest)
                if beside:
                    put_filters(four[1], y, at + column + f, count, rest)
                if below:
                    put_filters(four[2], y, at + row + f, count, rest)
                if below and beside:
                    put_filters(four[3], y, at + row + column + f, count, rest)
    return sum_of_lanes(found) == 0


# Channels first: tiles are vectors, counted through all rows of a block


@inlined
def four_rows(rows, at, wide, length):
    """The same tiles of the rows 0 to 3 that they cover: even rows lie before odd ones, and two rows are
    `wide` tiles apart.
    """
    even, odd = at, at + 4 * length
    return to_points(
        vector_at(rows, even), vector_at(rows, odd), vector_at(rows, even + wide), vector_at(rows, odd + wide)
    )


@kernel
def tiles_of_planes(x, frame, steps, plan, y0, x0, tall, wide, v, v_at, v_channel, point, lines, rows):
    """A block of one frame, `[16, channels, tiles]`. Rows are transformed along themselves to `[2, 4,
    tiles]`, vectors that reach into the next row, which is written later; then across."""
    prefer_wide_vectors()
    top, left, room, length = (
        2 * y0 - plan.top,
        2 * x0 - plan.left,
        lines.size // (2 * plan.tall + 2),
        rows.size // 8,
    )
    start = max(0, left)
    count = max(0, min(plan.width, left + 2 * wide + 2) - start)
    lines[:] = 0
    for c in range(plan.channels):
        for i in range(max(0, -top), min(2 * tall + 2, plan.height - top)):
            copy_row(
                x,
                frame + c * steps.channel + (top + i) * steps.row + start,
                lines,
                i * room + start - left,
                count,
            )
        for i in range(2 * tall + 2):
            for j in range(0, wide, LANES):
                at, to = i * room + 2 * j, i % 2 * 4 * length + i // 2 * wide + j
                p, q, r, s = (
                    vector_at(lines, at),
                    vector_at(lines, at + LANES),
                    vector_at(lines, at + 2),
                    vector_at(lines, at + LANES + 2),
                )
                four = to_points(
                    every_second(p, q, 0), every_second(p, q, 1), every_second(r, s, 0), every_second(r, s, 1)
                )
                put_vector(four[0], rows, to)
                put_vector(four[1], rows, to + length)
                put_vector(four[2], rows, to + 2 * length)
                put_vector(four[3], rows, to + 3 * length)
        for t in range(0, tall * wide, LANES):
            into = v_at + c * v_channel + t
            put_four(four_rows(rows, t, wide, length), v, into, point)
            put_four(four_rows(rows, t + length, wide, length), v, into + point, point)
            put_four(four_rows(rows, t + 2 * length, wide, length), v, into + 2 * point, point)
            put_four(four_rows(rows, t + 3 * length, wide, length), v, into + 3 * point, point)


@kernel
def pixels_of_planes(
    m, m_at, m_filter, point, shift, filters, y, frame, steps, plan, y0, x0, tall, wide, rows
):
    """A block of one frame back to pixels, channels first: upper rows of all tiles, lower ones, and from
    there to where they belong. Whether all of them are finite."""
    prefer_wide_vectors()
    width, lower, found = min(2 * wide, plan.out_width - 2 * x0), rows.size // 2, spread(np.float32(0))
    for f in range(filters):
        bias = spread(shift[f])
        for t in range(0, tall * wide, LANES):
            four = pixels_of(m, m_at + f * m_filter + t, point, bias)
            found = zero_if_finite(four, found)
            put_vector(in_turns(four[0], four[1], 0), rows, 2 * t)
            put_vector(in_turns(four[0], four[1], 1), rows, 2 * t + LANES)
            put_vector(in_turns(four[2], four[3], 0), rows, lower + 2 * t)
            put_vector(in_turns(four[2], four[3], 1), rows, lower + 2 * t + LANES)
        for i in range(min(2 * tall, plan.out_height - 2 * y0)):
            at = frame + f * steps.channel + (2 * y0 + i) * steps.row + 2 * x0
            copy_row(rows, i % 2 * lower + i // 2 * 2 * wide, y, at, width)
    return sum_of_lanes(found) == 0


@kernel
def convolve(x, x_steps, u, u_point, shift, y, y_steps, plan, LAST, taken, odd, blocks, first, last):
    """Blocks that no other thread has `taken`, whatever even share, first to last, was meant. u is what
    `transform_weight` makes; x and y have channels (LAST) or columns side by side. `odd[0]` becomes 1 if a
    number that comes out is not finite: that may be the transforms' doing, so the call has to be made
    otherwise."""
    channels = plan.channels
    down, across = -(-plan.out_height // 2), -(-plan.out_width // 2)
    blocks_down, blocks_across, chunks = (
        -(-down // plan.tall),
        -(-across // plan.wide),
        -(-plan.outputs // plan.chunk),
    )
    shares, most = -(-plan.filters // plan.share), plan.tall * plan.wide
    # Strides of an odd number of lines: multiples of 4 KiB would meet in the same few places of a cache.
    if LAST:
        v_row, m_row = up(channels, LANES), up(plan.share, LANES)
        v_point, m_point = up(most, ROWS) * v_row + LANES, up(most, ROWS) * m_row + LANES
        lines, rows = np.empty(0, np.float32), np.empty(16 * v_row, np.float32)
    else:
        v_row = m_row = up(most, 2 * LANES) + LANES
        v_point, m_point = channels * v_row + LANES, up(plan.share, ROWS) * m_row + LANES
        lines = aligned((2 * plan.tall + 2) * (2 * up(plan.wide, LANES) + LANES))
        rows = aligned(8 * up(most + plan.wide + LANES, LANES))
    v_depth, u_depth, size = plan.dilation * POINTS * v_point, POINTS * u_point, -(-channels // plan.parts)
    seen = min(plan.frames, plan.chunk + (plan.depth - 1) * plan.dilation)
    v, m = aligned(seen * POINTS * v_point + LANES), aligned(plan.chunk * POINTS * m_point)
    rows[:] = 0
    if LAST:
        v[:] = 0  # tiles beyond the last are multiplied too, and denormal numbers left there would take long
    while True:
        block = take(taken)
        if block >= blocks:
            break
        f0, block = block % shares * plan.share, block // shares
        y0, x0, block = (
            block // blocks_across % blocks_down * plan.tall,
            block % blocks_across * plan.wide,
            block // blocks_across // blocks_down,
        )
        o0, n = block % chunks * plan.chunk, block // chunks
        filters = min(plan.share, plan.filters - f0)
        tall, wide, count = (
            min(plan.tall, down - y0),
            min(plan.wide, across - x0),
            min(plan.chunk, plan.outputs - o0),
        )
        start, end = (
            max(0, o0 - plan.front),
            min(plan.frames, o0 + count - plan.front + (plan.depth - 1) * plan.dilation),
        )
        for f in range(start, end):
            at, into = n * x_steps.clip + f * x_steps.frame, (f - start) * POINTS * v_point
            if LAST:
                tiles_of_channels(x, at, x_steps, plan, y0, x0, tall, wide, v, into, v_row, v_point, rows)
            else:
                tiles_of_planes(
                    x, at, x_steps, plan, y0, x0, tall, wide, v, into, v_row, v_point, lines, rows
                )
        for point in range(POINTS):
            for o in range(count):
                into, f = (o * POINTS + point) * m_point, o0 + o - plan.front
                low = max(0, -(f // plan.dilation))  # depths that see a frame
                depth = min(plan.depth, (plan.frames - 1 - f) // plan.dilation + 1) - low
                if depth <= 0:
                    m[into : into + m_point] = 0
                    continue
                at, of = (
                    ((f + low * plan.dilation - start) * POINTS + point) * v_point,
                    (low * POINTS + point) * u_point + f0 * channels,
                )
                if LAST:
                    multiply(
                        v, at, v_depth, 1, v_row, LANES * v_row, u, of, u_depth, LANES, channels * LANES,
                        m, into, m_row, tall * wide, -(-filters // LANES), depth, channels, size,
                    )  # fmt: skip
                else:
                    multiply(
                        u, of, u_depth, LANES, 1, channels * LANES, v, at, v_depth, v_row, LANES,
                        m, into, m_row, filters, -(-(tall * wide) // LANES), depth, channels, size,
                    )  # fmt: skip
        for o in range(count):
            at, of = n * y_steps.clip + f0 * y_steps.channel + (o0 + o) * y_steps.frame, o * POINTS * m_point
            if LAST:
                finite = pixels_of_filters(
                    m, of, m_row, m_point, shift[f0:], filters, y, at, y_steps, plan, y0, x0, tall, wide, rows
                )
            else:
                finite = pixels_of_planes(
                    m, of, m_row, m_point, shift[f0:], filters, y, at, y_steps, plan, y0, x0, tall, wide, rows
                )
            if not finite:
                odd[0] = 1

"""Numba kernels of group_norm_silu on a CPU. Half types arrive as their bits, as in `common_cpu_kernels`.

`row_sums`, `line_sums`    sums of x and of its squares for each block of positions and each group
`combine`                  those of all blocks, in one order, to what the norm needs
`apply_rows`, `apply_lines`, `apply_spatial`  the norm and the activation

Sums are float64: a square of a float32 is exact there, so nothing depends on which products and sums LLVM
fuses. Each
sum is taken in one order, whatever the layout: of a channel and a column over frames and rows, then over the
columns of the block, then over the channels of the group.
"""

# pyright: basic, reportCallIssue=false

import numpy as np

from turnout.ops.common_cpu_kernels import (
    FUSED,
    LANES,
    fused,
    narrowed,
    prefer_wide_vectors,
    put_vector,
    silu,
    vector_at,
    vector_minus,
    widen,
    widened,
)
from turnout.ops.numba_cache import inlined, kernel

TILE = 1024  # positions that are widened at a time, where channels are not side by side


@kernel
def add(x, totals, squares):
    """Add values and their squares, each to a sum of its own."""
    prefer_wide_vectors()
    for i in range(x.size):
        value = np.float64(widened(x[i]))
        totals[i] += value
        squares[i] += value * value


@kernel
def add_apart(x, at, step, totals, squares):
    """The same of values that are `step` apart."""
    for i in range(totals.size):
        value = np.float64(widened(x[at + i * step]))
        totals[i] += value
        squares[i] += value * value


@kernel
def row_sums(x, frames, xb, xh, xw, shape, block, sums, first, last):
    """Blocks first to last of x with channels side by side.

    frames: where those of a batch entry begin. shape: batch, height, width, channels; block: rows, columns.
    sums: [batch * blocks, 2, groups].
    """
    _, height, width, channels = shape
    rows, columns = block
    groups = sums.shape[2]
    each = channels // groups
    down, across = -(-height // rows), -(-width // columns)
    totals, squares = np.empty(columns * channels), np.empty(columns * channels)
    for u in range(first, last):
        top, left = u // across % down * rows, u % across * columns
        wide = min(columns, width - left)
        totals[: wide * channels] = 0
        squares[: wide * channels] = 0
        for t in range(frames.size):
            for h in range(top, min(top + rows, height)):
                at = u // across // down * xb + frames[t] + h * xh + left * xw
                if xw == channels:
                    add(x[at : at + wide * channels], totals, squares)
                    continue
                for w in range(wide):
                    own = slice(w * channels, (w + 1) * channels)
                    add(x[at + w * xw : at + w * xw + channels], totals[own], squares[own])
        for w in range(1, wide):
            for c in range(channels):
                totals[c] += totals[w * channels + c]
                squares[c] += squares[w * channels + c]
        for g in range(groups):
            total, square = totals[g * each], squares[g * each]
            for c in range(g * each + 1, (g + 1) * each):
                total += totals[c]
                square += squares[c]
            sums[u, 0, g] = total
            sums[u, 1, g] = square


@kernel
def line_sums(x, frames, xb, xc, xh, xw, shape, block, sums, first, last):
    """The same for any strides; first and last count batch entries, rows of blocks and groups."""
    _, height, width, channels = shape
    rows, columns = block
    groups = sums.shape[2]
    each = channels // groups
    down, across = -(-height // rows), -(-width // columns)
    totals, squares = np.empty(width), np.empty(width)
    for u in range(first, last):
        line, g = u // groups, u % groups
        top = line % down * rows
        for c in range(g * each, (g + 1) * each):
            totals[:] = 0
            squares[:] = 0
            for t in range(frames.size):
                for h in range(top, min(top + rows, height)):
                    at = line // down * xb + c * xc + frames[t] + h * xh
                    if xw == 1:
                        add(x[at : at + width], totals, squares)
                    else:
                        add_apart(x, at, xw, totals, squares)
            for j in range(across):
                total, square = totals[j * columns], squares[j * columns]
                for w in range(j * columns + 1, min((j + 1) * columns, width)):
                    total += totals[w]
                    square += squares[w]
                if c == g * each:
                    sums[line * across + j, 0, g] = total
                    sums[line * across + j, 1, g] = square
                else:
                    sums[line * across + j, 0, g] += total
                    sums[line * across + j, 1, g] += square


@kernel
def combine(sums, count, eps, moments):
    """sums [batch, blocks, 2 * groups] of `count` values in all to moments [batch, 3, groups]: the mean in
    two numbers and what differences to it are multiplied with."""
    batch, blocks, width = sums.shape
    groups = width // 2
    total = np.empty(width)
    for b in range(batch):
        total[:] = 0
        for k in range(blocks):
            for i in range(width):
                total[i] += sums[b, k, i]
        for g in range(groups):
            mean = total[g] / count
            variance = total[groups + g] / count - mean * mean
            if variance < 0:
                variance = 0.0
            moments[b, 0, g] = np.float32(mean)
            moments[b, 1, g] = np.float32(mean - np.float64(np.float32(mean)))
            moments[b, 2, g] = np.float32(1.0 / np.sqrt(variance + eps))


@kernel
def spread_over_channels(moments, weight, bias, norm):
    """moments [batch, 3, groups] to norm [batch, 4, channels]: the mean in two numbers, scale and shift."""
    each = norm.shape[2] // moments.shape[2]
    for b in range(norm.shape[0]):
        for c in range(norm.shape[2]):
            norm[b, 0, c] = moments[b, 0, c // each]
            norm[b, 1, c] = moments[b, 1, c // each]
            norm[b, 2, c] = moments[b, 2, c // each] * weight[c]
            norm[b, 3, c] = bias[c]


@inlined
def place(r, sizes, steps):
    """Offset of position r, counted over three dimensions."""
    if sizes[0] == sizes[1] == 1:
        return r * steps[2]
    return (
        r // sizes[2] // sizes[1] * steps[0] + r // sizes[2] % sizes[1] * steps[1] + r % sizes[2] * steps[2]
    )


@kernel(fastmath=FUSED)
def apply_rows(x, xb, x_steps, norm, y, yb, y_steps, sizes, SILU, first, last):
    """Rows first to last of all batch entries, channels side by side. norm [batch, 4, channels]: the mean in
    two numbers, scale and shift."""
    prefer_wide_vectors()
    channels = norm.shape[2]
    whole, count = channels // LANES * LANES, sizes[0] * sizes[1] * sizes[2]
    for r in range(first, last):
        b = r // count
        at, out = b * xb + place(r % count, sizes, x_steps), b * yb + place(r % count, sizes, y_steps)
        rough, rest, scale, shift = norm[b, 0], norm[b, 1], norm[b, 2], norm[b, 3]
        for c in range(0, whole, LANES):
            away = vector_minus(vector_minus(vector_at(x, at + c), vector_at(rough, c)), vector_at(rest, c))
            values = fused(away, vector_at(scale, c), vector_at(shift, c))
            put_vector(silu(values) if SILU else values, y, out + c)
        for c in range(whole, channels):
            value = fused(widened(x[at + c]) - rough[c] - rest[c], scale[c], shift[c])
            y[out + c] = narrowed(silu(value) if SILU else value, y[out + c])


@kernel(fastmath=FUSED)
def finish_line(work, rough, rest, scale, shift, y, SILU):
    """Normalise, activate and round the positions of one channel."""
    prefer_wide_vectors()
    if SILU:
        for i in range(y.size):
            y[i] = narrowed(silu(fused(work[i] - rough - rest, scale, shift)), y[i])
    else:
        for i in range(y.size):
            y[i] = narrowed(fused(work[i] - rough - rest, scale, shift), y[i])


@kernel(fastmath=FUSED)
def finish_apart(work, rough, rest, scale, shift, y, at, step, SILU):
    """The same into places that are `step` apart."""
    for i in range(work.size):
        value = fused(work[i] - rough - rest, scale, shift)
        y[at + i * step] = narrowed(silu(value) if SILU else value, y[at + i * step])


@kernel(fastmath=FUSED)
def apply_lines(x, xb, xc, x_steps, norm, y, yb, yc, y_steps, sizes, SILU, first, last):
    """Tiles first to last of all lines of all channels, for any strides."""
    channels = norm.shape[2]
    tiles = -(-sizes[2] // TILE)
    widened_tile = np.empty(TILE, np.float32)
    for u in range(first, last):
        line, start = u // tiles, u % tiles * TILE
        plane, h = line // sizes[1], line % sizes[1]
        plane, t = plane // sizes[0], plane % sizes[0]
        b, c = plane // channels, plane % channels
        at = b * xb + c * xc + t * x_steps[0] + h * x_steps[1] + start * x_steps[2]
        out = b * yb + c * yc + t * y_steps[0] + h * y_steps[1] + start * y_steps[2]
        count = min(TILE, sizes[2] - start)
        work = widened_tile[:count]
        if x_steps[2] == 1:
            widen(x[at : at + count], work)
        else:
            for i in range(count):
                work[i] = widened(x[at + i * x_steps[2]])
        rough, rest, scale, shift = norm[b, 0, c], norm[b, 1, c], norm[b, 2, c], norm[b, 3, c]
        if y_steps[2] == 1:
            finish_line(work, rough, rest, scale, shift, y[out : out + count], SILU)
        else:
            finish_apart(work, rough, rest, scale, shift, y, out, y_steps[2], SILU)


@kernel(fastmath=FUSED)
def apply_spatial(x, xb, x_steps, norm, a, a_at, ab, d, d_at, db, y, yb, y_steps, sizes, SILU, first, last):
    """As `apply_rows`, then times a, plus d, whose channels are side by side too. a_at, d_at [3, most
    positions of an axis]: where a position along each axis has its values."""
    prefer_wide_vectors()
    channels = norm.shape[2]
    whole, count = channels // LANES * LANES, sizes[0] * sizes[1] * sizes[2]
    for r in range(first, last):
        b, p = r // count, r % count
        t, h, w = p // sizes[2] // sizes[1], p // sizes[2] % sizes[1], p % sizes[2]
        at, out = b * xb + place(p, sizes, x_steps), b * yb + place(p, sizes, y_steps)
        of_a = b * ab + a_at[0, t] + a_at[1, h] + a_at[2, w]
        of_d = b * db + d_at[0, t] + d_at[1, h] + d_at[2, w]
        rough, rest, scale, shift = norm[b, 0], norm[b, 1], norm[b, 2], norm[b, 3]
        for c in range(0, whole, LANES):
            away = vector_minus(vector_minus(vector_at(x, at + c), vector_at(rough, c)), vector_at(rest, c))
            normed = fused(away, vector_at(scale, c), vector_at(shift, c))
            values = fused(normed, vector_at(a, of_a + c), vector_at(d, of_d + c))
            put_vector(silu(values) if SILU else values, y, out + c)
        for c in range(whole, channels):
            normed = fused(widened(x[at + c]) - rough[c] - rest[c], scale[c], shift[c])
            value = fused(normed, widened(a[of_a + c]), widened(d[of_d + c]))
            y[out + c] = narrowed(silu(value) if SILU else value, y[out + c])

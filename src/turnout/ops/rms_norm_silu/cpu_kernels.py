"""Numba kernels of rms_norm_silu on a CPU. Half types arrive as their bits, as in `common_cpu_kernels`."""

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
    spread,
    sum_of_lanes,
    vector_at,
    vector_times,
    widen,
    widened,
)
from turnout.ops.numba_cache import inlined, kernel

WIDEST = 4096  # positions of a tile
CACHED = (
    49152  # float32 values of a tile of positions with all their channels: what stays in a second-level cache
)


def tiles_of(lines, length, channels):
    """Positions of one tile, and how many tiles there are."""
    tile = max(16, min(1024, CACHED // channels // 16 * 16))
    return tile, lines * -(-length // tile)


@kernel
def inverse_of(squares, channels, eps, CLAMP):
    """What x is multiplied with: 1 / sqrt(mean + eps), or with CLAMP sqrt(channels) / max(norm, eps)."""
    if CLAMP:
        return np.sqrt(np.float32(channels)) / max(np.sqrt(squares), eps)
    return np.float32(1.0) / np.sqrt(squares / np.float32(channels) + eps)


@inlined
def place(r, sizes, steps):
    """Offset of position r, counted over three dimensions."""
    if sizes[0] == sizes[1] == 1:
        return r * steps[2]
    return (
        r // sizes[2] // sizes[1] * steps[0] + r // sizes[2] % sizes[1] * steps[1] + r % sizes[2] * steps[2]
    )


@kernel(fastmath=FUSED)
def rows(x, x_steps, w, shift, y, y_steps, sizes, eps, CLAMP, SILU, first, last):
    """Rows first to last, channels side by side.

    A row is read twice, the second time from the first-level cache.
    """
    prefer_wide_vectors()
    channels, whole = w.size, w.size // LANES * LANES
    for r in range(first, last):
        at, out = place(r, sizes, x_steps), place(r, sizes, y_steps)
        sums = spread(np.float32(0))
        for c in range(0, whole, LANES):
            values = vector_at(x, at + c)
            sums = fused(values, values, sums)
        squares = sum_of_lanes(sums)
        for c in range(whole, channels):
            squares += widened(x[at + c]) ** 2
        inverse = inverse_of(squares, channels, eps, CLAMP)
        for c in range(0, whole, LANES):
            values = fused(
                vector_at(x, at + c), vector_times(vector_at(w, c), spread(inverse)), vector_at(shift, c)
            )
            put_vector(silu(values) if SILU else values, y, out + c)
        for c in range(whole, channels):
            value = widened(x[at + c]) * (inverse * w[c]) + shift[c]
            y[out + c] = narrowed(silu(value) if SILU else value, y[out + c])


@kernel(fastmath=FUSED)
def add_squares(row, total):
    prefer_wide_vectors()
    for i in range(row.size):
        total[i] += row[i] * row[i]


@kernel(fastmath=FUSED)
def finish_plane(work, w, shift, y, SILU):
    """Normalise, activate and round the positions of one channel at 0, with their inverse roots at WIDEST."""
    prefer_wide_vectors()
    if SILU:
        for i in range(y.size):
            y[i] = narrowed(silu(work[i] * work[WIDEST + i] * w + shift), y[i])
    else:
        for i in range(y.size):
            y[i] = narrowed(work[i] * work[WIDEST + i] * w + shift, y[i])


@kernel(fastmath=FUSED)
def planes(x, x_steps, xc, w, shift, y, y_steps, yc, sizes, tile, eps, CLAMP, SILU, first, last):
    """Tiles first to last of positions side by side, channels xc and yc apart.

    A tile is read twice, the second time from the cache.
    """
    work = np.empty(2 * WIDEST, np.float32)
    across = -(-sizes[2] // tile)
    for t in range(first, last):
        line, start = t // across, t % across * tile
        count = min(tile, sizes[2] - start)
        row, total = work[:count], work[WIDEST : WIDEST + count]
        at = line // sizes[1] * x_steps[0] + line % sizes[1] * x_steps[1] + start
        out = line // sizes[1] * y_steps[0] + line % sizes[1] * y_steps[1] + start
        total[:] = 0
        for c in range(w.size):
            widen(x[at + c * xc : at + c * xc + count], row)
            add_squares(row, total)
        for i in range(count):
            total[i] = inverse_of(total[i], w.size, eps, CLAMP)
        for c in range(w.size):
            widen(x[at + c * xc : at + c * xc + count], row)
            finish_plane(work, w[c], shift[c], y[out + c * yc : out + c * yc + count], SILU)

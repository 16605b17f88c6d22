"""Numba kernels of causal_conv1d on a CPU. They release the GIL; threads come from `turnout.ops.threads`.

Half types arrive as their bits, told apart by the integer's type: bfloat16 as uint16, float16 as int16. A row
of width 4 goes through registers in one pass. Otherwise a tile is widened to float32 once, taps are added to
it in the first-level cache, and it is rounded once on its way out; every loop over `i` becomes vector
instructions. `at` tables say where sequences start in flat memory, so a packed sequence is like any other.
"""

# Numba wants plain functions at module level; its intrinsics are typed by what they are given.
# pyright: basic, reportCallIssue=false

import numpy as np

from turnout.ops.common_cpu_kernels import (
    FUSED,
    LANES,
    finish,
    fused,
    moved_back,
    narrowed,
    prefer_wide_vectors,
    put_vector,
    silu,
    spread,
    vector_at,
    widen,
    widened,
)
from turnout.ops.numba_cache import inlined, kernel

# float32 values of one line: 4 KiB, so that a line, its sums and its marks stay in the first-level cache.
TILE = 1024
ROWS = 64  # rows of one block, channels side by side


@kernel(fastmath=FUSED)
def rows(x, x_at, xd, xl, w, bias, seg, init, y, y_at, yd, yl, sizes, length, SILU, SEG, INIT, first, last):
    """Rows first to last of [sequences, channels], any strides, at their best with positions side by side.

    w is [channels, width], init flat [sequences, channels, width - 1], seg flat [sequences, length].
    """
    prefer_wide_vectors()
    dim, width = w.shape
    reach = width - 1
    line = np.empty(TILE + reach, np.float32)
    acc = np.empty(TILE, np.float32)
    marks = np.empty(TILE + reach, np.int64)
    aside = np.empty(TILE, y.dtype)
    edge = np.zeros(LANES, np.float32)
    for row in range(first, last):
        n, d = row // dim, row % dim
        size = sizes[n]
        for k in range(reach):
            line[k] = widened(init[row * reach + k]) if INIT else np.float32(0)
            if SEG:
                marks[k] = seg[n * length] if INIT and size > 0 else -1
        if width == 4 and not SEG and xl == yl == 1:
            edge[LANES - 3 :] = line[:3]
            four_taps(edge, x, x_at[n] + d * xd, w[d], bias[d], y, y_at[n] + d * yd, size, SILU)
            continue
        for start in range(0, size, TILE):
            count = min(TILE, size - start)
            at, out = x_at[n] + d * xd + start * xl, y_at[n] + d * yd + start * yl
            into = y[out : out + count] if yl == 1 else aside[:count]
            if xl == 1:
                widen(x[at : at + count], line[reach : reach + count])
            else:
                for i in range(count):
                    line[reach + i] = widened(x[at + i * xl])
            if SEG:
                marks[reach : reach + count] = seg[n * length + start : n * length + start + count]
                add_own_taps(acc[:count], line, marks, w[d], bias[d])
                finish(acc[:count], into, SILU)
                for i in range(count):
                    if marks[reach + i] < 0:
                        into[i] = 0
            elif width == 4:
                edge[LANES - 3 :] = line[:3]
                four_taps(edge, line, reach, w[d], bias[d], into, 0, count, SILU)
            else:
                add_taps(acc[:count], line, w[d], bias[d])
                finish(acc[:count], into, SILU)
            if yl != 1:
                for i in range(count):
                    y[out + i * yl] = into[i]
            for k in range(reach):
                line[k] = line[count + k]
                if SEG:
                    marks[k] = marks[count + k]


@inlined
def four_products(before, here, p, q, r, s, bias):
    return fused(
        moved_back(before, here, 3),
        p,
        fused(moved_back(before, here, 2), q, fused(moved_back(before, here, 1), r, fused(here, s, bias))),
    )


@kernel(fastmath=FUSED)
def four_taps(edge, x, at, w, bias, y, out, count, SILU):
    """Width 4, which nearly every model has, in one pass over x from `at` on.

    `edge` are the LANES values before that.
    """
    prefer_wide_vectors()
    p, q, r, s, b = spread(w[0]), spread(w[1]), spread(w[2]), spread(w[3]), spread(bias)
    before, whole = vector_at(edge, 0), count // LANES * LANES
    for i in range(0, whole, LANES):
        here = vector_at(x, at + i)
        sums = four_products(before, here, p, q, r, s, b)
        put_vector(silu(sums) if SILU else sums, y, out + i)
        before = here
    if (
        whole < count and count >= 2 * LANES
    ):  # what is left over once more with what is before it, in whole vectors
        i = count - LANES
        sums = four_products(vector_at(x, at + i - LANES), vector_at(x, at + i), p, q, r, s, b)
        put_vector(silu(sums) if SILU else sums, y, out + i)
        return
    for i in range(whole, count):
        total = bias
        for k in range(4):
            total += w[k] * (widened(x[at + i + k - 3]) if i + k >= 3 else edge[LANES + i + k - 3])
        y[out + i] = narrowed(silu(total) if SILU else total, y[out + i])


# The inner loops below run over whole slices: an index that could be negative in Python's sense would keep
# LLVM from vector instructions.


@kernel(fastmath=FUSED)
def add_taps(acc, line, w, bias):
    """acc[i] = bias + sum_k w[k] * line[i + k]"""
    prefer_wide_vectors()
    acc[:] = bias
    for k in range(w.size):
        a, p = line[k : k + acc.size], w[k]
        for i in range(acc.size):
            acc[i] += p * a[i]


@kernel(fastmath=FUSED)
def add_own_taps(acc, line, marks, w, bias):
    """The same, of positions with the output's own mark."""
    prefer_wide_vectors()
    acc[:] = bias
    here = marks[w.size - 1 : w.size - 1 + acc.size]
    for k in range(w.size):
        a, there, p = line[k : k + acc.size], marks[k : k + acc.size], w[k]
        for i in range(acc.size):
            acc[i] += p * (a[i] if there[i] == here[i] else np.float32(0))


def blocks_of(sizes):
    """(sequence, first row) of every block of ROWS rows."""
    return np.array(
        [(n, row) for n, size in enumerate(sizes.tolist()) for row in range(0, size, ROWS)], np.int64
    ).reshape(-1, 2)


@kernel(fastmath=FUSED)
def cols(x, x_at, xl, w, bias, seg, init, y, y_at, sizes, blocks, length, SILU, SEG, INIT, first, last):
    """Blocks first to last, channels side by side in x and y. w is [width, channels]."""
    prefer_wide_vectors()
    width, dim = w.shape
    reach = width - 1
    taps = np.empty(
        (width + 1) * TILE, np.float32
    )  # TILE apart, which LLVM knows: pointers that may overlap cost it the vectors
    ring = np.empty((width, TILE), np.float32)  # the last rows, widened; position p is in ring[p % width]
    acc = np.empty(TILE, np.float32)
    for block in range(first, last):
        n, top = blocks[block]
        for left in range(0, dim, TILE):
            count = min(TILE, dim - left)
            for k in range(width):
                taps[k * TILE : k * TILE + count] = w[k, left : left + count]
            taps[width * TILE : width * TILE + count] = bias[left : left + count]
            for p in range(top - reach, top):
                row = ring[p % width]
                at = x_at[n] + p * xl + left
                if p >= 0:
                    widen(x[at : at + count], row)
                else:
                    for i in range(count):
                        row[i] = (
                            widened(init[(n * dim + left + i) * reach + p + reach]) if INIT else np.float32(0)
                        )
            for p in range(top, min(top + ROWS, sizes[n])):
                at, out = x_at[n] + p * xl + left, y_at[n] + p * dim + left
                widen(x[at : at + count], ring[p % width])
                if width == 4 and not SEG:
                    a, b, c, d = ring[(p + 1) % 4], ring[(p + 2) % 4], ring[(p + 3) % 4], ring[p % 4]
                    four_rows(a, b, c, d, taps, y[out : out + count], SILU)
                else:
                    add_rows(acc[:count], ring, taps, p, seg, n * length, SEG, INIT)
                    finish(acc[:count], y[out : out + count], SILU)
                if SEG and seg[n * length + p] < 0:
                    y[out : out + count] = 0


@kernel(fastmath=FUSED)
def four_rows(a, b, c, d, taps, y, SILU):
    """Width 4 in one pass."""
    prefer_wide_vectors()
    if SILU:
        for i in range(y.size):
            total = (
                taps[4 * TILE + i]
                + taps[i] * a[i]
                + taps[TILE + i] * b[i]
                + taps[2 * TILE + i] * c[i]
                + taps[3 * TILE + i] * d[i]
            )
            y[i] = narrowed(silu(total), y[i])
    else:
        for i in range(y.size):
            total = (
                taps[4 * TILE + i]
                + taps[i] * a[i]
                + taps[TILE + i] * b[i]
                + taps[2 * TILE + i] * c[i]
                + taps[3 * TILE + i] * d[i]
            )
            y[i] = narrowed(total, y[i])


@kernel(fastmath=FUSED)
def add_rows(acc, ring, taps, p, seg, base, SEG, INIT):
    """acc = bias + sum_k taps[k] * the row width - 1 - k above p, rows with another mark left out."""
    prefer_wide_vectors()
    width = ring.shape[0]
    acc[:] = taps[width * TILE : width * TILE + acc.size]
    for k in range(width):
        before = p - (width - 1) + k
        there = seg[base + max(before, 0)] if SEG and (before >= 0 or INIT) else -1
        if not SEG or there == seg[base + p]:
            a, q = ring[(p + k + 1) % width], taps[k * TILE : k * TILE + acc.size]
            for i in range(acc.size):
                acc[i] += q[i] * a[i]


@kernel
def finals(x, x_at, xd, xl, seg, init, final, sizes, dim, reach, length, SEG, INIT):
    """The last positions of each sequence as they are, its initial state where it is shorter.

    final is flat [sequences, channels, reach].
    """
    for n in range(sizes.size):
        size = sizes[n]
        for k in range(reach):
            p = size - reach + k
            keep = p >= 0 or INIT
            if SEG and size > 0 and keep:
                keep = seg[n * length + max(p, 0)] == seg[n * length + size - 1]
            for d in range(dim):
                at = (n * dim + d) * reach
                if not keep:
                    final[at + k] = 0
                elif p >= 0:
                    final[at + k] = x[x_at[n] + d * xd + p * xl]
                else:
                    final[at + k] = init[at + p + reach]

"""Numba kernel of causal_conv1d_update on a CPU.

Half types arrive as their bits, as in `common_cpu_kernels`.
"""

# pyright: basic, reportCallIssue=false

import numpy as np

from turnout.ops.common_cpu_kernels import finish, narrowed, widened
from turnout.ops.numba_cache import kernel

TILE = 256  # channels side by side, so that sums and activations become vector instructions


def tiles_of(batch, dim):
    return batch * -(-dim // TILE)


@kernel(fastmath={"contract", "nsz"})
def update(x, state, w, bias, y, slots, ring, length, size, strides, SILU, first, last):
    """Tiles first to last of [batch, channels]; w is [width, channels].

    ring says where each sequence writes next, empty where states move along instead.
    """
    xb, xd, xl, sb, sd, sl, yb, yd, yl = strides
    width, dim = w.shape
    reach, across = width - 1, -(-dim // TILE)
    rows = np.empty((width, TILE), np.float32)  # position p is in rows[p % width]
    acc = np.empty(TILE, np.float32)
    done = np.empty(TILE, y.dtype)
    for tile in range(first, last):
        b, left = tile // across, tile % across * TILE
        count = min(TILE, dim - left)
        source, held, out = b * xb + left * xd, slots[b] * sb + left * sd, b * yb + left * yd
        if slots[b] < 0:
            for i in range(length):
                for j in range(count):
                    y[out + i * yl + j * yd] = 0
            continue
        at = ring[b] if ring.size else 0
        for p in range(-reach, 0):
            place = (at + p + size) % size * sl
            for j in range(count):
                rows[p % width, j] = widened(state[held + place + j * sd])
        for i in range(length):
            for j in range(count):
                rows[i % width, j] = widened(x[source + i * xl + j * xd])
            acc[:count] = bias[left : left + count]
            for k in range(width):
                add(acc[:count], w[k, left : left + count], rows[(i + k + 1) % width])
            finish(acc[:count], done[:count], SILU)
            for j in range(count):
                y[out + i * yl + j * yd] = done[j]
        move(x, source, xd, xl, state, held, sd, sl, count, length, size, at, ring.size > 0)


@kernel(fastmath={"contract", "nsz"})
def add(acc, taps, row):
    for j in range(acc.size):
        acc[j] += taps[j] * row[j]


@kernel
def move(x, source, xd, xl, state, held, sd, sl, count, length, size, at, RING):
    """The new positions into the states of `count` channels: into their places of the ring, or at the end of
    what moves along.
    """
    if RING:
        for i in range(max(length - size, 0), length):
            place = (at + i) % size * sl
            for j in range(count):
                state[held + place + j * sd] = narrowed(widened(x[source + i * xl + j * xd]), state[held])
        return
    stay = max(size - length, 0)
    for j in range(count):
        base = held + j * sd
        for k in range(stay):
            state[base + k * sl] = state[base + (k + length) * sl]
        for k in range(stay, size):
            state[base + k * sl] = narrowed(
                widened(x[source + (k + length - size) * xl + j * xd]), state[held]
            )

"""Numba kernel of norm_rope on a CPU. Half types arrive as their bits, as in `common_cpu_kernels`.

A row of one head is widened, normalised, rotated and written before the next one is read. Roundings stand
where eager PyTorch has them, so products and sums are not fused. A rotation is x * cos + y * sin, where y is
the other element of x's pair; the sign of the first element's sin is in the table that is made once for a
token.

Row, cos and sin lie WIDEST apart in one buffer, which LLVM knows: pointers that may overlap would cost it the
vectors.
"""

# pyright: basic, reportCallIssue=false

import numpy as np

from turnout.ops.common_cpu_kernels import narrowed, prefer_wide_vectors, widen, widen_and_square, widened
from turnout.ops.numba_cache import kernel

WIDEST = 1024  # columns of a head
APART = {"nsz"}  # products and sums round one after the other
PAIR, ELEMENT, COMPLEX = 1, 2, 3  # how a table is to be read; 0 where there is none
HEAD, ALL = 1, 2  # what is normalised together; 0 for nothing


@kernel(fastmath=APART)
def make_table(cos, sin, at, kind, HALF, c, s):
    """cos and signed sin for each rotating element of one token, from wherever they stand in the tables."""
    prefer_wide_vectors()
    pairs = c.size // 2
    for i in range(pairs):
        first, second = (i, i + pairs) if HALF else (2 * i, 2 * i + 1)
        if kind == PAIR:
            c[first] = c[second] = cos[at + i]
            s[second] = sin[at + i]
            s[first] = -sin[at + i]
        elif kind == COMPLEX:
            c[first] = c[second] = cos[at + 2 * i]
            s[second] = cos[at + 2 * i + 1]
            s[first] = -cos[at + 2 * i + 1]
        else:
            c[first], c[second] = cos[at + first], cos[at + second]
            s[first], s[second] = -sin[at + first], sin[at + second]


@kernel(fastmath=APART)
def scale_row(row, inverse, w, like, WEIGHT, TWICE):
    """row times the inverse root and the weight, rounded to the type of `like` (and before the weight too,
    with TWICE).
    """
    prefer_wide_vectors()
    if not WEIGHT:
        for i in range(row.size):
            row[i] = widened(narrowed(row[i] * inverse, like))
    elif TWICE:
        for i in range(row.size):
            row[i] = widened(narrowed(widened(narrowed(row[i] * inverse, like)) * w[i], like))
    else:
        for i in range(row.size):
            row[i] = widened(narrowed(row[i] * inverse * w[i], like))


@kernel(fastmath=APART)
def turn_row(work, size, HALF, y):
    """The first `size` columns rotated, the others as they are."""
    prefer_wide_vectors()
    half = size // 2
    if HALF:
        low, high = y[:half], y[half:size]
        for i in range(half):
            low[i] = narrowed(work[i] * work[WIDEST + i] + work[half + i] * work[2 * WIDEST + i], low[i])
        for i in range(half):
            high[i] = narrowed(
                work[half + i] * work[WIDEST + half + i] + work[i] * work[2 * WIDEST + half + i], high[i]
            )
    else:
        for i in range(half):
            first, second = work[2 * i], work[2 * i + 1]
            y[2 * i] = narrowed(first * work[WIDEST + 2 * i] + second * work[2 * WIDEST + 2 * i], y[0])
            y[2 * i + 1] = narrowed(
                second * work[WIDEST + 2 * i + 1] + first * work[2 * WIDEST + 2 * i + 1], y[0]
            )
    rest = y[size:]
    plain = work[size : size + rest.size]
    for i in range(rest.size):
        rest[i] = narrowed(plain[i], rest[i])


@kernel(fastmath=APART)
def norm_rope(
    x,
    xb,
    xs,
    xh,
    tokens,
    before,
    heads,
    dim,
    w,
    eps,
    norm,
    TWICE,
    cos,
    sin,
    cb,
    cs,
    ch,
    kind,
    rotary,
    HALF,
    y,
    yb,
    ys,
    yh,
    first,
    last,
):
    """Tokens first to last of [batch, tokens] of one stream, which stands behind `before` others.

    w is [dim], [heads * dim] or empty.
    """
    prefer_wide_vectors()
    work = np.empty(3 * WIDEST, np.float32)
    row, c, s = work[:dim], work[WIDEST : WIDEST + rotary], work[2 * WIDEST : 2 * WIDEST + rotary]
    inverse = np.float32(1)
    for t in range(first, last):
        b, token = t // tokens, t % tokens
        at, out, table = b * xb + token * xs, b * yb + (before + token) * ys, b * cb + (before + token) * cs
        if kind > 0 and ch == 0:
            make_table(cos, sin, table, kind, HALF, c, s)
        if norm == ALL:
            total = np.float32(0)
            for h in range(heads):
                total += widen_and_square(x[at + h * xh : at + h * xh + dim], row)
            inverse = np.float32(1) / np.sqrt(total / np.float32(heads * dim) + eps)
        for h in range(heads):
            into = y[out + h * yh : out + h * yh + dim]
            if norm == HEAD:
                squares = widen_and_square(x[at + h * xh : at + h * xh + dim], row)
                inverse = np.float32(1) / np.sqrt(squares / np.float32(dim) + eps)
            else:
                widen(x[at + h * xh : at + h * xh + dim], row)
            if norm > 0:
                scale_row(
                    row, inverse, w[h * dim : (h + 1) * dim] if norm == ALL else w, into[0], w.size > 0, TWICE
                )
            if kind > 0 and ch != 0:
                make_table(cos, sin, table + h * ch, kind, HALF, c, s)
            turn_row(work, rotary, HALF, into)

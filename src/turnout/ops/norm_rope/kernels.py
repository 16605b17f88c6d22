"""The Triton kernel of norm_rope: normalise, rotate and permute rows of D elements.

Each is read once and written once.

A program takes T tokens of one stream and N chunks of BH heads, as N tiles [T*BH, D]. All loads stand before
the first store, and what depends on the token alone (the tables) is read once for the N chunks. q and k, and
two streams, are programs of one launch.

A row is three parts: pairs that rotate, first and second element of each as two tensors [rows, RD/2], and a
rest [rows, D - RD] that is only normalised. Interleaved pairs come as one vector load, taken apart in
registers; half pairs come as two loads. Roundings stand where eager PyTorch has them, and multiplications and
additions are not fused (see launches.py).
"""

# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# ruff: noqa: RET505, RUF005

import triton
import triton.language as tl


@triton.jit
def columns(rows, ok, SIZE: tl.constexpr, WIDTH: tl.constexpr, V: tl.constexpr):
    """Pointers [R, WIDTH] to SIZE columns of rows, and their mask [R, WIDTH].

    rows: pointers to the first column [R]; ok: which rows are inside [R]; WIDTH: SIZE as a power of two; V:
    columns of one vector.
    """
    c = tl.arange(0, WIDTH)  # [WIDTH]
    p = tl.multiple_of(
        rows[:, None] + c[None, :],  # [R, WIDTH]
        (1, V * rows.dtype.element_ty.primitive_bitwidth // 8),  # bytes of a vector
    )
    if SIZE == WIDTH:
        return p, ok[:, None] & (c >= 0)[None, :]
    return p, ok[:, None] & (c // V < SIZE // V)[None, :]


@triton.jit
def read(rows, ok, SIZE: tl.constexpr, WIDTH: tl.constexpr, V: tl.constexpr):
    """SIZE columns of rows, [R, WIDTH], with zeros outside. Parameters as in `columns`."""
    p, inside = columns(rows, ok, SIZE, WIDTH, V)
    return tl.load(p, mask=inside, other=0.0)


@triton.jit
def write(rows, ok, x, SIZE: tl.constexpr, WIDTH: tl.constexpr, V: tl.constexpr):
    """Store x [R, WIDTH] to SIZE columns of rows. Parameters as in `columns`."""
    p, inside = columns(rows, ok, SIZE, WIDTH, V)
    tl.store(p, x.to(rows.dtype.element_ty), mask=inside)


@triton.jit
def halves(x):
    """[R, 2 * n] -> even and odd columns, each [R, n]."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


@triton.jit
def read_pairs(rows, ok, HALF: tl.constexpr, RD: tl.constexpr, RW: tl.constexpr, V: tl.constexpr):
    """The rotating columns of rows as they lie in memory: a tuple of one tensor, or of two where pairs are
    half a row apart."""
    if HALF:
        return (read(rows, ok, RD // 2, RW // 2, V), read(rows + RD // 2, ok, RD // 2, RW // 2, V))
    else:
        return (read(rows, ok, RD, RW, V),)


@triton.jit
def as_pairs(raw, HALF: tl.constexpr):
    """First and second elements of pairs from what `read_pairs` read, in float32, each [R, RW / 2]."""
    if HALF:
        return raw[0].to(tl.float32), raw[1].to(tl.float32)
    else:
        return halves(raw[0].to(tl.float32))


@triton.jit
def scaled(x, inverse, w, TWICE: tl.constexpr, WEIGHT: tl.constexpr, like: tl.constexpr):
    """x times the inverse root and the weight, rounded to `like` (and before the weight too, with TWICE).

    x and w are [R, n] float32, inverse is [R]; so is the result, [R, n] float32.
    """
    x = x * inverse[:, None]
    if WEIGHT:
        if TWICE:
            x = x.to(like).to(tl.float32)
        x = x * w
    return x.to(like).to(tl.float32)


@triton.jit
def read_table(
    cos, sin,  # tables; of TABLE "complex", cos holds (cos, sin) pairs and sin is not read
    at, ok,  # [R] offsets of the tokens' rows in the tables, and which of them are inside
    TABLE: tl.constexpr, HALF: tl.constexpr,  # as in `norm_rope`
    RD: tl.constexpr, RW: tl.constexpr, TV: tl.constexpr,  # columns, as a power of two, of one vector
):  # fmt: skip
    """cos of the first and of the second elements of pairs, then sin of them; each [R, RW / 2] float32."""
    if TABLE == "pair":
        c = read(cos + at, ok, RD // 2, RW // 2, TV).to(tl.float32)
        s = read(sin + at, ok, RD // 2, RW // 2, TV).to(tl.float32)
        return c, c, s, s
    elif TABLE == "complex":
        c, s = halves(read(cos + at, ok, RD, RW, TV))
        return c, c, s, s
    else:
        c, d = as_pairs(read_pairs(cos + at, ok, HALF, RD, RW, TV), HALF)
        s, t = as_pairs(read_pairs(sin + at, ok, HALF, RD, RW, TV), HALF)
        return c, d, s, t


@triton.jit
def norm_rope(
    q, q2,  # [B, S, QH, D] and of the second stream [B, S2, QH, D], by their strides
    k, k2,  # [B, S, KH, D] and of the second stream [B, S2, KH, D]
    q_weight, q2_weight, k_weight, k2_weight,  # [D]; with NORM "all" [heads * D]
    cos, sin,  # tables, a row for each token of the joined streams
    q_out, k_out,  # [B, S + S2, QH, D], [B, S + S2, KH, D], by their strides
    eps, S, S2, QH, KH,  # tokens of each stream, heads of queries and of keys
    qb, qs, qh, q2b, q2s, q2h,  # strides in elements: batch (b), token (s), head (h)
    kb, ks, kh, k2b, k2s, k2h,
    cb, cs, ch,  # of cos and sin
    qob, qos, qoh, kob, kos, koh,  # of q_out and k_out
    D: tl.constexpr, RD: tl.constexpr,  # columns of a head, and how many of them rotate
    RW: tl.constexpr, EW: tl.constexpr,  # powers of two that hold RD and D - RD
    V: tl.constexpr, TV: tl.constexpr,  # columns of one vector, of q and k and of the tables
    T: tl.constexpr, BH: tl.constexpr, N: tl.constexpr,  # tokens of a program, heads of a chunk, chunks
    HALF: tl.constexpr,  # pairs are half of the rotating columns apart, not interleaved
    TABLE: tl.constexpr,  # "none", "pair", "element" or "complex": what the tables hold a value for
    TABLE_HEADS: tl.constexpr,  # heads have tables of their own
    STREAMS: tl.constexpr, KEYS: tl.constexpr,  # 1 or 2 streams; whether there is k
    BY_HEAD: tl.constexpr,  # order of the programs
    NORM: tl.constexpr,  # "none", "head" or "all": across all heads, BH * N of them
    WEIGHT: tl.constexpr, TWICE: tl.constexpr,  # there are weights; round before them too
):  # fmt: skip
    """Normalise heads, rotate RD of their D columns, and write them in the layout of the output.

    A program: T tokens and BH * N heads of q or k of one stream. Programs take all heads of some tokens
    before the next tokens, since those share the tables; BY_HEAD all tokens first, as they lie in [B, H, S, D].
    """
    R: tl.constexpr = T * BH
    dtype: tl.constexpr = q.dtype.element_ty
    groups = tl.cdiv(QH, BH * N)
    total = groups
    if KEYS:
        total += tl.cdiv(KH, BH * N)
    tiles = tl.cdiv(S, T)
    all_tiles = tiles
    if STREAMS == 2:
        all_tiles += tl.cdiv(S2, T)
    pid = tl.program_id(0)
    b = (pid // total // all_tiles).to(tl.int64)
    if BY_HEAD:
        group, tile = pid // all_tiles % total, pid % all_tiles
    else:
        group, tile = pid % total, pid // total % all_tiles

    # What this program reads (x) and writes (o), its heads and tokens: those of q unless it has others.
    x, xb, xs, xh, o, ob, os, oh, heads, weight = q, qb, qs, qh, q_out, qob, qos, qoh, QH, q_weight
    size, before = S, 0
    if STREAMS == 2:
        second = tile >= tiles
        x, xb, xs, xh = (
            tl.where(second, q2, q), tl.where(second, q2b, qb),
            tl.where(second, q2s, qs), tl.where(second, q2h, qh),
        )  # fmt: skip
        size, before, tile = (
            tl.where(second, S2, S), tl.where(second, S, 0), tl.where(second, tile - tiles, tile)
        )  # fmt: skip
        if WEIGHT:
            weight = tl.where(second, q2_weight, q_weight)
    if KEYS:
        key = group >= groups
        y, yb, ys, yh, y_weight = k, kb, ks, kh, k_weight
        if STREAMS == 2:
            y, yb, ys, yh = (
                tl.where(second, k2, k), tl.where(second, k2b, kb),
                tl.where(second, k2s, ks), tl.where(second, k2h, kh),
            )  # fmt: skip
            if WEIGHT:
                y_weight = tl.where(second, k2_weight, k_weight)
        x, xb, xs, xh = (
            tl.where(key, y, x), tl.where(key, yb, xb), tl.where(key, ys, xs), tl.where(key, yh, xh)
        )  # fmt: skip
        o, ob, os, oh = (
            tl.where(key, k_out, o), tl.where(key, kob, ob), tl.where(key, kos, os), tl.where(key, koh, oh)
        )  # fmt: skip
        heads, group = tl.where(key, KH, QH), tl.where(key, group - groups, group)
        if WEIGHT:
            weight = tl.where(key, y_weight, weight)
    xs, xh, os, oh = (
        tl.cast(xs, tl.int64), tl.cast(xh, tl.int64), tl.cast(os, tl.int64), tl.cast(oh, tl.int64)
    )  # fmt: skip

    i = tl.arange(0, R)  # [R]
    token = tile * T + i // BH  # [R]
    h = group * (BH * N) + i % BH  # [R] head of the first chunk
    live = token < size  # [R]
    x_rows = x + b * xb + token * xs + h * xh  # [R]

    pairs = ()  # N tuples, as `read_pairs` returns them
    rests = ()  # N tiles [R, EW]
    for n in tl.static_range(N):
        ok = live & (h + n * BH < heads)  # [R]
        at = x_rows + n * BH * xh  # [R]
        if RD > 0:
            pairs = pairs + (read_pairs(at, ok, HALF, RD, RW, V),)
        if RD < D:
            rests = rests + (read(at + RD, ok, D - RD, EW, V),)

    place = (before + token).to(tl.int64)  # [R] among the joined tokens
    if TABLE != "none":
        at_table = b * cb + place * cs  # [R]
        if not TABLE_HEADS:
            # [R, RW / 2] each
            first_cos, second_cos, first_sin, second_sin = read_table(
                cos, sin, at_table, live, TABLE, HALF, RD, RW, TV
            )  # fmt: skip
    if WEIGHT and NORM == "head":
        w_rows = weight + tl.zeros((R,), tl.int32)  # [R]
        if RD > 0:
            wa, wb = as_pairs(read_pairs(w_rows, live, HALF, RD, RW, V), HALF)  # [R, RW / 2] each
        if RD < D:
            we = read(w_rows + RD, live, D - RD, EW, V).to(tl.float32)  # [R, EW]

    if NORM == "all":
        squares = tl.zeros((R,), tl.float32)
        if RD > 0:
            total = tl.zeros((R, RW // 2), tl.float32)
            for n in tl.static_range(N):
                a, c = as_pairs(pairs[n], HALF)  # [R, RW / 2] each
                total += a * a + c * c
            squares += tl.sum(total, 1)
        if RD < D:
            others = tl.zeros((R, EW), tl.float32)
            for n in tl.static_range(N):
                e = rests[n].to(tl.float32)  # [R, EW]
                others += e * e
            squares += tl.sum(others, 1)
        mean = tl.sum(tl.reshape(squares, (T, BH)), 1) / (heads * D).to(tl.float32)  # [T]
        inverse = tl.reshape(tl.broadcast_to(tl.rsqrt(mean + eps)[:, None], (T, BH)), (R,))  # [R]

    o_rows = o + b * ob + place * os + h * oh  # [R]
    for n in tl.static_range(N):
        head = h + n * BH  # [R]
        ok = live & (head < heads)  # [R]
        at = o_rows + n * BH * oh  # [R]
        if NORM == "head":
            squares = tl.zeros((R,), tl.float32)
            if RD > 0:
                a, c = as_pairs(pairs[n], HALF)
                squares += tl.sum(a * a + c * c, 1)
            if RD < D:
                e = rests[n].to(tl.float32)
                squares += tl.sum(e * e, 1)
            inverse = tl.rsqrt(squares / D + eps)  # [R]
        if WEIGHT and NORM == "all":
            w_rows = weight + head * D  # [R]
            if RD > 0:
                wa, wb = as_pairs(read_pairs(w_rows, ok, HALF, RD, RW, V), HALF)  # [R, RW / 2] each
            if RD < D:
                we = read(w_rows + RD, ok, D - RD, EW, V).to(tl.float32)  # [R, EW]
        if RD > 0:
            a, c = as_pairs(pairs[n], HALF)  # [R, RW / 2] each
            if NORM != "none":
                if WEIGHT:
                    a = scaled(a, inverse, wa, TWICE, True, dtype)
                    c = scaled(c, inverse, wb, TWICE, True, dtype)
                else:
                    a = scaled(a, inverse, None, False, False, dtype)
                    c = scaled(c, inverse, None, False, False, dtype)
            if TABLE_HEADS:
                # [R, RW / 2] each
                first_cos, second_cos, first_sin, second_sin = read_table(
                    cos, sin, at_table + head * ch, ok, TABLE, HALF, RD, RW, TV
                )  # fmt: skip
            u = a * first_cos - c * first_sin  # [R, RW / 2]
            v = c * second_cos + a * second_sin  # [R, RW / 2]
            if HALF:
                write(at, ok, u, RD // 2, RW // 2, V)
                write(at + RD // 2, ok, v, RD // 2, RW // 2, V)
            else:
                write(at, ok, tl.reshape(tl.join(u.to(dtype), v.to(dtype)), (R, RW)), RD, RW, V)
        if RD < D:
            if NORM != "none":
                e = rests[n].to(tl.float32)  # [R, EW]
                if WEIGHT:
                    e = scaled(e, inverse, we, TWICE, True, dtype)
                else:
                    e = scaled(e, inverse, None, False, False, dtype)
                write(at + RD, ok, e, D - RD, EW, V)
            else:
                write(at + RD, ok, rests[n], D - RD, EW, V)

"""Triton kernels of attention: a running softmax over blocks of keys, in powers of two, accumulated in
float32."""

# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl


@triton.jit
def flash_kernel(
    q, k, v,  # [B, heads, rows, dim], [B, heads / group, keys, dim], [B, heads / group, keys, dim_v]
    lengths,  # [B, 2] with LENGTHS: the first lengths[b, 0] and the last lengths[b, 1] keys count
    key_mask,  # [B, keys] with MASK: keys where it is not 0 count
    sums, out,  # [B, heads, rows] float32 with GO_ON, [B, heads, rows, dim_v]
    heads, group,  # query heads, and how many share one key head
    rows, keys, dim, dim_v,  # queries, keys, columns of q and k, columns of v
    scale,  # of the scores, times log2(e)
    # strides in elements: batch, head, row, column
    q_b, q_h, q_s, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d,
    o_b, o_h, o_s, mask_b, mask_s,  # columns of out are side by side
    BM: tl.constexpr, BN: tl.constexpr,  # queries of a program, keys of a block
    BD: tl.constexpr, BV: tl.constexpr,  # dim and dim_v, rounded up to powers of two
    CAUSAL: tl.constexpr,  # query i sees the keys 0 to i
    LENGTHS: tl.constexpr, MASK: tl.constexpr,
    GO_ON: tl.constexpr,  # go on from other keys: `out` holds their result, `sums` their log-sum-exp
):  # fmt: skip
    """softmax(scale * q k^T) v over blocks of keys. A program: BM queries of one head."""
    tiles = tl.cdiv(rows, BM)
    tile = tl.program_id(0) % tiles
    bh = tl.program_id(0) // tiles
    batch, head = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    row = tile * BM + tl.arange(0, BM)  # [BM]
    d, dv = tl.arange(0, BD).to(tl.int64), tl.arange(0, BV).to(tl.int64)  # [BD], [BV]
    wide_row = row.to(tl.int64)  # [BM]
    q_at = q + batch * q_b + head * q_h + wide_row[:, None] * q_s + d[None, :] * q_d  # [BM, BD]
    queries = tl.load(q_at, mask=(row < rows)[:, None] & (d < dim)[None, :], other=0.0)  # [BM, BD]
    kv_head = head // group
    k += batch * k_b + kv_head * k_h
    v += batch * v_b + kv_head * v_h

    end, start = keys, keys  # keys that count: 0 to end, then start to keys
    if LENGTHS:
        end = tl.minimum(tl.maximum(tl.load(lengths + 2 * batch), 0), keys).to(tl.int32)
        start = tl.maximum(keys - tl.maximum(tl.load(lengths + 2 * batch + 1), 0), end).to(tl.int32)
    last = keys
    if CAUSAL:
        last = tl.minimum(keys, tile * BM + BM)
        end = tl.minimum(end, last)
    blocks = tl.cdiv(end, BN)
    all_blocks = blocks + tl.cdiv(tl.maximum(last - start, 0), BN)

    written = (row < rows)[:, None] & (dv < dim_v)[None, :]  # [BM, BV]
    o_at = out + batch * o_b + head * o_h + wide_row[:, None] * o_s + dv[None, :]  # [BM, BV]
    # Running maximum of the scores, sum of exponentials, sum of values.
    if GO_ON:
        written &= all_blocks > 0
        best = tl.load(
            sums + (batch * heads + head) * rows + wide_row, mask=row < rows, other=0.0  # [BM]
        ) * 1.4426950408889634  # log2(e)  # fmt: skip
        total = tl.where(best == float("-inf"), 0.0, 1.0)  # [BM]
        acc = tl.load(o_at, mask=written, other=0.0).to(tl.float32)  # [BM, BV]
    else:
        best = tl.full([BM], float("-inf"), tl.float32)
        total = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, BV], tl.float32)
    for i in range(all_blocks):
        n = tl.where(i < blocks, i * BN, start + (i - blocks) * BN)
        stop = tl.where(i < blocks, end, last)
        col = n + tl.arange(0, BN)  # [BN]
        wide_col = col.to(tl.int64)  # [BN]
        inside = col < stop  # [BN]
        kt = tl.load(
            k + wide_col[None, :] * k_s + d[:, None] * k_d,  # [BD, BN]
            mask=inside[None, :] & (d < dim)[:, None],
            other=0.0,
        )
        s = tl.dot(queries, kt) * scale  # [BM, BN]
        counts = inside  # [BN]
        if MASK:
            counts &= tl.load(key_mask + batch * mask_b + wide_col * mask_s, mask=inside, other=0) != 0
        if CAUSAL:
            s = tl.where(counts[None, :] & (col[None, :] <= row[:, None]), s, float("-inf"))
        else:
            s = tl.where(counts[None, :], s, float("-inf"))
        new = tl.maximum(best, tl.max(s, 1))  # [BM]
        safe = tl.where(new == float("-inf"), 0.0, new)  # [BM], finite where no key has counted so far
        p, old = tl.exp2(s - safe[:, None]), tl.exp2(best - safe)  # [BM, BN], [BM]
        v_at = v + wide_col[:, None] * v_s + dv[None, :] * v_d  # [BN, BV]
        values = tl.load(v_at, mask=inside[:, None] & (dv < dim_v)[None, :], other=0.0)  # [BN, BV]
        acc = tl.dot(p.to(values.dtype), values, acc * old[:, None])  # [BM, BV]
        total = total * old + tl.sum(p, 1)
        best = new
    acc = acc * tl.where(total == 0.0, 0.0, 1.0 / total)[:, None]
    tl.store(o_at, acc.to(out.dtype.element_ty), mask=written)


@triton.jit
def combine_kernel(
    parts,  # [SPLITS, total_rows, dim] float32, not divided by the sums
    maxima, sums,  # [SPLITS, total_rows] float32: largest score times log2(e), sum of powers of two
    out,  # [B, heads, rows, dim]
    total_rows, rows, heads, dim,  # total_rows = B * heads * rows
    o_b, o_h, o_s,  # strides of out in elements: batch, head, row
    SPLITS: tl.constexpr,  # parts of the keys
    BM: tl.constexpr, BD: tl.constexpr,  # rows of a program; dim, rounded up to a power of two
):  # fmt: skip
    """Join the results over SPLITS parts of the keys, always in the same order. A program: BM rows."""
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)  # [BM]
    d = tl.arange(0, BD)  # [BD]
    inside = row < total_rows  # [BM]
    both = inside[:, None] & (d < dim)[None, :]  # [BM, BD]
    best = tl.full([BM], float("-inf"), tl.float32)
    for i in tl.static_range(SPLITS):
        best = tl.maximum(best, tl.load(maxima + i * total_rows + row, mask=inside, other=float("-inf")))
    best = tl.where(best == float("-inf"), 0.0, best)
    acc = tl.zeros([BM, BD], tl.float32)
    total = tl.zeros([BM], tl.float32)
    for i in tl.static_range(SPLITS):
        weight = tl.exp2(
            tl.load(maxima + i * total_rows + row, mask=inside, other=float("-inf")) - best  # [BM]
        )  # fmt: skip
        total += weight * tl.load(sums + i * total_rows + row, mask=inside, other=0.0)
        acc += weight[:, None] * tl.load(
            parts + (i * total_rows + row)[:, None] * dim + d[None, :], mask=both, other=0.0  # [BM, BD]
        )  # fmt: skip
    acc = acc * tl.where(total == 0.0, 0.0, 1.0 / total)[:, None]
    batch, head, at = row // (heads * rows), row // rows % heads, row % rows  # [BM] each
    o_at = out + (batch * o_b + head * o_h + at * o_s)[:, None] + d[None, :]  # [BM, BD]
    tl.store(o_at, acc.to(out.dtype.element_ty), mask=both)

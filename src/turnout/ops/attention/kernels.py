"""Triton kernels of attention: a running softmax over blocks of keys, in powers of two, accumulated in float32."""

# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl


@triton.jit
def flash_kernel(
    q, k, v, lengths, key_mask, sums, out,
    heads, group, rows, keys, dim, dim_v, scale,
    q_b, q_h, q_s, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d, o_b, o_h, o_s, mask_b, mask_s,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    CAUSAL: tl.constexpr, LENGTHS: tl.constexpr, MASK: tl.constexpr, GO_ON: tl.constexpr,
):  # fmt: skip
    """out[b, h, row] of BM rows. The first lengths[b, 0] and the last lengths[b, 1] keys count. `scale` has the factor log2(e) in it.
    GO_ON from what `out` has over other keys, with the logarithm of the `sums` of exponentials behind it; [B, H, rows] both."""
    tiles = tl.cdiv(rows, BM)
    tile = tl.program_id(0) % tiles
    bh = tl.program_id(0) // tiles
    batch, head = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    row = tile * BM + tl.arange(0, BM)
    d, dv = tl.arange(0, BD).to(tl.int64), tl.arange(0, BV).to(tl.int64)
    wide_row = row.to(tl.int64)
    q_at = q + batch * q_b + head * q_h + wide_row[:, None] * q_s + d[None, :] * q_d
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

    written = (row < rows)[:, None] & (dv < dim_v)[None, :]
    o_at = out + batch * o_b + head * o_h + wide_row[:, None] * o_s + dv[None, :]
    if GO_ON:
        written &= all_blocks > 0
        best = tl.load(sums + (batch * heads + head) * rows + wide_row, mask=row < rows, other=0.0) * 1.4426950408889634
        total = tl.where(best == float("-inf"), 0.0, 1.0)
        acc = tl.load(o_at, mask=written, other=0.0).to(tl.float32)
    else:
        best = tl.full([BM], float("-inf"), tl.float32)
        total = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, BV], tl.float32)
    for i in range(all_blocks):
        n = tl.where(i < blocks, i * BN, start + (i - blocks) * BN)
        stop = tl.where(i < blocks, end, last)
        col = n + tl.arange(0, BN)
        wide_col = col.to(tl.int64)
        inside = col < stop
        kt = tl.load(k + wide_col[None, :] * k_s + d[:, None] * k_d, mask=inside[None, :] & (d < dim)[:, None], other=0.0)  # [BD, BN]
        s = tl.dot(queries, kt) * scale  # [BM, BN]
        counts = inside
        if MASK:
            counts &= tl.load(key_mask + batch * mask_b + wide_col * mask_s, mask=inside, other=0) != 0
        if CAUSAL:
            s = tl.where(counts[None, :] & (col[None, :] <= row[:, None]), s, float("-inf"))
        else:
            s = tl.where(counts[None, :], s, float("-inf"))
        new = tl.maximum(best, tl.max(s, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        p, old = tl.exp2(s - safe[:, None]), tl.exp2(best - safe)
        v_at = v + wide_col[:, None] * v_s + dv[None, :] * v_d
        values = tl.load(v_at, mask=inside[:, None] & (dv < dim_v)[None, :], other=0.0)  # [BN, BV]
        acc = tl.dot(p.to(values.dtype), values, acc * old[:, None])
        total = total * old + tl.sum(p, 1)
        best = new
    acc = acc * tl.where(total == 0.0, 0.0, 1.0 / total)[:, None]
    tl.store(o_at, acc.to(out.dtype.element_ty), mask=written)


@triton.jit
def combine_kernel(
    parts, maxima, sums, out, total_rows, rows, heads, dim, o_b, o_h, o_s,
    SPLITS: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Join the partial results of SPLITS parts of the keys, always in the same order. parts [SPLITS, total_rows, dim], in float32."""
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    d = tl.arange(0, BD)
    inside = row < total_rows
    both = inside[:, None] & (d < dim)[None, :]
    best = tl.full([BM], float("-inf"), tl.float32)
    for i in tl.static_range(SPLITS):
        best = tl.maximum(best, tl.load(maxima + i * total_rows + row, mask=inside, other=float("-inf")))
    best = tl.where(best == float("-inf"), 0.0, best)
    acc = tl.zeros([BM, BD], tl.float32)
    total = tl.zeros([BM], tl.float32)
    for i in tl.static_range(SPLITS):
        weight = tl.exp2(tl.load(maxima + i * total_rows + row, mask=inside, other=float("-inf")) - best)
        total += weight * tl.load(sums + i * total_rows + row, mask=inside, other=0.0)
        acc += weight[:, None] * tl.load(parts + (i * total_rows + row)[:, None] * dim + d[None, :], mask=both, other=0.0)
    acc = acc * tl.where(total == 0.0, 0.0, 1.0 / total)[:, None]
    batch, head, at = row // (heads * rows), row // rows % heads, row % rows
    o_at = out + (batch * o_b + head * o_h + at * o_s)[:, None] + d[None, :]
    tl.store(o_at, acc.to(out.dtype.element_ty), mask=both)

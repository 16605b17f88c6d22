"""Wide heads on Hopper, in Gluon.

TMA fills a ring of shared memory; two warpgroups share 64 queries and split the head between them. A head
of 512 is too wide for the registers of one warpgroup: 64 queries x 512 in float32 are 128 KiB, half of the
register file. So both warpgroups work on the same 64 queries. In scores = q k^T each takes half of the
keys, in out += p v each takes half of every column block. p passes through shared memory, where tensor
cores read it.
"""

# A branch on a constexpr must not be joined with one on a number.
# ruff: noqa: SIM102
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from turnout.launch.gluon import async_load, reinterpret

WARPS = 8


@gluon.jit
def v_block(slot, BK: gl.constexpr, W: gl.constexpr, SIZE: gl.constexpr):
    """A block of v, [1, 1, BK, W], at the start of a ring slot of SIZE elements.

    Triton 3.8 wants all of the slot accounted for, hence the blocks behind it; Triton 3.6 takes no layout as
    an argument, hence it is made here.
    """
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    return reinterpret(slot, slot.dtype, [SIZE // (BK * W), 1, 1, BK, W], layout).index(0)


@gluon.jit
def produce(
    q, k,  # TMA descriptors of [batch, heads, rows, dim], boxes [1, 1, BM, DC] and [1, 1, BN, DC]
    v0, v1,  # TMA descriptors of v, boxes [1, 1, BK, W0] and [1, 1, BK, W1]
    q_s, ring,  # shared memory: [CHUNKS, 1, 1, BM, DC], [SLOTS, 1, 1, BN, DC]
    q_full, full, empty,  # barriers: [1], [SLOTS, 1], [SLOTS, 1]
    batch, head, kv_head, row,  # row: the first query
    first, last,  # keys from first to last - 1
    BM: gl.constexpr, BN: gl.constexpr,  # queries, keys of a block
    CHUNKS: gl.constexpr, DC: gl.constexpr,  # q and k come in CHUNKS pieces of DC columns
    W0: gl.constexpr, W1: gl.constexpr, BK: gl.constexpr,  # v comes in pieces of BK keys, W0 or W1 columns
    SLOTS: gl.constexpr,  # of the ring
):  # fmt: skip
    """Load q, then k and v through the ring. One warp.

    Order in the ring: k of block 0; then k of block i + 1 and v of block i, over and over, as they are used.
    """
    mbarrier.expect(q_full, BM * DC * CHUNKS * 2)  # bytes: elements have 2
    for c in gl.static_range(CHUNKS):
        async_load(q, [batch, head, row, c * DC], q_full, q_s.index(c))
    at = 0  # pieces loaded so far
    for n in range(first, last + BN, BN):
        if n < last:
            for c in gl.static_range(CHUNKS):
                slot = at % SLOTS
                mbarrier.wait(empty.index(slot), ((at // SLOTS) & 1) ^ 1)
                mbarrier.expect(full.index(slot), BN * DC * 2)
                async_load(k, [batch, kv_head, n, c * DC], full.index(slot), ring.index(slot))
                at += 1
        if n > first:
            for part in gl.static_range(BN // BK):
                key = n - BN + part * BK
                slot = at % SLOTS
                mbarrier.wait(empty.index(slot), ((at // SLOTS) & 1) ^ 1)
                mbarrier.expect(full.index(slot), BK * W0 * 2)
                into = v_block(ring.index(slot), BK, W0, BN * DC)
                async_load(v0, [batch, kv_head, key, 0], full.index(slot), into)
                at += 1
                slot = at % SLOTS
                mbarrier.wait(empty.index(slot), ((at // SLOTS) & 1) ^ 1)
                mbarrier.expect(full.index(slot), BK * W1 * 2)
                into = v_block(ring.index(slot), BK, W1, BN * DC)
                async_load(v1, [batch, kv_head, key, W0], full.index(slot), into)
                at += 1


@gluon.jit
def wait_full(ring, full, at, zero, SLOTS: gl.constexpr):
    """The slot [1, 1, BN, DC] of the at-th piece that the producer loaded, once it is there. zero: see
    `consume`."""
    slot = at % SLOTS
    mbarrier.wait(full.index(slot), (at // SLOTS) & 1)
    return ring.index(slot + zero)


@gluon.jit
def release(empty, at, SLOTS: gl.constexpr):
    """Tell the producer that the slot of the at-th piece may be overwritten."""
    mbarrier.arrive(empty.index(at % SLOTS), count=1)


@gluon.jit
def softmax(
    s,  # [BM, BN] scores
    m, total,  # [BM] largest score so far; [BM, 2] sums so far of each half of the keys
    n, row, keys,  # first key, first query, all keys
    scale,  # of the scores, times log2(e)
    CAUSAL: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    layout: gl.constexpr,  # of s
):  # fmt: skip
    """One step of the running softmax, in powers of two.

    Returns p [BM, BN], the new maximum [BM] and sums [BM, 2], and what older sums are to be multiplied by
    [BM]. Each warpgroup sums up its own half of the keys; the halves are added at the end.
    """
    if n + BN > keys:
        col = n + gl.arange(0, BN, layout=gl.SliceLayout(0, layout))  # [BN]
        s = gl.where((col < keys)[None, :], s, float("-inf"))
    if CAUSAL:
        if n + BN > row:
            col = n + gl.arange(0, BN, layout=gl.SliceLayout(0, layout))  # [BN]
            at = row + gl.arange(0, BM, layout=gl.SliceLayout(1, layout))  # [BM]
            s = gl.where(col[None, :] <= at[:, None], s, float("-inf"))
    new = gl.maximum(m, gl.max(s, 1))  # [BM]
    safe = gl.where(new == float("-inf"), 0.0, new) * scale  # [BM], finite where no key has counted so far
    p = gl.exp2(s * scale - safe[:, None])  # [BM, BN]
    old = gl.exp2(m * scale - safe)  # [BM]
    halves = gl.sum(p.reshape([BM, 2, BN // 2]), 2)  # [BM, 2]
    total = total * gl.convert_layout(old, gl.SliceLayout(1, total.type.layout))[:, None] + halves
    return p, new, total, old


@gluon.jit
def wide_kernel(
    q, k, v0, v1,  # TMA descriptors, as in `produce`; v1 is None if W1 == W0
    out,  # [batch, heads, rows, dim], or [SPLITS, batch * heads, rows, dim] float32
    maxima, sums,  # [SPLITS, batch * heads, rows] float32, or None with one split
    heads, group, rows, keys, dim,  # group: query heads that share one key head
    blocks_each,  # blocks of keys in a split
    scale,  # of the scores, times log2(e)
    stride_b, stride_h, stride_s,  # of out, in elements
    BM: gl.constexpr, BN: gl.constexpr, CHUNKS: gl.constexpr, DC: gl.constexpr,  # as in `produce`
    W0: gl.constexpr, W1: gl.constexpr, BK: gl.constexpr, SLOTS: gl.constexpr,
    CAUSAL: gl.constexpr, SPLITS: gl.constexpr,  # SPLITS: parts of the keys, one for each program
):  # fmt: skip
    """softmax(scale * q k^T) v. A program: BM queries of one head.

    With SPLITS > 1 it takes one part of the keys and writes its sums in float32, for `combine_kernel` to
    join.
    """
    tiles = gl.cdiv(rows, BM)
    program = gl.program_id(0)
    part = program % SPLITS
    tile = (program // SPLITS) % tiles
    bh = program // (SPLITS * tiles)
    batch, head = bh // heads, bh % heads
    row = tile * BM
    first = part * blocks_each * BN
    last = gl.minimum(keys, first + blocks_each * BN)
    if CAUSAL:
        last = gl.minimum(last, row + BM)
    last = gl.maximum(last, first + 1)  # at least one block, all of it masked

    v1 = v0 if W1 == W0 else v1  # one descriptor reads both
    dtype: gl.constexpr = q.dtype
    q_s = gl.allocate_shared_memory(dtype, [CHUNKS, 1, 1, BM, DC], q.layout)
    ring = gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, BN, DC], k.layout)
    p_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    p_s = gl.allocate_shared_memory(dtype, [2, BM, BN], p_layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (consume, (
                out, maxima, sums, q_s, ring, p_s, q_full, full, empty,
                batch, head, bh, heads, part, row, rows, first, last, keys, dim,
                scale, stride_b, stride_h, stride_s, BM, BN, CHUNKS, DC, W0, W1, BK, SLOTS, CAUSAL, SPLITS,
            )),
            (produce, (
                q, k, v0, v1, q_s, ring, q_full, full, empty,
                batch, head, head // group, row, first, last, BM, BN, CHUNKS, DC, W0, W1, BK, SLOTS,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip


@gluon.jit
def consume(
    out, maxima, sums,  # as in `wide_kernel`
    q_s, ring, p_s,  # shared memory; p_s [2, BM, BN]: p of the block at hand and of the next
    q_full, full, empty,  # barriers
    batch, head, bh, heads,  # bh = batch * heads + head
    part, row, rows, first, last, keys, dim,  # part: of the keys; the others as in `produce`
    scale, stride_b, stride_h, stride_s,
    BM: gl.constexpr, BN: gl.constexpr, CHUNKS: gl.constexpr, DC: gl.constexpr,  # as in `produce`
    W0: gl.constexpr, W1: gl.constexpr, BK: gl.constexpr, SLOTS: gl.constexpr,
    CAUSAL: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """Multiply. Two warpgroups: while p v of one block is multiplied, the softmax of the next is taken."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, BN // 2, 16]
    )  # fmt: skip
    layout0: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, W0 // 2, 16]
    )  # fmt: skip
    layout1: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, W1 // 2, 16]
    )  # fmt: skip
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    dtype: gl.constexpr = q_s.dtype
    PARTS: gl.constexpr = BN // BK  # pieces of v along the keys of a block
    acc0 = gl.zeros([BM, W0], gl.float32, layout0)
    acc1 = gl.zeros([BM, W1], gl.float32, layout1)
    m = gl.full([BM], float("-inf"), gl.float32, row_layout)
    s = gl.zeros([BM, BN], gl.float32, s_layout)
    total = gl.sum(s.reshape([BM, 2, BN // 2]), 2)  # [BM, 2] zeros, in the layout of `softmax`

    mbarrier.wait(q_full, 0)
    at = 0  # pieces used so far
    for c in gl.static_range(CHUNKS):
        chunk = wait_full(ring, full, at, 0, SLOTS)  # [1, 1, BN, DC]
        s = warpgroup_mma(
            q_s.index(c).reshape([BM, DC]), chunk.reshape([BN, DC]).permute((1, 0)), s,
            use_acc=c > 0, is_async=True,
        )  # fmt: skip
        s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
        release(empty, at, SLOTS)
        at += 1
    p, m, total, old = softmax(s, m, total, first, row, keys, scale, CAUSAL, BM, BN, s_layout)
    p_slot = 0  # which half of p_s has p of the block whose v comes next
    p_s.index(p_slot).store(p.to(dtype))
    fence_async_shared()

    for n in range(first + BN, last, BN):
        # 0, but not known before: else the addresses of q and of the slots are worked out ahead and kept in
        # registers, which are needed for sums. (For q that is so with every ptxas, for the slots with 13.3
        # and 13.4.)
        zero = n >> 30
        # Scores of this block; meanwhile the sums so far are brought to the maximum of the block before.
        for c in gl.static_range(CHUNKS):
            piece = wait_full(ring, full, at, zero, SLOTS)  # [1, 1, BN, DC]
            s = warpgroup_mma(
                q_s.index(c + zero).reshape([BM, DC]), piece.reshape([BN, DC]).permute((1, 0)), s,
                use_acc=c > 0, is_async=True,
            )  # fmt: skip
            if c == 0:
                acc0 = acc0 * gl.convert_layout(old, gl.SliceLayout(1, layout0))[:, None]
                acc1 = acc1 * gl.convert_layout(old, gl.SliceLayout(1, layout1))[:, None]
            else:
                s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
                release(empty, at - 1, SLOTS)
            at += 1
        # p v of the block before this; its last two products go on while the softmax of this block is taken.
        for i in gl.static_range(PARTS):
            p_part = p_s.index(p_slot).slice(i * BK, BK, dim=1)
            piece = v_block(wait_full(ring, full, at, zero, SLOTS), BK, W0, BN * DC).reshape([BK, W0])
            acc0 = warpgroup_mma(p_part, piece, acc0, is_async=True)
            if i == 0:
                s, acc0 = warpgroup_mma_wait(num_outstanding=1, deps=(s, acc0))
            else:
                acc0, acc1 = warpgroup_mma_wait(num_outstanding=1, deps=(acc0, acc1))
            release(empty, at - 1, SLOTS)
            at += 1
            piece = v_block(wait_full(ring, full, at, zero, SLOTS), BK, W1, BN * DC).reshape([BK, W1])
            acc1 = warpgroup_mma(p_part, piece, acc1, is_async=True)
            if i < PARTS - 1:
                acc0, acc1 = warpgroup_mma_wait(num_outstanding=1, deps=(acc0, acc1))
                release(empty, at - 1, SLOTS)
            else:
                acc0, acc1 = warpgroup_mma_wait(num_outstanding=2, deps=(acc0, acc1))
            at += 1
        p, m, total, old = softmax(s, m, total, n, row, keys, scale, CAUSAL, BM, BN, s_layout)
        p_slot ^= 1
        p_s.index(p_slot).store(p.to(dtype))
        fence_async_shared()
        acc0, acc1 = warpgroup_mma_wait(num_outstanding=0, deps=(acc0, acc1))
        release(empty, at - 2, SLOTS)
        release(empty, at - 1, SLOTS)

    acc0 = acc0 * gl.convert_layout(old, gl.SliceLayout(1, layout0))[:, None]
    acc1 = acc1 * gl.convert_layout(old, gl.SliceLayout(1, layout1))[:, None]
    for i in gl.static_range(PARTS):
        p_part = p_s.index(p_slot).slice(i * BK, BK, dim=1)
        piece = v_block(wait_full(ring, full, at, 0, SLOTS), BK, W0, BN * DC).reshape([BK, W0])
        acc0 = warpgroup_mma(p_part, piece, acc0, is_async=True)
        at += 1
        piece = v_block(wait_full(ring, full, at, 0, SLOTS), BK, W1, BN * DC).reshape([BK, W1])
        acc1 = warpgroup_mma(p_part, piece, acc1, is_async=True)
        at += 1
    acc0, acc1 = warpgroup_mma_wait(num_outstanding=0, deps=(acc0, acc1))

    total = gl.convert_layout(gl.sum(total, 1), row_layout)  # [BM]
    at_row = row + gl.arange(0, BM, layout=row_layout)  # [BM]
    if SPLITS == 1:
        inverse = gl.where(total == 0.0, 0.0, 1.0 / total)  # [BM]
        acc0 = acc0 * gl.convert_layout(inverse, gl.SliceLayout(1, layout0))[:, None]
        acc1 = acc1 * gl.convert_layout(inverse, gl.SliceLayout(1, layout1))[:, None]
        base = out + batch.to(gl.int64) * stride_b + head.to(gl.int64) * stride_h
    else:
        # Index in [SPLITS, batch * heads]: programs / (splits * tiles) = batch * heads.
        partial = part.to(gl.int64) * (gl.num_programs(0) // (SPLITS * gl.cdiv(rows, BM))) + bh
        gl.store(maxima + partial * rows + at_row, m * scale, mask=at_row < rows)
        gl.store(sums + partial * rows + at_row, total, mask=at_row < rows)
        base = out + partial * stride_h
    store(base, acc0, row, rows, 0, dim, stride_s, BM, W0, layout0)
    store(base, acc1, row, rows, W0, dim, stride_s, BM, W1, layout1)


@gluon.jit
def store(
    base,  # [rows, dim] of one head
    acc,  # [BM, W]
    row, rows, column, dim,  # row, column: where acc begins
    stride_s,  # from row to row, in elements
    BM: gl.constexpr, W: gl.constexpr,
    layout: gl.constexpr,  # of acc
):  # fmt: skip
    """Write sums to the output, as far as they are inside of it."""
    at = row + gl.arange(0, BM, layout=gl.SliceLayout(1, layout))  # [BM]
    col = column + gl.arange(0, W, layout=gl.SliceLayout(0, layout))  # [W]
    inside = (at < rows)[:, None] & (col < dim)[None, :]  # [BM, W]
    gl.store(
        base + at.to(gl.int64)[:, None] * stride_s + col[None, :],  # [BM, W]
        acc.to(base.dtype.element_ty),
        mask=inside,
    )

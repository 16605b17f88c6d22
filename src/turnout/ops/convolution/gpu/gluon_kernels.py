"""Implicit GEMM for Hopper, in Gluon: one warp fetches with TMA, two warpgroups multiply.

The kernels see axes [N, S, U, W, C]: S is shared (depth, or height where that suits better), U is the other
one. A tile is SLOTS places along S times 128 pixels, half of them for each warpgroup. One place along S of
the input serves up to KS of the tile's outputs: it is fetched once for all of them, and may be held in
registers while it is multiplied. Shared memory is what bounds these kernels.

The 128 pixels are BOXES boxes of BU x BW, each fetched by itself: neighbours along W, and behind the last of
a row the first of the next. So few pixels are computed for nothing where tiles in one piece would stick out.
The two warpgroups share one box, or have theirs.

A group is one tap along U and W and one block of channels: SLOTS + KS - 1 places of the input and KS blocks
of the weight, STAGES groups in flight. What lies outside of x TMA fills with zeros: that is the padding.
Frames before the first may come from another tensor, `cache`: they are places along S, or, BY_FRAME, lie
along U, where no box has pixels of two frames.
"""
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false
# pyright: reportIndexIssue=false
# No starred expressions in Triton, and what is known while compiling stands apart.
# ruff: noqa: RUF005, RET505, SIM102

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from turnout.launch.gluon import async_load, async_store, reinterpret

# Sizes do not change the code: one compiled kernel serves all of them.
NUMBERS = (
    "tiles", "nw", "nt", "nu", "ns", "channel_blocks", "frames", "size", "ps", "pu", "pw",
    "filters", "OS", "OU", "OW",
    "on", "os", "ou", "ow", "oc", "rn", "rs", "ru", "rw", "rc",
)  # fmt: skip


@gluon.jit
def place(
    tile, columns, nt, ns,  # number of the tile; blocks of filters; tiles of a place; tiles along S
    SLOTS: gl.constexpr, BOXES: gl.constexpr,  # places along S and boxes of a tile
):  # fmt: skip
    """Column block, batch, first place along S and first box of a tile, of the nt tiles that the boxes of a
    place make. Blocks of columns are neighbours: they read the same pixels."""
    column = tile % columns
    tile = tile // columns
    box = (tile % nt) * BOXES
    tile = tile // nt
    return column, tile // ns, (tile % ns) * SLOTS, box


@gluon.jit
def step(u, w, nw, BU: gl.constexpr, BW: gl.constexpr):
    """The first row u and column w of the next box, of nw boxes along W that are BU and BW apart."""
    w += BW
    past = w >= nw * BW
    return gl.where(past, u + BU, u), gl.where(past, 0, w)


@gluon.jit
def seen(
    s, frames, size, ps,  # place of the output; frames of cache; places of x along S; padding before these
    KO: gl.constexpr, DS: gl.constexpr,  # taps and dilation along S
    REPLICATE: gl.constexpr,  # the first frame stands for those before it
):  # fmt: skip
    """First and end of the taps along S that see anything but padding from place s; one at least, as a tile
    must have a group."""
    first = s * 0
    end = first + KO
    if KO > 1:
        if not REPLICATE:
            first = gl.minimum(gl.maximum((ps - frames - s + DS - 1) // DS, 0), KO - 1)
        end = gl.maximum(gl.minimum((size + ps - s + DS - 1) // DS, KO), first + 1)
    return first, end


@gluon.jit
def fetch(
    x, cache,  # TMA descriptors of [N, S, U, W, C]; cache: the frames before x, or None
    w1, w2,  # TMA descriptors of the weight [F, taps, C] or [KW, F, taps, C], BN1 and BN2 filters at a time
    xs,  # shared memory: STAGES * PLACES * BOXES boxes [1, 1, rows, columns, BC] of 128 / BOXES pixels
    b1, b2,  # shared memory: STAGES * KS blocks of the weight, of BN1 * BC and BN2 * BC elements
    full, free_x, free_b,  # barriers, see `rings`
    tiles, columns, nw, nt, ns,  # tiles; blocks of filters; boxes along W; tiles of a place; tiles along S
    channel_blocks, frames, size,  # blocks of BC channels; frames of cache; places of x along S
    ps, pu, pw,  # padding before the first element
    KO: gl.constexpr, KS: gl.constexpr, KU: gl.constexpr, KW: gl.constexpr,  # taps, see `implicit_gemm`
    TAP_S: gl.constexpr, TAP_U: gl.constexpr,  # how far apart taps along S and U are in the weight
    DS: gl.constexpr, DU: gl.constexpr, DW: gl.constexpr,  # dilation
    REPLICATE: gl.constexpr,  # the first frame stands for those before it
    SLOTS: gl.constexpr, STAGES: gl.constexpr,  # places along S of a tile; groups in flight
    BOXES: gl.constexpr, BU: gl.constexpr, BW: gl.constexpr,  # boxes of a place; rows, columns between them
    BC: gl.constexpr, BN1: gl.constexpr, BN2: gl.constexpr,  # channels, filters of a block in two pieces
    BY_FRAME: gl.constexpr,  # the frames of cache lie along U
):  # fmt: skip
    """Load the pixels and the weight of all groups of all tiles. BU, BW: how far apart boxes are. They may
    overlap.

    One warp with 24 registers a thread. Written out for all places, what it works out ahead would not fit: so
    LLVM must not know how many there are, and `zero` is not known to be 0."""
    zero = frames >> 31
    PLACES: gl.constexpr = SLOTS + KS - 1
    X_BYTES: gl.constexpr = 128 * BC * x.dtype.primitive_bitwidth // 8
    W_BYTES: gl.constexpr = (BN1 + BN2) * BC * x.dtype.primitive_bitwidth // 8
    group = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        column, n, s, box = place(tile, columns, nt, ns, SLOTS, BOXES)
        u, w = (box // nw) * BU - pu, (box % nw) * BW
        first_tap, end_tap = seen(s, frames, size, ps, KO, DS, REPLICATE)
        for ko in range(first_tap, end_tap):
            for ku in range(KU):
                for kw in range(KW):
                    for block in range(channel_blocks):
                        stage = group % STAGES
                        phase = (group // STAGES) & 1 ^ 1
                        for p in range(PLACES + zero):
                            ready = full.index(stage * PLACES + p)  # [1]
                            mbarrier.wait(free_x.index(stage * PLACES + p), phase)
                            if p < KS:
                                slot = stage * KS + p
                                mbarrier.wait(free_b.index(slot), phase)
                                mbarrier.expect(ready, X_BYTES + W_BYTES)
                                tap = (ko + p) * TAP_S + ku * TAP_U + kw
                                filter = column * (BN1 + BN2)
                                if len(w1.block_shape) == 4:  # [KW, F, taps, C]
                                    async_load(w1, [0, filter, tap, block * BC], ready, b1.index(slot))
                                else:
                                    async_load(w1, [filter, tap, block * BC], ready, b1.index(slot))
                                if BN2 > 0:
                                    async_load(w2, [filter + BN1, tap, block * BC], ready, b2.index(slot))
                            else:
                                mbarrier.expect(ready, X_BYTES)
                            frame = s + (ko + p) * DS - ps
                            if REPLICATE:
                                frame = gl.maximum(frame, -frames)
                            at_u, at_w = u, w
                            for i in gl.static_range(BOXES):
                                into = xs.index((stage * PLACES + p) * BOXES + i)  # [1, 1, rows, columns, BC]
                                to_u, to_w = at_u + ku * DU, at_w + kw * DW - pw
                                fetch_box(
                                    x, cache, frames, n, frame, to_u, to_w, block * BC, ready, into, BY_FRAME
                                )
                                if i < BOXES - 1:
                                    at_u, at_w = step(at_u, at_w, nw, BU, BW)
                        group += 1


@gluon.jit
def fetch_box(
    x, cache, frames,  # TMA descriptors of [N, S, U, W, C], cache may be None; frames of cache
    n, s, u, w, channel,  # where the box begins
    ready, into,  # barrier [1]; shared memory [1, 1, rows, columns, BC]
    BY_FRAME: gl.constexpr,  # as in `fetch`
):  # fmt: skip
    """Load the box at [n, s, u, w, channel] from x, or from `cache` where it is before x, into `into`."""
    if cache is None:
        async_load(x, [n, s, u, w, channel], ready, into)
    elif BY_FRAME:
        if u < 0:
            async_load(cache, [n, s, u + frames, w, channel], ready, into)
        else:
            async_load(x, [n, s, u, w, channel], ready, into)
    else:
        if s < 0:
            async_load(cache, [n, s + frames, u, w, channel], ready, into)
        else:
            async_load(x, [n, s, u, w, channel], ready, into)


@gluon.jit
def rows_of(
    boxes,  # shared memory: COUNT * ROWS * COLUMNS elements
    COUNT: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,  # matrices; pixels, elements of a pixel
):  # fmt: skip
    """COUNT matrices [ROWS, COLUMNS] in the shared memory of these boxes, as the tensor cores see them: rows
    are pixels."""
    bits: gl.constexpr = boxes.dtype.primitive_bitwidth
    # bytes
    wide: gl.constexpr = COLUMNS * bits // 8 if COLUMNS * bits < 1024 else 128
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=wide, element_bitwidth=bits, rank=2)
    return reinterpret(boxes, boxes.dtype, [COUNT, ROWS, COLUMNS], layout)  # [COUNT, ROWS, COLUMNS]


@gluon.jit
def hold_bias(
    bias, filters,  # [filters]
    first: gl.constexpr, apart: gl.constexpr,  # the first filter held, and how far apart blocks are
    N: gl.constexpr, BLOCKS: gl.constexpr,  # filters that are held of a block; blocks
):  # fmt: skip
    """The bias in shared memory, [BLOCKS, N]: to fetch it for every tile would be seen."""
    # [BLOCKS, N]
    held = gl.allocate_shared_memory(gl.float32, [BLOCKS, N], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    for i in gl.static_range(BLOCKS):
        filter = i * apart + first + gl.arange(0, N, gl.BlockedLayout([1], [32], [4], [0]))  # [N]
        # [N]
        held.index(i).store(gl.load(bias + filter, mask=filter < filters, other=0.0).to(gl.float32))
    return held


@gluon.jit
def begin(
    bias, column,  # shared memory [BLOCKS, N], see `hold_bias`; which block
    N: gl.constexpr, layout: gl.constexpr,  # filters; layout of the accumulator
    BIAS: gl.constexpr,  # whether there is a bias
):  # fmt: skip
    """A fresh accumulator [64, N]: zeros, or with BIAS the bias [N] of a block of filters in every row."""
    acc = gl.zeros((64, N), gl.float32, layout)  # [64, N]
    if BIAS:
        acc += bias.index(column).load(gl.SliceLayout(0, layout))[None, :]  # [1, N]
    return acc


@gluon.jit
def multiply(
    a1, a2,  # [64, BC] pixels, in shared memory or in registers: one for each of the two products
    b1, b2,  # BN1 * BC and BN2 * BC elements of the weight, in shared memory
    accs,  # SLOTS accumulators [64, BN1], then with BN2 > 0 as many [64, BN2]
    slot: gl.constexpr, SLOTS: gl.constexpr,  # which slot, of how many
    BN1: gl.constexpr, BN2: gl.constexpr, BC: gl.constexpr,  # filters of the two products; channels
):  # fmt: skip
    """Add pixels times a block of the weight to one slot's accumulators, without waiting."""
    first = warpgroup_mma(a1, b1.reshape([BN1, BC]).permute([1, 0]), accs[slot], is_async=True)  # [64, BN1]
    accs = accs[:slot] + (first,) + accs[slot + 1 :]
    if BN2 > 0:
        # [64, BN2]
        second = warpgroup_mma(a2, b2.reshape([BN2, BC]).permute([1, 0]), accs[SLOTS + slot], is_async=True)
        accs = accs[: SLOTS + slot] + (second,) + accs[SLOTS + slot + 1 :]
    return accs


@gluon.jit
def settle(
    accs, used,  # accumulators as in `multiply`; a tuple of operands [64, BC], may be empty
    outstanding: gl.constexpr,  # products that may still be under way
):  # fmt: skip
    """The accumulators, once all but the last products are done. `used` are operands in registers, which must
    live until then."""
    if len(accs) + len(used) == 1:
        return (warpgroup_mma_wait(num_outstanding=outstanding, deps=accs),)
    else:
        return warpgroup_mma_wait(num_outstanding=outstanding, deps=accs + used)[: len(accs)]


@gluon.jit
def rounded(a):
    """a, of any shape, to the nearest TF32: the tensor cores would cut bits off."""
    if a.dtype == gl.float32:
        a = gl.inline_asm_elementwise(
            "cvt.rna.tf32.f32 $0, $1;", "=r,r", [a], dtype=gl.float32, is_pure=True, pack=1
        )
    return a


@gluon.constexpr_function
def products(p, slots, kernel, pieces):
    """How many products place p of a group takes part in."""
    return sum(0 <= p - k < slots for k in range(kernel)) * pieces


@gluon.jit
def accumulate(
    accs,  # as in `multiply`
    group, groups,  # groups before this tile, groups of it
    pixels,  # shared memory: matrices [64, BC], two for each place, one for each warpgroup
    b1, b2, full, free_x, free_b,  # as in `fetch`
    layout1: gl.constexpr, layout2: gl.constexpr,  # of the accumulators [64, BN1] and [64, BN2]
    KS: gl.constexpr, SLOTS: gl.constexpr, STAGES: gl.constexpr,  # as in `fetch`
    BC: gl.constexpr, BN1: gl.constexpr, BN2: gl.constexpr,  # as in `fetch`
    RS: gl.constexpr,  # pixels go through registers
    HALF: gl.constexpr,  # which warpgroup this is, 0 or 1
):  # fmt: skip
    """All groups of one tile. `pixels` are matrices of 64, one for each warpgroup. With RS they are read
    once, into registers, for all their products. Those of the last place have only one: read from shared
    memory, it may go on while the next group begins. TF32 is rounded in registers, so there none goes past
    them."""
    BITS: gl.constexpr = pixels.dtype.primitive_bitwidth
    PLACES: gl.constexpr = SLOTS + KS - 1
    PIECES: gl.constexpr = 2 if BN2 > 0 else 1
    # Places that go through registers.
    HELD: gl.constexpr = (PLACES if BITS == 32 else PLACES - 1) if RS else 0
    gl.assume(groups > 0)  # else the sums are copied for the case that there is none (400 instructions)
    for g in range(groups):
        stage = group % STAGES
        phase = (group // STAGES) & 1
        held = ()  # operands [64, BC] in registers whose products may still be under way
        for p in gl.static_range(PLACES):
            mbarrier.wait(full.index(stage * PLACES + p), phase)
            a1 = pixels.index(2 * (stage * PLACES + p) + HALF)  # [64, BC]
            a2 = a1  # [64, BC], for the second product
            if p < HELD:
                # [64, BC], in registers
                a1 = rounded(
                    a1.load(gl.DotOperandLayout(operand_index=0, parent=layout1, k_width=32 // BITS))
                )
                # [64, BC]
                a2 = gl.convert_layout(
                    a1, gl.DotOperandLayout(operand_index=0, parent=layout2, k_width=32 // BITS)
                )
            for k in gl.static_range(KS):
                if p - k >= 0 and p - k < SLOTS:
                    accs = multiply(
                        a1, a2, b1.index(stage * KS + k), b2.index(stage * KS + k),
                        accs, p - k, SLOTS, BN1, BN2, BC,
                    )  # fmt: skip
            if p < HELD:
                mbarrier.arrive(free_x.index(stage * PLACES + p), count=1)
            # From here on only this place's products may be under way, and what those before it used is free.
            accs = settle(accs, held, products(p, SLOTS, KS, PIECES))
            held = ()
            if p < HELD:
                held = (a1,)  # [64, BC]
            if p > 0:
                if p - 1 >= HELD:
                    mbarrier.arrive(free_x.index(stage * PLACES + p - 1), count=1)
                if p >= SLOTS:
                    mbarrier.arrive(free_b.index(stage * KS + p - SLOTS), count=1)
            elif HELD < PLACES:
                if g > 0:
                    before = (group - 1) % STAGES
                    mbarrier.arrive(free_x.index(before * PLACES + PLACES - 1), count=1)
                    mbarrier.arrive(free_b.index(before * KS + KS - 1), count=1)
        if HELD == PLACES:
            accs = settle(accs, held, 0)
            mbarrier.arrive(free_b.index(stage * KS + KS - 1), count=1)
        group += 1
    if HELD < PLACES:
        accs = settle(accs, (), 0)
        last = (group - 1) % STAGES
        mbarrier.arrive(free_x.index(last * PLACES + PLACES - 1), count=1)
        mbarrier.arrive(free_b.index(last * KS + KS - 1), count=1)
    return accs


@gluon.constexpr_function
def panels(filters, dtype):
    """In how many pieces these filters of a pixel are written: TMA takes 128 bytes at a time."""
    return max(filters * dtype.primitive_bitwidth // 1024, 1)


@gluon.jit
def fetch_residual(
    r,  # TMA descriptor of the residual [batch, OS, OU, OW, filters]
    o,  # shared memory: panels [1, 1, rows, columns, N / PANELS] of boxes of the output
    n, s, u, w, filter,  # where the box begins
    arrived,  # barrier [1]
    first: gl.constexpr, apart: gl.constexpr,  # the first panel of this box, and how far apart they are
    N: gl.constexpr, PANELS: gl.constexpr,  # filters, and panels that they are split into
):  # fmt: skip
    """Load a box of the residual to where the output will be."""
    for p in gl.static_range(PANELS):
        async_load(r, [n, s, u, w, filter + p * (N // PANELS)], arrived, o.index(first + p * apart))


@gluon.jit
def store(
    y, o,  # TMA descriptor of the output [batch, OS, OU, OW, filters]; shared memory as in `fetch_residual`
    n, s, u, w, filter,  # where the box begins
    first: gl.constexpr, apart: gl.constexpr, N: gl.constexpr, PANELS: gl.constexpr,  # as in `fetch_residual`
):  # fmt: skip
    """Store a box of the output by its TMA descriptor y. Parameters as in `fetch_residual`."""
    for p in gl.static_range(PANELS):
        async_store(y, [n, s, u, w, filter + p * (N // PANELS)], o.index(first + p * apart))


@gluon.jit
def compute(
    y1, y2,  # TMA descriptors of the output [N, OS, OU, OW, filters], BN1 and BN2 filters
    r1, r2,  # TMA descriptors of the residual, as of the output; may be None
    bias1, bias2,  # shared memory [BLOCKS, BN1], [BLOCKS, BN2]: see `hold_bias`
    xs, b1, b2,  # as in `fetch`
    o1, o2,  # shared memory for boxes of the output: 128 * BN1 and 128 * BN2 elements, see `implicit_gemm`
    full, free_x, free_b, arrived,  # barriers: see `rings`; arrived [1]: boxes of the residual
    tiles, columns, nw, nt, ns,  # as in `fetch`
    groups_of_tap,  # groups of one of the KO taps
    frames, size, ps, KO: gl.constexpr, DS: gl.constexpr, REPLICATE: gl.constexpr,  # as in `fetch`
    KS: gl.constexpr, SLOTS: gl.constexpr, STAGES: gl.constexpr,  # as in `fetch`
    BOXES: gl.constexpr, BU: gl.constexpr, BW: gl.constexpr,  # boxes of a place; rows, columns of a box
    BC: gl.constexpr, BN1: gl.constexpr, BN2: gl.constexpr,  # as in `fetch`
    BIAS: gl.constexpr, RS: gl.constexpr, HALF: gl.constexpr,  # RS, HALF: as in `accumulate`
):  # fmt: skip
    """Multiply and write. One warpgroup: half of every tile's pixels."""
    BITS: gl.constexpr = y1.dtype.primitive_bitwidth
    OWN: gl.constexpr = BOXES // 2 if BOXES > 1 else 1  # boxes of this warpgroup, or its half of one
    # Rows and columns from the box to this warpgroup's half of it.
    HALF_U: gl.constexpr = HALF * (BU // 2) if BOXES == 1 else 0
    HALF_W: gl.constexpr = HALF * (BW // 2) if BOXES == 1 and BU == 1 else 0
    P1: gl.constexpr = panels(BN1, y1.dtype)  # panels of a box
    P2: gl.constexpr = panels(BN2, y1.dtype)
    O1: gl.constexpr = HALF * OWN * P1  # the first box of this warpgroup
    O2: gl.constexpr = HALF * OWN * P2
    layout1: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN1, 256 // BITS]
    )
    layout2: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN2 if BN2 > 0 else BN1, 256 // BITS]
    )
    pixels = rows_of(xs, 2 * STAGES * (SLOTS + KS - 1), 64, BC)  # matrices [64, BC]
    out1, out2 = (
        rows_of(o1, 2, 64, BN1).index(HALF),  # [64, BN1]
        rows_of(o2, 2, 64, BN2 if BN2 > 0 else BN1).index(HALF),  # [64, BN2]
    )
    group = 0
    count = 0  # times that a residual has been waited for
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        column, n, s, box = place(tile, columns, nt, ns, SLOTS, BOXES)
        f1, f2 = column * (BN1 + BN2), column * (BN1 + BN2) + BN1
        start = begin(bias1, column, BN1, layout1, BIAS)  # [64, BN1]
        accs = (start,)  # SLOTS of [64, BN1], then with BN2 > 0 as many [64, BN2]
        for _ in gl.static_range(SLOTS - 1):
            accs = accs + (start,)
        if BN2 > 0:
            start2 = begin(bias2, column, BN2, layout2, BIAS)  # [64, BN2]
            for _ in gl.static_range(SLOTS):
                accs = accs + (start2,)
        first_tap, end_tap = seen(s, frames, size, ps, KO, DS, REPLICATE)
        groups = (end_tap - first_tap) * groups_of_tap
        accs = accumulate(
            accs, group, groups, pixels, b1, b2, full, free_x, free_b, layout1, layout2,
            KS, SLOTS, STAGES, BC, BN1, BN2, RS, HALF,
        )  # fmt: skip
        group += groups
        if BOXES > 1:
            box += HALF * OWN
        u, w = (box // nw) * BU + HALF_U, (box % nw) * BW + HALF_W
        for i in gl.static_range(SLOTS):
            tma.store_wait(0)
            first = accs[i]  # [64, BN1]
            second = accs[SLOTS + i if BN2 > 0 else i]  # [64, BN2]
            if r1 is not None:
                mbarrier.expect(arrived, 64 * (BN1 + BN2) * BITS // 8)
                at_u, at_w = u, w
                for j in gl.static_range(OWN):
                    fetch_residual(r1, o1, n, s + i, at_u, at_w, f1, arrived, O1 + j, OWN, BN1, P1)
                    if BN2 > 0:
                        fetch_residual(r2, o2, n, s + i, at_u, at_w, f2, arrived, O2 + j, OWN, BN2, P2)
                    if j < OWN - 1:
                        at_u, at_w = step(at_u, at_w, nw, BU, BW)
                mbarrier.wait(arrived, count & 1)
                count += 1
                first += out1.load(layout1).to(gl.float32)  # [64, BN1]
                if BN2 > 0:
                    second += out2.load(layout2).to(gl.float32)  # [64, BN2]
            out1.store(first.to(y1.dtype))  # [64, BN1]
            if BN2 > 0:
                out2.store(second.to(y1.dtype))  # [64, BN2]
            fence_async_shared()
            at_u, at_w = u, w
            for j in gl.static_range(OWN):
                store(y1, o1, n, s + i, at_u, at_w, f1, O1 + j, OWN, BN1, P1)
                if BN2 > 0:
                    store(y2, o2, n, s + i, at_u, at_w, f2, O2 + j, OWN, BN2, P2)
                if j < OWN - 1:
                    at_u, at_w = step(at_u, at_w, nw, BU, BW)
    tma.store_wait(0)


@gluon.jit
def rings(
    STAGES: gl.constexpr,  # groups in flight
    PLACES: gl.constexpr, KS: gl.constexpr,  # places of the input and blocks of the weight of a group
):  # fmt: skip
    """Barriers: what has come, and what both warpgroups are done with.

    full: one for each place of each stage, with its block of the weight; free_x: places; free_b: weight
    blocks.
    """
    # [STAGES * PLACES, 1]
    full = gl.allocate_shared_memory(gl.int64, [STAGES * PLACES, 1], mbarrier.MBarrierLayout())
    # [STAGES * PLACES, 1]
    free_x = gl.allocate_shared_memory(gl.int64, [STAGES * PLACES, 1], mbarrier.MBarrierLayout())
    # [STAGES * KS, 1]
    free_b = gl.allocate_shared_memory(gl.int64, [STAGES * KS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES * PLACES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free_x.index(i), count=2)
    for i in gl.static_range(STAGES * KS):
        mbarrier.init(free_b.index(i), count=2)
    return full, free_x, free_b


@gluon.jit(do_not_specialize=NUMBERS)
def implicit_gemm(
    x, cache,  # TMA descriptors of [N, S, U, W, C], as in `fetch`; cache may be None
    w1, w2,  # TMA descriptors of [F, taps, C], BN1 and BN2 filters at a time
    y1, y2, r1, r2,  # TMA descriptors of [N, OS, OU, OW, filters], as in `compute`
    bias,  # [filters], or None
    tiles, nw, nt, ns, channel_blocks, frames, size, ps, pu, pw,  # as in `fetch`
    filters,  # size of bias
    BLOCKS: gl.constexpr,  # of BN1 + BN2 filters
    KO: gl.constexpr, KS: gl.constexpr, KU: gl.constexpr, KW: gl.constexpr,  # taps along S (twice), U, W
    TAP_S: gl.constexpr, TAP_U: gl.constexpr,  # how far apart taps along S and U are in the weight
    DS: gl.constexpr, DU: gl.constexpr, DW: gl.constexpr, REPLICATE: gl.constexpr,  # as in `fetch`
    SLOTS: gl.constexpr, STAGES: gl.constexpr,  # as in `fetch`
    BOXES: gl.constexpr, BU: gl.constexpr, BW: gl.constexpr,  # boxes of a place; rows, columns of a box
    BC: gl.constexpr, BN1: gl.constexpr, BN2: gl.constexpr,  # channels, filters of a block in two pieces
    RS: gl.constexpr, BY_FRAME: gl.constexpr,  # as in `accumulate`, as in `fetch`
):  # fmt: skip
    """out[pixel, filter] = sum over taps and channels. A program takes every num_programs-th tile.

    TAP_S, TAP_U: how far apart taps along S and U are in the weight [F, taps, C]. SLOTS > 1 needs KO = 1;
    else the taps along S are KO, one after the other, and KS = 1.
    """
    dtype: gl.constexpr = x.dtype
    PLACES: gl.constexpr = SLOTS + KS - 1
    # [STAGES * PLACES * BOXES, 1, 1, BU, BW, BC]
    xs = gl.allocate_shared_memory(dtype, [STAGES * PLACES * BOXES] + x.block_shape, x.layout)
    b1 = gl.allocate_shared_memory(dtype, [STAGES * KS, BN1, 1, BC], w1.layout)  # [STAGES * KS, BN1, 1, BC]
    OWN: gl.constexpr = BOXES // 2 if BOXES > 1 else 1  # as in `compute`
    # [2 * OWN * panels, 1, 1, rows, columns, BN1 / panels], 64 / OWN pixels each
    o1 = gl.allocate_shared_memory(dtype, [2 * OWN * panels(BN1, dtype)] + y1.block_shape, y1.layout)
    if BN2 > 0:
        # [STAGES * KS, BN2, 1, BC]
        b2 = gl.allocate_shared_memory(dtype, [STAGES * KS, BN2, 1, BC], w2.layout)
        # [2 * OWN * panels, 1, 1, rows, columns, BN2 / panels]
        o2 = gl.allocate_shared_memory(dtype, [2 * OWN * panels(BN2, dtype)] + y2.block_shape, y2.layout)
    else:
        b2 = b1  # stands for one that is not there
        o2 = o1
    BIAS: gl.constexpr = bias is not None
    bias1 = b1  # stands for one that is not there
    bias2 = b1
    if BIAS:
        bias1 = hold_bias(bias, filters, 0, BN1 + BN2, BN1, BLOCKS)  # [BLOCKS, BN1]
        if BN2 > 0:
            bias2 = hold_bias(bias, filters, BN1, BN1 + BN2, BN2, BLOCKS)  # [BLOCKS, BN2]
    full, free_x, free_b = rings(STAGES, PLACES, KS)
    # [2, 1]: one for each warpgroup
    arrived = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(arrived.index(i), count=1)
    groups = KU * KW * channel_blocks
    gl.warp_specialize(
        [
            (compute, (y1, y2, r1, r2, bias1, bias2, xs, b1, b2, o1, o2,
                       full, free_x, free_b, arrived.index(0),
                       tiles, BLOCKS, nw, nt, ns, groups, frames, size, ps, KO, DS, REPLICATE,
                       KS, SLOTS, STAGES, BOXES, BU, BW, BC, BN1, BN2, BIAS, RS, 0)),
            (compute, (y1, y2, r1, r2, bias1, bias2, xs, b1, b2, o1, o2,
                       full, free_x, free_b, arrived.index(1),
                       tiles, BLOCKS, nw, nt, ns, groups, frames, size, ps, KO, DS, REPLICATE,
                       KS, SLOTS, STAGES, BOXES, BU, BW, BC, BN1, BN2, BIAS, RS, 1)),
            (fetch, (x, cache, w1, w2, xs, b1, b2, full, free_x, free_b,
                     tiles, BLOCKS, nw, nt, ns, channel_blocks, frames, size, ps, pu, pw,
                     KO, KS, KU, KW, TAP_S, TAP_U, DS, DU, DW, REPLICATE,
                     SLOTS, STAGES, BOXES, BU, BW, BC, BN1, BN2, BY_FRAME)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit(do_not_specialize=("count",))
def round_to_tf32(
    x, y, count,  # [count], [count]
    BLOCK: gl.constexpr,  # elements of a program
):  # fmt: skip
    """y = x rounded to the nearest TF32, `count` elements side by side. A program: BLOCK of them."""
    at = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, gl.BlockedLayout([4], [32], [4], [0]))  # [BLOCK]
    gl.store(y + at, rounded(gl.load(x + at, mask=at < count)), mask=at < count)  # [BLOCK]

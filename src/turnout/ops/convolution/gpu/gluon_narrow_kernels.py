"""Convolutions with few filters for Hopper, in Gluon: one warp fetches with TMA, two warpgroups multiply.

Columns of the product are columns of the kernel, then filters, so a pixel is fetched once for all columns of
the kernel. What belongs to one output pixel then stands in neighbouring rows of the sums, and is gathered
from there. The two warpgroups' 64 pixels overlap by as many as the kernel is wide, less one.

`narrow_out` shares places along S among the outputs of a tile, as `implicit_gemm` does. `narrow_out_rolled`
goes down the rows of a strip: each is fetched once, and added to all the outputs that see it. What bounds
both is how fast the second-level cache hands out pixels.
"""
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false
# pyright: reportIndexIssue=false
# ruff: noqa: RUF005 (no starred expressions in Triton)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from turnout.launch.gluon import async_load
from turnout.ops.convolution.gpu.gluon_kernels import (
    NUMBERS,
    accumulate,
    fetch,
    fetch_box,
    multiply,
    place,
    rings,
    rows_of,
    settle,
)


@gluon.constexpr_function
def sums_layout(columns, bits):
    # of sums [64, columns]
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 256 // bits]
    )


@gluon.jit
def write(
    sums,  # [64, BK * BF]
    out, residual, bias,  # [N, OS, OU, OW, filters] by their strides, [filters]
    n, s, u, w,  # batch, place, row and first column of the output
    inside, filters, OW,  # whether to write; sizes of the output
    on, os, ou, ow, oc, rn, rs, ru, rw, rc,  # strides of out and residual, in elements
    layout: gl.constexpr,  # of sums
    BK: gl.constexpr, BF: gl.constexpr, WINDOW: gl.constexpr,  # as in `compute_narrow`
):  # fmt: skip
    """Write WINDOW output pixels of [n, s, u] from w on.

    sums: products [64, BK * BF] of 64 input pixels, in `layout`. residual, bias: may be None. inside: whether
    this row is inside of the output. on, os, ou, ow, oc and rn, ..., rc: strides of out and residual, in
    elements.
    """
    LANES: gl.constexpr = BF if BF < 32 else 32
    flat: gl.constexpr = gl.BlockedLayout([1, 1], [32 // LANES, LANES], [4, 1], [1, 0])
    column = gl.arange(0, BK * BF, gl.SliceLayout(0, layout)) // BF  # [BK * BF]: of the kernel
    row = gl.arange(0, 64, gl.SliceLayout(1, layout))  # [64]
    pixel = gl.arange(0, 64, gl.SliceLayout(1, flat))  # [64]
    filter = gl.arange(0, BF, gl.SliceLayout(0, flat))  # [BF]
    shifted = gl.minimum(row[:, None] + column[None, :], 63)  # [64, BK * BF]
    gathered = gl.gather(sums, shifted, 0)  # [64, BK * BF]
    if BK > 65 - WINDOW:  # columns without a tap hold zeros, but NaN beside a pixel that is not finite
        gathered = gl.where((column < 65 - WINDOW)[None, :], gathered, 0.0)  # [64, BK * BF]
    total = gl.convert_layout(gl.sum(gl.reshape(gathered, (64, BK, BF)), 1), flat)  # [64, BF]
    if bias is not None:
        # [1, BF]
        total += gl.load(bias + filter, mask=filter < filters, other=0.0).to(gl.float32)[None, :]
    at = w + pixel  # [64]
    inside = ((pixel < WINDOW) & (at < OW))[:, None] & (filter < filters)[None, :] & inside  # [64, BF]
    if residual is not None:
        beside = gl.cast(n, gl.int64) * rn + gl.cast(s, gl.int64) * rs + gl.cast(u, gl.int64) * ru
        beside = residual + beside + (at[:, None] * rw + filter[None, :] * rc)  # [64, BF]
        total += gl.load(beside, mask=inside, other=0.0).to(gl.float32)  # [64, BF]
    to = gl.cast(n, gl.int64) * on + gl.cast(s, gl.int64) * os + gl.cast(u, gl.int64) * ou
    # [64, BF]
    gl.store(
        out + to + (at[:, None] * ow + filter[None, :] * oc), total.to(out.dtype.element_ty), mask=inside
    )


@gluon.jit
def compute_narrow(
    out, residual, bias,  # [N, OS, OU, OW, filters] by their strides, [filters]
    xs, b1,  # shared memory: [2 * STAGES * PLACES, 1, 1, 1, 64, BC], [STAGES * KS, BK, BF, 1, BC]
    full, free_x, free_b, tiles, nw, nt, ns,  # as in `fetch`
    groups, filters, OS, OU, OW,  # groups of a tile; sizes of the output
    on, os, ou, ow, oc, rn, rs, ru, rw, rc,  # strides of out and residual, in elements
    KS: gl.constexpr, SLOTS: gl.constexpr, STAGES: gl.constexpr, BC: gl.constexpr,  # as in `fetch`
    BK: gl.constexpr, BF: gl.constexpr,  # columns of the kernel and filters, as powers of two
    WINDOW: gl.constexpr, HALF: gl.constexpr,  # output pixels of a warpgroup; which one this is
):  # fmt: skip
    """One warpgroup: WINDOW pixels of every tile."""
    BN: gl.constexpr = BK * BF
    layout: gl.constexpr = sums_layout(BN, xs.dtype.primitive_bitwidth)
    pixels = rows_of(xs, 2 * STAGES * (SLOTS + KS - 1), 64, BC)  # matrices [64, BC]
    group = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        _, n, s, box = place(tile, 1, nt, ns, SLOTS, 2)
        u, w = (box + HALF) // nw, (box + HALF) % nw * WINDOW
        none = gl.zeros((64, BN), gl.float32, layout)  # [64, BN]
        accs = (none,)  # SLOTS of [64, BN]
        for _ in gl.static_range(SLOTS - 1):
            accs = accs + (none,)
        accs = accumulate(
            accs, group, groups, pixels, b1, b1, full, free_x, free_b, layout, layout,
            KS, SLOTS, STAGES, BC, BN, 0, True, HALF,
        )  # fmt: skip
        group += groups
        for i in gl.static_range(SLOTS):
            write(
                accs[i], out, residual, bias, n, s + i, u, w, (s + i < OS) & (u < OU), filters, OW,
                on, os, ou, ow, oc, rn, rs, ru, rw, rc, layout, BK, BF, WINDOW,
            )  # fmt: skip


@gluon.jit(do_not_specialize=NUMBERS)
def narrow_out(
    x, cache,  # TMA descriptors of [N, S, U, W, C]; cache: the frames before x, or None
    w1,  # TMA descriptor of the weight [KW, filters, taps along S and U, C]
    out, residual, bias,  # as in `compute_narrow`
    tiles, nw, nt, ns, channel_blocks, frames, size, ps, pu, pw,  # as in `fetch`
    filters, OS, OU, OW, on, os, ou, ow, oc, rn, rs, ru, rw, rc,  # as in `compute_narrow`
    KS: gl.constexpr, KU: gl.constexpr, TAP_S: gl.constexpr, TAP_U: gl.constexpr,  # as in `fetch`
    REPLICATE: gl.constexpr, SLOTS: gl.constexpr, STAGES: gl.constexpr, BC: gl.constexpr,  # as in `fetch`
    BK: gl.constexpr, BF: gl.constexpr, WINDOW: gl.constexpr,  # as in `compute_narrow`
    REGISTERS: gl.constexpr,  # of a thread that multiplies
):  # fmt: skip
    """Few filters: the kernel's columns are columns of the product too, so every pixel is fetched once for
    each tap along U only."""
    PLACES: gl.constexpr = SLOTS + KS - 1  # of the input along S that a group fetches
    # [2 * STAGES * PLACES, 1, 1, 1, 64, BC]
    xs = gl.allocate_shared_memory(x.dtype, [2 * STAGES * PLACES, 1, 1, 1, 64, BC], x.layout)
    # [STAGES * KS, BK, BF, 1, BC]
    b1 = gl.allocate_shared_memory(x.dtype, [STAGES * KS, BK, BF, 1, BC], w1.layout)
    full, free_x, free_b = rings(STAGES, PLACES, KS)
    groups = KU * channel_blocks
    gl.warp_specialize(
        [
            (compute_narrow, (out, residual, bias, xs, b1, full, free_x, free_b,
                              tiles, nw, nt, ns, groups, filters, OS, OU, OW,
                              on, os, ou, ow, oc, rn, rs, ru, rw, rc,
                              KS, SLOTS, STAGES, BC, BK, BF, WINDOW, 0)),
            (compute_narrow, (out, residual, bias, xs, b1, full, free_x, free_b,
                              tiles, nw, nt, ns, groups, filters, OS, OU, OW,
                              on, os, ou, ow, oc, rn, rs, ru, rw, rc,
                              KS, SLOTS, STAGES, BC, BK, BF, WINDOW, 1)),
            (fetch, (x, cache, w1, w1, xs, b1, b1, full, free_x, free_b,
                     tiles, 1, nw, nt, ns, channel_blocks, frames, size, ps, pu, pw,
                     1, KS, KU, 1, TAP_S, TAP_U, 1, 1, 1, REPLICATE,
                     SLOTS, STAGES, 2, 1, WINDOW, BC, BK * BF, 0, False)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip


@gluon.jit
def strip(
    tile, nw, nu, ns,  # number of the strip; strips along W and along U; frames
    ROWS: gl.constexpr, WINDOW: gl.constexpr,  # rows of a strip; output pixels of a warpgroup
):  # fmt: skip
    """Batch, frame, first row and column of a strip, and whether it is gone through upwards, as every other
    one is: two strips then come to the rows they share at the same time, and one of them finds these in the
    cache. Frames are neighbours: they read the same ones."""
    s = tile % ns
    tile = tile // ns
    w = (tile % nw) * (2 * WINDOW)
    tile = tile // nw
    return tile // nu, s, (tile % nu) * ROWS, w, tile % nu % 2 == 1


@gluon.jit
def barriers(
    NUMBER: gl.constexpr, ARRIVALS: gl.constexpr,  # barriers; arrivals that complete a phase of one
):  # fmt: skip
    """Each must be waited for. Triton hands out the memory of one that is not, but to the card it stays a
    barrier: when another process is given the card for a while, those 8 bytes do not come back as they
    were."""
    made = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())  # [NUMBER, 1]
    for i in gl.static_range(NUMBER):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def fetch_rolled(
    x, cache, w1,  # TMA descriptors, as in `narrow_out`
    # [2 * STAGES, 1, 1, 1, 64, BC]
    xs,  # shared memory: STAGES groups: BC channels of a row of one frame, in two boxes of 64 pixels
    taps,  # shared memory: KU * KS * BLOCKS blocks [BK, BF, 1, BC] of the weight
    # [STAGES, 1], [STAGES, 1], [1]
    full, free, held,  # barriers: groups that have come, groups that are done with, the weight
    tiles, nw, nu, ns,  # strips; strips along W and along U; frames
    frames, ps, pu, pw,  # frames of cache; padding before the first element
    KS: gl.constexpr, KU: gl.constexpr,  # taps along S and U
    BLOCKS: gl.constexpr, REPLICATE: gl.constexpr,  # blocks of BC channels; the first frame for those before
    ROWS: gl.constexpr, STAGES: gl.constexpr,  # rows of a strip of the output; groups in flight
    BC: gl.constexpr, BN: gl.constexpr, WINDOW: gl.constexpr,  # BN: BK * BF, as in `compute_rolled`
):  # fmt: skip
    """The whole weight once, then row by row: all frames that an output sees, all channels."""
    ROW_BYTES: gl.constexpr = BC * x.dtype.primitive_bitwidth // 8
    mbarrier.expect(held, KU * KS * BLOCKS * BN * ROW_BYTES)
    for ku in range(KU):
        for ks in range(KS):
            for block in range(BLOCKS):
                async_load(
                    w1, [0, 0, ks * KU + ku, block * BC], held, taps.index((ku * KS + ks) * BLOCKS + block)
                )
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        n, s, u, w, up = strip(tile, nw, nu, ns, ROWS, WINDOW)
        for row in range(ROWS + KU - 1):
            at_u = u - pu + gl.where(up, ROWS + KU - 2 - row, row)
            for ks in range(KS):
                frame = s + ks - ps
                if REPLICATE:
                    frame = gl.maximum(frame, -frames)
                for block in range(BLOCKS):
                    stage = step % STAGES
                    ready = full.index(stage)  # [1]
                    mbarrier.wait(free.index(stage), (step // STAGES) & 1 ^ 1)
                    mbarrier.expect(ready, 128 * ROW_BYTES)
                    for half in gl.static_range(2):
                        into = xs.index(2 * stage + half)  # [1, 1, 1, 64, BC]
                        fetch_box(
                            x, cache, frames, n, frame, at_u, w - pw + half * WINDOW, block * BC,
                            ready, into, False,
                        )  # fmt: skip
                    step += 1


@gluon.jit
def compute_rolled(
    out, residual, bias,  # as in `compute_narrow`
    xs, taps, full, free, held, tiles, nw, nu, ns,  # as in `fetch_rolled`
    filters, OU, OW, on, os, ou, ow, oc, rn, rs, ru, rw, rc,  # as in `compute_narrow`
    KU: gl.constexpr, GROUPS: gl.constexpr,  # taps along U; groups of a row: KS * BLOCKS
    ROWS: gl.constexpr, STAGES: gl.constexpr, BC: gl.constexpr,  # as in `fetch_rolled`
    BK: gl.constexpr, BF: gl.constexpr, WINDOW: gl.constexpr, HALF: gl.constexpr,  # as in `compute_narrow`
):  # fmt: skip
    """One warpgroup: WINDOW columns of every strip. Row r of the input belongs to the outputs r - KU + 1 to
    r, whose sums take turns: once the last row an output sees has been added, it is written, and its place
    begins anew. Pixels are read once, into registers."""
    layout: gl.constexpr = sums_layout(BK * BF, xs.dtype.primitive_bitwidth)
    operand: gl.constexpr = gl.DotOperandLayout(
        operand_index=0, parent=layout, k_width=32 // xs.dtype.primitive_bitwidth
    )
    none = gl.zeros((64, BK * BF), gl.float32, layout)  # [64, BK * BF]
    mbarrier.wait(held, 0)
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        n, s, u, w, up = strip(tile, nw, nu, ns, ROWS, WINDOW)
        accs = (none,)  # KU of [64, BK * BF]
        for _ in gl.static_range(KU - 1):
            accs = accs + (none,)
        for first in range(0, ROWS + KU - 1, KU):
            for j in gl.static_range(KU):
                for group in range(GROUPS):
                    stage = step % STAGES
                    mbarrier.wait(full.index(stage), (step // STAGES) & 1)
                    pixels = xs.index(2 * stage + HALF).reshape([64, BC]).load(operand)  # [64, BC]
                    for ku in gl.static_range(KU):
                        tap = taps.index(gl.where(up, KU - 1 - ku, ku) * GROUPS + group)  # [BK, BF, 1, BC]
                        accs = multiply(
                            pixels, pixels, tap, tap, accs, (j - ku + KU) % KU, KU, BK * BF, 0, BC
                        )
                    # Triton makes the four warps meet here, so all of them have read their pixels.
                    mbarrier.arrive(free.index(stage), count=1)
                    accs = settle(accs, (pixels,), 0)
                    step += 1
                row = first + j - (KU - 1)
                at_u = u + gl.where(up, ROWS - 1 - row, row)
                inside = (row >= 0) & (at_u < OU)
                write(
                    accs[(j + 1) % KU], out, residual, bias, n, s, at_u, w + HALF * WINDOW, inside,
                    filters, OW, on, os, ou, ow, oc, rn, rs, ru, rw, rc, layout, BK, BF, WINDOW,
                )  # fmt: skip
                accs = accs[: (j + 1) % KU] + (none,) + accs[(j + 1) % KU + 1 :]


@gluon.jit(do_not_specialize=NUMBERS)
def narrow_out_rolled(
    x, cache, w1, out, residual, bias,  # as in `narrow_out`
    tiles, nw, nu, ns, frames, ps, pu, pw,  # as in `fetch_rolled`
    filters, OU, OW, on, os, ou, ow, oc, rn, rs, ru, rw, rc,  # as in `compute_narrow`
    KS: gl.constexpr, KU: gl.constexpr, BLOCKS: gl.constexpr, REPLICATE: gl.constexpr,  # as in `fetch_rolled`
    ROWS: gl.constexpr, STAGES: gl.constexpr, BC: gl.constexpr,  # as in `fetch_rolled`
    BK: gl.constexpr, BF: gl.constexpr, WINDOW: gl.constexpr,  # as in `compute_narrow`
    REGISTERS: gl.constexpr,  # of a thread that multiplies
):  # fmt: skip
    """S is the depth, U the height. ROWS + KU - 1 is a multiple of KU; BLOCKS are those of channels."""
    # [2 * STAGES, 1, 1, 1, 64, BC]
    xs = gl.allocate_shared_memory(x.dtype, [2 * STAGES, 1, 1, 1, 64, BC], x.layout)
    # [KU * KS * BLOCKS, BK, BF, 1, BC]
    taps = gl.allocate_shared_memory(x.dtype, [KU * KS * BLOCKS, BK, BF, 1, BC], w1.layout)
    full = barriers(STAGES, 1)  # [STAGES, 1]
    free = barriers(STAGES, 2)  # [STAGES, 1]
    held = barriers(1, 1)  # [1, 1]
    gl.warp_specialize(
        [
            (compute_rolled, (out, residual, bias, xs, taps, full, free, held.index(0),
                              tiles, nw, nu, ns, filters, OU, OW, on, os, ou, ow, oc, rn, rs, ru, rw, rc,
                              KU, KS * BLOCKS, ROWS, STAGES, BC, BK, BF, WINDOW, 0)),
            (compute_rolled, (out, residual, bias, xs, taps, full, free, held.index(0),
                              tiles, nw, nu, ns, filters, OU, OW, on, os, ou, ow, oc, rn, rs, ru, rw, rc,
                              KU, KS * BLOCKS, ROWS, STAGES, BC, BK, BF, WINDOW, 1)),
            (fetch_rolled, (x, cache, w1, xs, taps, full, free, held.index(0),
                            tiles, nw, nu, ns, frames, ps, pu, pw,
                            KS, KU, BLOCKS, REPLICATE, ROWS, STAGES, BC, BK * BF, WINDOW)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip

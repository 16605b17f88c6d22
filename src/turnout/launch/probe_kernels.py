"""A small Gluon kernel with every name of Gluon that turnout's kernels use: a Triton that compiles it has
them all.
"""
# pyright: basic, reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportAssignmentType=false

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from turnout.launch.descriptors import described, pattern
from turnout.launch.gluon import async_load, async_store, reinterpret
from turnout.launch.launcher import Launch


@gluon.jit
def load_partition(x, tile, ready, count):
    for _ in range(count):
        mbarrier.expect(ready.index(0), 64 * 64 * 2)
        async_load(x, [0, 0], ready.index(0), tile)


@gluon.jit
def mma_partition(y, tile, ready, count):
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]
    )
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    total = gl.zeros((64, 64), gl.float32, layout)
    matrix = reinterpret(tile, tile.dtype, [64, 64], flat)  # [64, 64]
    for i in range(count):
        mbarrier.wait(ready.index(0), i & 1)
        total = warpgroup_mma(matrix, matrix.permute([1, 0]), total, is_async=True)
        total = warpgroup_mma_wait(num_outstanding=0, deps=(total,))
    matrix.store(total.to(tile.dtype))
    fence_async_shared()
    async_store(y, [0, 0], tile)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=("count",))
def probe(x, y, count, ROWS: gl.constexpr):
    tile = gl.allocate_shared_memory(x.dtype, [ROWS, 64], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(ready.index(0), count=1)
    gl.warp_specialize(
        [(mma_partition, (y, tile, ready, count)), (load_partition, (x, tile, ready, count))], [1], [24]
    )


def probe_launch() -> Launch:
    """The launch that is compiled, never run."""
    x = torch.empty(64, 64, dtype=torch.bfloat16, device="meta")
    block = described(x, pattern((64, 64), (64, 1), torch.bfloat16, (64, 64)))
    return Launch(probe, 1, (block, block), (1,), {"ROWS": 64}, 4, {})

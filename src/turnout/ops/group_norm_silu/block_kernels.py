"""Triton kernels of group norms by sums of blocks: see `blocks`.

Channels are side by side, positions have three strides.

`block_sums`     sums of x and of its squares for each block of rows and columns, over all frames
`block_moments`  those of all blocks, in one order, to the mean in two numbers and the inverse root of the
                 variance
`block_apply`    the norm and the activation

What a program sums follows from its block alone, never from how many blocks there are: so a part of a picture
has the sums that the whole has. Sums are float64, as on a CPU: a square of a float32 is exact, so no pivot is
needed.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

import triton
import triton.language as tl

from turnout.ops.group_norm_silu.kernels import activated, channels_of, spread

_SUMS = ("T", "H", "W", "R", "C", "down", "across", "blocks", "xb", "xt", "xh", "xw")
_APPLY = ("H", "W", "P", "programs", "blocks", "xb", "xt", "xh", "xw", "yb", "yt", "yh", "yw")


@triton.jit(do_not_specialize=_SUMS)
def block_sums(
    x,  # [batch, T, H, W, G * CG], channels side by side
    sums,  # [batch, down, across, 2, G] float64: of x, of its squares
    T, H, W, G,  # frames, rows, columns, groups
    R, C, down, across,  # rows and columns of a block of positions; such blocks along H and along W
    blocks,  # of GB groups
    xb, xt, xh, xw,  # strides of x in elements
    CG: tl.constexpr, GB: tl.constexpr,  # channels of a group, groups of a program
    CB: tl.constexpr,  # CG, rounded up to a power of two
    BP: tl.constexpr, V: tl.constexpr,  # positions at a time, channels of one vector
):  # fmt: skip
    """sums [batch, down, across, 2, G]. A program: one block of R rows and C columns, GB groups."""
    xt, xh, xw = tl.cast(xt, tl.int64), tl.cast(xh, tl.int64), tl.cast(xw, tl.int64)
    pid = tl.program_id(0).to(tl.int64)
    group_block, place = pid % blocks, pid // blocks
    left, top, b = place % across * C, place // across % down * R, place // across // down
    rows = tl.minimum(R, H - top).to(tl.int32)
    columns = tl.minimum(C, W - left).to(tl.int32)
    c, real = channels_of(group_block.to(tl.int32), G, CG, GB, CB)  # [GB * CB] each
    lane = tl.arange(0, BP)  # [BP]
    total = tl.zeros((BP, GB * CB), tl.float64)
    squares = tl.zeros((BP, GB * CB), tl.float64)
    base = x + b * xb + top * xh + left * xw
    size = T * rows * columns
    for start in range(0, size, BP):
        p = start + lane
        line = p // columns
        at = line // rows * xt + line % rows * xh + p % columns * xw  # [BP]
        ok = (p < size)[:, None] & real[None, :]  # [BP, GB * CB]
        here = tl.multiple_of(
            base + at[:, None] + c[None, :],  # [BP, GB * CB]
            (1, V * x.dtype.element_ty.primitive_bitwidth // 8),  # bytes of a vector
        )
        value = tl.load(here, mask=ok, other=0.0).to(tl.float32).to(tl.float64)
        total += value
        squares += value * value
    total = tl.sum(tl.reshape(tl.sum(total, 0), (GB, CB)), 1)  # [GB]
    squares = tl.sum(tl.reshape(tl.sum(squares, 0), (GB, CB)), 1)  # [GB]
    g = group_block * GB + tl.arange(0, GB)  # [GB]
    into = sums + place * 2 * G + g  # [GB]
    tl.store(into, total, mask=g < G)
    tl.store(into + G, squares, mask=g < G)


@triton.jit(do_not_specialize=("blocks", "count", "tiles"))
def block_moments(sums, moments, eps, blocks, count, G, tiles, GB: tl.constexpr, BB: tl.constexpr):
    """sums [batch, blocks, 2, G] of `count` values each to moments [batch, 3, G]. A program: GB groups."""
    pid = tl.program_id(0).to(tl.int64)
    b = pid // tiles
    g = pid % tiles * GB + tl.arange(0, GB)  # [GB]
    lane = tl.arange(0, BB)  # [BB]
    total = tl.zeros((BB, GB), tl.float64)
    squares = tl.zeros((BB, GB), tl.float64)
    for start in range(0, blocks, BB):
        ok = (start + lane < blocks)[:, None] & (g < G)[None, :]
        at = sums + (b * blocks + start + lane)[:, None] * 2 * G + g[None, :]  # [BB, GB]
        total += tl.load(at, mask=ok, other=0.0)
        squares += tl.load(at + G, mask=ok, other=0.0)
    size = tl.cast(count, tl.float64)
    mean = tl.sum(total, 0) / size  # [GB]
    variance = tl.sum(squares, 0) / size - mean * mean  # [GB]
    variance = tl.where(variance < 0, 0.0, variance)  # NaN stays
    rough = mean.to(tl.float32)
    rest = (mean - rough.to(tl.float64)).to(tl.float32)
    inverse = (1.0 / tl.sqrt(variance + eps)).to(tl.float32)
    into = moments + b * 3 * G + g
    tl.store(into, rough, mask=g < G)
    tl.store(into + G, rest, mask=g < G)
    tl.store(into + 2 * G, inverse, mask=g < G)


@triton.jit(do_not_specialize=_APPLY)
def block_apply(
    x, moments,  # x as in `block_sums`; [batch, 3, G] float32: rough mean, rest of it, inverse root
    w, bias, y,  # [G * CG] each; y as x
    H, W, P, G, programs, blocks,  # P = T * H * W; programs share the positions; blocks of GB groups
    xb, xt, xh, xw, yb, yt, yh, yw,  # strides in elements
    CG: tl.constexpr, GB: tl.constexpr, CB: tl.constexpr, BP: tl.constexpr, V: tl.constexpr,  # as above
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """A program takes every `programs`-th tile of BP positions, and the channels of GB groups."""
    xt, xh, xw = tl.cast(xt, tl.int64), tl.cast(xh, tl.int64), tl.cast(xw, tl.int64)
    yt, yh, yw = tl.cast(yt, tl.int64), tl.cast(yh, tl.int64), tl.cast(yw, tl.int64)
    pid = tl.program_id(0).to(tl.int64)
    block, walk, b = pid % blocks, (pid // blocks % programs).to(tl.int32), pid // blocks // programs
    c, real = channels_of(block.to(tl.int32), G, CG, GB, CB)
    g = block.to(tl.int32) * GB + tl.arange(0, GB)  # [GB]
    found = moments + b * 3 * G + g  # [GB]
    rough = spread(tl.load(found, mask=g < G, other=0.0), GB, CB)[None, :]  # [1, GB * CB]
    rest = spread(tl.load(found + G, mask=g < G, other=0.0), GB, CB)[None, :]  # [1, GB * CB]
    scale = spread(tl.load(found + 2 * G, mask=g < G, other=0.0), GB, CB)  # [GB * CB]
    shift = tl.zeros((GB * CB,), tl.float32)
    if WEIGHT:
        scale *= tl.load(w + c, mask=real, other=0.0).to(tl.float32)
    if BIAS:
        shift += tl.load(bias + c, mask=real, other=0.0).to(tl.float32)
    lane = tl.arange(0, BP)
    for start in range(walk * BP, P, programs * BP):
        p = start + lane
        line = p // W
        of_x = line // H * xt + line % H * xh + p % W * xw
        of_y = line // H * yt + line % H * yh + p % W * yw
        ok = (p < P)[:, None] & real[None, :]
        at = x + b * xb + of_x[:, None] + c[None, :]  # [BP, GB * CB]
        at = tl.multiple_of(at, (1, V * x.dtype.element_ty.primitive_bitwidth // 8))
        into = y + b * yb + of_y[:, None] + c[None, :]  # [BP, GB * CB]
        into = tl.multiple_of(into, (1, V * y.dtype.element_ty.primitive_bitwidth // 8))
        value = tl.load(at, mask=ok, other=0.0).to(tl.float32)
        found_y = activated(value, rough, rest, scale[None, :], shift[None, :], SILU, y.dtype.element_ty)
        tl.store(into, found_y, mask=ok)

"""What Numba kernels of several ops share. They release the GIL; threads come from `turnout.ops.threads`.

Half types arrive as their bits, told apart by the integer's type: bfloat16 as uint16, float16 as int16. A row is widened to float32 once
and rounded once on its way out. Every loop over `i` becomes vector instructions: it runs over whole slices, since an index that could be
negative in Python's sense would keep LLVM from them.
"""

# Numba wants plain functions at module level; its intrinsics are typed by what they are given.
# pyright: basic, reportCallIssue=false

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

FUSED = {"contract", "nsz"}  # a product and a sum may round once; NaN and Inf keep their meaning
_SINGLE, _WORD = ir.FloatType(), ir.IntType(32)


@intrinsic
def widened(typing_context, value):
    """float32 of a float32, of bfloat16 bits (uint16) or of float16 bits (int16)."""

    def emit(context, builder, signature, args):
        if value is types.uint16:
            return builder.bitcast(builder.shl(builder.zext(args[0], _WORD), ir.Constant(_WORD, 16)), _SINGLE)
        if value is types.int16:
            return builder.fpext(builder.bitcast(args[0], ir.HalfType()), _SINGLE)
        return args[0]

    return types.float32(value), emit


@intrinsic
def narrowed(typing_context, value, like):
    """A float32 rounded to the type of `like`, to nearest even. NaN stays NaN."""

    def emit(context, builder, signature, args):
        if like is types.uint16:
            bits = builder.bitcast(args[0], _WORD)
            odd = builder.and_(builder.lshr(bits, ir.Constant(_WORD, 16)), ir.Constant(_WORD, 1))
            rounded = builder.add(bits, builder.add(odd, ir.Constant(_WORD, 0x7FFF)))
            kept = builder.select(builder.fcmp_unordered("uno", args[0], args[0]), ir.Constant(_WORD, 0x7FC00000), rounded)
            return builder.trunc(builder.lshr(kept, ir.Constant(_WORD, 16)), ir.IntType(16))
        if like is types.int16:
            return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))
        return args[0]

    return like(types.float32, like), emit


@intrinsic
def prefer_wide_vectors(typing_context):
    """LLVM keeps to half of AVX-512's registers unless a function asks for all; silu takes a third less time with them."""

    def emit(context, builder, signature, args):
        if isinstance(builder.function.attributes, set):  # llvmlite has no name for it, 0.50 prints what is there
            set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic
def fused(typing_context, a, b, c):
    """a * b + c, rounded once."""

    def emit(context, builder, signature, args):
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), emit


@intrinsic
def power_of_two(typing_context, shifted):
    """2**n, where n is the integer in the low bits of n + 1.5 * 2**23."""

    def emit(context, builder, signature, args):
        n = builder.add(builder.bitcast(args[0], _WORD), ir.Constant(_WORD, 127 - 0x4B400000))
        return builder.bitcast(builder.shl(n, ir.Constant(_WORD, 23)), _SINGLE)

    return types.float32(types.float32), emit


@numba.njit(nogil=True, cache=True, fastmath=FUSED, error_model="numpy")
def silu(a):
    """a / (1 + exp(-a)), within 2 units in the last place: Numba calls the scalar exp of the C library, this one becomes vectors.

    exp(-a) = 2**n * 2**f with a polynomial for f in [-1/2, 1/2]. At n = 128 it is infinite, as it should, and silu is 0.
    """
    t = min(max(a, np.float32(-89.0)), np.float32(87.0))
    shifted = t * np.float32(-1.44269504) + np.float32(12582912.0)  # rounds to an integer in the low bits
    f = fused(t, np.float32(-1.44269504), np.float32(12582912.0) - shifted)  # the product's own rounding would be most of the error
    f = f + t * np.float32(-1.9259630e-8)  # what log2(e) has beyond float32
    p = np.float32(1.5353362e-4)
    p = p * f + np.float32(1.3398875e-3)
    p = p * f + np.float32(9.6184369e-3)
    p = p * f + np.float32(5.5503324e-2)
    p = p * f + np.float32(2.4022648e-1)
    p = p * f + np.float32(6.9314718e-1)
    p = p * f + np.float32(1.0)
    return a / (np.float32(1.0) + p * power_of_two(shifted))


@numba.njit(nogil=True, cache=True, fastmath=FUSED, error_model="numpy")
def widen(x, into):
    prefer_wide_vectors()
    for i in range(x.size):
        into[i] = widened(x[i])


@numba.njit(nogil=True, cache=True, fastmath=FUSED, error_model="numpy")
def finish(acc, y, SILU):
    """Activate and round; all bits of a zero are zero in every type."""
    prefer_wide_vectors()
    if SILU:
        for i in range(y.size):
            y[i] = narrowed(silu(acc[i]), y[i])
    else:
        for i in range(y.size):
            y[i] = narrowed(acc[i], y[i])


@numba.njit(nogil=True, cache=True, fastmath=FUSED | {"reassoc"}, error_model="numpy")
def widen_and_square(x, into):
    """The sum of the squares of x, in as many partial sums as a vector has lanes, while it is widened."""
    prefer_wide_vectors()
    total = np.float32(0)
    for i in range(x.size):
        value = widened(x[i])
        into[i] = value
        total += value * value
    return total

"""Numba kernels of long sums on a CPU. They release the GIL; threads come from `turnout.ops.threads`.

Half types arrive as their 16 bits. Products of one chunk are added in float32 lanes (float64 for float32 inputs, whose products are exact
there), chunks in float64 in one fixed order, so the result does not depend on the number of threads.
"""

# Numba wants plain functions at module level; its intrinsics are typed by what they return.
# pyright: basic

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

CHUNK = 16384

# Sums may be reordered into vector lanes; NaN and Inf keep their meaning.
_REORDER = {"reassoc", "contract", "nsz"}


@intrinsic
def from_bfloat16(typing_context, bits):
    def emit(context, builder, signature, args):
        word = builder.shl(builder.zext(args[0], ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(word, ir.FloatType())

    return types.float32(types.uint16), emit


@intrinsic
def from_float16(typing_context, bits):
    def emit(context, builder, signature, args):
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), emit


@numba.njit(nogil=True, cache=True, fastmath=_REORDER)
def sum_float32(a, b, first, last, out):
    for chunk in range(first, last):
        x, y = a[chunk * CHUNK : (chunk + 1) * CHUNK], b[chunk * CHUNK : (chunk + 1) * CHUNK]
        total = 0.0
        for i in range(x.size):
            total += np.float64(x[i]) * np.float64(y[i])
        out[chunk] = total


@numba.njit(nogil=True, cache=True, fastmath=_REORDER)
def sum_bfloat16(a, b, first, last, out):
    for chunk in range(first, last):
        x, y = a[chunk * CHUNK : (chunk + 1) * CHUNK], b[chunk * CHUNK : (chunk + 1) * CHUNK]
        total = np.float32(0)
        for i in range(x.size):
            total += from_bfloat16(x[i]) * from_bfloat16(y[i])
        out[chunk] = total


@numba.njit(nogil=True, cache=True, fastmath=_REORDER)
def sum_float16(a, b, first, last, out):
    for chunk in range(first, last):
        x, y = a[chunk * CHUNK : (chunk + 1) * CHUNK], b[chunk * CHUNK : (chunk + 1) * CHUNK]
        total = np.float32(0)
        for i in range(x.size):
            total += from_float16(x[i]) * from_float16(y[i])
        out[chunk] = total

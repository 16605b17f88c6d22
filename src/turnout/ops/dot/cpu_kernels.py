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


def _kernel(widen, zero):
    """Part p of `out` is one chunk of one sum: products of a[row * a_step + i] and b[row * b_step + i]."""

    @numba.njit(nogil=True, fastmath=_REORDER)
    def sum_chunks(a, b, a_step, b_step, length, out, first, last):
        per_sum = (length + CHUNK - 1) // CHUNK
        for part in range(first, last):
            row, start = part // per_sum, (part % per_sum) * CHUNK
            stop = min(start + CHUNK, length)
            x, y = a[row * a_step + start : row * a_step + stop], b[row * b_step + start : row * b_step + stop]
            total = zero
            for i in range(x.size):
                total += widen(x[i]) * widen(y[i])
            out[part] = total

    return sum_chunks


@numba.njit(inline="always")
def from_float32(x):
    return np.float64(x)


sum_float32 = _kernel(from_float32, np.float64(0))
sum_bfloat16 = _kernel(from_bfloat16, np.float32(0))
sum_float16 = _kernel(from_float16, np.float32(0))

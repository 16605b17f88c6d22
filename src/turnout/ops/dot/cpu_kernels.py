"""Numba kernel of long sums on a CPU. It releases the GIL; threads come from `turnout.ops.threads`.

Half types arrive as their bits, as in `common_cpu_kernels`. Products of one chunk are added in float32 lanes
(float64 for float32 inputs, whose products are exact there), chunks in float64 in one fixed order, so the
result does not depend on the number of threads.
"""

# pyright: basic, reportCallIssue=false

from turnout.ops.common_cpu_kernels import widened
from turnout.ops.numba_cache import kernel

CHUNK = 16384


@kernel(
    fastmath={"reassoc", "contract", "nsz"}
)  # sums may be reordered into vector lanes; NaN and Inf keep their meaning
def sum_chunks(a, b, a_step, b_step, length, zero, out, first, last):
    """Part p of `out` is one chunk of one sum: products of a[row * a_step + i] and b[row * b_step + i], added
    in the type of `zero`.
    """
    wide = type(zero)
    per_sum = (length + CHUNK - 1) // CHUNK
    for part in range(first, last):
        row, start = part // per_sum, (part % per_sum) * CHUNK
        stop = min(start + CHUNK, length)
        x, y = a[row * a_step + start : row * a_step + stop], b[row * b_step + start : row * b_step + stop]
        total = zero
        for i in range(x.size):
            total += wide(widened(x[i])) * wide(widened(y[i]))
        out[part] = total

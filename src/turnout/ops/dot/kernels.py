"""Triton kernels of dot, inner and matmul with one output: every sum is taken in one fixed order.

A complex tensor comes as its real view, so an element is a (real, imaginary) pair of floats and strides count floats.
"""

import triton
import triton.language as tl


@triton.jit
def multiply(a_ptr, b_ptr, at, a_stride, b_stride, keep, COMPLEX: tl.constexpr, MASKED: tl.constexpr):
    """Products of the elements at the given places, as (real, imaginary); the imaginary part of reals is their real part again."""
    if COMPLEX:
        pair = tl.arange(0, 2)[None, :]
        a_at = at[:, None] * a_stride + pair  # [BLOCK, 2]
        b_at = at[:, None] * b_stride + pair
        if MASKED:
            a = tl.load(a_ptr + a_at, mask=keep[:, None], other=0.0)
            b = tl.load(b_ptr + b_at, mask=keep[:, None], other=0.0)
        else:
            a = tl.load(a_ptr + a_at)
            b = tl.load(b_ptr + b_at)
        a_real, a_imag = tl.split(a)
        b_real, b_imag = tl.split(b)
        return a_real * b_real - a_imag * b_imag, a_real * b_imag + a_imag * b_real
    else:
        if MASKED:
            a = tl.load(a_ptr + at * a_stride, mask=keep, other=0.0)
            b = tl.load(b_ptr + at * b_stride, mask=keep, other=0.0)
        else:
            a = tl.load(a_ptr + at * a_stride)
            b = tl.load(b_ptr + at * b_stride)
        product = a.to(tl.float32) * b.to(tl.float32)
        return product, product


@triton.jit
def dot_chunks(
    a_ptr, b_ptr, out_ptr, length, chunks,
    a_stride, b_stride, a_batch_stride, b_batch_stride,
    BLOCK: tl.constexpr, COMPLEX: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (batch, chunk) sums every chunks-th block of one pair of vectors into out[batch, chunk]."""
    if OVERLAP:  # lets sum_chunks take its place on the card before this kernel ends; it still waits for the results
        tl.extra.cuda.gdc_launch_dependents()
    batch = tl.program_id(0) // chunks
    chunk = tl.program_id(0) % chunks
    a_ptr += batch.to(tl.int64) * a_batch_stride
    b_ptr += batch.to(tl.int64) * b_batch_stride
    lane = tl.arange(0, BLOCK).to(tl.int64)  # places times strides may pass 2^31
    real = tl.zeros([BLOCK], tl.float32)
    imag = tl.zeros([BLOCK], tl.float32)
    full = length // BLOCK  # blocks that need no mask: a mask would split the 16-byte loads
    for block in range(chunk, full, chunks):
        at = block * BLOCK + lane
        x, y = multiply(a_ptr, b_ptr, at, a_stride, b_stride, lane, COMPLEX, False)
        real += x
        if COMPLEX:
            imag += y
    if chunk == full % chunks:
        at = full * BLOCK + lane
        x, y = multiply(a_ptr, b_ptr, at, a_stride, b_stride, at < length, COMPLEX, True)
        real += x
        if COMPLEX:
            imag += y
    out_at = tl.program_id(0).to(tl.int64)
    if COMPLEX:
        tl.store(out_ptr + 2 * out_at, tl.sum(real))
        tl.store(out_ptr + 2 * out_at + 1, tl.sum(imag))
    else:
        tl.store(out_ptr + out_at, tl.sum(real).to(out_ptr.dtype.element_ty))


@triton.jit
def sum_chunks(partial_ptr, out_ptr, chunks, BLOCK: tl.constexpr, COMPLEX: tl.constexpr, OVERLAP: tl.constexpr):
    """Program batch sums partial[batch, :chunks] into out[batch]."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    batch = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    if COMPLEX:
        at = (batch * chunks + lane[:, None]) * 2 + tl.arange(0, 2)[None, :]  # [BLOCK, 2]
        real, imag = tl.split(tl.load(partial_ptr + at, mask=(lane < chunks)[:, None], other=0.0))
        tl.store(out_ptr + 2 * batch, tl.sum(real))
        tl.store(out_ptr + 2 * batch + 1, tl.sum(imag))
    else:
        part = tl.load(partial_ptr + batch * chunks + lane, mask=lane < chunks, other=0.0)
        tl.store(out_ptr + batch, tl.sum(part).to(out_ptr.dtype.element_ty))

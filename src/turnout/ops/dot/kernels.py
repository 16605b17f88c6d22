"""Triton kernels of dot, inner and matmul with one output: every sum is taken in one fixed order.

A complex tensor comes as its real view, so an element is a (real, imaginary) pair of floats and strides count floats.
Products of float32 are exact in float64 and are added there, so the result is the rounded true sum; products of the half types are exact
in float32 and are added there, lane by lane, then across lanes and chunks in float64. Neither is felt: the loads take longer.
"""

# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false
import triton
import triton.language as tl


@triton.jit
def products(a_ptr, b_ptr, at, a_stride, b_stride, keep, ACC: tl.constexpr, COMPLEX: tl.constexpr, MASKED: tl.constexpr):
    """Real and imaginary parts of the products at the given places; of reals, the product twice."""
    if COMPLEX:
        pair = tl.arange(0, 2)[None, :]
        if MASKED:
            a = tl.load(a_ptr + at[:, None] * a_stride + pair, mask=keep[:, None], other=0.0)  # [BLOCK, 2]
            b = tl.load(b_ptr + at[:, None] * b_stride + pair, mask=keep[:, None], other=0.0)
        else:
            a = tl.load(a_ptr + at[:, None] * a_stride + pair)
            b = tl.load(b_ptr + at[:, None] * b_stride + pair)
        a_real, a_imag = tl.split(a.to(ACC))
        b_real, b_imag = tl.split(b.to(ACC))
        return a_real * b_real - a_imag * b_imag, a_real * b_imag + a_imag * b_real
    if MASKED:
        a = tl.load(a_ptr + at * a_stride, mask=keep, other=0.0)
        b = tl.load(b_ptr + at * b_stride, mask=keep, other=0.0)
    else:
        a = tl.load(a_ptr + at * a_stride)
        b = tl.load(b_ptr + at * b_stride)
    product = a.to(ACC) * b.to(ACC)
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
    ACC: tl.constexpr = tl.float64 if a_ptr.dtype.element_ty == tl.float32 else tl.float32
    batch = tl.program_id(0) // chunks
    chunk = tl.program_id(0) % chunks
    a_ptr += batch.to(tl.int64) * a_batch_stride
    b_ptr += batch.to(tl.int64) * b_batch_stride
    lane = tl.arange(0, BLOCK).to(tl.int64)  # places times strides may pass 2^31
    real = tl.zeros([BLOCK], ACC)
    imag = tl.zeros([BLOCK], ACC)
    full = length // BLOCK  # blocks that need no mask: a mask would split the 16-byte loads
    for block in range(chunk, full, chunks):
        x, y = products(a_ptr, b_ptr, block * BLOCK + lane, a_stride, b_stride, lane, ACC, COMPLEX, False)
        real += x
        if COMPLEX:
            imag += y
    if chunk == full % chunks:
        at = full * BLOCK + lane
        x, y = products(a_ptr, b_ptr, at, a_stride, b_stride, at < length, ACC, COMPLEX, True)
        real += x
        if COMPLEX:
            imag += y
    out_at = tl.program_id(0).to(tl.int64)
    kind: tl.constexpr = out_ptr.dtype.element_ty
    if COMPLEX:
        tl.store(out_ptr + 2 * out_at, tl.sum(real).to(kind))
        tl.store(out_ptr + 2 * out_at + 1, tl.sum(imag).to(kind))
    else:
        tl.store(out_ptr + out_at, tl.sum(real.to(tl.float64)).to(kind))


@triton.jit
def sum_chunks(partial_ptr, out_ptr, chunks, BLOCK: tl.constexpr, COMPLEX: tl.constexpr, OVERLAP: tl.constexpr):
    """Program batch sums partial[batch, :chunks] into out[batch]."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    batch = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    kind: tl.constexpr = out_ptr.dtype.element_ty
    if COMPLEX:
        at = (batch * chunks + lane[:, None]) * 2 + tl.arange(0, 2)[None, :]  # [BLOCK, 2]
        real, imag = tl.split(tl.load(partial_ptr + at, mask=(lane < chunks)[:, None], other=0.0))
        tl.store(out_ptr + 2 * batch, tl.sum(real).to(kind))
        tl.store(out_ptr + 2 * batch + 1, tl.sum(imag).to(kind))
    else:
        part = tl.load(partial_ptr + batch * chunks + lane, mask=lane < chunks, other=0.0)
        tl.store(out_ptr + batch, tl.sum(part).to(kind))

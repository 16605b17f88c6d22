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
    a_ptr, b_ptr, out_ptr, work_ptr, length, chunks,
    a_stride, b_stride, a_batch_stride, b_batch_stride, counters,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr, COMPLEX: tl.constexpr,
):  # fmt: skip
    """Program (batch, chunk) sums every chunks-th block of one pair of vectors. The last one to end of each batch adds up what all have
    found, in the order of the chunks, into out[batch]. CHUNKS is the power of two from `chunks` on. `work` begins with counters for
    batches, zero before and after; then comes room for what they find. With one chunk it is not used."""
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
    if CHUNKS == 1:
        store(out_ptr + batch.to(tl.int64) * (2 if COMPLEX else 1), tl.sum(real.to(tl.float64)), tl.sum(imag.to(tl.float64)), COMPLEX)
    else:
        each: tl.constexpr = 2 if COMPLEX else 1
        found = work_ptr + counters // 2 + batch * chunks * each
        store(found + chunk * each, tl.sum(real.to(tl.float64)), tl.sum(imag.to(tl.float64)), COMPLEX)
        counter = work_ptr.to(tl.pointer_type(tl.int32)) + batch
        tl.debug_barrier()
        if tl.atomic_add(counter, 1, sem="acq_rel") == chunks - 1:
            mine = tl.arange(0, CHUNKS)
            keep = mine < chunks
            total = tl.sum(tl.load(found + mine * each, mask=keep, other=0.0, cache_modifier=".cg"))  # written by others: not from L1
            rest = tl.sum(tl.load(found + mine * each + 1, mask=keep, other=0.0, cache_modifier=".cg")) if COMPLEX else total
            store(out_ptr + batch * each, total, rest, COMPLEX)
            tl.store(counter, 0)


@triton.jit
def store(at, real, imag, COMPLEX: tl.constexpr):
    tl.store(at, real.to(at.dtype.element_ty))
    if COMPLEX:
        tl.store(at + 1, imag.to(at.dtype.element_ty))

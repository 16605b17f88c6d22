"""Triton kernels of dot, inner and matmul with one output: every sum is taken in one fixed order.

A complex tensor comes as its real view, so an element is a (real, imaginary) pair of floats and strides count
floats. Products of float32 are exact in float64 and are added there: the result is the rounded true sum.
Products of the half types are exact in float32 and are added there, lane by lane, then across lanes and
chunks in float64. Neither costs time: the loads take longer.
"""

# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false
import triton
import triton.language as tl


@triton.jit
def products(
    a_ptr, b_ptr,  # first element of each vector
    at,  # [BLOCK] int64, indices of the elements
    a_stride, b_stride,  # from one element to the next, in floats
    keep,  # [BLOCK] which indices are inside; read with MASKED only
    ACC: tl.constexpr,  # dtype of the products
    COMPLEX: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Real and imaginary parts of the products at some indices, each [BLOCK]; of reals, the product twice."""
    if COMPLEX:
        pair = tl.arange(0, 2)[None, :]  # [1, 2] real, imaginary
        if MASKED:
            a = tl.load(a_ptr + at[:, None] * a_stride + pair, mask=keep[:, None], other=0.0)  # [BLOCK, 2]
            b = tl.load(b_ptr + at[:, None] * b_stride + pair, mask=keep[:, None], other=0.0)  # [BLOCK, 2]
        else:
            a = tl.load(a_ptr + at[:, None] * a_stride + pair)  # [BLOCK, 2]
            b = tl.load(b_ptr + at[:, None] * b_stride + pair)  # [BLOCK, 2]
        a_real, a_imag = tl.split(a.to(ACC))  # [BLOCK] each
        b_real, b_imag = tl.split(b.to(ACC))  # [BLOCK] each
        return a_real * b_real - a_imag * b_imag, a_real * b_imag + a_imag * b_real
    if MASKED:
        a = tl.load(a_ptr + at * a_stride, mask=keep, other=0.0)  # [BLOCK]
        b = tl.load(b_ptr + at * b_stride, mask=keep, other=0.0)  # [BLOCK]
    else:
        a = tl.load(a_ptr + at * a_stride)  # [BLOCK]
        b = tl.load(b_ptr + at * b_stride)  # [BLOCK]
    product = a.to(ACC) * b.to(ACC)  # [BLOCK]
    return product, product


@triton.jit
def dot_chunks(
    a_ptr, b_ptr,  # [batch, length] each
    out_ptr,  # [batch], contiguous
    work_ptr,  # float64 words: counters, then partial sums [batch, chunks]; with one chunk not used
    length, chunks,  # elements of a vector, programs that share it
    a_stride, b_stride, a_batch_stride, b_batch_stride,  # in floats
    counters,  # int32 counters that `work` begins with
    BLOCK: tl.constexpr,  # elements at a time
    CHUNKS: tl.constexpr,  # `chunks`, rounded up to a power of two
    COMPLEX: tl.constexpr,
):  # fmt: skip
    """Multiply and add up pairs of vectors. Program (batch, chunk) takes every chunks-th block of one pair.

    The last program of each batch to end adds up the partial sums of all, in the order of the chunks, into
    out[batch]. The counter of a batch tells who is last; counters are zero before and after.
    """
    ACC: tl.constexpr = tl.float64 if a_ptr.dtype.element_ty == tl.float32 else tl.float32
    batch = tl.program_id(0) // chunks
    chunk = tl.program_id(0) % chunks
    a_ptr += batch.to(tl.int64) * a_batch_stride
    b_ptr += batch.to(tl.int64) * b_batch_stride
    lane = tl.arange(0, BLOCK).to(tl.int64)  # [BLOCK] int64: indices times strides may pass 2^31
    real = tl.zeros([BLOCK], ACC)
    imag = tl.zeros([BLOCK], ACC)
    full = length // BLOCK  # blocks that need no mask: a mask would split the 16-byte loads
    for block in range(chunk, full, chunks):
        x, y = products(a_ptr, b_ptr, block * BLOCK + lane, a_stride, b_stride, lane, ACC, COMPLEX, False)
        real += x
        if COMPLEX:
            imag += y
    if chunk == full % chunks:  # the rest is this program's
        at = full * BLOCK + lane  # [BLOCK]
        x, y = products(a_ptr, b_ptr, at, a_stride, b_stride, at < length, ACC, COMPLEX, True)
        real += x
        if COMPLEX:
            imag += y
    if CHUNKS == 1:
        store_sum(
            out_ptr + batch.to(tl.int64) * (2 if COMPLEX else 1),
            tl.sum(real.to(tl.float64)), tl.sum(imag.to(tl.float64)), COMPLEX,
        )  # fmt: skip
    else:
        numbers: tl.constexpr = 2 if COMPLEX else 1  # of one sum
        partial = work_ptr + counters // 2 + batch * chunks * numbers  # two int32 counters a float64
        store_sum(
            partial + chunk * numbers,
            tl.sum(real.to(tl.float64)), tl.sum(imag.to(tl.float64)), COMPLEX,
        )  # fmt: skip
        counter = work_ptr.to(tl.pointer_type(tl.int32)) + batch
        tl.debug_barrier()
        if tl.atomic_add(counter, 1, sem="acq_rel") == chunks - 1:
            other = tl.arange(0, CHUNKS)  # [CHUNKS]
            keep = other < chunks
            # ".cg": written by other programs, so not from L1.
            total = tl.sum(tl.load(partial + other * numbers, mask=keep, other=0.0, cache_modifier=".cg"))
            imag_total = tl.sum(
                tl.load(partial + other * numbers + 1, mask=keep, other=0.0, cache_modifier=".cg")
            ) if COMPLEX else total  # fmt: skip
            store_sum(out_ptr + batch * numbers, total, imag_total, COMPLEX)
            tl.store(counter, 0)


@triton.jit
def store_sum(at, real, imag, COMPLEX: tl.constexpr):
    """Round one sum to the dtype of the output or of the work space at pointer `at`, and store it there."""
    tl.store(at, real.to(at.dtype.element_ty))
    if COMPLEX:
        tl.store(at + 1, imag.to(at.dtype.element_ty))

"""Triton kernel of selective_scan and selective_scan_update: a program walks along one sequence, a thread holds the states of a channel."""

# A branch on a constexpr needs its else.
# ruff: noqa: RET505
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from turnout.ops.common_kernels import exp_of_minus, silu, speaks_ptx


@triton.jit
def softplus(a):
    """log(1 + exp(a)) as max(a, 0) + log(1 + e) with e = exp(-|a|), and that as 2 atanh(e / (2 + e)): 1 + e would lose most of a small e,
    and Mamba's steps are small."""
    e = exp_of_minus(tl.abs(a))
    inverse = 1.0 / (2.0 + e)
    s = e * inverse
    s += inverse * tl.fma(-s, 2.0 + e, e)  # tl.div_rn branches, and no step could be begun before the one before it has ended
    q = s * s
    series = 1 / 3 + q * (1 / 5 + q * (1 / 7 + q * (1 / 9 + q * (1 / 11 + q * (1 / 13)))))
    return tl.maximum(a, 0.0, propagate_nan=tl.PropagateNan.ALL) + (2.0 * s + 2.0 * s * q * series)


@triton.jit
def fast_exp2(a):
    """2^a to a unit or two of the last place, subnormals flushed."""
    if speaks_ptx():
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [a], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.exp2(a)


@triton.jit
def moved_on(h, t, added):
    """2^t * h + added. Where t is small, 2^t - 1 by its series: rounding 2^t itself, next to 1, would be felt for as long as the state
    remembers. Elsewhere states forget faster than errors grow."""
    small = tl.abs(t) < 0.09
    less_one = t * (0.6931471805599453 + t * (0.2402265069591007 + t * (0.05550410866482158 + t * 0.009618129107628477)))
    factor = tl.where(small, less_one, fast_exp2(t))
    return tl.where(small, h, 0.0) + tl.fma(factor, h, added)


@triton.jit
def read(px, pt, pz, pb, pc, xl, tl_, zl, bl, cl, start, L, dm, nm, GATED: tl.constexpr, STEPS: tl.constexpr):
    """x, dt, z, B and C of STEPS positions, zeros beyond the end."""
    xs, ts, zs, ins, outs = (), (), (), (), ()
    for i in tl.static_range(STEPS):
        at = start + i
        real = dm & (at < L)
        xs = xs + (tl.load(px + at * xl, mask=real, other=0.0),)  # noqa: RUF005
        ts = ts + (tl.load(pt + at * tl_, mask=real, other=0.0),)  # noqa: RUF005
        if GATED:
            zs = zs + (tl.load(pz + at * zl, mask=real, other=0.0),)  # noqa: RUF005
        ins = ins + (tl.load(pb + at * bl, mask=nm & (at < L), other=0.0),)  # noqa: RUF005
        outs = outs + (tl.load(pc + at * cl, mask=nm & (at < L), other=0.0),)  # noqa: RUF005
    return xs, ts, zs, ins, outs


@triton.jit
def scan(
    x, dt, A, B, C, D, z, bias, initial, y, final,
    dim, L, xb, xd, xl, tb, td, tl_, ad, an, bb, bn, bl, cb, cn, cl, zb, zd, zl, ib, id_, in_, yb, yd, yl, fb, fd, fn,
    SOFTPLUS: tl.constexpr, LOG: tl.constexpr, FINAL: tl.constexpr, STATES: tl.constexpr, N: tl.constexpr, BD: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """BD channels of one sequence, N >= STATES. STEPS positions are read while those before them are scanned. LOG: given is log(-A), not A.
    final is [batch, dim, states] and may be initial itself: a program reads its states before it writes them."""
    blocks = tl.cdiv(dim, BD)
    pid = tl.program_id(0)
    b = (pid // blocks).to(tl.int64)
    d = (pid % blocks * BD + tl.arange(0, BD)).to(tl.int64)
    n = tl.arange(0, N).to(tl.int64)
    dm, nm = d < dim, n < STATES
    both = nm[:, None] & dm[None]  # [N, BD] throughout: the states of a channel in one thread, nothing is exchanged when they are summed
    rate = tl.load(A + (n * an)[:, None] + (d * ad)[None], mask=both, other=0.0).to(tl.float32)
    if LOG:
        rate = -exp_of_minus(-rate)
    rate *= 1.4426950408889634  # log2(e)
    h = tl.zeros((N, BD), tl.float32)
    if initial is not None:
        h = tl.load(initial + b * ib + (n * in_)[:, None] + (d * id_)[None], mask=both, other=0.0).to(tl.float32)
    shift = tl.zeros((BD,), tl.float32)
    if bias is not None:
        shift = tl.load(bias + d, mask=dm, other=0.0).to(tl.float32)
    skip = tl.zeros((BD,), tl.float32)
    if D is not None:
        skip = tl.load(D + d, mask=dm, other=0.0).to(tl.float32)
    px, pt, py = x + b * xb + d * xd, dt + b * tb + d * td, y + b * yb + d * yd
    pb, pc = B + b * bb + n * bn, C + b * cb + n * cn
    pz = px
    if z is not None:
        pz = z + b * zb + d * zd
    xl, tl_, yl = tl.cast(xl, tl.int64), tl.cast(tl_, tl.int64), tl.cast(yl, tl.int64)
    bl, cl, zl = tl.cast(bl, tl.int64), tl.cast(cl, tl.int64), tl.cast(zl, tl.int64)

    xs, ts, zs, ins, outs = read(px, pt, pz, pb, pc, xl, tl_, zl, bl, cl, 0, L, dm, nm, z is not None, STEPS)
    for start in range(0, L, STEPS):
        later = read(px, pt, pz, pb, pc, xl, tl_, zl, bl, cl, start + STEPS, L, dm, nm, z is not None, STEPS)
        for i in tl.static_range(STEPS):
            at = start + i
            step = ts[i].to(tl.float32) + shift
            if SOFTPLUS:
                step = softplus(step)
            step = tl.where(at < L, step, 0.0)  # beyond the end nothing decays and nothing is added
            value = xs[i].to(tl.float32)
            h = moved_on(h, rate * step[None], ins[i].to(tl.float32)[:, None] * (step * value)[None])
            seen = h * outs[i].to(tl.float32)[:, None]
            if STATES < N:  # an infinite step times the zero of a state that is not there is not a number
                seen = tl.where(nm[:, None], seen, 0.0)
            out = tl.sum(seen, 0) + skip * value
            if z is not None:
                out = out * silu(zs[i].to(tl.float32), y.dtype.element_ty == tl.float32)
            tl.store(py + at * yl, out.to(y.dtype.element_ty), mask=dm & (at < L))
        xs, ts, zs, ins, outs = later
    if FINAL:
        tl.store(final + b * fb + (n * fn)[:, None] + (d * fd)[None], h.to(final.dtype.element_ty), mask=both)

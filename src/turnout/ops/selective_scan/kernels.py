"""Triton kernel of selective_scan and selective_scan_update.

A program walks along one sequence; a thread holds the states of a channel.
"""

# A branch on a constexpr needs its else.
# ruff: noqa: RET505
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from turnout.ops.common_kernels import exp_of_minus, silu, speaks_ptx


@triton.jit
def softplus(a):
    """log(1 + exp(a)), float32 of any shape.

    As max(a, 0) + log(1 + e) with e = exp(-|a|), and that as 2 atanh(e / (2 + e)): 1 + e would lose most of a
    small e, and Mamba's steps are small.
    """
    e = exp_of_minus(tl.abs(a))
    inverse = 1.0 / (2.0 + e)
    s = e * inverse
    # In place of tl.div_rn, which branches: no step could begin before the one before it has ended.
    s += inverse * tl.fma(-s, 2.0 + e, e)
    q = s * s
    series = 1 / 3 + q * (1 / 5 + q * (1 / 7 + q * (1 / 9 + q * (1 / 11 + q * (1 / 13)))))
    return tl.maximum(a, 0.0, propagate_nan=tl.PropagateNan.ALL) + (2.0 * s + 2.0 * s * q * series)


@triton.jit
def fast_exp2(a):
    """2^a, float32 of any shape, to a unit or two of the last place, subnormals flushed."""
    if speaks_ptx():
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [a], dtype=tl.float32, is_pure=True, pack=1
        )  # fmt: skip
    else:
        return tl.exp2(a)


@triton.jit
def next_state(h, t, added):
    """2^t * h + added, the states one position further; [N, BD] each.

    Where t is small, 2^t - 1 comes from its series: rounding 2^t itself, next to 1, would be felt for as
    long as the state remembers. Elsewhere states forget faster than errors grow.
    """
    small = tl.abs(t) < 0.09
    factor_less_one = t * (
        0.6931471805599453 + t * (0.2402265069591007 + t * (0.05550410866482158 + t * 0.009618129107628477))
    )  # fmt: skip
    factor = tl.where(small, factor_less_one, fast_exp2(t))
    return tl.where(small, h, 0.0) + tl.fma(factor, h, added)


@triton.jit
def load_positions(
    px, pt, pz, pb, pc,  # pointers to the first position of x, dt, z [BD], B and C [N]
    xl, tl_, zl, bl, cl,  # their strides by position, in elements
    start, L,  # first position to load_positions, positions of the sequence
    dm, nm,  # [BD], [N] which channels and states are inside
    GATED: tl.constexpr, STEPS: tl.constexpr,  # whether there is z; positions to load_positions
):  # fmt: skip
    """x, dt, z [BD], B and C [N] of STEPS positions from `start` on, a tuple of each; zeros past the end."""
    xs, ts, zs, ins, outs = (), (), (), (), ()
    for i in tl.static_range(STEPS):
        at = start + i
        real = dm & (at < L)  # [BD]
        xs = xs + (tl.load(px + at * xl, mask=real, other=0.0),)  # noqa: RUF005
        ts = ts + (tl.load(pt + at * tl_, mask=real, other=0.0),)  # noqa: RUF005
        if GATED:
            zs = zs + (tl.load(pz + at * zl, mask=real, other=0.0),)  # noqa: RUF005
        ins = ins + (tl.load(pb + at * bl, mask=nm & (at < L), other=0.0),)  # noqa: RUF005
        outs = outs + (tl.load(pc + at * cl, mask=nm & (at < L), other=0.0),)  # noqa: RUF005
    return xs, ts, zs, ins, outs


@triton.jit
def scan(
    x, dt,  # [batch, dim, L]
    A,  # [dim, STATES]
    B, C,  # [batch, STATES, L]
    D, z,  # [dim], [batch, dim, L]; None: left out
    bias,  # [dim], added to dt, or None
    initial, y, final,  # [batch, dim, STATES] or None, [batch, dim, L], [batch, dim, STATES]
    dim, L,  # channels, positions
    xb, xd, xl, tb, td, tl_,  # strides in elements: of x, dt (t)
    ad, an, bb, bn, bl, cb, cn, cl,  # of A, B, C; by batch (b), channel (d), state (n), position (l)
    zb, zd, zl, ib, id_, in_,  # of z and initial (i)
    yb, yd, yl, fb, fd, fn,  # of y and final (f)
    SOFTPLUS: tl.constexpr,  # steps are softplus(dt + bias)
    LOG: tl.constexpr,  # A holds log(-A)
    FINAL: tl.constexpr,  # write the states after the last position
    STATES: tl.constexpr, N: tl.constexpr,  # states of a channel; rounded up to a power of two
    BD: tl.constexpr, STEPS: tl.constexpr,  # channels of a program; positions load_positions ahead
):  # fmt: skip
    """Scan one sequence along its positions. A program: BD channels of one sequence, all their states.

    STEPS positions are read while those before them are scanned. `final` may be `initial` itself: a
    program reads its states before it writes them.
    """
    blocks = tl.cdiv(dim, BD)
    pid = tl.program_id(0)
    b = (pid // blocks).to(tl.int64)
    d = (pid % blocks * BD + tl.arange(0, BD)).to(tl.int64)  # [BD]
    n = tl.arange(0, N).to(tl.int64)  # [N]
    dm, nm = d < dim, n < STATES  # [BD], [N]
    # [N, BD] throughout: one thread has all states of a channel and sums them without an exchange.
    both = nm[:, None] & dm[None]  # [N, BD]
    rate = tl.load(A + (n * an)[:, None] + (d * ad)[None], mask=both, other=0.0).to(tl.float32)
    if LOG:
        rate = -exp_of_minus(-rate)
    rate *= 1.4426950408889634  # [N, BD], times log2(e): states decay by powers of two
    h = tl.zeros((N, BD), tl.float32)
    if initial is not None:
        h = tl.load(
            initial + b * ib + (n * in_)[:, None] + (d * id_)[None], mask=both, other=0.0  # [N, BD]
        ).to(tl.float32)  # fmt: skip
    shift = tl.zeros((BD,), tl.float32)
    if bias is not None:
        shift = tl.load(bias + d, mask=dm, other=0.0).to(tl.float32)  # [BD]
    skip = tl.zeros((BD,), tl.float32)
    if D is not None:
        skip = tl.load(D + d, mask=dm, other=0.0).to(tl.float32)  # [BD]
    px, pt, py = x + b * xb + d * xd, dt + b * tb + d * td, y + b * yb + d * yd  # [BD] each
    pb, pc = B + b * bb + n * bn, C + b * cb + n * cn  # [N] each
    pz = px
    if z is not None:
        pz = z + b * zb + d * zd  # [BD]
    xl, tl_, yl = tl.cast(xl, tl.int64), tl.cast(tl_, tl.int64), tl.cast(yl, tl.int64)
    bl, cl, zl = tl.cast(bl, tl.int64), tl.cast(cl, tl.int64), tl.cast(zl, tl.int64)

    xs, ts, zs, ins, outs = load_positions(
        px, pt, pz, pb, pc, xl, tl_, zl, bl, cl, 0, L, dm, nm, z is not None, STEPS
    )  # fmt: skip
    for start in range(0, L, STEPS):
        following = load_positions(
            px, pt, pz, pb, pc, xl, tl_, zl, bl, cl, start + STEPS, L, dm, nm, z is not None, STEPS
        )  # fmt: skip
        for i in tl.static_range(STEPS):
            at = start + i
            step = ts[i].to(tl.float32) + shift  # [BD]
            if SOFTPLUS:
                step = softplus(step)
            step = tl.where(at < L, step, 0.0)  # beyond the end nothing decays and nothing is added
            value = xs[i].to(tl.float32)  # [BD]
            h = next_state(h, rate * step[None], ins[i].to(tl.float32)[:, None] * (step * value)[None])
            terms = h * outs[i].to(tl.float32)[:, None]  # [N, BD]
            if STATES < N:  # an infinite step times the zero of a state that is not there is not a number
                terms = tl.where(nm[:, None], terms, 0.0)
            out = tl.sum(terms, 0) + skip * value  # [BD]
            if z is not None:
                out = out * silu(zs[i].to(tl.float32), y.dtype.element_ty == tl.float32)
            tl.store(py + at * yl, out.to(y.dtype.element_ty), mask=dm & (at < L))
        xs, ts, zs, ins, outs = following
    if FINAL:
        tl.store(final + b * fb + (n * fn)[:, None] + (d * fd)[None], h.to(final.dtype.element_ty), mask=both)

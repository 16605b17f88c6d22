"""Triton kernel of selective_scan: one program walks along one sequence with the states of a few channels in registers."""

# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from turnout.ops.common_kernels import exp_of_minus, sigmoid


@triton.jit
def softplus(a):
    """log(1 + exp(a)), a itself beyond 20, and a series where 1 + exp(a) would lose its small part."""
    e = exp_of_minus(-tl.minimum(a, 20.0))
    near = tl.where(e < 0.01, e * (1.0 + e * (-0.5 + e * (0.3333333333 - e * 0.25))), tl.log(1.0 + e))
    return tl.where(a > 20.0, a, near)


@triton.jit
def scan(
    x, dt, A, B, C, D, z, bias, initial, y, final,
    dim, L, states, xb, xd, xl, tb, td, tl_, ad, an, bb, bn, bl, cb, cn, cl, zb, zd, zl, ib, id_, in_, yb, yd, yl,
    SOFTPLUS: tl.constexpr, FINAL: tl.constexpr, N: tl.constexpr, BD: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """BD channels of one sequence. STEPS positions are read before the first of them is needed. final is [batch, dim, states]."""
    blocks = tl.cdiv(dim, BD)
    pid = tl.program_id(0)
    b = (pid // blocks).to(tl.int64)
    d = (pid % blocks * BD + tl.arange(0, BD)).to(tl.int64)
    n = tl.arange(0, N).to(tl.int64)
    dm, nm = d < dim, n < states
    both = dm[:, None] & nm[None]
    rate = tl.load(A + (d * ad)[:, None] + (n * an)[None], mask=both, other=0.0).to(tl.float32)
    h = tl.zeros((BD, N), tl.float32)
    if initial is not None:
        h = tl.load(initial + b * ib + (d * id_)[:, None] + (n * in_)[None], mask=both, other=0.0).to(tl.float32)
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

    for start in range(0, L, STEPS):
        xs, ts, zs, ins, outs = (), (), (), (), ()
        for i in tl.static_range(STEPS):
            at = start + i
            real = dm & (at < L)
            xs = xs + (tl.load(px + at * xl, mask=real, other=0.0),)  # noqa: RUF005
            ts = ts + (tl.load(pt + at * tl_, mask=real, other=0.0),)  # noqa: RUF005
            ins = ins + (tl.load(pb + at * bl, mask=nm & (at < L), other=0.0),)  # noqa: RUF005
            outs = outs + (tl.load(pc + at * cl, mask=nm & (at < L), other=0.0),)  # noqa: RUF005
            if z is not None:
                zs = zs + (tl.load(pz + at * zl, mask=real, other=0.0),)  # noqa: RUF005
        for i in tl.static_range(STEPS):
            at = start + i
            step = ts[i].to(tl.float32) + shift
            if SOFTPLUS:
                step = softplus(step)
            step = tl.where(at < L, step, 0.0)  # beyond the end nothing decays and nothing is added
            value = xs[i].to(tl.float32)
            h = exp_of_minus(-(step[:, None] * rate)) * h + (step * value)[:, None] * ins[i].to(tl.float32)[None]
            out = tl.sum(tl.where(nm[None], h * outs[i].to(tl.float32)[None], 0.0), 1) + skip * value
            if z is not None:
                gate = zs[i].to(tl.float32)
                out = out * gate * sigmoid(gate, y.dtype.element_ty == tl.float32)
            tl.store(py + at * yl, out.to(y.dtype.element_ty), mask=dm & (at < L))
    if FINAL:
        tl.store(final + (b * dim + d[:, None]) * states + n[None], h, mask=both)

"""What Triton kernels of several ops share."""

# A branch on a constexpr needs its else.
# ruff: noqa: RET505
# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl
from triton import knobs
from triton.runtime.jit import constexpr_function


@constexpr_function
def speaks_ptx():
    """Whether the code is compiled for NVIDIA, so that inline PTX may be used. Not so in the interpreter."""
    target = tl.target_info.current_target()
    return not knobs.runtime.interpret and (target is None or target.backend == "cuda")


@triton.jit
def exp_of_minus(a):
    """exp(-a) to the last bit but one, float32 of any shape: what a * log2(e) rounds away is put back."""
    near = tl.minimum(tl.maximum(a, -87.0), 87.0)  # keeps the correction finite where exp is infinite or zero
    rounded = near * -1.4426950216293335  # log2(e) in two floats: this one, and what it leaves out below
    lost = tl.fma(near, -1.4426950216293335, -rounded) + near * -1.9259629911e-8
    return tl.exp2(a * -1.4426950216293335) * (1.0 + 0.6931471805599453 * lost)


@triton.jit
def sigmoid(a, PRECISE: tl.constexpr = False):
    """1 / (1 + exp(-a)), float32 of any shape.

    PRECISE: correctly rounded division, for results that stay in float32. A half type does not see it.
    """
    if PRECISE:
        return tl.div_rn(1.0, 1.0 + exp_of_minus(a))
    elif speaks_ptx():
        # Flushing subnormals saves three of eight instructions and costs nothing: exp2 is then added to 1.
        return tl.inline_asm_elementwise(
            "{.reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000;"
            " rcp.approx.ftz.f32 $0, t;}",
            "=f,f", [a], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return 1.0 / (1.0 + tl.exp2(a * -1.4426950408889634))


@triton.jit
def silu(a, PRECISE: tl.constexpr):
    """a / (1 + exp(-a)), float32 of any shape, with PRECISE as in `sigmoid`."""
    if PRECISE:
        return tl.div_rn(a, 1.0 + exp_of_minus(a))
    else:
        return a * sigmoid(a)

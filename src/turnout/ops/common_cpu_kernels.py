"""What Numba kernels of several ops share. They release the GIL; threads come from `turnout.ops.threads`.

Half types arrive as their bits, told apart by the integer's type: bfloat16 as uint16, float16 as int16. A row
is widened to float32 once and rounded once on its way out. Long loops over `i` are left to LLVM to become
vector instructions: they run over whole slices, since an index that could be negative in Python's sense would
keep it from them. Rows of a few hundred elements are written in vectors of LANES by
hand: what LLVM asks before each of its loops (do the arrays overlap? what is left over?) took a third of
their time.
"""

# Numba wants plain functions at module level; its intrinsics are typed by what they are given.
# pyright: basic, reportCallIssue=false

import functools

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, models, register_model

from turnout.ops.numba_cache import kernel

FUSED = {"contract", "nsz"}  # a product and a sum may round once; NaN and Inf keep their meaning
LANES = 16  # float32 values: one register of AVX-512, two of AVX2
_SINGLE, _HALF, _WORD, _SHORT = ir.FloatType(), ir.HalfType(), ir.IntType(32), ir.IntType(16)


class Vector(types.Type):
    """LANES float32 values in registers."""


VECTOR = Vector("Vector")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, ir.VectorType(_SINGLE, LANES))


# What is emitted below is the same for one value and for a vector of them; constants and types take the shape
# of a value.


def _of(element, shape):
    """An element's type in the shape of another type."""
    return ir.VectorType(element, shape.count) if isinstance(shape, ir.VectorType) else element


def _constant(kind, number):
    return (
        ir.Constant(kind, [number] * kind.count)
        if isinstance(kind, ir.VectorType)
        else ir.Constant(kind, number)
    )


def _fma(builder, a, b, c):
    name = f"llvm.fma.v{LANES}f32" if isinstance(a.type, ir.VectorType) else "llvm.fma.f32"
    return builder.call(
        cgutils.get_or_insert_function(builder.module, ir.FunctionType(a.type, [a.type] * 3), name), [a, b, c]
    )


def _widen(builder, bits, kind):
    if kind is types.uint16:
        word = _of(_WORD, bits.type)
        return builder.bitcast(
            builder.shl(builder.zext(bits, word), _constant(word, 16)), _of(_SINGLE, bits.type)
        )
    if kind is types.int16:
        return builder.fpext(builder.bitcast(bits, _of(_HALF, bits.type)), _of(_SINGLE, bits.type))
    return bits


def _narrow(builder, value, kind):
    word, short = _of(_WORD, value.type), _of(_SHORT, value.type)
    number = functools.partial(_constant, word)
    if kind is types.uint16:
        bits = builder.bitcast(value, word)
        odd = builder.and_(builder.lshr(bits, number(16)), number(1))
        rounded = builder.add(bits, builder.add(odd, number(0x7FFF)))
        kept = builder.select(builder.fcmp_unordered("uno", value, value), number(0x7FC00000), rounded)
        return builder.trunc(builder.lshr(kept, number(16)), short)
    if kind is types.int16:
        return builder.bitcast(builder.fptrunc(value, _of(_HALF, value.type)), short)
    return value


@intrinsic
def widened(typing_context, value):
    """float32 of a float32, of bfloat16 bits (uint16) or of float16 bits (int16)."""

    def emit(context, builder, signature, args):
        return _widen(builder, args[0], value)

    return types.float32(value), emit


@intrinsic
def narrowed(typing_context, value, like):
    """A float32 rounded to the type of `like`, to nearest even. NaN stays NaN."""

    def emit(context, builder, signature, args):
        return _narrow(builder, args[0], like)

    return like(types.float32, like), emit


def _place(context, builder, kind, array, at):
    """Where LANES elements of a flat array begin, and how they may be aligned."""
    data = builder.gep(context.make_array(kind)(context, builder, array).data, [at])
    element = data.type.pointee
    return builder.bitcast(
        data, ir.VectorType(element, LANES).as_pointer()
    ), element.width // 8 if isinstance(element, ir.IntType) else 4


@intrinsic
def vector_at(typing_context, x, at):
    """The LANES elements of a flat array that begin `at` there, widened. Nothing is checked."""

    def emit(context, builder, signature, args):
        where, align = _place(context, builder, x, *args)
        return _widen(builder, builder.load(where, align=align), x.dtype)

    return VECTOR(x, types.intp), emit


@intrinsic
def put_vector(typing_context, vector, y, at):
    """Round a vector to the type of a flat array and put it `at` there. Nothing is checked."""

    def emit(context, builder, signature, args):
        where, align = _place(context, builder, y, *args[1:])
        builder.store(_narrow(builder, args[0], y.dtype), where, align=align)
        return context.get_dummy_value()

    return types.void(VECTOR, y, types.intp), emit


@intrinsic
def spread(typing_context, value):
    """A float32 in all lanes."""

    def emit(context, builder, signature, args):
        rest = ir.Constant(ir.VectorType(_SINGLE, LANES), ir.Undefined)
        first = builder.insert_element(rest, args[0], ir.Constant(_WORD, 0))
        return builder.shuffle_vector(first, rest, _constant(ir.VectorType(_WORD, LANES), 0))

    return VECTOR(types.float32), emit


@intrinsic
def vector_times(typing_context, a, b):
    def emit(context, builder, signature, args):
        return builder.fmul(*args)

    return VECTOR(VECTOR, VECTOR), emit


@intrinsic
def vector_plus(typing_context, a, b):
    def emit(context, builder, signature, args):
        return builder.fadd(*args)

    return VECTOR(VECTOR, VECTOR), emit


@intrinsic
def vector_minus(typing_context, a, b):
    def emit(context, builder, signature, args):
        return builder.fsub(*args)

    return VECTOR(VECTOR, VECTOR), emit


@intrinsic(prefer_literal=True)
def every_second(typing_context, a, b, first):
    """The lanes `first`, `first` + 2, ... of two vectors in a row."""

    def emit(context, builder, signature, args):
        lanes = ir.Constant(ir.VectorType(_WORD, LANES), list(range(first.literal_value, 2 * LANES, 2)))
        return builder.shuffle_vector(args[0], args[1], lanes)

    return VECTOR(VECTOR, VECTOR, first), emit


@intrinsic(prefer_literal=True)
def in_turns(typing_context, a, b, half):
    """The lanes of two vectors in turns: a0, b0, a1, ...

    Two vectors' worth, of which this is `half` 0 or 1.
    """

    def emit(context, builder, signature, args):
        first = half.literal_value * LANES // 2
        lanes = ir.Constant(
            ir.VectorType(_WORD, LANES),
            [lane for i in range(first, first + LANES // 2) for lane in (i, LANES + i)],
        )
        return builder.shuffle_vector(args[0], args[1], lanes)

    return VECTOR(VECTOR, VECTOR, half), emit


@intrinsic(prefer_literal=True)
def moved_back(typing_context, before, here, count):
    """The vector that begins `count` lanes before `here` does, where `before` ends."""

    def emit(context, builder, signature, args):
        first = LANES - count.literal_value
        lanes = ir.Constant(ir.VectorType(_WORD, LANES), list(range(first, first + LANES)))
        return builder.shuffle_vector(args[0], args[1], lanes)

    return VECTOR(VECTOR, VECTOR, count), emit


@intrinsic
def sum_of_lanes(typing_context, vector):
    """The sum of all lanes, by halves."""

    def emit(context, builder, signature, args):
        sums, count = args[0], LANES
        while count > 1:
            count //= 2
            low, high = (
                ir.Constant(ir.VectorType(_WORD, count), list(range(at, at + count))) for at in (0, count)
            )
            rest = ir.Constant(sums.type, ir.Undefined)
            sums = builder.fadd(
                builder.shuffle_vector(sums, rest, low), builder.shuffle_vector(sums, rest, high)
            )
        return builder.extract_element(sums, ir.Constant(_WORD, 0))

    return types.float32(VECTOR), emit


@intrinsic
def prefer_wide_vectors(typing_context):
    """LLVM keeps to half of AVX-512's registers unless a function asks for all; silu takes a third less time
    with them.
    """

    def emit(context, builder, signature, args):
        if isinstance(
            builder.function.attributes, set
        ):  # llvmlite has no name for it, 0.50 prints what is there
            set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic
def fused(typing_context, a, b, c):
    """a * b + c, rounded once; of vectors too."""

    def emit(context, builder, signature, args):
        return _fma(builder, *args)

    return a(a, a, a), emit


@intrinsic
def silu(typing_context, a):
    """a / (1 + exp(-a)) of a float32 or a vector: Numba calls the scalar exp of the C library, this one
    becomes vectors.

    exp(-a) = 2**n * exp(-r) with a polynomial (within 3.1e-9) for r in [-ln(2)/2, ln(2)/2]. At n = 128 it is
    infinite, as it should, and silu is 0. Within 3 units in the last place where |a| < 20, as torch's own; on
    average as good. Flags stand at each instruction: sums in another order would undo the rounding of n.
    """

    def emit(context, builder, signature, args):
        value = args[0]
        number, word = (
            functools.partial(_constant, value.type),
            functools.partial(_constant, _of(_WORD, value.type)),
        )
        add, subtract, multiply, divide = (
            functools.partial(made, flags=("contract",))
            for made in (builder.fadd, builder.fsub, builder.fmul, builder.fdiv)
        )
        t = builder.select(builder.fcmp_ordered(">", value, number(-89.0)), value, number(-89.0))
        t = builder.select(builder.fcmp_ordered("<", t, number(87.0)), t, number(87.0))
        shifted = add(
            multiply(t, number(-1.44269504)), number(12582912.0)
        )  # rounds to an integer in the low bits
        r = _fma(
            builder, subtract(shifted, number(12582912.0)), number(0.693147182), t
        )  # ln(2) in float32 is 1.9e-9 too large
        power = number(0.00138206338)
        for coefficient in (-0.00836867373, 0.0416682661, -0.166665211, 0.49999994, -1.0, 1.0):
            power = add(multiply(power, r), number(coefficient))
        exponent = builder.add(builder.bitcast(shifted, _of(_WORD, value.type)), word(127 - 0x4B400000))
        scale = builder.bitcast(builder.shl(exponent, word(23)), value.type)
        return divide(value, add(number(1.0), multiply(power, scale)))

    return a(a), emit


@kernel(fastmath=FUSED)
def widen(x, into):
    prefer_wide_vectors()
    for i in range(x.size):
        into[i] = widened(x[i])


@kernel(fastmath=FUSED)
def finish(acc, y, SILU):
    """Activate and round; all bits of a zero are zero in every type."""
    prefer_wide_vectors()
    if SILU:
        for i in range(y.size):
            y[i] = narrowed(silu(acc[i]), y[i])
    else:
        for i in range(y.size):
            y[i] = narrowed(acc[i], y[i])


@kernel(fastmath=FUSED | {"reassoc"})
def widen_and_square(x, into):
    """The sum of the squares of x, in as many partial sums as a vector has lanes, while it is widened."""
    prefer_wide_vectors()
    total = np.float32(0)
    for i in range(x.size):
        value = widened(x[i])
        into[i] = value
        total += value * value
    return total

"""Products of small matrices in float32, in Numba: what Winograd's points are multiplied by."""

# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false

import llvmlite.binding
from llvmlite import ir
from numba.core import config, types
from numba.extending import intrinsic

from turnout.ops.common_cpu_kernels import LANES, _fma, prefer_wide_vectors
from turnout.ops.numba_cache import kernel

# Rows and vectors of a product that is kept in registers: 24 of the 32 of AVX-512. Elsewhere a vector takes
# two or four. Numba may be told to do without (NUMBA_CPU_FEATURES).
ROWS, COLUMNS = (
    (8, 3)
    if "+avx512f" in (config.CPU_FEATURES or llvmlite.binding.get_host_cpu_features().flatten())
    else (4, 1)
)
# Rows of a product: with three columns and the filters or pixels of 64 channels they fit a first-level cache.
AT_ONCE = 64


@intrinsic(prefer_literal=True)
def add_product(
    typing_context,
    a,
    a_at,
    a_row,
    a_next,
    b,
    b_at,
    b_column,
    b_next,
    c,
    c_at,
    c_row,
    count,
    again,
    ROWS,
    COLUMNS,
):
    """Rows of a times columns of b, vectors of LANES: the sums over `count` go to c, or `again` are added to
    what is there.
    """
    rows, columns = ROWS.literal_value, COLUMNS.literal_value
    single, index = ir.FloatType(), ir.IntType(64)
    vector = ir.VectorType(single, LANES)

    def emit(context, builder, signature, args):
        _, a_from, a_step, a_k, _, b_from, b_step, b_k, _, c_from, c_step, length, adds = args[:13]
        left, right, sums = (
            context.make_array(kind)(context, builder, args[i]).data for i, kind in ((0, a), (4, b), (8, c))
        )

        def times(step, n):
            return builder.mul(step, ir.Constant(index, n))

        def begins(data, at, step, n):
            return [builder.gep(data, [builder.add(at, times(step, i))]) for i in range(n)]

        lefts, rights, places = (
            begins(left, a_from, a_step, rows),
            begins(right, b_from, b_step, columns),
            begins(sums, c_from, c_step, rows),
        )
        before, loop, after = (
            builder.block,
            builder.append_basic_block("products"),
            builder.append_basic_block("sums"),
        )
        builder.branch(loop)
        builder.position_at_end(loop)
        k = builder.phi(index)
        k.add_incoming(ir.Constant(index, 0), before)
        totals = [[builder.phi(vector) for _ in range(columns)] for _ in range(rows)]
        at_right = builder.mul(k, b_k)
        vectors = [
            builder.load(builder.bitcast(builder.gep(start, [at_right]), vector.as_pointer()), align=4)
            for start in rights
        ]
        at_left = builder.mul(k, a_k)
        for start, row in zip(lefts, totals, strict=True):
            value = builder.load(builder.gep(start, [at_left]))
            rest = ir.Constant(vector, ir.Undefined)
            lanes = builder.shuffle_vector(
                builder.insert_element(rest, value, ir.Constant(ir.IntType(32), 0)),
                rest,
                ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES),
            )
            for total, factor in zip(row, vectors, strict=True):
                total.add_incoming(ir.Constant(vector, [0.0] * LANES), before)
                total.add_incoming(_fma(builder, lanes, factor, total), loop)
        following = builder.add(k, ir.Constant(index, 1))
        k.add_incoming(following, loop)
        builder.cbranch(builder.icmp_signed("<", following, length), loop, after)
        builder.position_at_end(after)
        ends = [[total.incomings[1][0] for total in row] for row in totals]
        wheres = [
            [
                builder.bitcast(builder.gep(place, [ir.Constant(index, LANES * i)]), vector.as_pointer())
                for i in range(columns)
            ]
            for place in places
        ]
        with builder.if_else(adds) as (then, otherwise):
            with then:
                for row, where in zip(ends, wheres, strict=True):
                    for value, place in zip(row, where, strict=True):
                        builder.store(builder.fadd(builder.load(place, align=4), value), place, align=4)
            with otherwise:
                for row, where in zip(ends, wheres, strict=True):
                    for value, place in zip(row, where, strict=True):
                        builder.store(value, place, align=4)
        return context.get_dummy_value()

    i = types.intp
    return types.void(a, i, i, i, b, i, i, i, c, i, i, i, types.boolean, ROWS, COLUMNS), emit


@kernel
def multiply(
    a, a_at, a_depth, a_channel, a_row, a_lanes,
    b, b_at, b_depth, b_channel, b_column,
    c, c_at, c_row,
    rows, columns, depth, channels, size,
):  # fmt: skip
    """Sums over depths and over channels, `size` of them at a time, of rows (in steps of ROWS) times columns
    (vectors), into c.

    Every number is so many elements from one to the next; every LANES rows of a are `a_lanes` apart. A part
    of c small enough for the first-level cache stays there until all is added to it.
    """
    prefer_wide_vectors()
    v = 0
    while v < columns:
        left = columns - v
        width = min(COLUMNS, 2 if left == 4 else left)
        for top in range(0, rows, AT_ONCE):
            for z in range(depth):
                for k in range(0, channels, size):
                    begin, again, count = (
                        b_at + z * b_depth + k * b_channel + v * b_column,
                        z + k > 0,
                        min(size, channels - k),
                    )
                    for r in range(top, min(rows, top + AT_ONCE), ROWS):
                        at, into = (
                            a_at + z * a_depth + k * a_channel + r // LANES * a_lanes + r % LANES * a_row,
                            c_at + r * c_row + v * LANES,
                        )
                        if width == 3:
                            add_product(
                                a,
                                at,
                                a_row,
                                a_channel,
                                b,
                                begin,
                                b_column,
                                b_channel,
                                c,
                                into,
                                c_row,
                                count,
                                again,
                                ROWS,
                                3,
                            )
                        elif width == 2:
                            add_product(
                                a,
                                at,
                                a_row,
                                a_channel,
                                b,
                                begin,
                                b_column,
                                b_channel,
                                c,
                                into,
                                c_row,
                                count,
                                again,
                                ROWS,
                                2,
                            )
                        else:
                            add_product(
                                a,
                                at,
                                a_row,
                                a_channel,
                                b,
                                begin,
                                b_column,
                                b_channel,
                                c,
                                into,
                                c_row,
                                count,
                                again,
                                ROWS,
                                1,
                            )
        v += width

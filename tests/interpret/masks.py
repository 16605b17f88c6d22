"""Give Triton's interpreter the type of comparisons back.

Where two numbers are compared, the interpreter of Triton 3.9 notes the type of the numbers for the result.
Spread over a block, in `mask & (i < n)`, it becomes a block of that type, and loads take only booleans for a
mask. Compiled code has no such step.
"""

import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def keep_comparisons_boolean():
    """Note the result of a comparison as a boolean, whichever version of Triton this is."""
    binary_op = InterpreterBuilder.binary_op

    def with_type_of_result(self, lhs, rhs, op):
        result = binary_op(self, lhs, rhs, op)
        return TensorHandle(result.data, tl.int1) if result.data.dtype == bool else result

    InterpreterBuilder.binary_op = with_type_of_result

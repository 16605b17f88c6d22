"""One folder per op. Importing this package declares all of them; nothing is compiled, and neither Triton nor Numba is imported."""

import turnout.ops.dot.routes
import turnout.ops.inner.routes
import turnout.ops.matmul.routes  # noqa: F401
from turnout.ops.dot import dot
from turnout.ops.inner import inner
from turnout.ops.matmul import matmul

__all__ = ["dot", "inner", "matmul"]

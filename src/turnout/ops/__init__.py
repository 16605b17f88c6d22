"""One folder per op. Importing this package declares all of them; nothing is compiled, and neither Triton nor Numba is imported."""

import turnout.ops.causal_conv1d.routes
import turnout.ops.causal_conv1d_backward.routes
import turnout.ops.causal_conv1d_update.routes
import turnout.ops.dot.routes
import turnout.ops.inner.routes
import turnout.ops.matmul.routes  # noqa: F401
from turnout.ops.causal_conv1d import causal_conv1d
from turnout.ops.causal_conv1d_update import causal_conv1d_update
from turnout.ops.dot import dot
from turnout.ops.inner import inner
from turnout.ops.matmul import matmul

__all__ = ["causal_conv1d", "causal_conv1d_update", "dot", "inner", "matmul"]

"""Real lengths of inner: those of dot."""

from __future__ import annotations

import torch

from turnout.ops.dot.cases import DTYPES, LENGTHS, case

CASES = [case(f"K={k}", (k,), (k,), dtype) for dtype in DTYPES for k in LENGTHS]
PEERS = {"torch.inner": torch.inner}

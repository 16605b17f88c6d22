"""Products with one output: (1, K) @ (K, 1) as in ml-explore/mlx #3533, and batches of them as einsum and attention scores of one query make."""

from __future__ import annotations

import torch

from turnout.ops.dot.cases import DTYPES, LENGTHS, case

BATCHES = ((16, 1_000_000), (64, 65536), (512, 4096), (4096, 128))

CASES = [case(f"1x{k}@{k}x1", (1, k), (k, 1), dtype) for dtype in DTYPES for k in LENGTHS]
CASES += [
    case(f"{n}x1x{k}@{n}x{k}x1", (n, 1, k), (n, k, 1), dtype, "einsum('nk,nk->n'), pytorch #101249")
    for dtype in DTYPES
    for n, k in BATCHES
]
PEERS = {"torch.matmul": torch.matmul}

"""Products with one output: (1, K) @ (K, 1) as in ml-explore/mlx #3533, and batches of them, as einsum
makes.
"""

from __future__ import annotations

import random

import torch

from turnout.ops.dot.cases import DTYPES, KINDS, LENGTHS, case
from turnout.routing.case import Cases, small_integers

BATCHES = ((16, 1_000_000), (64, 65536), (512, 4096), (4096, 128))

CALLS = [case(f"1x{k}@{k}x1", (1, k), (k, 1), dtype) for dtype in DTYPES for k in LENGTHS]
CALLS += [
    case(f"{n}x1x{k}@{n}x{k}x1", (n, 1, k), (n, k, 1), dtype, "einsum('nk,nk->n'), pytorch #101249")
    for dtype in DTYPES
    for n, k in BATCHES
]
PEERS = {"torch.matmul": torch.matmul}


def random_call(draw: random.Random, device: torch.device) -> tuple:
    """Any valid call, small, with exact sums: one output mostly, then batches, broadcasts and true matrix
    products.
    """
    dtype, length = draw.choice(KINDS), draw.choice((0, 1, 7, 16, 1025, 9000))
    rows, cols = draw.choice(((1, 1), (1, 1), (1, 1), (2, 3), (0, 1)))
    batch = draw.choice(((), (), (1,), (3,), (2, 3), (0,)))
    other = batch if draw.random() < 0.8 else ()
    a = (length,) if not batch and draw.random() < 0.2 else (*batch, rows, length)
    b = (length,) if not other and draw.random() < 0.2 else (*other, length, cols)
    return small_integers(draw, a, dtype, device), small_integers(draw, b, dtype, device)


CASES = Cases(CALLS, random_call, peers=PEERS)

"""Real lengths of inner: those of dot."""

from __future__ import annotations

import random

import torch

from turnout.ops.dot.cases import DTYPES, KINDS, LENGTHS, case
from turnout.routing.case import Cases, small_integers

CALLS = [case(f"K={k}", (k,), (k,), dtype) for dtype in DTYPES for k in LENGTHS]
PEERS = {"torch.inner": torch.inner}


def random_call(draw: random.Random, device: torch.device) -> tuple:
    """Any valid call, small, with exact sums: vectors, single rows, matrices, scalars."""
    dtype, length = draw.choice(KINDS), draw.choice((0, 1, 7, 16, 1025, 9000))
    lead = [draw.choice(((), (), (1,), (1, 1), (2, 3), (0,))) for _ in range(2)]
    shapes = [(*shape, length) for shape in lead] if draw.random() < 0.9 else [(), (length,)]
    return tuple(small_integers(draw, shape, dtype, device) for shape in shapes)


CASES = Cases(CALLS, random_call, peers=PEERS)

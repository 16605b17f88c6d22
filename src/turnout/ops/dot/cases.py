"""Real lengths of dot: from one element to the 50M of the report that MLX's split dot product answers
(ml-explore/mlx #3533).
"""

from __future__ import annotations

import random

import torch

from turnout.routing.case import Case, Cases, normal, seeded, small_integers

LENGTHS = (1, 16, 256, 4096, 16384, 131072, 1_000_000, 50_000_000)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.complex64)


def case(
    name: str,
    a: tuple[int, ...],
    b: tuple[int, ...],
    dtype: torch.dtype,
    source: str = "ml-explore/mlx #3533, and shorter",
) -> Case:
    def make(device: torch.device, seed: int) -> tuple:
        generator = seeded(device, seed)
        return normal(a, dtype, device, generator), normal(b, dtype, device, generator)

    return Case(name, source, dtype, make)


CALLS = [case(f"K={k}", (k,), (k,), dtype) for dtype in DTYPES for k in LENGTHS]
PEERS = {"torch.dot": torch.dot}

# Every dtype torch.dot takes on a CPU; half of the draws are of those that have routes.
KINDS = (
    *DTYPES,
    *DTYPES,
    torch.float64,
    torch.complex128,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
)


def random_call(draw: random.Random, device: torch.device) -> tuple:
    """Any valid call, small, with exact sums: lengths around the blocks, strides, offsets, zero length."""
    dtype = draw.choice(KINDS)
    length = draw.choice((0, 1, 2, 15, 16, 17, 100, 1023, 1024, 1025, 3000, 16385))
    return small_integers(draw, (length,), dtype, device), small_integers(draw, (length,), dtype, device)


CASES = Cases(CALLS, random_call, peers=PEERS)

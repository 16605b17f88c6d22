"""Real lengths of dot: from one element to the 50M of the report that MLX's split dot product answers (ml-explore/mlx #3533)."""

from __future__ import annotations

import torch

from turnout.routing.case import Case, normal, seeded

LENGTHS = (1, 16, 256, 4096, 16384, 131072, 1_000_000, 50_000_000)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.complex64)


def case(name: str, a: tuple[int, ...], b: tuple[int, ...], dtype: torch.dtype, source: str = "ml-explore/mlx #3533, and shorter") -> Case:
    def make(device: torch.device, seed: int) -> tuple:
        generator = seeded(device, seed)
        return normal(a, dtype, device, generator), normal(b, dtype, device, generator)

    return Case(name, source, dtype, make)


CASES = [case(f"K={k}", (k,), (k,), dtype) for dtype in DTYPES for k in LENGTHS]
PEERS = {"torch.dot": torch.dot}

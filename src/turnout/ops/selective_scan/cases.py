"""Real scans: prefill and decoding of Mamba, channels side by side as its projections leave them."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from turnout.routing.case import Case, Cases, normal, seeded, small_integers

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


def case(
    name: str,
    source: str,
    batch: int,
    dim: int,
    length: int,
    dtype: torch.dtype,
    *,
    states: int = 16,
    held: bool = False,
) -> Case:
    """Steps and rates as a trained model has them: dt from 0.001 to 0.1, A from -1 to -states."""

    def make(device: torch.device, seed: int) -> tuple:
        generator = seeded(device, seed)
        x, z = (normal((batch, length, dim), dtype, device, generator).transpose(1, 2) for _ in range(2))
        dt = normal((batch, dim, length), dtype, device, generator)
        rates = -torch.arange(1, states + 1, device=device, dtype=FP32).expand(dim, states).contiguous()
        into, out = (
            normal((batch, length, states), dtype, device, generator).transpose(1, 2) for _ in range(2)
        )
        bias = torch.linspace(-7, -2, dim, device=device)
        state = normal((batch, dim, states), FP32, device, generator) if held else None
        return x, dt, rates, into, out, torch.ones(dim, device=device), z, bias, True, state, True

    return Case(f"{name} {batch}x{dim}x{length} states {states}", source, dtype, make)


MAMBA = "Mamba 790m, state-spaces/mamba"

CALLS = [
    case("tiny", MAMBA, 2, 8, 5, FP32, states=4).only_for_tests(),
    case("tiny", MAMBA, 1, 40, 70, FP16, held=True).only_for_tests(),
    case("step", MAMBA, 8, 3072, 1, BF16, held=True),
    case("prefill", MAMBA, 1, 3072, 2048, BF16),
    case("prefill", MAMBA, 8, 3072, 2048, BF16),
    case("prefill", MAMBA, 1, 3072, 2048, FP32),
]


def one_by_one(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Any,
    z: Tensor,
    dt_bias: Tensor,
    dt_softplus: bool,
    state: Any,
    final: bool,
) -> tuple[Tensor, Tensor]:
    """What transformers does without the package: a step of Python for every position."""
    step = F.softplus(dt + dt_bias.to(dt.dtype)[:, None])
    decay = torch.exp(A[None, :, None] * step[..., None])
    added = (step[..., None] * B.transpose(1, 2)[:, None].float()) * x[..., None].float()
    held = x.new_zeros(x.shape[0], x.shape[1], A.shape[1]) if state is None else state
    parts = []
    for i in range(x.shape[2]):
        held = decay[:, :, i] * held + added[:, :, i]
        parts.append(torch.matmul(held.to(x.dtype), C[:, :, i, None])[..., 0])
    y = torch.stack(parts, -1) + x * D[None, :, None]
    return (y * F.silu(z)).to(x.dtype), held


PEERS = {"transformers": one_by_one}


def random_call(draw: random.Random, device: torch.device) -> tuple:
    """Any valid scan, small."""
    dtype = draw.choice((FP32, FP32, FP16, BF16, torch.float64))
    batch, dim, length, states = (
        draw.choice((1, 2)),
        draw.choice((1, 3, 8, 17)),
        draw.choice((0, 1, 2, 5, 13)),
        draw.choice((1, 2, 4, 5)),
    )

    def some(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return small_integers(draw, shape, kind, device)

    held = FP32 if dtype is not torch.float64 else dtype
    x, dt, B, C = (
        some(batch, dim, length),
        some(batch, dim, length),
        some(batch, states, length),
        some(batch, states, length),
    )
    A = -some(dim, states, kind=held).abs()
    D = some(dim, kind=held) if draw.random() < 0.5 else None
    z = some(batch, dim, length) if draw.random() < 0.5 else None
    bias = some(dim, kind=held) if draw.random() < 0.5 else None
    state = some(batch, dim, states, kind=held) if draw.random() < 0.5 else None
    return x, dt.abs(), A, B, C, D, z, bias, draw.random() < 0.5, state, draw.random() < 0.5


CASES = Cases(CALLS, random_call, peers=PEERS, exact=False)

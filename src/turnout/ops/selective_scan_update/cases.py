"""Real steps of decoding with Mamba, steps and rates as a trained model has them."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from turnout.measure.peers import compiled, replayed
from turnout.ops.selective_scan.cases import BF16, FP16, FP32, MAMBA
from turnout.ops.selective_scan_update import SELECTIVE_SCAN_UPDATE
from turnout.routing.case import Case, Cases, normal, seeded, small_integers


def case(name: str, source: str, batch: int, dim: int, dtype: torch.dtype, *, states: int = 16) -> Case:
    """dt from 0.001 to 0.1, A from -1 to -states, given as logarithms; x, dt, B, C and z as the halves and
    parts of projections.
    """

    def make(device: torch.device, seed: int) -> tuple:
        generator = seeded(device, seed)
        x, dt = (normal((batch, dim), dtype, device, generator) for _ in range(2))
        z = normal((batch, 2 * dim), dtype, device, generator)[:, dim:]
        rates = torch.arange(1, states + 1, device=device, dtype=FP32).log().expand(dim, states).to(dtype)
        into, out = normal((batch, 2 * states), dtype, device, generator).chunk(2, 1)
        bias = torch.linspace(-7, -2, dim, device=device).to(dtype)
        state = normal((batch, dim, states), FP32, device, generator)
        return (
            x,
            state,
            dt,
            rates,
            into,
            out,
            torch.ones(dim, device=device, dtype=dtype),
            z,
            bias,
            True,
            True,
        )

    return Case(f"{name} {batch}x{dim} states {states}", source, dtype, make)


CALLS = [
    case("tiny", MAMBA, 2, 8, FP32, states=4).only_for_tests(),
    case("tiny", MAMBA, 3, 40, FP16).only_for_tests(),
    *(case("step", MAMBA, batch, 3072, BF16) for batch in (1, 8, 64)),
    case("step", MAMBA, 64, 3072, FP32),
]


def eager(
    x: Tensor,
    state: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Any,
    z: Any,
    dt_bias: Any,
    dt_softplus: bool,
    log_rates: bool,
) -> Tensor:
    """What transformers does without the package, with the line of the model that makes the rates."""
    rates = -torch.exp(A.float()) if log_rates else A
    step = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    step = F.softplus(step) if dt_softplus else step
    decay = torch.exp(step.float()[..., None] * rates.float())
    moved = state.float() * decay + step.float()[..., None] * B.float()[:, None] * x.float()[..., None]
    state.copy_(moved.to(state.dtype))
    y = torch.matmul(moved.to(C.dtype), C[..., None])[..., 0]
    y = y if D is None else y + x * D
    return (y if z is None else y * F.silu(z)).to(x.dtype)


PEERS = {"transformers": eager, "torch.compile": compiled(eager)}
BOUNDS = {
    "graph replay": replayed(SELECTIVE_SCAN_UPDATE)
}  # a step is all launch until hundreds of sequences take it


def random_call(draw: random.Random, device: torch.device) -> tuple:
    """Any valid step, small."""
    dtype = draw.choice((FP32, FP32, FP16, BF16, torch.float64))
    batch, dim, states = draw.choice((1, 2, 3)), draw.choice((1, 3, 8, 17, 40)), draw.choice((1, 2, 4, 5))
    held = draw.choice((FP32, FP32, dtype)) if dtype is not torch.float64 else dtype

    def some(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return small_integers(draw, shape, kind, device)

    state = some(batch, dim, states, kind=held)
    if any(stride == 0 for stride in state.stride()):
        state = state.contiguous()  # states are written, each needs memory of its own
    x, dt, B, C = some(batch, dim), some(batch, dim), some(batch, states), some(batch, states)
    log_rates = draw.random() < 0.5
    A = some(dim, states, kind=held)
    D = some(dim, kind=held) if draw.random() < 0.5 else None
    z = some(batch, dim) if draw.random() < 0.5 else None
    bias = some(dim, kind=held) if draw.random() < 0.5 else None
    return x, state, dt.abs(), -A.abs(), B, C, D, z, bias, draw.random() < 0.5, log_rates


CASES = Cases(CALLS, random_call, peers=PEERS, bounds=BOUNDS, exact=False)

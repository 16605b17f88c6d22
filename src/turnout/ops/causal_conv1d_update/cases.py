"""Real steps of decoding: one position of each sequence, states of four positions, as Mamba's inference code
keeps them.
"""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from turnout.measure.peers import compiled, replayed
from turnout.ops.causal_conv1d.cases import BF16, FP16, FP32, KINDS
from turnout.ops.causal_conv1d_update import CAUSAL_CONV1D_UPDATE
from turnout.routing.case import Case, Cases, normal, seeded, small_integers


def case(
    name: str,
    source: str,
    batch: int,
    dim: int,
    dtype: torch.dtype,
    *,
    size: int = 4,
    width: int = 4,
    length: int = 0,
    pool: int = 0,
) -> Case:
    def make(device: torch.device, seed: int) -> tuple:
        generator = seeded(device, seed)
        x = normal((batch, dim, length) if length else (batch, dim), dtype, device, generator)
        state = normal((pool or batch, dim, size), dtype, device, generator)
        weight, bias = (
            normal((dim, width), dtype, device, generator),
            normal((dim,), dtype, device, generator),
        )
        slots = (
            torch.randperm(pool, device=device, generator=generator)[:batch].to(torch.int32) if pool else None
        )
        return x, state, weight, bias, "silu", None, slots

    return Case(f"{name} {batch}x{dim} state {size}", source, dtype, make)


MAMBA = "Mamba 2.8b, state-spaces/mamba"

CALLS = [
    case("tiny", MAMBA, 2, 8, FP32).only_for_tests(),
    case("tiny", MAMBA, 3, 5, FP16, size=5).only_for_tests(),
    case("tiny slots", "vLLM's Mamba cache", 2, 8, FP32, pool=4).only_for_tests(),
    case("tiny tokens", "speculative decoding", 2, 8, FP32, length=3).only_for_tests(),
    *(case("step", MAMBA, batch, 5120, BF16) for batch in (1, 64, 512)),
    case("step slots", "vLLM's Mamba cache", 64, 5120, BF16, pool=256),
    case("tokens", "speculative decoding", 64, 5120, BF16, length=4),
    case("step", "Gated DeltaNet, Qwen3-Next", 64, 8192, BF16, size=3),
    case("step", MAMBA, 512, 5120, FP32),
]


def eager(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    lengths: Any,
    slots: Tensor | None,
) -> Tensor:
    """Roll the state and take one weighted sum, as models do without a kernel."""
    new = x if x.dim() == 3 else x[..., None]
    states = state if slots is None else state[slots]
    line = torch.cat([states, new], 2)
    if slots is None:
        state.copy_(line[..., new.shape[2] :])
    else:
        state[slots] = line[..., new.shape[2] :]
    y = F.conv1d(line, weight[:, None], bias, groups=weight.shape[0])[..., -new.shape[2] :]
    y = F.silu(y) if activation == "silu" else y
    return y if x.dim() == 3 else y[..., 0]


PEERS = {"torch": eager, "torch.compile": compiled(eager)}
# A step is bound by its launch until it has hundreds of sequences.
BOUNDS = {"graph replay": replayed(CAUSAL_CONV1D_UPDATE)}


def random_call(draw: random.Random, device: torch.device) -> tuple:
    """Any valid step, small, with exact sums: with and without an axis of positions, rings, slots with
    padding, longer states.
    """
    dtype, weight_dtype = draw.choice(KINDS)
    batch, dim, width = (
        draw.choice((1, 2, 3)),
        draw.choice((1, 3, 8, 17, 40)),
        draw.choice((1, 2, 3, 4, 4, 4, 5, 9)),
    )
    size = width - 1 + draw.choice((0, 1, 1, 4))
    length = draw.choice((0, 0, 1, 2, 5, 12))
    shape = (batch, dim, length) if length else (batch, dim)
    x = small_integers(draw, shape, dtype, device)
    slots = lengths = None
    pool = batch
    if draw.random() < 0.4:
        pool = batch + draw.choice((0, 2))
        chosen = [slot if draw.random() < 0.8 else -1 for slot in draw.sample(range(pool), batch)]
        slots = torch.tensor(chosen, dtype=torch.int32, device=device)
    if size and draw.random() < 0.4:
        lengths = torch.tensor([draw.randrange(30) for _ in range(batch)], dtype=torch.int32, device=device)
    state_dtype = dtype if draw.random() < 0.8 else torch.float32
    state = small_integers(draw, (pool, dim, size), state_dtype, device)
    if any(stride == 0 for stride in state.stride()):
        state = state.contiguous()  # states are written, each needs memory of its own
    weight = small_integers(draw, (dim, width), weight_dtype, device)
    bias = small_integers(draw, (dim,), weight_dtype, device) if draw.random() < 0.5 else None
    return x, state, weight, bias, None, lengths, slots


CASES = Cases(CALLS, random_call, peers=PEERS, bounds=BOUNDS, ordinary=("weight",))

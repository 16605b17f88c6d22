"""Real calls of gated_add: the ends of diffusion transformers' blocks."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from turnout.measure.peers import compiled
from turnout.ops.layer_norm_modulate import cases, gated
from turnout.ops.layer_norm_modulate.cases import BF16, FLUX, FP16, FP32, WAN
from turnout.routing.case import Case, Cases, small_integers


def case(
    name: str,
    source: str,
    shape: tuple[int, int, int],
    dtype: torch.dtype = BF16,
    *,
    modulation: torch.dtype | None = None,
    each_token: bool = False,
) -> Case:
    whole = cases.case(
        name, source, shape, dtype, residual=True, modulation=modulation, each_token=each_token
    )
    return Case(whole.name, source, dtype, lambda device, seed: whole.make(device, seed)[:3])


CALLS = [
    case("tiny", FLUX, (2, 5, 24), FP32).only_for_tests(),
    case("tiny, each token", WAN, (1, 6, 33), FP16, each_token=True).only_for_tests(),
    case("picture", FLUX, (1, 4096, 3072)),
    case("text", FLUX, (1, 512, 3072)),
    case("joined", f"{FLUX}, single blocks", (1, 4608, 3072)),
    case("video", WAN, (1, 32760, 5120), modulation=FP32),
    case("picture", "Flux in float32", (1, 4096, 3072), FP32),
]


def eager(x: Tensor, residual: Tensor, gate: Tensor | None) -> Tensor:
    """What diffusers does, step by step."""
    return gated(x, residual, gate)


PEERS = {"diffusers": eager, "torch.compile": compiled(eager)}


def add(x: Tensor, residual: Tensor, gate: Tensor | None) -> Tensor:
    """The fewest bytes."""
    return residual + x


BOUNDS = {"add": add}


def random_call(draw: random.Random, device: torch.device) -> tuple:
    """Any valid call, small."""
    dtype, shape = draw.choice((FP32, FP32, FP16, BF16, BF16, torch.float64)), cases.random_shape(draw)
    wide = dtype if draw.random() < 0.7 or dtype is torch.float64 else FP32
    x, residual = (small_integers(draw, shape, dtype, device) for _ in range(2))
    return x, residual, cases.random_modulation(draw, shape, wide, device)


CASES = Cases(CALLS, random_call, peers=PEERS, bounds=BOUNDS, exact=False)

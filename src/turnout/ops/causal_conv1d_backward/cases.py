"""Backwards of causal_conv1d's training shapes."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from turnout.ops.causal_conv1d import CAUSAL_CONV1D, cases, channel_last, reference
from turnout.ops.causal_conv1d.cases import BF16, DELTA, FIRST, FP32, LAST, MAMBA, MAMBA2, SPLIT
from turnout.ops.causal_conv1d.launches import empty_dense
from turnout.routing.case import Case, Cases, normal, seeded, small_integers


def case(*forward: Any, **options: Any) -> Case:
    """A forward case, and random gradients of what it returns."""
    call = cases.case(*forward, **options)

    def make(device: torch.device, seed: int) -> tuple:
        args = CAUSAL_CONV1D.arguments(*call.make(device, seed))
        x, weight, *_, ends, _, states = args
        generator = seeded(device, seed + 1)
        grad = empty_dense(x, channel_last(x)).copy_(normal(tuple(x.shape), x.dtype, device, generator))
        sequences = x.shape[0] if ends is None else ends.shape[0] - 1
        final = (sequences, x.shape[1], weight.shape[1] - 1) if states else (0,)
        return grad, normal(final, x.dtype, device, generator), *args

    return Case(call.name, call.source, call.dtype, make)


CALLS = [
    case("tiny", MAMBA, (2, 8, 16), FIRST, FP32).only_for_tests(),
    case("tiny", MAMBA2, (2, 8, 16), LAST, FP32).only_for_tests(),
    case("tiny packed", DELTA, (1, 6, 20), LAST, FP32, sequences=3, states=True).only_for_tests(),
    case("tiny states", MAMBA, (2, 5, 9), FIRST, FP32, states=True).only_for_tests(),
    *(case("training", MAMBA, (8, 4096, 4096), layout, BF16) for layout in (FIRST, LAST)),
    *(case("training", "Mamba 130m to 370m", (32, 1536, 2048), layout, BF16) for layout in (FIRST, LAST)),
    *(case("prompt", "Mamba 2.8b", (1, 5120, 8192), layout, BF16) for layout in (FIRST, LAST)),
    case("few channels", "long sequences: genomes, audio", (1, 256, 262144), FIRST, BF16),
    case("short rows", "many short sequences", (64, 2048, 64), FIRST, BF16),
    case("projection", MAMBA2, (8, 4096, 4096), SPLIT, BF16),
    case("packed", DELTA, (1, 8192, 32768), LAST, BF16, sequences=16, states=True),
]


def eager(
    grad: Tensor,
    grad_final: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    *rest: Any,
) -> Any:
    """Backward through the padded grouped convolution, the forward of which is part of the time."""
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias) if t is not None]
    with torch.enable_grad():
        y = cases.eager(leaves[0], leaves[1], leaves[2] if bias is not None else None, activation)
    return torch.autograd.grad(y, leaves, grad)


PEERS = {"torch with forward": eager}


def random_call(draw: random.Random, device: torch.device) -> tuple:
    """The backward of any valid call with a gradient of small integers."""
    args = CAUSAL_CONV1D.arguments(*cases.random_call(draw, device))
    y, final = reference(*args)
    return (
        small_integers(draw, tuple(y.shape), y.dtype, device),
        small_integers(draw, tuple(final.shape), y.dtype, device),
        *args,
    )


CASES = Cases(CALLS, random_call, peers=PEERS, ordinary=("weight",))

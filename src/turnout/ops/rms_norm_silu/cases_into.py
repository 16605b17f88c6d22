"""Real calls of rms_norm_silu that write behind the cache of a causal convolution."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from turnout.ops.rms_norm_silu import cases
from turnout.ops.rms_norm_silu.cases import FIRST, LAST
from turnout.routing.case import Case, Cases, small_integers


def behind_cache(x: Tensor, frames: int = 2) -> Tensor:
    """A place like x [B, C, T, H, W], in x's memory format, behind `frames` frames of a buffer."""
    last = x.stride(1) == 1
    batch, channels, time, *rest = x.shape
    if last:
        return x.new_zeros(batch, time + frames, *rest, channels).movedim(-1, 1)[:, :, frames:]
    return x.new_zeros(batch, channels, time + frames, *rest)[:, :, frames:]


def case(name: str, shape: tuple[int, ...], layout: str, dtype: torch.dtype = torch.bfloat16) -> Case:
    fresh = cases.case(name, cases.WAN, shape, layout, dtype)

    def make(device: torch.device, seed: int) -> tuple:
        x, weight, bias, *rest = fresh.make(device, seed)
        return x, weight, bias, behind_cache(x), *rest

    return Case(fresh.name, fresh.source, dtype, make)


CALLS = [
    case("tiny", (2, 12, 2, 3, 5), LAST, torch.float32).only_for_tests(),
    case("tiny", (2, 6, 2, 3, 5), FIRST, torch.float16).only_for_tests(),
    *(
        case("wan", shape, LAST)
        for shape in (
            (1, 384, 1, 60, 104),
            (1, 384, 4, 120, 208),
            (1, 192, 4, 240, 416),
            (1, 96, 4, 480, 832),
        )
    ),
]


def eager(x: Tensor, weight: Tensor | None, bias: Tensor | None, out: Tensor, *rest: Any) -> Tensor:
    """What diffusers does, then a copy behind the cache."""
    return out.copy_(cases.eager(x, weight, bias, *rest))


PEERS = {"diffusers": eager}


def copy(x: Tensor, weight: Tensor | None, bias: Tensor | None, out: Tensor, *rest: Any) -> Tensor:
    """The fewest bytes."""
    return out.copy_(x)


BOUNDS = {"copy": copy}


def random_call(draw: random.Random, device: torch.device) -> tuple:
    """Any valid call, small, into a place with gaps or without."""
    x, weight, bias, *rest = cases.random_call(draw, device)
    if x.dim() == 5 and draw.random() < 0.6:
        out = behind_cache(x)
    elif draw.random() < 0.5:
        out = torch.empty_like(x)
    else:
        out = small_integers(draw, tuple(x.shape), x.dtype, device)
        out = out.clone() if 0 in out.stride() else out
    return x, weight, bias, out, *rest


CASES = Cases(CALLS, random_call, peers=PEERS, bounds=BOUNDS, exact=False)

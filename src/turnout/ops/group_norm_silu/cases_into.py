"""Real calls of group_norm_silu that write behind the cache of a causal convolution, or inside its border."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from turnout.ops.group_norm_silu import cases
from turnout.ops.group_norm_silu.cases import FIRST, LAST, inside_border
from turnout.ops.rms_norm_silu.cases_into import behind_cache
from turnout.routing.case import Case, Cases, small_integers


def case(
    name: str,
    shape: tuple[int, ...],
    layout: str,
    dtype: torch.dtype = torch.bfloat16,
    *,
    groups: int = 32,
    place: Callable[[Tensor], Tensor] = behind_cache,
    gapped: bool = False,
) -> Case:
    """x in a buffer of its own, or itself inside a border where `gapped`; `place` makes the output."""
    source = HUNYUAN if place is inside_border else "HunyuanVideo VAE"
    fresh = cases.case(name, source, shape, layout, dtype, groups=groups)

    def make(device: torch.device, seed: int) -> tuple:
        x, count, weight, bias, *rest = fresh.make(device, seed)
        return inside_border(x).copy_(x) if gapped else x, count, weight, bias, place(x), *rest

    return Case(fresh.name, fresh.source, dtype, make)


HUNYUAN = "HunyuanVideo VAE, 544 x 960, 33 frames"
# Its norms, from the middle block to the last, of 5 latent frames: diffusers decodes them in tiles of that
# many unless told otherwise. Then the largest in one piece.
SHAPES = (
    (1, 512, 5, 68, 120),
    (1, 512, 5, 136, 240),
    (1, 512, 9, 272, 480),
    (1, 256, 9, 272, 480),
    (1, 256, 17, 544, 960),
    (1, 128, 17, 544, 960),
    (1, 128, 33, 544, 960),
)

CALLS = [
    case("tiny", (2, 12, 2, 3, 5), LAST, torch.float32, groups=4).only_for_tests(),
    case("tiny", (2, 6, 2, 3, 5), FIRST, torch.float16, groups=3).only_for_tests(),
    *(case("video", (1, 128, 20, 256, 256), layout) for layout in (LAST, FIRST)),
    case(
        "tiny inside a border", (2, 12, 2, 3, 5), LAST, torch.float32, groups=4, place=inside_border
    ).only_for_tests(),
    case(
        "tiny from border to border",
        (1, 8, 2, 3, 5),
        LAST,
        torch.float16,
        groups=2,
        place=inside_border,
        gapped=True,
    ).only_for_tests(),
    *(case("inside a border", shape, LAST, place=inside_border) for shape in SHAPES),
    case("inside a border", (1, 256, 9, 272, 480), LAST, torch.float32, place=inside_border),
    case("from border to border", (1, 256, 9, 272, 480), LAST, place=inside_border, gapped=True),
]


def eager(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, out: Tensor, *rest: Any
) -> Tensor:
    """What diffusers does, then a copy behind the cache."""
    return out.copy_(cases.eager(x, groups, weight, bias, *rest))


PEERS = {"diffusers": eager}


def copy(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, out: Tensor, *rest: Any
) -> Tensor:
    """x into its place: two of the three passes this op needs."""
    return out.copy_(x)


BOUNDS = {"copy": copy}


def random_call(draw: random.Random, device: torch.device) -> tuple:
    """Any valid call, small, into a place with gaps or without."""
    x, groups, weight, bias, *rest = cases.random_call(draw, device)
    if x.dim() == 5 and draw.random() < 0.6:
        out = behind_cache(x)
    elif x.dim() > 3 and draw.random() < 0.6:
        out = inside_border(x)
    elif draw.random() < 0.5:
        out = torch.empty_like(x)
    else:
        out = small_integers(draw, tuple(x.shape), x.dtype, device)
        out = out.clone() if 0 in out.stride() else out
    return x, groups, weight, bias, out, *rest


CASES = Cases(CALLS, random_call, peers=PEERS, bounds=BOUNDS, exact=False)

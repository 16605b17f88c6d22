"""Real calls of rms_norm_silu: between the convolutions of video decoders, and a last dimension."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from turnout.measure.peers import compiled
from turnout.ops.rms_norm_silu import normalised
from turnout.routing.case import Case, Cases, normal, seeded, small_integers

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
FIRST, LAST = "channel-first", "channel-last"


def make_x(
    shape: tuple[int, ...], layout: str, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Tensor:
    """Random values [B, C, ...] with positions or channels side by side."""
    if layout == FIRST:
        return normal(shape, dtype, device, generator)
    return normal((shape[0], *shape[2:], shape[1]), dtype, device, generator).movedim(-1, 1)


def case(
    name: str,
    source: str,
    shape: tuple[int, ...],
    layout: str,
    dtype: torch.dtype = BF16,
    *,
    style: str = "normalize",
    weight: bool = True,
    dim: int = 1,
    silu: bool = True,
) -> Case:
    def make(device: torch.device, seed: int) -> tuple:
        generator = seeded(device, seed)
        x = make_x(shape, layout, dtype, device, generator)
        scale = normal((shape[dim],), dtype, device, generator) if weight else None
        return x, scale, None, 1e-12 if style == "normalize" else 1e-6, dim, style, silu

    return Case(f"{name} {'x'.join(map(str, shape))} {layout}", source, dtype, make)


WAN, LTX = "Wan2.1 VAE, 480 x 832, a chunk of one latent frame", "LTX VAE, 512 x 768 x 121"

CALLS = [
    case("tiny", WAN, (1, 12, 2, 3, 5), LAST, FP32).only_for_tests(),
    case("tiny", WAN, (2, 6, 3, 5), FIRST, FP16).only_for_tests(),
    case(
        "last dimension",
        "a transformer's block",
        (3, 5, 40),
        FIRST,
        FP32,
        style="rms_norm",
        dim=2,
        silu=False,
    ),
    *(
        case("wan", WAN, shape, layout)
        for layout in (LAST, FIRST)
        for shape in (
            (1, 384, 1, 60, 104),
            (1, 384, 2, 60, 104),
            (1, 384, 4, 120, 208),
            (1, 192, 4, 240, 416),
            (1, 96, 4, 480, 832),
        )
    ),
    case("wan 2.2", "Wan2.2 VAE, 704 x 1280", (1, 1024, 4, 88, 160), LAST),
    case("wan 2.2", "Wan2.2 VAE, 704 x 1280", (1, 256, 4, 352, 640), LAST),
    case("qwen", "Qwen-Image VAE, 1024 x 1024", (1, 96, 1, 1024, 1024), LAST),
    *(
        case("ltx", LTX, (1, 128, 121, 128, 192), layout, style="rms_norm", weight=False)
        for layout in (LAST, FIRST)
    ),
    case(
        "last dimension", "a transformer's block", (1, 4608, 3072), FIRST, style="rms_norm", dim=2, silu=False
    ),
    case("wan", WAN, (1, 96, 4, 480, 832), LAST, FP16),
    case("wan", WAN, (1, 96, 4, 480, 832), LAST, FP32),
    *(
        case("wan on a CPU", "Wan2.1 VAE, a small decode", (1, 96, 4, 60, 104), layout, dtype).only_on_a_cpu()
        for dtype in (FP32, BF16)
        for layout in (LAST, FIRST)
    ),
]


def eager(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dim: int, style: str, silu: bool
) -> Tensor:
    """What diffusers does, step by step."""
    return normalised(x, weight, bias, eps, dim, style, silu)


PEERS = {"diffusers": eager, "torch.compile": compiled(eager)}


def copy(x: Tensor, *rest: Any) -> Tensor:
    """The fewest bytes: x into fresh memory, as it lies."""
    return torch.empty_like(x).copy_(x)


BOUNDS = {"copy": copy}


def random_call(draw: random.Random, device: torch.device) -> tuple:
    """Any valid call, small: layouts, channels odd and even, weights or none, both styles."""
    dtype = draw.choice((FP32, FP32, FP16, BF16, BF16, torch.float64))
    rest = draw.choice(((), (33,), (1,), (6, 7), (2, 0), (4, 8), (2, 3, 5), (2, 4, 8), (3, 5, 4)))
    shape = (draw.choice((1, 1, 2, 3)), draw.choice((1, 2, 3, 8, 12, 16, 24, 40)), *rest)
    dim = draw.choice((1, 1, 1, len(shape) - 1))
    x = small_integers(draw, shape, dtype, device)
    if draw.random() < 0.4:
        x = small_integers(draw, (shape[0], *shape[2:], shape[1]), dtype, device).movedim(-1, 1)
    weight_dtype = dtype if draw.random() < 0.8 else FP32
    weight, bias = (
        small_integers(draw, (shape[dim],), weight_dtype, device) if draw.random() < share else None
        for share in (0.8, 0.3)
    )
    style = draw.choice(("normalize", "rms_norm"))
    return x, weight, bias, 1e-12 if style == "normalize" else 1e-6, dim, style, draw.random() < 0.7


CASES = Cases(CALLS, random_call, peers=PEERS, bounds=BOUNDS, exact=False)

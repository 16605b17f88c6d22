"""Real calls of group_norm_silu: between the convolutions of image and video decoders."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from turnout.measure.peers import compiled
from turnout.ops.group_norm_silu import normalised
from turnout.ops.rms_norm_silu.cases import BF16, FIRST, FP16, FP32, LAST, make_x
from turnout.routing.case import Case, Cases, normal, seeded, small_integers


def case(
    name: str,
    source: str,
    shape: tuple[int, ...],
    layout: str,
    dtype: torch.dtype = BF16,
    *,
    groups: int = 32,
    silu: bool = True,
) -> Case:
    def make(device: torch.device, seed: int) -> tuple:
        generator = seeded(device, seed)
        x = make_x(shape, layout, dtype, device, generator)
        weight, bias = (normal((shape[1],), dtype, device, generator) for _ in range(2))
        return x, groups, weight, bias, 1e-6, silu

    return Case(f"{name} {'x'.join(map(str, shape))} {layout}", source, dtype, make)


FLUX = "Flux VAE, 1024 x 1024"

CALLS = [
    case("tiny", FLUX, (2, 8, 3, 5), LAST, FP32, groups=4).only_for_tests(),
    case("tiny", FLUX, (1, 6, 4, 4), FIRST, FP16, groups=3).only_for_tests(),
    case("tiny", "HunyuanVideo VAE", (1, 12, 2, 3, 4), LAST, FP32, groups=4).only_for_tests(),
    *(
        case("flux", FLUX, shape, layout)
        for layout in (LAST, FIRST)
        for shape in (
            (1, 512, 128, 128),
            (1, 512, 256, 256),
            (1, 512, 512, 512),
            (1, 256, 512, 512),
            (1, 256, 1024, 1024),
            (1, 128, 1024, 1024),
        )
    ),
    case(
        "attention",
        "Flux VAE, before the attention of the middle block",
        (1, 512, 128, 128),
        FIRST,
        silu=False,
    ),
    case("batch", "SDXL UNet, two pictures", (2, 1280, 32, 32), FIRST),
    case("batch", "SDXL UNet, two pictures", (2, 640, 64, 64), LAST),
    *(case("video", "HunyuanVideo VAE", (1, 128, 20, 256, 256), layout) for layout in (LAST, FIRST)),
    case("flux", FLUX, (1, 128, 1024, 1024), LAST, FP16),
    case("flux", FLUX, (1, 128, 1024, 1024), LAST, FP32),
    case("flux on a CPU", "Flux VAE, 128 x 128", (1, 128, 128, 128), FIRST, FP32).only_on_a_cpu(),
]


def inside_border(x: Tensor, before: int = 2, edge: int = 1) -> Tensor:
    """A place like x `[B, C, ..., H, W]`, channels side by side: the inside of a larger buffer of zeros, with
    `before` frames in front and `edge` pixels around."""
    batch, channels, *sizes = x.shape
    befores = [before] * (len(sizes) - 2) + [edge] * 2
    padded = [
        size + low + (edge if axis >= len(sizes) - 2 else 0)
        for axis, (size, low) in enumerate(zip(sizes, befores, strict=True))
    ]
    buffer = x.new_zeros(batch, *padded, channels).movedim(-1, 1)
    return buffer[(..., *[slice(low, low + size) for low, size in zip(befores, sizes, strict=True)])]


def eager(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, silu: bool
) -> Tensor:
    """What diffusers does: PyTorch's norm, then its activation."""
    return normalised(x, groups, weight, bias, eps, silu)


PEERS = {"diffusers": eager, "torch.compile": compiled(eager)}


def copy(x: Tensor, *rest: Any) -> Tensor:
    """x into fresh memory, as it lies: two of the three passes this op needs."""
    return torch.empty_like(x).copy_(x)


BOUNDS = {"copy": copy}


def random_call(draw: random.Random, device: torch.device) -> tuple:
    """Any valid call, small: layouts, group sizes odd and even, a mean away from zero."""
    dtype = draw.choice((FP32, FP32, FP16, BF16, BF16, torch.float64))
    groups, each = draw.choice((1, 2, 3, 4)), draw.choice((1, 2, 3, 4))
    rest = draw.choice(
        ((130,), (9, 13), (5, 5, 5), (2, 8, 8), (64,), (7, 16), (3, 6, 7), (1, 96), (), (1,), (2, 0))
    )
    shape = (draw.choice((1, 1, 1, 2)), groups * each, *rest)
    x = small_integers(draw, shape, dtype, device)
    if draw.random() < 0.4:
        x = small_integers(draw, (shape[0], *shape[2:], shape[1]), dtype, device).movedim(-1, 1)
    if draw.random() < 0.3 and 0 not in x.stride():
        x += 40
    weight_dtype = dtype if draw.random() < 0.8 else FP32
    weight, bias = (
        small_integers(draw, (shape[1],), weight_dtype, device) if draw.random() < 0.8 else None
        for _ in range(2)
    )
    silu = draw.random() < 0.7
    if x.dim() > 3 and x.stride(1) == 1 and draw.random() < 0.4:
        x = inside_border(x).copy_(x)
    return x, groups, weight, bias, 1e-3, silu


CASES = Cases(CALLS, random_call, peers=PEERS, bounds=BOUNDS, exact=False)

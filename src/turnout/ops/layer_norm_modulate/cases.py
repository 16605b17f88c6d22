"""Real calls of layer_norm_modulate: between the products of diffusion transformers."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from turnout.measure.peers import compiled
from turnout.ops.layer_norm_modulate import gated, modulated
from turnout.routing.case import Case, Cases, normal, seeded, small_integers

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


def case(
    name: str,
    source: str,
    shape: tuple[int, int, int],
    dtype: torch.dtype = BF16,
    *,
    residual: bool = False,
    gate: bool = True,
    modulation: torch.dtype | None = None,
    scaled: bool = True,
    each_token: bool = False,
    weight: bool = False,
) -> Case:
    batch, tokens, channels = shape

    def make(device: torch.device, seed: int) -> tuple:
        generator = seeded(device, seed)

        def stream() -> Tensor:
            return normal(shape, dtype, device, generator)

        def of_norm() -> Tensor | None:
            return normal((channels,), FP32, device, generator) if weight else None

        # a sixth of one product's columns, as models cut them
        wide = normal(
            (batch, tokens if each_token else 1, 6, channels), modulation or dtype, device, generator
        )
        gates = wide[:, :, 2] if residual and gate else None
        scale, shift = (wide[:, :, 1], wide[:, :, 0]) if scaled else (None, None)
        return stream(), stream() if residual else None, gates, of_norm(), of_norm(), scale, shift, 1e-6

    return Case(f"{name} {'x'.join(map(str, shape))}", source, dtype, make)


FLUX, WAN, QWEN = "Flux, 1024 x 1024", "Wan2.1 14B, 480 x 832 x 81", "Qwen-Image, 1328 x 1328"

CALLS = [
    case("tiny", FLUX, (2, 5, 24), FP32).only_for_tests(),
    case("tiny, gated", FLUX, (1, 6, 40), FP16, residual=True).only_for_tests(),
    case(
        "tiny, each token", WAN, (2, 3, 33), FP32, residual=True, each_token=True, weight=True
    ).only_for_tests(),
    case("picture", FLUX, (1, 4096, 3072)),
    case("text", FLUX, (1, 512, 3072)),
    case("joined", f"{FLUX}, single blocks", (1, 4608, 3072)),
    case("picture, gated", FLUX, (1, 4096, 3072), residual=True),
    case("text, gated", FLUX, (1, 512, 3072), residual=True),
    case("video", WAN, (1, 32760, 5120), modulation=FP32),
    case(
        "video, gated, weights",
        WAN,
        (1, 32760, 5120),
        residual=True,
        modulation=FP32,
        scaled=False,
        weight=True,
    ),
    case("video, added", WAN, (1, 32760, 5120), residual=True, gate=False, modulation=FP32),
    case("video", "Wan2.1 1.3B, 480 x 832 x 81", (1, 32760, 1536), modulation=FP32),
    case(
        "video, each token", "Wan2.2 5B, 704 x 1280 x 121", (1, 27280, 3072), modulation=FP32, each_token=True
    ),
    case("picture, gated", QWEN, (2, 6889, 3072), residual=True),
    case("picture, gated", "Flux in float16", (1, 4096, 3072), FP16, residual=True),
    case("picture, gated", "Flux in float32", (1, 4096, 3072), FP32, residual=True),
]


def eager(
    x: Tensor,
    residual: Tensor | None,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """What diffusers does, step by step."""
    h = x if residual is None else gated(x, residual, gate)
    return modulated(h, weight, bias, scale, shift, eps), h


PEERS = {"diffusers": eager, "torch.compile": compiled(eager)}


def copy(x: Tensor, residual: Tensor | None, *rest: Any) -> list[Tensor]:
    """The fewest bytes: every stream into fresh memory, as it lies."""
    return [torch.empty_like(stream).copy_(stream) for stream in (x, residual) if stream is not None]


BOUNDS = {"copy": copy}


def random_modulation(
    draw: random.Random, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """One for each batch, for each token or for all of them; sometimes none."""
    batch, tokens, channels = shape
    if draw.random() < 0.2:
        return None
    sizes = draw.choice(
        ((batch, 1, channels), (batch, 1, channels), (batch, tokens, channels), (1, 1, channels))
    )
    return small_integers(draw, sizes, dtype, device)


def random_shape(draw: random.Random) -> tuple[int, int, int]:
    return (
        draw.choice((1, 1, 2, 3)),
        draw.choice((0, 1, 2, 5, 9, 17)),
        draw.choice((1, 2, 3, 7, 8, 16, 24, 33, 40, 64)),
    )


def random_call(draw: random.Random, device: torch.device) -> tuple:
    """Any valid call, small: strides, channels odd and even, modulations of every shape and of two dtypes."""
    dtype, shape = draw.choice((FP32, FP32, FP16, BF16, BF16, torch.float64)), random_shape(draw)
    wide = dtype if draw.random() < 0.7 or dtype is torch.float64 else FP32
    x = small_integers(draw, shape, dtype, device)
    residual = small_integers(draw, shape, dtype, device) if draw.random() < 0.6 else None
    gate = None if residual is None else random_modulation(draw, shape, wide, device)
    weight, bias = (
        small_integers(draw, shape[2:], wide, device) if draw.random() < 0.3 else None for _ in range(2)
    )
    scale, shift = (random_modulation(draw, shape, wide, device) for _ in range(2))
    return x, residual, gate, weight, bias, scale, shift, 1e-6


CASES = Cases(CALLS, random_call, peers=PEERS, bounds=BOUNDS, exact=False)

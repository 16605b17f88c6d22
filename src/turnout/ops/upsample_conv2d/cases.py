"""Real calls of upsample_conv2d: the upsampling layers of image and video decoders."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import Tensor

from turnout.ops.convolution.cases import (
    BF16,
    FIRST,
    FLUX,
    FP16,
    FP32,
    KINDS,
    LAST,
    WAN21,
    WAN22,
    autotuned,
    kept_in,
    make_filled,
    make_weight,
    named,
    random_bias,
    random_tensor,
)
from turnout.ops.upsample_conv2d import upsampled
from turnout.routing.case import Case, Cases, normal, seeded


def case(
    source: str,
    size: tuple[int, int],
    channels: tuple[int, int],
    dtype: torch.dtype = BF16,
    *,
    batch: int = 1,
    layout: str = LAST,
) -> Case:
    """An image of `size` to one twice as high and wide, then 3x3."""
    into, out = channels

    def make(device: torch.device, seed: int) -> tuple:
        generator = seeded(device, seed)
        x = make_filled((batch, into, *size), layout, dtype, device, generator)
        weight = make_weight(out, into, (3, 3), layout, dtype, device, generator)
        return x, weight, normal((out,), dtype, device, generator)

    return Case(named(size, channels, (3, 3), batch, layout=layout), source, dtype, make)


CALLS = [
    case("tiny", (5, 6), (8, 5), FP32).only_for_tests(),
    case("tiny", (5, 6), (8, 5), FP32, layout=FIRST).only_for_tests(),
    case("tiny", (4, 4), (16, 16), FP16, batch=2).only_for_tests(),
    case(FLUX, (128, 128), (512, 512)),
    case(FLUX, (512, 512), (256, 256)),
    case(FLUX, (512, 512), (256, 256), layout=FIRST),
    case(FLUX, (512, 512), (256, 256), FP32),
    case(WAN21, (240, 416), (192, 96)),
    case(WAN21, (240, 416), (192, 96), batch=4),
    case(WAN21, (120, 208), (384, 192), batch=4),
    case(WAN21, (60, 104), (384, 192), batch=2),
    case(WAN22, (176, 320), (512, 256), batch=4),
    case("a small image on a CPU", (64, 64), (64, 64), FP32, layout=FIRST).only_on_a_cpu(),
]


def upsample_then_convolve(layout: str):
    def run(input: Tensor, weight: Tensor, bias: Tensor | None, scale: int, padding: list[int]) -> Tensor:
        return F.conv2d(upsampled(kept_in(input, layout), scale), kept_in(weight, layout), bias, 1, padding)

    return run


PEERS = {
    "torch channels-first": upsample_then_convolve(FIRST),
    "torch channels-last": upsample_then_convolve(LAST),
    "torch channels-last, cudnn.benchmark": autotuned(upsample_then_convolve(LAST)),
}


def random_call(draw: random.Random, device: torch.device) -> tuple:
    """Any valid call, small, with exact sums: scales, kernels and paddings of all kinds."""
    scale, kernel = draw.choice((1, 2, 2, 2, 2, 3, 4)), [draw.choice((1, 2, 3, 3, 3, 5)) for _ in range(2)]
    if draw.random() < 0.4:
        scale, kernel = 2, [3, 3]
    padding = [draw.choice((k // 2, k // 2, k // 2, 0, 1, 2)) for k in kernel]
    size = [max(1, k - 2 * p) + draw.choice((0, 1, 4)) for k, p in zip(kernel, padding, strict=True)]
    into, out, dtype = draw.choice((1, 3, 8, 8, 16)), draw.choice((1, 3, 8, 8, 16)), draw.choice(KINDS)
    x = random_tensor(draw, (draw.choice((1, 1, 2)), into, *size), dtype, device)
    weight = random_tensor(draw, (out, into, *kernel), dtype, device)
    return x, weight, random_bias(draw, out, dtype, device), scale, padding


CASES = Cases(
    CALLS,
    random_call,
    peers=PEERS,
    ordinary=("weight",),
    of_torch=("channels-last", "phases"),
    not_interpreted=("implicit-gemm-hopper",),
)

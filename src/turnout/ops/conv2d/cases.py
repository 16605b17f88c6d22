"""Real calls of conv2d: image autoencoders, the 2-D layers of video autoencoders, a UNet."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F

from turnout.ops.convolution.cases import (
    FIRST,
    FLUX,
    FP16,
    FP32,
    SDXL,
    WAN21,
    convolution_case,
    peers,
    random_convolution,
)
from turnout.routing.case import Cases

CALLS = [
    convolution_case("tiny", (6, 7), (8, 5), FP32).only_for_tests(),
    convolution_case("tiny", (6, 7), (8, 5), FP32, layout=FIRST).only_for_tests(),
    convolution_case("tiny", (5, 6), (16, 16), FP16, kernel=1, batch=2).only_for_tests(),
    convolution_case("tiny", (8, 8), (16, 3), FP16).only_for_tests(),
    convolution_case(FLUX, (128, 128), (16, 512)),
    convolution_case(FLUX, (128, 128), (512, 512)),
    convolution_case(FLUX, (256, 256), (512, 512)),
    convolution_case(FLUX, (512, 512), (512, 256)),
    convolution_case(FLUX, (512, 512), (256, 256)),
    convolution_case(FLUX, (1024, 1024), (256, 128)),
    convolution_case(FLUX, (1024, 1024), (128, 128)),
    convolution_case(FLUX, (1024, 1024), (128, 128), layout=FIRST),
    convolution_case(FLUX, (1024, 1024), (128, 3)),
    convolution_case(FLUX, (1024, 1024), (3, 128)),
    convolution_case(FLUX, (1025, 1025), (128, 128), stride=2, padding=0),
    convolution_case(FLUX, (512, 512), (512, 512), kernel=1),
    convolution_case(FLUX, (1024, 1024), (256, 128), kernel=1),
    convolution_case(FLUX, (1024, 1024), (128, 128), FP32),
    convolution_case(SDXL, (128, 128), (320, 320), FP16, batch=2),
    convolution_case(SDXL, (32, 32), (1280, 1280), FP16, batch=2),
    convolution_case(WAN21, (480, 832), (192, 96), batch=4),
    convolution_case("a small image on a CPU", (64, 64), (64, 64), FP32, layout=FIRST).only_on_a_cpu(),
]
PEERS = peers(F.conv2d)


def random_call(draw: random.Random, device: torch.device) -> tuple:
    """Any valid call, small, with exact sums."""
    return random_convolution(draw, device, 2)


CASES = Cases(
    CALLS,
    random_call,
    peers=PEERS,
    ordinary=("weight",),
    of_torch=("channels-last", "pointwise"),
    not_interpreted=("implicit-gemm-hopper", "narrow-out-hopper"),
)

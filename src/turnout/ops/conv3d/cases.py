"""Real calls of conv3d: video autoencoders, and the three shapes that mlx reports."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from turnout.ops.convolution.cases import (
    BF16,
    COGVIDEOX,
    FIRST,
    FP16,
    FP32,
    HUNYUAN,
    LAST,
    LTX,
    MLX,
    WAN21,
    WAN22,
    convolution_case,
    kept_in,
    peers,
    random_convolution,
)
from turnout.routing.case import Cases

CPU = "Wan2.1 VAE on a CPU"

CALLS = [
    convolution_case("tiny", (3, 6, 7), (8, 5), FP32).only_for_tests(),
    convolution_case("tiny", (3, 6, 7), (8, 5), FP32, layout=FIRST).only_for_tests(),
    convolution_case("tiny", (2, 5, 6), (16, 16), FP16, kernel=1, batch=2).only_for_tests(),
    convolution_case("tiny", (2, 8, 8), (16, 3), FP16).only_for_tests(),
    *(
        convolution_case(CPU, (4, 60, 104), (96, 96), dtype, layout=layout).only_on_a_cpu()
        for dtype in (FP32, BF16)
        for layout in (FIRST, LAST)
    ),
    convolution_case(CPU, (4, 64, 64), (64, 3), FP32, layout=FIRST).only_on_a_cpu(),
    convolution_case(WAN21, (4, 480, 832), (96, 96)),
    convolution_case(WAN21, (4, 480, 832), (96, 96), bias=False),
    convolution_case(WAN21, (4, 480, 832), (96, 96), layout=FIRST),
    convolution_case(WAN21, (4, 480, 832), (192, 96)),
    convolution_case(WAN21, (4, 240, 416), (192, 192)),
    convolution_case(WAN21, (4, 120, 208), (384, 384)),
    convolution_case(WAN21, (4, 60, 104), (384, 384)),
    convolution_case(WAN21, (4, 480, 832), (96, 3)),
    convolution_case(WAN21, (4, 480, 832), (192, 96), kernel=1),
    convolution_case(WAN21, (4, 60, 104), (16, 384)),
    convolution_case(WAN21, (81, 480, 832), (96, 96)),
    convolution_case(WAN21, (4, 480, 832), (96, 96), FP32),
    convolution_case(WAN21, (4, 480, 832), (192, 96), FP32),
    convolution_case(WAN22, (4, 352, 640), (256, 256)),
    convolution_case(WAN22, (4, 176, 320), (512, 512)),
    convolution_case(WAN22, (2, 88, 160), (1024, 1024)),
    convolution_case(WAN22, (4, 352, 640), (256, 12)),
    convolution_case(LTX, (61, 64, 96), (256, 256)),
    convolution_case(LTX, (121, 128, 192), (128, 128)),
    convolution_case(LTX, (121, 128, 192), (128, 48)),
    convolution_case(HUNYUAN, (67, 258, 258), (128, 128), FP16, padding=0),
    convolution_case(COGVIDEOX, (10, 482, 722), (128, 128), padding=0),
    convolution_case(MLX, (21, 60, 104), (1024, 1024)),
    convolution_case(MLX, (41, 120, 208), (512, 512)),
    convolution_case(MLX, (41, 240, 416), (512, 512)),
]


def conv2d_per_tap(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    *_: Any,
) -> Tensor:
    """The loop that models write: a 2-D convolution of all frames for each depth of the kernel, added up in
    the output's dtype.
    """
    input, weight = kept_in(input, LAST), kept_in(weight, LAST)
    batch, into = input.shape[:2]
    depth = weight.shape[2]
    frames = F.pad(input, (0, 0, 0, 0, padding[0], padding[0])) if padding[0] else input
    count = (frames.shape[2] - dilation[0] * (depth - 1) - 1) // stride[0] + 1
    total = None
    for k in range(depth):
        tap = (
            frames[:, :, k * dilation[0] :: stride[0]][:, :, :count]
            .transpose(1, 2)
            .reshape(batch * count, into, *input.shape[3:])
        )
        y = F.conv2d(
            tap, weight[:, :, k], bias if k == 0 else None, stride[1:], padding[1:], dilation[1:], groups
        )
        total = y if total is None else total.add_(y)
    assert total is not None
    return total.unflatten(0, (batch, count)).transpose(1, 2)


PEERS = peers(F.conv3d) | {"conv2d per tap": conv2d_per_tap}


def random_call(draw: random.Random, device: torch.device) -> tuple:
    """Any valid call, small, with exact sums."""
    return random_convolution(draw, device, 3)


CASES = Cases(
    CALLS,
    random_call,
    peers=PEERS,
    ordinary=("weight",),
    of_torch=("channels-last", "pointwise", "depth-taps", "depth-chunks"),
    not_interpreted=("implicit-gemm-hopper", "narrow-out-hopper"),
)

"""Real calls of causal_conv3d: video autoencoders that decode a clip in chunks, with the last frames of the
chunk before.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from turnout.ops.causal_conv3d import with_frames_before
from turnout.ops.conv3d import conv3d
from turnout.ops.convolution.cases import (
    BF16,
    COGVIDEOX,
    FIRST,
    FP16,
    FP32,
    HUNYUAN,
    KINDS,
    LAST,
    LTX,
    WAN21,
    WAN22,
    kept_for,
    kept_in,
    make_filled,
    make_weight,
    named,
    random_bias,
    random_sizes,
    random_tensor,
)
from turnout.ops.convolution.problem import spread
from turnout.routing.case import Case, Cases, normal, seeded


def case(
    source: str,
    size: Sequence[int],
    channels: tuple[int, int],
    dtype: torch.dtype = BF16,
    *,
    kernel: int | Sequence[int] = 3,
    stride: int = 1,
    held: int = 2,
    pad_mode: str = "zeros",
    layout: str = LAST,
    added: bool = False,
) -> Case:
    """A chunk of `size` frames and pixels after `held` frames of cache, 0 for the first chunk of a clip.
    added: with a residual, as the second convolution of a residual block has it."""
    kernel, (into, out) = spread(kernel, 3), channels

    def make(device: torch.device, seed: int) -> tuple:
        generator = seeded(device, seed)
        x = make_filled((1, into, *size), layout, dtype, device, generator)
        weight = make_weight(out, into, kernel, layout, dtype, device, generator)
        cache = make_filled((1, into, held, *size[1:]), layout, dtype, device, generator) if held else None
        call = (
            x,
            weight,
            normal((out,), dtype, device, generator),
            cache,
            [stride, 1, 1],
            [k // 2 for k in kernel[1:]],
            1,
            1,
            pad_mode,
        )
        residual = make_filled((1, out, *size), layout, dtype, device, generator) if added else None
        return (*call, False, residual) if added else call

    before = (f"after {held}" if held else pad_mode) + (", added" if added else "")
    return Case(
        f"{named(size, channels, kernel, stride=stride, layout=layout)} {before}", source, dtype, make
    )


CALLS = [
    case("tiny", (3, 6, 7), (8, 5), FP32).only_for_tests(),
    case("tiny", (3, 6, 7), (8, 5), FP32, held=0, layout=FIRST).only_for_tests(),
    case("tiny", (1, 5, 6), (16, 16), FP16, held=1, pad_mode="replicate").only_for_tests(),
    case("tiny", (2, 8, 8), (16, 3), FP16).only_for_tests(),
    case(WAN21, (1, 60, 104), (384, 384)),
    case(WAN21, (1, 60, 104), (384, 384), added=True),
    case(WAN21, (2, 120, 208), (384, 384)),
    case(WAN21, (2, 240, 416), (192, 192)),
    case(WAN21, (2, 480, 832), (96, 96)),
    case(WAN21, (4, 480, 832), (96, 96)),
    case(WAN21, (4, 480, 832), (96, 96), layout=FIRST),
    case(WAN21, (4, 480, 832), (96, 96), held=0),
    case(WAN21, (4, 480, 832), (96, 3)),
    case(WAN21, (1, 60, 104), (384, 768), kernel=(3, 1, 1)),
    case(WAN22, (2, 352, 640), (256, 256)),
    case(WAN22, (2, 176, 320), (512, 512)),
    case(WAN22, (1, 44, 80), (1024, 1024)),
    case(WAN22, (1, 44, 80), (1024, 1024), added=True),
    case(WAN22, (2, 88, 160), (1024, 1024)),
    case(WAN22, (2, 88, 160), (1024, 1024), added=True),
    case(LTX, (121, 128, 192), (128, 128), held=0, pad_mode="replicate"),
    case(HUNYUAN, (17, 32, 32), (512, 512), FP16, held=0, pad_mode="replicate"),
    case(COGVIDEOX, (8, 480, 720), (128, 128)),
    case("Wan2.1 VAE on a CPU", (4, 60, 104), (96, 96), FP32, layout=FIRST).only_on_a_cpu(),
    case("Wan2.1 VAE on a CPU", (4, 60, 104), (96, 96), BF16, layout=FIRST).only_on_a_cpu(),
]


def joined_in(layout: str) -> Any:
    """Concatenate, pad and convolve in one layout, as models do."""

    def run(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        cache: Tensor | None,
        stride: list[int],
        padding: list[int],
        dilation: list[int],
        groups: int,
        pad_mode: str,
        residual: Tensor | None = None,
    ) -> Tensor:
        input, weight, cache = (None if x is None else kept_in(x, layout) for x in (input, weight, cache))  # pyright: ignore[reportAssignmentType]
        whole = with_frames_before(input, cache, (weight.shape[2] - 1) * dilation[0], pad_mode)
        y = F.conv3d(whole, weight, bias, stride, [0, *padding], dilation, groups)
        return y if residual is None else y + residual

    return run


def joined_before(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cache: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    pad_mode: str,
    residual: Tensor | None = None,
) -> Tensor:
    """Our convolution of one tensor in which all frames stand already."""
    before = (weight.shape[2] - 1) * dilation[0]
    whole = kept_for(input, "joined", lambda: with_frames_before(input, cache, before, pad_mode))
    return conv3d(whole, weight, bias, stride, [0, *padding], dilation, groups, residual=residual)


BOUNDS = {"conv3d of joined frames": joined_before}
PEERS = {
    "torch cat, pad, conv3d, channels-first": joined_in(FIRST),
    "torch cat, pad, conv3d, channels-last": joined_in(LAST),
}


def random_call(draw: random.Random, device: torch.device) -> tuple:
    """Any valid call, small, with exact sums: no cache, a full one, one too short, one too long, both
    paddings.
    """
    sizes, dtype, mode = random_sizes(draw, 3), draw.choice(KINDS), draw.choice(("zeros", "replicate"))
    x, weight = (random_tensor(draw, sizes[name], dtype, device) for name in ("shape", "weight"))
    before = (weight.shape[2] - 1) * sizes["dilation"][0]
    cached = draw.choice((None, None, before, before, max(0, before - 1), before + 1))
    cache = (
        None if cached is None else random_tensor(draw, (*x.shape[:2], cached, *x.shape[3:]), dtype, device)
    )
    numbers = (sizes["stride"], sizes["padding"][1:], sizes["dilation"], sizes["groups"])
    return x, weight, random_bias(draw, weight.shape[0], dtype, device), cache, *numbers, mode


CASES = Cases(
    CALLS,
    random_call,
    peers=PEERS,
    bounds=BOUNDS,
    ordinary=("weight",),
    of_torch=("channels-last", "depth-taps"),
    not_interpreted=("implicit-gemm-hopper", "narrow-out-hopper"),
)

"""Real calls of add_repeated: the shortcuts of Wan 2.2's decoder."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from turnout.ops.add_repeated import reference
from turnout.routing.case import Case, Cases, normal, seeded, small_integers

WAN = "Wan 2.2, decoder"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FIRST, LAST = torch.contiguous_format, torch.channels_last_3d


def case(
    name: str,
    shape: tuple[int, int, int, int, int],
    channels: int,
    times: tuple[int, int, int],
    dtype: torch.dtype = BF16,
    *,
    kept: int | None = None,
    layout: torch.memory_format = LAST,
) -> Case:
    """shape: of x. channels: of y. kept: frames of y for each of x; None: all repeats."""
    batch, _, frames, height, width = shape
    large = (batch, channels, frames * (kept or times[0]), height * times[1], width * times[2])

    def make(device: torch.device, seed: int) -> tuple:
        generator = seeded(device, seed)
        x, y = (
            normal(size, dtype, device, generator).contiguous(memory_format=layout) for size in (shape, large)
        )
        return y, x, list(times)

    return Case(f"{name} {'x'.join(map(str, shape))}", WAN, dtype, make)


CALLS = [
    case("tiny", (1, 12, 2, 3, 5), 12, (2, 2, 2), FP32).only_for_tests(),
    case("tiny, first", (2, 24, 1, 3, 5), 24, (2, 2, 2), FP16, kept=1).only_for_tests(),
    case("tiny, halved", (1, 48, 2, 3, 5), 24, (1, 2, 2), FP32).only_for_tests(),
    case("tiny, halved in time", (1, 16, 1, 3, 5), 8, (2, 2, 2), FP32, layout=FIRST).only_for_tests(),
    case("wan", (1, 1024, 1, 44, 80), 1024, (2, 2, 2)),
    case("wan, first", (1, 1024, 1, 88, 160), 1024, (2, 2, 2), kept=1),
    case("wan", (1, 1024, 2, 88, 160), 1024, (2, 2, 2)),
    case("wan", (1, 1024, 2, 176, 320), 512, (1, 2, 2)),
]


# The reference is what diffusers does: the shortcut is built, then added.
PEERS = {"diffusers": reference}


def add(y: Tensor, x: Tensor, times: list[int]) -> Tensor:
    """As many bytes of y."""
    return y + 1


BOUNDS = {"add": add}


def random_call(draw: random.Random, device: torch.device) -> tuple:
    """Any valid call, small."""
    dtype = draw.choice((FP32, FP32, FP16, BF16, torch.float64))
    times = [draw.choice((1, 2, 2, 3)) for _ in range(3)]
    channels = draw.choice((1, 3, 8, 16, 40))
    picked = 1
    for count in range(draw.choice((0, 0, 1, 2, 3))):
        picked *= times[count]
    batch, frames, height, width = (draw.choice((1, 2, 3)), *(draw.choice((1, 2, 3, 5)) for _ in range(3)))
    kept = draw.randint(1, times[0])
    y = small_integers(
        draw, (batch, channels, frames * kept, height * times[1], width * times[2]), dtype, device
    )
    x = small_integers(draw, (batch, channels * picked, frames, height, width), dtype, device)
    if draw.random() < 0.7:
        y, x = (tensor.contiguous(memory_format=LAST) for tensor in (y, x))
    return y, x, times


CASES = Cases(CALLS, random_call, peers=PEERS, bounds=BOUNDS)

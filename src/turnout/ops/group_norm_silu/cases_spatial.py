"""Real calls of spatial_norm_silu: the norms of CogVideoX's decoder."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from turnout.measure.peers import compiled
from turnout.ops.group_norm_silu import cases, normalised
from turnout.ops.group_norm_silu.cases import LAST
from turnout.ops.rms_norm_silu.cases import FIRST, make_x
from turnout.routing.case import Case, Cases, seeded, small_integers

COG = "CogVideoX VAE, 480 x 720, a chunk of two latent frames"


def case(
    name: str,
    shape: tuple[int, ...],
    small: tuple[int, ...],
    layout: str = LAST,
    dtype: torch.dtype = torch.bfloat16,
    *,
    groups: int = 32,
    silu: bool = True,
    first_apart: bool = False,
) -> Case:
    """small: the sizes of scale and shift behind the channels."""
    fresh = cases.case(name, COG, shape, layout, dtype, groups=groups, silu=silu)

    def make(device: torch.device, seed: int) -> tuple:
        x, _, weight, bias, eps, _ = fresh.make(device, seed)
        generator = seeded(device, seed + 1)
        scale, shift = (make_x((*shape[:2], *small), layout, dtype, device, generator) for _ in range(2))
        return x, groups, weight, bias, scale, shift, eps, silu, first_apart

    return Case(f"{fresh.name} from {'x'.join(map(str, small))}", fresh.source, dtype, make)


CALLS = [
    case(
        "tiny", (2, 12, 3, 4, 6), (2, 2, 3), LAST, torch.float32, groups=4, first_apart=True
    ).only_for_tests(),
    case("tiny", (1, 6, 4, 8), (4, 2), LAST, torch.float16, groups=3, silu=False).only_for_tests(),
    case("tiny", (1, 6, 2, 4, 6), (2, 2, 3), FIRST, torch.float32, groups=2).only_for_tests(),
    case("cogvideox", (1, 512, 2, 60, 90), (2, 60, 90)),
    case("cogvideox", (1, 512, 4, 120, 180), (2, 60, 90)),
    case("cogvideox", (1, 256, 8, 240, 360), (2, 60, 90)),
    case("cogvideox", (1, 256, 8, 480, 720), (2, 60, 90)),
    case("cogvideox", (1, 128, 8, 480, 720), (2, 60, 90)),
    case("cogvideox, first chunk", (1, 128, 9, 480, 720), (3, 60, 90), first_apart=True),
]


def eager(
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor,
    shift: Tensor,
    eps: float,
    silu: bool,
    first_apart: bool,
) -> Tensor:
    """PyTorch's norm, then scale and shift as large as x, as diffusers has them, and its activation."""
    large = []
    for small in (scale, shift):
        if first_apart and x.shape[2] > 1:
            parts = ((small[:, :, :1], (1, *x.shape[3:])), (small[:, :, 1:], (x.shape[2] - 1, *x.shape[3:])))
            large.append(torch.cat([F.interpolate(part, size=size) for part, size in parts], 2))
        else:
            large.append(F.interpolate(small, size=x.shape[2:]))
    y = normalised(x, groups, weight, bias, eps, False) * large[0] + large[1]
    return F.silu(y) if silu else y


PEERS = {"diffusers": eager, "torch.compile": compiled(eager)}


def copy(x: Tensor, *rest: Any) -> Tensor:
    """x into fresh memory, as it lies: two of the three passes this op needs."""
    return torch.empty_like(x).copy_(x)


BOUNDS = {"copy": copy}


def random_call(draw: random.Random, device: torch.device) -> tuple:
    """Any valid call, small: one to three dimensions, each repeated or not, the first apart or not."""
    while True:
        x, groups, weight, bias, eps, silu = cases.random_call(draw, device)
        if 3 <= x.dim() <= 5 and x.numel():
            break
    first_apart = draw.random() < 0.4
    smalls = []
    for dim, size in enumerate(x.shape[2:]):
        apart = int(first_apart and dim == 0)
        rest = size - apart
        smalls.append(
            apart + draw.choice([n for n in range(1, rest + 1) if rest % n == 0]) if rest else apart
        )
    shape, dtype = (*x.shape[:2], *smalls), x.dtype if draw.random() < 0.8 else torch.float32
    scale_and_shift = []
    for _ in range(2):
        last = draw.random() < 0.7
        lying = (shape[0], *shape[2:], shape[1]) if last else shape
        values = small_integers(draw, lying, dtype, device)
        scale_and_shift.append(values.movedim(-1, 1) if last else values)
    return x, groups, weight, bias, *scale_and_shift, eps, silu, first_apart


CASES = Cases(CALLS, random_call, peers=PEERS, bounds=BOUNDS, exact=False)

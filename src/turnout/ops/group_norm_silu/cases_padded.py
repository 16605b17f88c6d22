"""Real calls of group_norm_silu_pad: what HunyuanVideo's causal convolutions read."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from turnout.measure.peers import compiled
from turnout.ops.group_norm_silu import cases, cases_into, normalised
from turnout.ops.group_norm_silu.cases import FIRST, LAST
from turnout.ops.group_norm_silu.padded import MODES
from turnout.routing.case import Case, Cases

AROUND = (1, 1, 1, 1, 2, 0)  # a pixel on each side, two frames before the first


def case(
    name: str,
    shape: tuple[int, ...],
    layout: str = LAST,
    dtype: torch.dtype = torch.bfloat16,
    *,
    groups: int = 32,
    padding: tuple[int, ...] = AROUND,
    mode: str = "replicate",
) -> Case:
    fresh = cases.case(name, cases_into.HUNYUAN, shape, layout, dtype, groups=groups)

    def make(device: torch.device, seed: int) -> tuple:
        return *fresh.make(device, seed), list(padding), mode

    return Case(fresh.name, fresh.source, dtype, make)


CALLS = [
    case("tiny", (2, 12, 2, 3, 5), LAST, torch.float32, groups=4).only_for_tests(),
    case(
        "tiny reflected", (1, 6, 4, 3), LAST, torch.float16, groups=2, padding=(1, 2, 3, 0), mode="reflect"
    ).only_for_tests(),
    case(
        "tiny in zeros", (1, 6, 4, 3), FIRST, torch.float32, groups=2, padding=(1, 2, 3, 0), mode="constant"
    ).only_for_tests(),
    *(case("replicated", shape) for shape in cases_into.SHAPES),
    case("replicated", (1, 256, 9, 272, 480), dtype=torch.float32),
]


def eager(
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    silu: bool,
    padding: list[int],
    mode: str,
) -> Tensor:
    """What diffusers does: PyTorch's norm, its activation, then a copy with the border."""
    return F.pad(normalised(x, groups, weight, bias, eps, silu), tuple(padding), mode)


PEERS = {"diffusers": eager, "torch.compile": compiled(eager)}


def copy(x: Tensor, *rest: Any) -> Tensor:
    """x into fresh memory, as it lies: nearly two of the three passes this op needs."""
    return torch.empty_like(x).copy_(x)


BOUNDS = {"copy": copy}


def random_call(draw: random.Random, device: torch.device) -> tuple:
    """Any valid call, small: one to three dimensions, borders of every mode and none."""
    while True:
        args = cases.random_call(draw, device)
        if 3 <= args[0].dim() <= 5 and args[0].numel():
            break
    mode = draw.choice(MODES)
    sizes = [size for size in reversed(args[0].shape[2:]) for _ in range(2)]
    padding = [min(draw.choice((0, 0, 1, 2, 3)), size - 1 if mode == "reflect" else 3) for size in sizes]
    return *args, padding, mode


CASES = Cases(CALLS, random_call, peers=PEERS, bounds=BOUNDS, exact=False)

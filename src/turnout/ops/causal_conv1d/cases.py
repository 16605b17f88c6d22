"""Real calls of causal_conv1d: from state-space and linear-attention models, and the shapes that other
kernels are slow at.
"""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from turnout.measure.peers import compiled
from turnout.ops.causal_conv1d import channel_last
from turnout.ops.causal_conv1d.launches import empty_dense
from turnout.routing.case import Case, Cases, normal, seeded, small_integers
from turnout.routing.machine import has_package

Shape = tuple[int, int, int]

FIRST, LAST, SPLIT = "channel-first", "channel-last", "split"


def make_x(
    shape: Shape, layout: str, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Tensor:
    """x in a layout. `split` is that of Mamba-2: channels cut out of a wider projection, then permuted."""
    batch, dim, length = shape
    if layout == FIRST:
        return normal((batch, dim, length), dtype, device, generator)
    wider = 0 if layout == LAST else dim // 2 + 24
    return normal((batch, length, dim + wider), dtype, device, generator)[..., wider:].transpose(1, 2)


def case(
    name: str,
    source: str,
    shape: Shape,
    layout: str,
    dtype: torch.dtype = torch.bfloat16,
    *,
    width: int = 4,
    activation: str | None = "silu",
    sequences: int = 0,
    states: bool = False,
) -> Case:
    def make(device: torch.device, seed: int) -> tuple:
        generator = seeded(device, seed)
        batch, dim, length = shape
        x = make_x(shape, layout, dtype, device, generator)
        weight, bias = (
            normal((dim, width), dtype, device, generator),
            normal((dim,), dtype, device, generator),
        )
        ends = (
            torch.arange(sequences + 1, device=device, dtype=torch.int32) * length // sequences
            if sequences
            else None
        )
        initial = normal((sequences or batch, dim, width - 1), dtype, device, generator) if states else None
        return x, weight, bias, activation, None, ends, initial, states

    return Case(f"{name} {'x'.join(map(str, shape))} {layout}", source, dtype, make)


MAMBA, MAMBA2, DELTA = (
    "Mamba, state-spaces/mamba",
    "Mamba-2, state-spaces/mamba",
    "Gated DeltaNet, Qwen3-Next",
)
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16

CALLS = [
    case("tiny", MAMBA, (2, 8, 16), FIRST, FP32).only_for_tests(),
    case("tiny", MAMBA2, (2, 8, 16), LAST, FP32).only_for_tests(),
    case("tiny packed", DELTA, (1, 6, 20), LAST, FP32, sequences=3, states=True).only_for_tests(),
    case("tiny", MAMBA, (1, 5, 9), FIRST, FP16, width=3).only_for_tests(),
    *(case("training", MAMBA, (8, 4096, 4096), layout) for layout in (FIRST, LAST)),
    *(case("training", "Mamba 130m to 370m", (32, 1536, 2048), layout) for layout in (FIRST, LAST)),
    *(case("long prompt", MAMBA2, (1, 8192, 65536), layout) for layout in (FIRST, LAST)),
    *(case("prompt", "Mamba 2.8b", (1, 5120, 8192), layout) for layout in (FIRST, LAST)),
    *(
        case("few channels", "long sequences: genomes, audio", (1, 256, 262144), layout)
        for layout in (FIRST, LAST)
    ),
    *(case("short rows", "many short sequences", (64, 2048, 64), layout) for layout in (FIRST, LAST)),
    case("projection", MAMBA2, (8, 4096, 4096), SPLIT),
    case("projection", DELTA, (1, 8192, 8192), SPLIT),
    case("packed", DELTA, (1, 8192, 32768), LAST, sequences=16, states=True),
    case("packed", MAMBA2, (1, 4096, 32768), FIRST, sequences=16),
    *(case("training", MAMBA, (8, 4096, 4096), layout, FP16) for layout in (FIRST, LAST)),
    *(case("training", MAMBA, (8, 2048, 4096), layout, FP32) for layout in (FIRST, LAST)),
    *(
        case("two sequences", "Mamba 130m on a CPU", (2, 1536, 2048), layout, dtype).only_on_a_cpu()
        for dtype in (FP32, BF16)
        for layout in (FIRST, LAST)
    ),
]


def eager(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, *rest: Any) -> Tensor:
    """A padded grouped convolution, which models fall back to. It takes no packing and no states."""
    y = F.conv1d(x, weight[:, None], bias, padding=weight.shape[1] - 1, groups=weight.shape[0])[
        ..., : x.shape[2]
    ]
    return F.silu(y) if activation == "silu" else y


def fla(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, *rest: Any) -> Tensor:
    """flash-linear-attention's Triton kernel, which takes [batch, length, channels]."""
    from fla.modules.convolution import causal_conv1d  # pyright: ignore[reportMissingImports]

    return causal_conv1d(x.transpose(1, 2), weight, bias, activation=activation)[0].transpose(1, 2)


PEERS = {"torch": eager, "torch.compile": compiled(eager)} | ({"fla": fla} if has_package("fla") else {})


def copy(x: Tensor, *rest: Any) -> Tensor:
    """The fewest bytes: x into a fresh tensor of the same layout."""
    return empty_dense(x, channel_last(x)).copy_(x)


BOUNDS = {"copy": copy}

# float64 has no routes; the others are what models use, filters in the same dtype or in float32.
KINDS = (
    (FP32, FP32),
    (BF16, BF16),
    (FP16, FP16),
    (BF16, FP32),
    (FP16, FP32),
    (FP32, BF16),
    (torch.float64, torch.float64),
)


def random_call(draw: random.Random, device: torch.device) -> tuple:
    """Any valid call, small, with exact sums: layouts, widths, dtypes, packings, states, sequences shorter
    than the width. Mostly without activation, which nothing but the same formula gives bit for bit."""
    dtype, weight_dtype = draw.choice(KINDS)
    batch, dim, width = (
        draw.choice((1, 1, 2, 3)),
        draw.choice((1, 2, 3, 8, 16, 17, 24, 40)),
        draw.choice((1, 2, 3, 4, 4, 4, 4, 5, 6, 7, 8, 9)),
    )
    length = draw.choice((0, 1, 2, 3, 7, 8, 16, 33, 64, 130))
    packing = draw.choice(("none", "none", "seq_idx", "cu_seqlens"))
    seq_idx = cu_seqlens = None
    sequences = batch
    if packing == "seq_idx":
        runs = [draw.choice((-1, 0, 1, 2)) for _ in range(batch * length // 3 + 1)]
        flat = [runs[i // 3] for i in range(batch * length)]
        seq_idx = torch.tensor(flat, dtype=draw.choice((torch.int32, torch.int64)), device=device).reshape(
            batch, length
        )
    elif packing == "cu_seqlens":
        batch, sequences = 1, draw.choice((1, 2, 4))
        cuts = sorted(draw.randint(0, length) for _ in range(sequences - 1))
        cu_seqlens = torch.tensor([0, *cuts, length], dtype=torch.int32, device=device)
    x = small_integers(draw, (batch, dim, length), dtype, device)
    if draw.random() < 0.5:
        x = small_integers(draw, (batch, length, dim), dtype, device).transpose(1, 2)
    weight = small_integers(draw, (dim, width), weight_dtype, device)
    bias = small_integers(draw, (dim,), weight_dtype, device) if draw.random() < 0.5 else None
    initial = (
        small_integers(draw, (sequences, dim, width - 1), dtype, device) if draw.random() < 0.4 else None
    )
    return x, weight, bias, None, seq_idx, cu_seqlens, initial, draw.random() < 0.4


CASES = Cases(CALLS, random_call, peers=PEERS, bounds=BOUNDS, ordinary=("weight",))

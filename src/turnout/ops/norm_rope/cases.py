"""Real calls of norm_rope: what diffusion transformers do to q, k and v before attention."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from turnout.measure.peers import compiled
from turnout.ops.norm_rope import joined, rotated
from turnout.ops.norm_rope.checks import Call
from turnout.routing.case import Case, Cases, normal, seeded, small_integers

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


def angles(
    shape: tuple[int, ...], kind: str, pairing: str, device: torch.device, generator: torch.Generator
) -> tuple[Tensor, Tensor | None]:
    """Tables of random angles [..., pairs], as models hand them over: a value for each pair, each value
    twice, or complex.
    """
    turn = 100 * torch.rand(shape, device=device, generator=generator)
    if kind == "complex":
        return torch.polar(torch.ones_like(turn), turn), None
    if kind == "element":
        turn = turn.repeat_interleave(2, -1) if pairing == "interleaved" else torch.cat([turn, turn], -1)
    return turn.cos(), turn.sin()


def case(
    name: str,
    source: str,
    tokens: tuple[int, ...],
    heads: tuple[int, ...] = (24, 24),
    dim: int = 128,
    dtype: torch.dtype = BF16,
    *,
    norm: str = "head",
    table: str = "element",
    pairing: str = "interleaved",
    rotary: int | None = None,
    per_head: bool = False,
    packed: bool = False,
    out_layout: str = "bhsd",
    round_before_weight: bool = False,
    batch: int = 1,
) -> Case:
    turning = 0 if table == "none" else rotary or dim

    def make(device: torch.device, seed: int) -> tuple:
        generator = seeded(device, seed)

        def stream(which: int, part: int) -> Tensor | None:
            if which >= len(heads) or part >= len(tokens):
                return None
            if not packed:
                return normal((batch, tokens[part], heads[which], dim), dtype, device, generator)
            wide = normal((batch, tokens[part], 3 * heads[which], dim), dtype, device, generator)
            return wide[:, :, which * heads[which] : (which + 1) * heads[which]]

        streams = [stream(which, part) for which in (0, 1) for part in (0, 1)]
        sizes = [None if x is None else x.shape[2] * dim if norm == "all" else dim for x in streams]
        weights = [
            None if n is None or norm == "none" else normal((n,), dtype, device, generator) for n in sizes
        ]
        cos = sin = None
        if table != "none":
            rows_shape = (batch, sum(tokens), heads[0]) if per_head else (sum(tokens),)
            cos, sin = angles((*rows_shape, turning // 2), table, pairing, device, generator)
        return (*streams, *weights, cos, sin, 1e-6, norm, turning, pairing, out_layout, round_before_weight)

    sizes = "x".join(map(str, (batch, "+".join(map(str, tokens)), *heads[:1], dim)))
    return Case(f"{name} {sizes}", source, dtype, make)


FLUX, WAN, QWEN, LTX = "Flux, black-forest-labs", "Wan2.1, Wan-AI", "Qwen-Image", "LTX-Video"

CALLS = [
    case("tiny", FLUX, (5, 7), (4, 4), 16, FP32).only_for_tests(),
    case("tiny", WAN, (9,), (3, 3), 16, FP32, norm="all").only_for_tests(),
    case("tiny half", "Cosmos", (9,), (4, 2), 24, FP16, pairing="half", rotary=16, batch=2).only_for_tests(),
    case("tiny v", FLUX, (6, 3), (3,), 20, FP32, norm="none", table="none").only_for_tests(),
    case("text", "Flux, 512 tokens", (512,)),
    case("small picture", "Flux, 512 x 512", (512, 1024)),
    case("two streams", "Flux, 1024 x 1024, double blocks", (512, 4096)),
    case("one stream", "Flux, 1024 x 1024, single blocks", (4608,), packed=True),
    case("q and k", "HunyuanVideo, 480 x 832 x 81", (32760,)),
    case("across heads", "Wan2.1 14B, 480 x 832 x 81", (32760,), (40, 40), norm="all"),
    case("across heads", "Wan2.1 1.3B, 480 x 832 x 81", (32760,), (12, 12), norm="all"),
    case("across heads, text", "Wan2.1 14B, keys of the prompt", (512,), (40,), norm="all", table="none"),
    case("v", "HunyuanVideo, 480 x 832 x 81", (32760,), (24,), norm="none", table="none"),
    case("v, two streams", "Flux, 1024 x 1024", (512, 4096), (24,), norm="none", table="none"),
    case("complex", QWEN, (1024, 4096), table="complex", round_before_weight=True),
    case("rotation only", "Flux in exact numerics, after its own norm", (4608,), norm="none"),
    case("tables for each head", LTX, (4992,), (32, 32), 64, norm="all", per_head=True),
    case(
        "half, tables for each head",
        "LTX-2",
        (6144,),
        (32, 32),
        128,
        norm="all",
        per_head=True,
        table="pair",
        pairing="half",
    ),
    case("half", "Cosmos, NVIDIA", (8800,), (32, 32), pairing="half", round_before_weight=True),
    case(
        "part, grouped heads",
        "GLM-4, a prompt",
        (4096,),
        (32, 2),
        norm="none",
        table="pair",
        rotary=64,
        out_layout="bshd",
    ),
    case("q and k", "HunyuanVideo in float16", (4608,), dtype=FP16),
    case("q and k", "Flux in float32", (4608,), dtype=FP32),
    *(case("q and k", "Flux on a CPU", (1024,), dtype=dtype).only_on_a_cpu() for dtype in (FP32, BF16)),
]


def eager(*args: Any) -> list[Tensor]:
    """What diffusers does, step by step."""
    call, outputs = Call(*args), []
    for streams in call.of_q_and_k:
        y = rotated(joined(streams, call), call.cos, call.sin, call.rotary, call.pairing)
        outputs.append(y.transpose(1, 2).contiguous() if call.out_layout == "bhsd" else y.contiguous())
    return outputs


PEERS = {"diffusers": eager, "torch.compile": compiled(eager)}


def copy(*args: Any) -> list[Tensor]:
    """The fewest bytes: every stream into fresh memory, as it lies."""
    return [torch.empty_like(x).copy_(x) for x in args[:4] if x is not None]


def permute_copy(*args: Any) -> list[Tensor]:
    """The same, permuted by PyTorch."""
    return [x.transpose(1, 2).contiguous() for x in args[:4] if x is not None]


BOUNDS = {"copy": copy, "permute copy": permute_copy}


def random_call(draw: random.Random, device: torch.device) -> tuple:
    """Any valid call, small: layouts, streams, heads, norms, tables of every shape, pairings."""
    dtype = draw.choice((FP32, FP32, FP16, BF16, BF16, torch.float64))
    batch, tokens = (
        draw.choice((1, 1, 2, 3)),
        (draw.choice((0, 1, 1, 2, 5, 9, 17)), draw.choice((1, 2, 6)))[: draw.choice((1, 1, 2))],
    )
    dim, norm = draw.choice((2, 6, 8, 16, 20, 32, 40)), draw.choice(("none", "head", "head", "all"))
    heads = (draw.choice((1, 2, 3, 4, 8)), draw.choice((1, 2, 3, 4)))[: draw.choice((1, 2))]
    streams = [
        small_integers(draw, (batch, tokens[part], heads[which], dim), dtype, device)
        if which < len(heads) and part < len(tokens)
        else None
        for which in (0, 1)
        for part in (0, 1)
    ]
    weights: list[Tensor | None] = [None] * 4
    if norm != "none" and draw.random() < 0.8:
        weight_dtype = dtype if draw.random() < 0.8 else FP32
        sizes = [None if x is None else x.shape[2] * dim if norm == "all" else dim for x in streams]
        weights = [None if n is None else small_integers(draw, (n,), weight_dtype, device) for n in sizes]
    table, pairing = draw.choice(("none", "pair", "element", "complex")), draw.choice(("interleaved", "half"))
    rotary = 0 if table == "none" else draw.choice([n for n in (2, 4, 8, 12, dim, dim, dim) if n <= dim])
    cos = sin = None
    if table != "none":
        rows = draw.choice(((), (1,), (batch,)))
        across = draw.choice(((), (1,), (heads[0],))) if rows and len(set(heads)) == 1 else ()
        generator = torch.Generator(device).manual_seed(draw.randrange(2**31))
        cos, sin = angles((*rows, sum(tokens), *across, rotary // 2), table, pairing, device, generator)
        if dtype is torch.float64:
            cos, sin = (
                cos.to(torch.complex128 if cos.is_complex() else dtype),
                None if sin is None else sin.to(dtype),
            )
        elif sin is not None and draw.random() < 0.2:
            cos, sin = cos.to(dtype), sin.to(dtype)
    return (
        *streams,
        *weights,
        cos,
        sin,
        1e-6,
        norm,
        rotary,
        pairing,
        draw.choice(("bhsd", "bhsd", "bshd")),
        draw.random() < 0.2,
    )


CASES = Cases(CALLS, random_call, peers=PEERS, bounds=BOUNDS, exact=False)

"""Real calls of attention: transformers of images and videos, the wide heads of their VAEs, padded text, and
small ones of every kind.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from turnout.ops.attention import padding
from turnout.routing.case import Case, Cases, normal, seeded

FLUX, WAN, VAE, QWEN = "Flux.1", "Wan2.1", "AutoencoderKL, mid block", "Qwen-Image, padded text"
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


def case(
    name: str,
    source: str,
    batch: int,
    heads: int,
    rows: int,
    dim: int,
    dtype: torch.dtype = BF16,
    *,
    keys: int | None = None,
    kv_heads: int | None = None,
    inside: bool = False,
    causal: bool = False,
    lengths: list | None = None,
    masked: list | None = None,
) -> Case:
    """`inside`: [B, S, H, D] in memory. `masked`: the lengths as a boolean mask."""

    def make(device: torch.device, seed: int) -> tuple:
        generator = seeded(device, seed)

        def one(count: int, length: int) -> Tensor:
            if inside:
                return normal((batch, length, count, dim), dtype, device, generator).transpose(1, 2)
            return normal((batch, count, length, dim), dtype, device, generator)

        q, (k, v) = one(heads, rows), (one(kv_heads or heads, keys or rows) for _ in range(2))
        mask = None
        if masked is not None:
            mask = (torch.arange(k.shape[2], device=device) < torch.tensor(masked, device=device)[:, None])[
                :, None, None
            ]
        return q, k, v, mask, causal, None, lengths

    shape = "x".join(map(str, (batch, heads, rows, dim)))
    return Case(f"{name} {shape}", source, dtype, make)


CALLS = [
    case("tiny", FLUX, 2, 3, 33, 64, FP32).only_for_tests(),
    case("tiny padded", QWEN, 2, 2, 20, 64, FP16, keys=50, lengths=[[7, 30], [20, 30]]).only_for_tests(),
    case("tiny wide", VAE, 1, 1, 70, 512, FP16).only_for_tests(),
    case("tiny causal", "transformers", 1, 4, 40, 32, FP32, kv_heads=2, causal=True).only_for_tests(),
    case("wide head", VAE + ", 512^2", 1, 1, 4096, 512),
    case("wide head", VAE + ", 1024^2", 1, 1, 16384, 512),
    case("wide head", "Wan2.1 VAE, mid block", 1, 1, 4096, 384),
    case("wide head", "Wan2.1 VAE, mid block", 1, 1, 16384, 384),
    case("wide head", VAE + ", 512^2", 1, 1, 4096, 512, FP16),
    case("wide head causal", "Gemma-4", 1, 8, 2048, 512, kv_heads=2, causal=True),
    case("image", FLUX, 1, 24, 4608, 128),
    case("image inside", FLUX, 1, 24, 4608, 128, inside=True),
    case("narrow heads", "Stable Diffusion 3.5", 1, 24, 4608, 64),
    case("video 480p", WAN, 1, 40, 32760, 128),
    case("video 720p", WAN + " 1.3B", 2, 12, 75600, 128),
    case("text", WAN + ", cross attention", 1, 40, 32760, 128, keys=512),
    case("unpadded", QWEN, 2, 24, 4608, 128),
    case("padded", QWEN, 2, 24, 4608, 128, lengths=[4400, 4608]),
    case("text then image", QWEN, 2, 24, 4608, 128, lengths=[[300, 4096], [512, 4096]]),
    case("masked", QWEN, 2, 24, 4608, 128, masked=[4400, 4608]),
    case("two sequences", "on a CPU", 1, 8, 1024, 64, FP32).only_on_a_cpu(),
]


def by_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    kv_lengths: Tensor | None,
    lengths: list[int],
) -> Tensor:
    """torch's attention as models call it, in whatever layout it returns: padding as a boolean mask."""
    valid = padding.valid_key_mask(lengths, kv_lengths, k.shape[0], k.shape[2], q.device)
    mask = mask if valid is None else valid[:, None, None]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=bool(q.shape[1] != k.shape[1])
    )


def preferring(backend: SDPBackend) -> Callable[..., Tensor]:
    """torch's attention, told which of its kernels to take if that can."""
    order = [
        backend,
        *(
            b
            for b in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
            if b != backend
        ),
    ]

    def call(*args: Any) -> Tensor:
        with sdpa_kernel([*order, SDPBackend.MATH], set_priority=True):
            return by_torch(*args)

    return call


PEERS = {
    "torch": by_torch,
    "torch-cudnn": preferring(SDPBackend.CUDNN_ATTENTION),
    "torch-flash": preferring(SDPBackend.FLASH_ATTENTION),
    "torch-efficient": preferring(SDPBackend.EFFICIENT_ATTENTION),
}

USUAL, WIDE = (16, 24, 64, 64, 128, 128, 20), (264, 320, 512, 512, 300)
LENGTHS = (1, 2, 3, 7, 16, 17, 33, 64)


def random_call(draw: random.Random, device: torch.device) -> tuple:
    """Any valid call, small: dtypes, layouts, grouped heads, head dims, cross attention, masks, lengths,
    nothing at all. One in six is what models with padded text ask for."""
    if draw.random() < 1 / 6:
        return _padded_call(draw, device)
    dtype = draw.choice((BF16, BF16, BF16, BF16, FP16, FP16, FP16, FP32, FP32, torch.float64))
    wide = draw.random() < 0.55
    dim = draw.choice(WIDE if wide else USUAL)
    batch, kv_heads = draw.choice((1, 1, 2, 3)), draw.choice((1, 1, 2))
    heads = kv_heads * draw.choice((1, 1, 1, 1, 2))
    if wide and draw.random() < 0.8:  # small enough for an interpreter
        batch = kv_heads = heads = 1
    rows = draw.choice((1, 2, 3) if wide else LENGTHS)
    keys = draw.choice((*LENGTHS, 130))
    if draw.random() < 0.03:
        rows, keys = draw.choice(((0, 5), (5, 0)))
    generator = torch.Generator().manual_seed(draw.randrange(2**31))

    strided = draw.random() < 0.1

    def one(count: int, length: int, width: int) -> Tensor:
        kind = draw.choice(
            ("across", "skipping") if strided else ("heads outside", "heads inside", "projection")
        )
        if kind == "across":
            return (
                torch.randn(batch, count, width, length, generator=generator)
                .to(device, dtype)
                .transpose(2, 3)
            )
        wider = {"projection": 16, "skipping": width}.get(kind, 0)
        x = torch.randn(batch, length, count, width + wider, generator=generator).to(device, dtype)
        x = (x[..., ::2] if kind == "skipping" else x[..., wider:]).transpose(1, 2)
        return x.contiguous() if kind == "heads outside" else x

    dim_v = draw.choice((16, 5)) if draw.random() < 0.08 and not wide else dim
    q, k, v = one(heads, rows, dim), one(kv_heads, keys, dim), one(kv_heads, keys, dim_v)
    mask = lengths = None
    kind = draw.random()
    if kind < 0.2:
        lengths = [_two(draw, keys) for _ in range(batch)]
        if draw.random() < 0.5:
            lengths = [sum(pair) for pair in lengths]
        if draw.random() < 0.3:
            lengths = torch.tensor(lengths, device=device, dtype=draw.choice((torch.int32, torch.int64)))
    elif kind < 0.35:
        shape = draw.choice(((batch, 1, 1, keys), (keys,), (batch, heads, rows, keys), (rows, keys)))
        mask = (torch.rand(shape, generator=generator) < 0.7).to(device)
        if draw.random() < 0.3:
            mask = torch.where(mask, 0.0, -torch.inf).to(dtype)
    return q, k, v, mask, draw.random() < 0.2, draw.choice((None, None, 0.3)), lengths


def _two(draw: random.Random, keys: int) -> list[int]:
    head = draw.randint(0, keys)
    return [head, draw.choice((0, draw.randint(0, keys - head)))]


def _padded_call(draw: random.Random, device: torch.device) -> tuple:
    batch, heads, rows, keys = (
        draw.choice((1, 2, 3)),
        draw.choice((1, 2, 4)),
        draw.choice(LENGTHS),
        draw.choice((16, 33, 64, 130)),
    )
    dim, dtype = draw.choice((16, 64, 128)), draw.choice((BF16, FP16))
    text, inside = keys // 4, draw.random() < 0.5
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    q, k, v = (
        torch.randn(batch, n, heads, dim, generator=generator).to(device, dtype).transpose(1, 2)
        for n in (rows, keys, keys)
    )
    if not inside:
        q, k, v = (x.contiguous() for x in (q, k, v))
    if draw.random() < 0.5:
        return q, k, v, None, False, None, [[draw.randint(0, text), keys - text] for _ in range(batch)]
    return q, k, v, None, False, None, [keys - draw.randint(0, text) for _ in range(batch)]


CASES = Cases(
    CALLS,
    random_call,
    peers=PEERS,
    exact=False,
    ordinary=("q", "k", "v"),
    of_torch=(
        "cudnn",
        "flash",
        "efficient",
        "flash-attention-3",
        "flash-attention-4",
        "math",
        "narrow",
        "common-keys",
    ),
    not_interpreted=("wide-head-hopper",),
)

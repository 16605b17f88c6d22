"""How the cases of all convolutions are made: real calls, random small ones with exact sums, and what torch
users do today.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from turnout.ops.convolution.problem import spread
from turnout.routing.case import Case, normal, seeded, small_integers

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
FIRST, LAST = "channels-first", "channels-last"
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}

WAN21, WAN22 = "Wan2.1 VAE, 480x832", "Wan2.2 VAE, 704x1280"
LTX, HUNYUAN, COGVIDEOX = "LTX-Video VAE, 512x768x121", "HunyuanVideo VAE", "CogVideoX VAE, 480x720"
FLUX, SDXL, MLX = "AutoencoderKL of Flux and SDXL, 1024x1024", "SDXL UNet", "ml-explore/mlx #3785"


def make_filled(
    shape: Sequence[int],
    layout: str,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
    scale: float = 1.0,
) -> Tensor:
    """Normal values in a layout, without a second buffer of that size."""
    if layout == FIRST:
        return normal(tuple(shape), dtype, device, generator).mul_(scale)
    return normal((shape[0], *shape[2:], shape[1]), dtype, device, generator).mul_(scale).movedim(-1, 1)


def make_weight(
    out: int,
    into: int,
    kernel: Sequence[int],
    layout: str,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
) -> Tensor:
    """Weights that keep the size of values, as trained ones do."""
    return make_filled((out, into, *kernel), layout, dtype, device, generator, (into * prod(kernel)) ** -0.5)


def convolution_case(
    source: str,
    size: Sequence[int],
    channels: tuple[int, int],
    dtype: torch.dtype = BF16,
    *,
    kernel: int | Sequence[int] = 3,
    batch: int = 1,
    stride: int = 1,
    padding: int | Sequence[int] | None = None,
    dilation: int = 1,
    groups: int = 1,
    layout: str = LAST,
    bias: bool = True,
) -> Case:
    """A convolution over `size` pixels with a padding that keeps it, unless one is given."""
    kernel = spread(kernel, len(size))
    padding = [d // 2 for d in kernel] if padding is None else spread(padding, len(size))
    into, out = channels

    def make(device: torch.device, seed: int) -> tuple:
        generator = seeded(device, seed)
        x = make_filled((batch, into, *size), layout, dtype, device, generator)
        weight = make_weight(out, into // groups, kernel, layout, dtype, device, generator)
        return (
            x,
            weight,
            normal((out,), dtype, device, generator) if bias else None,
            stride,
            padding,
            dilation,
            groups,
        )

    name = named(size, channels, kernel, batch, stride, dilation, groups, layout)
    return Case(name if bias else f"{name}, no bias", source, dtype, make)


def named(
    size: Sequence[int],
    channels: tuple[int, int],
    kernel: Sequence[int],
    batch: int = 1,
    stride: int = 1,
    dilation: int = 1,
    groups: int = 1,
    layout: str = LAST,
) -> str:
    """The name of a case: `4x480x832 96->96 3x3x3 channels-last`."""
    parts = ["x".join(map(str, size)), f"{channels[0]}->{channels[1]}", "x".join(map(str, kernel))]
    parts += [
        f"{word} {n}"
        for word, n in (("batch", batch), ("stride", stride), ("dilation", dilation), ("groups", groups))
        if n != 1
    ]
    return " ".join([*parts, layout])


# Random calls


KINDS = (FP32, FP32, BF16, BF16, FP16, torch.float64)


def random_sizes(draw: random.Random, spatial: int) -> dict[str, Any]:
    """Sizes of a small convolution, valid most of the time: odd channels, groups, depthwise, strides,
    dilations, empty ones.
    """
    groups = draw.choice((1, 1, 1, 1, 2, 3))
    into, out = (groups * draw.choice((1, 2, 3, 5, 8, 16)) for _ in range(2))
    kind = draw.random()
    if kind < 0.1:
        groups, out = into, into * draw.choice((1, 2))
    elif kind < 0.5:  # whole vectors of channels, as models have them
        groups, into, out = 1, draw.choice((8, 16, 24)), draw.choice((3, 8, 16, 24))
    kernel = (
        [draw.choice((1, 3))] * spatial
        if draw.random() < 0.4
        else [draw.choice((1, 2, 3, 3, 4, 5)) for _ in range(spatial)]
    )
    plain = draw.random() < 0.5
    stride = [1 if plain else draw.choice((1, 1, 2, 3)) for _ in range(spatial)]
    dilation = [1 if plain else draw.choice((1, 1, 2)) for _ in range(spatial)]
    padding = [k // 2 if plain else draw.choice((0, 1, 2)) for k in kernel]
    # oneDNN crashes on some calls in which outputs see nothing but padding (torch 2.13).
    if max(kernel) > 1 or groups > 1:
        padding = [min(p, d * (k - 1)) for p, d, k in zip(padding, dilation, kernel, strict=True)]
    least = (max(1, d * (k - 1) + 1 - 2 * p) for k, d, p in zip(kernel, dilation, padding, strict=True))
    size = [n + draw.choice((0, 0, 1, 2, 4, 6)) for n in least]
    size = [_seen(*numbers) for numbers in zip(size, kernel, stride, padding, dilation, strict=True)]
    batch = draw.choice((1, 1, 1, 2, 3)) if draw.random() < 0.98 else 0
    return {
        "shape": (batch, into, *size),
        "weight": (out, into // groups, *kernel),
        "stride": stride,
        "padding": padding,
        "dilation": dilation,
        "groups": groups,
    }


def _seen(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """So many pixels or a few more, that some output sees one of them: where none does, oneDNN writes beside
    its memory (torch 2.13).

    >>> _seen(1, 1, 2, 1, 1), _seen(1, 2, 3, 1, 2), _seen(1, 3, 1, 1, 1)
    (2, 2, 1)
    """
    outputs = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    places = (o * stride - padding + k * dilation for o in range(outputs) for k in range(kernel))
    return (
        size
        if any(0 <= place < size for place in places)
        else _seen(size + 1, kernel, stride, padding, dilation)
    )


def random_tensor(
    draw: random.Random, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Small integers in any layout, a third of the time channels last. One channel comes contiguous: torch
    2.13 gets conv3d wrong on a CPU where the strides of one channel look like channels last."""
    if shape[1] == 1:
        return small_integers(draw, shape, dtype, device).clone(memory_format=torch.contiguous_format)
    if draw.random() < 0.35:
        return small_integers(draw, (shape[0], *shape[2:], shape[1]), dtype, device).movedim(-1, 1)
    return small_integers(draw, shape, dtype, device)


def random_bias(draw: random.Random, count: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    return small_integers(draw, (count,), dtype, device) if draw.random() < 0.6 else None


def random_convolution(draw: random.Random, device: torch.device, spatial: int) -> tuple:
    """The public arguments of any valid call of conv2d or conv3d."""
    sizes, dtype = random_sizes(draw, spatial), draw.choice(KINDS)
    x, weight = (random_tensor(draw, sizes[name], dtype, device) for name in ("shape", "weight"))
    numbers = (sizes["stride"], sizes["padding"], sizes["dilation"], sizes["groups"])
    convolve = F.conv2d if spatial == 2 else F.conv3d
    residual = None
    if draw.random() < 0.2:
        shape = convolve(x.to("meta"), weight.to("meta"), None, *numbers).shape
        residual = random_tensor(draw, tuple(shape), dtype, device)
    return x, weight, random_bias(draw, weight.shape[0], dtype, device), *numbers, residual


# Peers


_kept: Any = WeakIdKeyDictionary()


def kept_in(x: Tensor, layout: str) -> Tensor:
    """A tensor in a layout.

    The copy is kept as long as the tensor lives: a peer does not pay for the layout the case happens to have.
    """
    format = torch.contiguous_format if layout == FIRST else FORMATS[x.dim()]
    if x.is_contiguous(memory_format=format):
        return x
    return kept_for(x, layout, lambda: x.contiguous(memory_format=format))


def kept_for(x: Tensor, name: str, make: Callable[[], Tensor]) -> Tensor:
    """A tensor made of x once, and kept as long as x lives."""
    copies = _kept.setdefault(x, {})
    if name not in copies:
        copies[name] = make()
    return copies[name]


def in_layout(convolve: Callable[..., Tensor], layout: str) -> Callable[..., Tensor]:
    """Torch's convolution on tensors that have this layout already."""

    def run(input: Tensor, weight: Tensor, bias: Tensor | None, *numbers: Any) -> Tensor:
        return convolve(kept_in(input, layout), kept_in(weight, layout), bias, *numbers[:4])

    return run


def autotuned(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same with `cudnn.benchmark`, which is left as it was.

    ROCm searches for minutes, so there it stays off.
    """

    def tuned(*args: Any) -> Tensor:
        before = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = torch.version.hip is None
        try:
            return run(*args)
        finally:
            torch.backends.cudnn.benchmark = before

    return tuned


def peers(convolve: Callable[..., Tensor]) -> dict[str, Callable[..., Tensor]]:
    return {
        "torch channels-first": in_layout(convolve, FIRST),
        "torch channels-last": in_layout(convolve, LAST),
        "torch channels-last, cudnn.benchmark": autotuned(in_layout(convolve, LAST)),
    }

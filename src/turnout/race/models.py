"""What may race: real architectures in several sizes, with random weights or those of a folder, and one call to make of each."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

Call = Callable[[Any], Tensor]


class Racer(NamedTuple):
    """A model by name: its sizes (the last one is the full one), and how to make it and its call for one of them."""

    title: str
    sizes: dict[str, tuple[int, ...]]
    make: Callable[[Settings], tuple[Any, Call]]
    pictures: bool  # whether the output is frames in [-1, 1], [B, 3, (T,) H, W]
    axes: str = ""  # what the numbers of a size are

    def describe(self, size: str) -> str:
        return f"{self.title}, {size}: {' x '.join(map(str, self.sizes[size]))} {self.axes}".rstrip()


class Settings(NamedTuple):
    """One race: the numbers of its size, dtype, device, and a folder of weights (None: random ones)."""

    size: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    weights: Path | None


def _diffusers(name: str) -> Any:
    return getattr(importlib.import_module("diffusers"), name)


def _made(settings: Settings, cls: Any, part: str, **config: Any) -> Any:
    """A model in evaluation mode: from a folder, or from its part of a pipeline's folder, or random from a configuration."""
    if settings.weights is not None:
        inner = settings.weights / part
        model = cls.from_pretrained(inner if inner.is_dir() else settings.weights, torch_dtype=settings.dtype)
    else:
        torch.manual_seed(0)
        with torch.device(settings.device):
            model = cls(**config)
    # torch's own `to`: diffusers' tells us that its models know better which parts stay in float32
    return torch.nn.Module.to(model, settings.device, settings.dtype).eval().requires_grad_(False)


def _random(settings: Settings, *shape: int) -> Tensor:
    generator = torch.Generator(settings.device).manual_seed(1)
    return torch.randn(shape, generator=generator, device=settings.device).to(settings.dtype)


def _decode(latents: Tensor) -> Call:
    return lambda model: model.decode(latents.to(model.dtype), return_dict=False)[0]


WAN22 = {
    "base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, "is_residual": True, "in_channels": 12, "out_channels": 12, "patch_size": 2,
    "scale_factor_spatial": 16, "latents_mean": [0.0] * 48, "latents_std": [1.0] * 48,
}  # fmt: skip
FLUX_VAE = {
    "down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4, "block_out_channels": [128, 256, 512, 512],
    "layers_per_block": 2, "latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False,
}  # fmt: skip


def wan_vae(settings: Settings) -> tuple[Any, Call]:
    height, width, frames = settings.size
    model = _made(settings, _diffusers("AutoencoderKLWan"), "vae")
    return model, _decode(_random(settings, 1, 16, 1 + (frames - 1) // 4, height // 8, width // 8))


def wan22_vae(settings: Settings) -> tuple[Any, Call]:
    height, width, frames = settings.size
    model = _made(settings, _diffusers("AutoencoderKLWan"), "vae", **WAN22)
    return model, _decode(_random(settings, 1, 48, 1 + (frames - 1) // 4, height // 16, width // 16))


def flux_vae(settings: Settings) -> tuple[Any, Call]:
    height, width = settings.size
    return _made(settings, _diffusers("AutoencoderKL"), "vae", **FLUX_VAE), _decode(_random(settings, 1, 16, height // 8, width // 8))


def ltx_vae(settings: Settings) -> tuple[Any, Call]:
    height, width, frames = settings.size
    model = _made(settings, _diffusers("AutoencoderKLLTXVideo"), "vae")
    return model, _decode(_random(settings, 1, 128, 1 + (frames - 1) // 8, height // 32, width // 32))


def flux(settings: Settings) -> tuple[Any, Call]:
    double, single, side, words = settings.size
    model = _made(
        settings, _diffusers("FluxTransformer2DModel"), "transformer", num_layers=double, num_single_layers=single, guidance_embeds=True
    )
    pixels = torch.arange(side * side, device=settings.device)
    places = torch.stack([torch.zeros_like(pixels), pixels // side, pixels % side], 1).float()
    image, text = _random(settings, 1, side * side, 64), _random(settings, 1, words, 4096)
    pooled, half = _random(settings, 1, 768), torch.full((1,), 0.5, device=settings.device)

    def call(model: Any) -> Tensor:
        inputs = (x.to(model.dtype) for x in (image, text, pooled, half, 8 * half))
        names = ("hidden_states", "encoder_hidden_states", "pooled_projections", "timestep", "guidance")
        return model(**dict(zip(names, inputs, strict=True)), img_ids=places, txt_ids=places.new_zeros(words, 3), return_dict=False)[0]

    return model, call


def wan(settings: Settings) -> tuple[Any, Call]:
    layers, frames, height, width, words = settings.size
    heads = 12 if layers > 2 else 4
    model = _made(
        settings, _diffusers("WanTransformer3DModel"), "transformer", num_layers=layers, num_attention_heads=heads, ffn_dim=heads * 128 * 4
    )
    video, text = _random(settings, 1, 16, frames, height, width), _random(settings, 1, words, 4096)

    def call(model: Any) -> Tensor:
        step = torch.full((1,), 500, device=settings.device)
        return model(video.to(model.dtype), timestep=step, encoder_hidden_states=text.to(model.dtype), return_dict=False)[0]

    return model, call


def _mamba(settings: Settings, layers: int, hidden: int) -> Any:
    transformers = importlib.import_module("transformers")
    config = transformers.MambaConfig(num_hidden_layers=layers, hidden_size=hidden, vocab_size=1024)
    return _made(settings, transformers.MambaForCausalLM, "", config=config)


def _tokens(settings: Settings, batch: int, length: int) -> Tensor:
    return torch.randint(1024, (batch, length), generator=torch.Generator().manual_seed(1)).to(settings.device)


def mamba(settings: Settings) -> tuple[Any, Call]:
    layers, hidden, batch, length = settings.size
    tokens = _tokens(settings, batch, length)
    return _mamba(settings, layers, hidden), lambda model: model(tokens, use_cache=False).logits


def mamba_decode(settings: Settings) -> tuple[Any, Call]:
    """The logits of every step after a short prompt. The tokens are the prompt's own, so that a tie decides nothing."""
    layers, hidden, batch, steps = settings.size
    prompt = _tokens(settings, batch, 8)
    rules = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "output_logits": True, "return_dict_in_generate": True}

    def same_token(sequences: Tensor, scores: Tensor) -> Tensor:
        forced = torch.full_like(scores, -math.inf)
        return forced.index_fill(1, prompt[0, :1], 0.0)

    def call(model: Any) -> Tensor:
        found = model.generate(prompt, max_new_tokens=steps, logits_processor=[same_token], **rules)
        return torch.stack(found.logits)

    return _mamba(settings, layers, hidden), call


IMAGE, VIDEO = "(height x width)", "(height x width x frames)"
RACERS = {
    "wan-vae": Racer("Wan 2.1 VAE decode", {"tiny": (16, 24, 5), "small": (32, 48, 5), "full": (480, 832, 81)}, wan_vae, True, VIDEO),
    "wan22-vae": Racer("Wan 2.2 VAE decode", {"tiny": (32, 32, 5), "small": (64, 96, 9), "full": (704, 1280, 61)}, wan22_vae, True, VIDEO),
    "flux-vae": Racer("Flux VAE decode", {"tiny": (32, 32), "small": (128, 128), "full": (1024, 1024)}, flux_vae, True, IMAGE),
    "ltx-vae": Racer("LTX VAE decode", {"tiny": (32, 32, 9), "small": (64, 96, 17), "full": (512, 768, 121)}, ltx_vae, True, VIDEO),
    "flux": Racer("Flux transformer", {"tiny": (1, 1, 4, 8), "small": (1, 1, 16, 64), "full": (4, 8, 64, 512)}, flux, False),
    "wan": Racer("Wan transformer", {"tiny": (1, 1, 4, 4, 8), "small": (2, 2, 8, 12, 16), "full": (4, 21, 60, 104, 512)}, wan, False),
    "mamba": Racer("Mamba prefill", {"tiny": (1, 64, 1, 16), "small": (2, 256, 2, 128), "full": (4, 1536, 8, 2048)}, mamba, False),
    "mamba-decode": Racer(
        "Mamba decode", {"tiny": (1, 64, 2, 4), "small": (2, 256, 2, 16), "full": (24, 1536, 8, 32)}, mamba_decode, False
    ),
}

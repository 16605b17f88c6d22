"""Which VAEs can be distributed, what of them mixes all pixels of a frame, and what is refused."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from turnout.models.state import REPLAYS

LATENTS = 4  # of Wan 2.1 at 480 x 832, four fill eight H200 as far as frames are small: see docs/guides
_SWAPPING = ("_hf_hook", "_diffusers_hook")  # attributes of modules with hooks of accelerate, of diffusers
_AUTOENCODERS = "diffusers.models.autoencoders"


class Known(NamedTuple):
    """Modules of a VAE that mix all pixels of a frame. Every rank computes them whole, but for `attention`:
    of those whose last step that mixes pixels is attention, a rank attends from its own pixels only.

    rest: whether the encoder drops the last row of an odd number where it halves them ("down"), or keeps it
    ("up"); None where it takes multiples of the latents only, or it is not known."""

    attention: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    rest: Literal["down", "up"] | None = None


KNOWN = {
    f"{_AUTOENCODERS}.autoencoder_kl_wan.AutoencoderKLWan": Known(("WanAttentionBlock",), rest="down"),
    f"{_AUTOENCODERS}.autoencoder_kl_qwenimage.AutoencoderKLQwenImage": Known(
        ("QwenImageAttentionBlock",), rest="down"
    ),
    f"{_AUTOENCODERS}.autoencoder_kl.AutoencoderKL": Known(("Attention",), rest="down"),
    f"{_AUTOENCODERS}.autoencoder_kl_flux2.AutoencoderKLFlux2": Known(("Attention",), rest="down"),
    f"{_AUTOENCODERS}.autoencoder_kl_hunyuan_video.AutoencoderKLHunyuanVideo": Known(
        whole=("HunyuanVideoMidBlock3D",), rest="up"
    ),
    f"{_AUTOENCODERS}.autoencoder_kl_cogvideox.AutoencoderKLCogVideoX": Known(rest="down"),
    f"{_AUTOENCODERS}.autoencoder_kl_ltx.AutoencoderKLLTXVideo": Known(),
    f"{_AUTOENCODERS}.autoencoder_kl_ltx2.AutoencoderKLLTX2Video": Known(),
}


def known_parts(vae: Any) -> Known:
    for cls in type(vae).__mro__:
        key = f"{cls.__module__}.{cls.__qualname__}"
        if key in KNOWN:
            return KNOWN[key]
    names = ", ".join(sorted(key.rpartition(".")[2] for key in KNOWN))
    raise ValueError(f"distribute: {type(vae).__name__} is not known; one of: {names}")


def most_latents(vae: Any, latents: Any) -> int:
    """How many latents go through a decoder at a time, at most."""
    by_latent = hasattr(vae, "_cached_conv_counts")
    if latents == "auto":
        return LATENTS if by_latent else 1
    if not isinstance(latents, int) or isinstance(latents, bool) or latents < 1:
        raise ValueError(f"distribute: latents {latents!r}; it needs 'auto' or a number of at least 1")
    if latents > 1 and not by_latent:
        raise ValueError(
            f"distribute: latents {latents} for {type(vae).__name__}, which decodes all latents at once; "
            "leave latents out"
        )
    return latents


def refuse_tiling(vae: Any) -> None:
    if getattr(vae, "use_tiling", False):
        raise ValueError(
            f"distribute: tiling of {type(vae).__name__} is on, whose overlaps change the picture; "
            "call vae.disable_tiling()"
        )


def refuse_noise(vae: nn.Module) -> None:
    for path, module in vae.named_modules():
        if getattr(module, "per_channel_scale1", None) is not None:
            raise ValueError(
                f"distribute: {path} adds noise, which ranks would draw for themselves; "
                "it needs a model with inject_noise=False"
            )


def refuse_compiled() -> None:
    if torch.compiler.is_compiling():
        raise RuntimeError("a distributed model cannot be compiled from outside; restore() it first")


def refuse_swapped(vae: nn.Module) -> None:
    """Ranks that are threads share the modules: one would take away what another one computes with."""
    for path, module in vae.named_modules():
        if path and not vars(module).keys().isdisjoint(_SWAPPING):
            raise ValueError(
                f"weights of {path} come and go around its calls (offloading, layerwise casting), and ranks "
                "in lockstep share them; use processes, each with a model of its own"
            )


def refuse_captured(vae: Any) -> None:
    for module in vae.modules():
        if module._compiled_call_impl is not None or "_orig_mod" in module._modules:
            raise ValueError(
                f"a distributed model cannot have compiled parts, and {type(module).__name__} is compiled: "
                "the program would keep the part of one rank; use the module as it was before"
            )
    if REPLAYS in vars(vae):
        raise ValueError(
            "a distributed model is not captured in CUDA graphs; call accelerate(vae) without graph=True"
        )


def why_whole(vae: nn.Module, x: Tensor) -> str | None:
    """Why a call is computed whole on every rank."""
    if torch.is_grad_enabled() and (
        x.requires_grad or any(weight.requires_grad for weight in vae.parameters())
    ):
        return "gradients are wanted (torch.no_grad() is not entered)"
    if torch.is_autocast_enabled(x.device.type):
        return "autocast is on"
    return None


def pixels_of_a_latent(vae: Any) -> int:
    """Rows and columns of pixels that one of the latents stands for."""
    ratio = getattr(vae, "spatial_compression_ratio", None)
    return 2 ** (len(vae.config.block_out_channels) - 1) if ratio is None else int(ratio)

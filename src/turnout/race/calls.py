"""The calls of the models that race: random inputs of a size, and a function of the model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from turnout.race.racer import VOCABULARY, Call, MakeCall, Settings
from turnout.routing.device import is_planning


def weight_dtype(model: Any) -> torch.dtype:
    """The dtype of a model's weights, which are all of one: that of the first. `model.dtype` of diffusers and
    transformers walks through all modules, 13 ms of a host for a U-Net of SDXL, and would be part of every
    timed call.
    """
    return next(model.parameters()).dtype


def random_tensor(settings: Settings, *shape: int) -> Tensor:
    # While calls are only planned, the device need not be here.
    generator = None if is_planning() else torch.Generator(settings.device).manual_seed(1)
    return torch.randn(shape, generator=generator, device=settings.device).to(settings.dtype)


# ---- VAEs: their inputs follow from the model's own configuration, so that any folder of weights can race


def ratios(model: Any) -> tuple[int, int]:
    """How many pixels on each side, and how many frames, one latent stands for."""
    config = model.config
    halved = 2 ** (len(config.get("block_out_channels") or config.get("dim_mult")) - 1)

    def first(*names: str, default: int) -> int:
        value = next((config[name] for name in names if config.get(name)), None)
        return value or next((vars(model)[name] for name in names if vars(model).get(name)), default)

    return (
        first("scale_factor_spatial", "spatial_compression_ratio", default=halved),
        first("scale_factor_temporal", "temporal_compression_ratio", default=4),
    )


def decode_call(axes: Sequence[str], video: bool) -> MakeCall:
    """Decode random latents, `[B, C, H, W]`, of a video's VAE `[B, C, T, H, W]`."""

    def make(model: Any, settings: Settings) -> Call:
        size = dict(zip(axes, settings.size, strict=True))
        pixels, frames = ratios(model)
        batch = size.get("images", 1)
        channels = model.config.get("latent_channels") or model.config.get("z_dim")
        time = (1 + (size.get("frames", 1) - 1) // frames,) if video else ()
        plane = (size["height"] // pixels, size["width"] // pixels)
        latents = random_tensor(settings, batch, channels, *time, *plane)
        # LTX 0.9.1 and later takes the share of noise that is left.
        noise = [torch.full((batch,), 0.05)] if model.config.get("timestep_conditioning") else []

        def call(model: Any) -> Tensor:
            dtype = weight_dtype(model)
            inputs = (x.to(latents.device, dtype) for x in (latents, *noise))
            return model.decode(*inputs, return_dict=False)[0]

        return call

    return make


def encode_call(axes: Sequence[str], video: bool) -> MakeCall:
    """Encode random pictures, `[B, 3, (T,) H, W]` in [-1, 1]; the output is the mean of the latents'
    distribution."""

    def make(model: Any, settings: Settings) -> Call:
        size = dict(zip(axes, settings.size, strict=True))
        time = (size.get("frames", 1),) if video else ()
        shape = (size.get("images", 1), 3, *time, size["height"], size["width"])
        pixels = random_tensor(settings, *shape).clamp(-1, 1)
        return lambda model: model.encode(pixels.to(weight_dtype(model)), return_dict=False)[0].mode()

    return make


# ---- transformers and U-Nets


def flux_call(model: Any, settings: Settings) -> Call:
    *_, side, words = settings.size
    config = model.config
    pixels = torch.arange(side * side, device=settings.device)
    places = torch.stack([torch.zeros_like(pixels), pixels // side, pixels % side], 1).float()
    image = random_tensor(settings, 1, side * side, config.in_channels)
    text, pooled = (
        random_tensor(settings, 1, words, config.joint_attention_dim),
        random_tensor(settings, 1, config.pooled_projection_dim),
    )
    half = torch.full((1,), 0.5, device=settings.device)

    def call(model: Any) -> Tensor:
        dtype = weight_dtype(model)
        inputs = (x.to(dtype) for x in (image, text, pooled, half, 8 * half))
        names = ("hidden_states", "encoder_hidden_states", "pooled_projections", "timestep", "guidance")
        return model(
            **dict(zip(names, inputs, strict=True)),
            img_ids=places,
            txt_ids=places.new_zeros(words, 3),
            return_dict=False,
        )[0]

    return call


def wan_call(model: Any, settings: Settings) -> Call:
    _, frames, height, width, words = settings.size
    video = random_tensor(settings, 1, model.config.in_channels, frames, height, width)
    text = random_tensor(settings, 1, words, model.config.text_dim)
    step = torch.full((1,), 500, device=settings.device)

    def call(model: Any) -> Tensor:
        dtype = weight_dtype(model)
        inputs = {"hidden_states": video.to(dtype), "encoder_hidden_states": text.to(dtype)}
        return model(**inputs, timestep=step, return_dict=False)[0]

    return call


def qwen_image_call(model: Any, settings: Settings) -> Call:
    """One step without a mask: the pipeline gives none where every word counts."""
    _, side, words = settings.size
    image = random_tensor(settings, 1, side * side, model.config.in_channels)
    text = random_tensor(settings, 1, words, model.config.joint_attention_dim)
    half = torch.full((1,), 0.5, device=settings.device)

    def call(model: Any) -> Tensor:
        dtype = weight_dtype(model)
        return model(
            hidden_states=image.to(dtype),
            encoder_hidden_states=text.to(dtype),
            timestep=half.to(dtype),
            img_shapes=[[(1, side, side)]],
            return_dict=False,
        )[0]

    return call


def unet_call(model: Any, settings: Settings) -> Call:
    """One step: a picture with its prompt and without; SDXL's also with a pooled text and six sizes."""
    batch, height, width = settings.size
    config = model.config
    latents = random_tensor(settings, batch, config.in_channels, height // 8, width // 8)
    text = random_tensor(settings, batch, 77, config.cross_attention_dim)  # CLIP's 77 words
    step = torch.tensor(500, device=settings.device)
    added: dict[str, Tensor] = {}
    if config.addition_embed_type == "text_time":
        pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        times = torch.tensor([height, width, 0, 0, height, width], device=settings.device)
        added = {"text_embeds": random_tensor(settings, batch, pooled), "time_ids": times.repeat(batch, 1)}

    def call(model: Any) -> Tensor:
        dtype = weight_dtype(model)
        conditions = {name: value.to(dtype) for name, value in added.items()} or None
        inputs = (latents.to(dtype), step, text.to(dtype))
        return model(*inputs, added_cond_kwargs=conditions, return_dict=False)[0]

    return call


# ---- state-space models


def _tokens(settings: Settings, batch: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(VOCABULARY, (batch, length), generator=generator).to(settings.device)


def prefill_call(model: Any, settings: Settings) -> Call:
    *_, batch, length = settings.size
    tokens = _tokens(settings, batch, length)
    return lambda model: model(tokens, use_cache=False).logits


def generate_call(model: Any, settings: Settings) -> Call:
    """Generate after a short prompt, and return the logits of every step.

    Each step takes a token of the prompt, not the likeliest one, so that no tie can change the sequence.
    """
    *_, batch, steps = settings.size
    prompt = _tokens(settings, batch, 8)
    rules = {
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
        "output_logits": True,
        "return_dict_in_generate": True,
    }

    def same_token(sequences: Tensor, scores: Tensor) -> Tensor:
        forced = torch.full_like(scores, -math.inf)
        return forced.index_fill(1, prompt[0, :1], 0.0)

    def call(model: Any) -> Tensor:
        generated = model.generate(prompt, max_new_tokens=steps, logits_processor=[same_token], **rules)
        return torch.stack(generated.logits)

    return call

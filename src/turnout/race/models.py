"""The models that race: every known one in three sizes, with random weights or a folder's, and its call."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from turnout.models.accelerate import accelerate
from turnout.race import configs
from turnout.race.calls import (
    decode_call,
    encode_call,
    flux_call,
    generate_call,
    prefill_call,
    qwen_image_call,
    ratios,
    unet_call,
    wan_call,
)
from turnout.race.racer import VOCABULARY, MakeCall, Racer
from turnout.routing.names import not_known


def racer_named(name: str) -> Racer:
    """Find the race of a model by name; the error for an unknown name lists the nearest one, and all."""
    if name in RACERS:
        return RACERS[name]
    raise not_known("model", name, [*RACERS, "all"])


def names_of(models: list[str]) -> list[str]:
    """The models of a command, each once; "all" stands for every one. Raises ValueError for unknown names."""
    for name in models:
        if name != "all":
            racer_named(name)
    return list(RACERS) if "all" in models else list(dict.fromkeys(models))


def size_named(name: str, size: str, device: torch.device) -> str:
    """Check a size of a model; "" is the full one on a GPU and the small one on a CPU."""
    sizes = racer_named(name).sizes
    size = size or ("full" if device.type == "cuda" else "small")
    if size not in sizes:
        raise ValueError(f"{name} has no size {size!r}; one of: {', '.join(sizes)}")
    return size


def prepare_accelerated(
    name: str, size: str, dtype: torch.dtype, device: torch.device
) -> Callable[[], Tensor]:
    """Build and accelerate a model, and return its call without gradients, for `tune(during=...)`."""
    racer, size = racer_named(name), size_named(name, size, device)
    with torch.no_grad():
        model, call = racer.make(size, dtype, device)
        accelerate(model)
    return lambda: torch.no_grad()(call)(model)


def check_weights(folder: Path, racer: Racer) -> None:
    """Raise ValueError if a folder cannot hold the weights of a model, before anything is built.

    The folder is the model's own, with a config.json, or a pipeline's, with the model in `racer.part`.
    """
    if not folder.is_dir():
        raise ValueError(f"--weights {folder}: there is no such folder; give a model's or a pipeline's")
    file = next(
        (path for path in (folder / racer.part / "config.json", folder / "config.json") if path.is_file()),
        None,
    )
    if file is None:
        inner = f", and no {racer.part}/config.json" if racer.part else ""
        raise ValueError(f"--weights {folder}: it has no config.json{inner}; give a model's or a pipeline's")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        names = [config["_class_name"]] if "_class_name" in config else config.get("architectures", [])
    except (OSError, ValueError, TypeError, AttributeError) as mistake:
        raise ValueError(f"--weights {folder}: {file.name} cannot be read as JSON: {mistake}") from mistake
    if names and racer.model not in names:
        raise ValueError(f"--weights {folder}: it is a {names[0]}, this race needs a {racer.model}")


IMAGE, VIDEO, IMAGES = ("height", "width"), ("height", "width", "frames"), ("images", "height", "width")


def check_size(name: str, racer: Racer, model: Any, numbers: tuple[int, ...]) -> None:
    """Raise ValueError if a VAE has no latents for a picture of this size."""
    if racer.part != "vae":
        return
    pixels, _ = ratios(model)
    sides = zip(racer.axes.strip("()").split(" x "), numbers, strict=True)
    unfit = [n for axis, n in sides if axis in IMAGE and n % pixels]
    if unfit:
        shown = " x ".join(map(str, numbers))
        raise ValueError(
            f"{name} of {shown} {racer.axes}: {unfit[0]} is no multiple of {pixels}, "
            "the pixels a side of one latent"
        )


def _vae(
    name: str,
    title: str,
    model: str,
    axes: tuple[str, ...],
    *,
    tiny: tuple[int, ...],
    small: tuple[int, ...],
    full: tuple[int, ...],
    full_encode: tuple[int, ...] | None = None,
    video: bool = True,
    dtypes: tuple[str, ...] = ("bfloat16",),
) -> dict[str, Racer]:
    """A VAE's two races, `NAME` (decode) and `NAME-encode`."""
    by_size = {
        "tiny": configs.TINY[name],
        "small": configs.SMALL.get(name, configs.FULL[name]),
        "full": configs.FULL[name],
    }
    shown = f"({' x '.join(axes)})"

    def racer(verb: str, part: str, largest: tuple[int, ...], call: MakeCall, pictures: bool) -> Racer:
        return Racer(
            f"{title} {verb}",
            "diffusers",
            model,
            {"tiny": tiny, "small": small, "full": largest},
            by_size,
            call,
            shown,
            "vae",
            part,
            pictures,
            dtypes,
        )

    return {
        name: racer("decode", "decoder", full, decode_call(axes, video), True),
        f"{name}-encode": racer("encode", "encoder", full_encode or full, encode_call(axes, video), False),
    }


def _by_size(name: str) -> dict[str, configs.Config]:
    base = name.removesuffix("-decode")
    return {"tiny": configs.TINY[base], "small": configs.SMALL[base], "full": configs.FULL[name]}


def _mamba(name: str, title: str, model: str, layers: str, *, prefill: tuple[int, int]) -> dict[str, Racer]:
    """A state-space family's two races, `NAME` (prefill) and `NAME-decode`.

    prefill: batch and length of the full size. layers: how many the published model has, in words.
    """

    def racer(key: str, kind: str, call: MakeCall, runs: dict[str, tuple[int, int]]) -> Racer:
        by_size = _by_size(key)
        sizes = {}
        for size, run in runs.items():
            config = by_size[size]
            sizes[size] = (config["num_hidden_layers"], _width(key, config), *run)
        note = f"{by_size['full']['num_hidden_layers']} layers of {layers}, a vocabulary of {VOCABULARY}"
        cls = f"{model}ForCausalLM"
        return Racer(f"{title} {kind}", "transformers", cls, sizes, by_size, call, note=note)

    prompts = {"tiny": (1, 16), "small": (2, 128), "full": prefill}
    steps = {"tiny": (2, 4), "small": (2, 16), "full": (8, 32)}
    return {
        name: racer(name, "prefill", prefill_call, prompts),
        f"{name}-decode": racer(f"{name}-decode", "decode", generate_call, steps),
    }


def _width(name: str, config: configs.Config) -> int:
    """The hidden size of a state-space model: its configuration's, or the default of its class."""
    defaults = {"mamba2": 4096, "jamba": 4096, "bamba": 4096, "zamba2": 2560}
    return config.get("hidden_size") or defaults[name.removesuffix("-decode")]


_HALF = ("float16",)
_ALL: dict[str, Racer] = {
    **_vae(
        "wan-vae", "Wan 2.1 VAE", "AutoencoderKLWan", VIDEO,
        tiny=(16, 24, 5), small=(32, 48, 5), full=(480, 832, 81), full_encode=(480, 832, 33),
    ),
    **_vae(
        "wan22-vae", "Wan 2.2 VAE", "AutoencoderKLWan", VIDEO,
        tiny=(32, 32, 5), small=(64, 96, 9), full=(704, 1280, 61), full_encode=(704, 1280, 33),
    ),
    **_vae(
        "qwen-image-vae", "Qwen-Image VAE", "AutoencoderKLQwenImage", IMAGE,
        tiny=(16, 24), small=(64, 64), full=(1328, 1328),
    ),
    **_vae(
        "ltx-vae", "LTX VAE", "AutoencoderKLLTXVideo", VIDEO,
        tiny=(32, 32, 9), small=(64, 96, 17), full=(512, 768, 121),
    ),
    **_vae(
        "ltx2-vae", "LTX-2 VAE", "AutoencoderKLLTX2Video", VIDEO,
        tiny=(64, 64, 9), small=(64, 96, 17), full=(512, 768, 121),
    ),
    **_vae(
        "hunyuan-vae", "HunyuanVideo VAE", "AutoencoderKLHunyuanVideo", VIDEO,
        tiny=(32, 32, 9), small=(64, 64, 5), full=(544, 960, 33),
    ),
    **_vae(
        "cogvideox-vae", "CogVideoX VAE", "AutoencoderKLCogVideoX", VIDEO,
        tiny=(32, 48, 9), small=(64, 64, 9), full=(480, 720, 49),
    ),
    **_vae(
        "sd-vae", "Stable Diffusion VAE", "AutoencoderKL", IMAGES, video=False, dtypes=("bfloat16",),
        tiny=(2, 16, 24), small=(2, 64, 64), full=(4, 512, 512),
    ),
    **_vae(
        "sdxl-vae", "SDXL VAE", "AutoencoderKL", IMAGE, video=False, dtypes=("float16", "float32"),
        tiny=(16, 24), small=(128, 128), full=(1024, 1024),
    ),
    **_vae(
        "flux-vae", "Flux VAE", "AutoencoderKL", IMAGE, video=False,
        tiny=(32, 32), small=(128, 128), full=(1024, 1024),
    ),
    **_vae(
        "flux2-vae", "Flux 2 VAE", "AutoencoderKLFlux2", IMAGE, video=False,
        tiny=(32, 32), small=(128, 128), full=(1024, 1024),
    ),
    "flux": Racer(
        "Flux transformer", "diffusers", "FluxTransformer2DModel",
        {"tiny": (1, 1, 4, 8), "small": (1, 1, 16, 64), "full": (4, 8, 64, 512)},
        _by_size("flux"), flux_call,
        part="transformer", note="4 of 19 and 8 of 38 blocks, 1024 x 1024 pixels, 512 words",
    ),
    "wan": Racer(
        "Wan transformer", "diffusers", "WanTransformer3DModel",
        {"tiny": (1, 1, 4, 4, 8), "small": (2, 2, 8, 12, 16), "full": (4, 21, 60, 104, 512)},
        _by_size("wan"), wan_call,
        part="transformer", note="4 of 30 blocks of Wan 2.1 1.3B, 480 x 832 pixels, 81 frames, 512 words",
    ),
    "qwen-image": Racer(
        "Qwen-Image transformer", "diffusers", "QwenImageTransformer2DModel",
        {"tiny": (1, 4, 8), "small": (1, 16, 64), "full": (4, 83, 512)},
        _by_size("qwen-image"), qwen_image_call,
        part="transformer", note="4 of 60 blocks, 1328 x 1328 pixels, 512 words",
    ),
    "sdxl-unet": Racer(
        "SDXL U-Net", "diffusers", "UNet2DConditionModel",
        {"tiny": (2, 64, 64), "small": (2, 256, 256), "full": (2, 1024, 1024)},
        _by_size("sdxl-unet"), unet_call,
        f"({' x '.join(IMAGES)})", "unet", dtypes=_HALF,
    ),
    "sd15-unet": Racer(
        "Stable Diffusion 1.5 U-Net", "diffusers", "UNet2DConditionModel",
        {"tiny": (2, 64, 64), "small": (2, 128, 128), "full": (2, 512, 512)},
        _by_size("sd15-unet"), unet_call,
        f"({' x '.join(IMAGES)})", "unet", dtypes=_HALF,
    ),
    # Stock's scans are loops in Python over the length (Mamba, Falcon Mamba, Jamba), or hold scores of every
    # pair of tokens in a chunk, for every head (the others): the lengths are what a card has time and memory
    # for.
    **_mamba("mamba", "Mamba", "Mamba", "Mamba 790M's 48", prefill=(8, 2048)),
    **_mamba("mamba2", "Mamba-2", "Mamba2", "Mamba-Codestral 7B's 64", prefill=(1, 1024)),
    **_mamba("falcon-mamba", "Falcon Mamba", "FalconMamba", "Falcon Mamba 7B's 64", prefill=(2, 1024)),
    **_mamba("jamba", "Jamba", "Jamba", "Jamba v0.1's 32 with 2 of 16 experts", prefill=(2, 1024)),
    **_mamba("bamba", "Bamba", "Bamba", "Bamba 9B's 32", prefill=(1, 1024)),
    **_mamba("falcon-h1", "Falcon H1", "FalconH1", "Falcon H1 7B's 44", prefill=(1, 1024)),
    **_mamba("zamba2", "Zamba2", "Zamba2", "Zamba2 2.7B's 54", prefill=(1, 1024)),
}  # fmt: skip
# In the order of `turnout race all`: what was slower than stock first, what has been raced often last.
_FIRST = (
    "hunyuan-vae",
    "sdxl-unet",
    "cogvideox-vae",
    "qwen-image-vae",
    "hunyuan-vae-encode",
    "wan-vae-encode",
    "flux-vae-encode",
    "ltx-vae-encode",
    "sd-vae",
    "sdxl-vae",
    "flux2-vae",
    "ltx2-vae",
    "sd15-unet",
    "flux",
    "wan",
    "qwen-image",
    "mamba",
    "mamba-decode",
    "mamba2",
    "mamba2-decode",
    "falcon-mamba",
    "falcon-mamba-decode",
    "jamba",
    "jamba-decode",
    "bamba",
    "bamba-decode",
    "falcon-h1",
    "falcon-h1-decode",
    "zamba2",
    "zamba2-decode",
)
RACERS: dict[str, Racer] = {name: _ALL[name] for name in (*_FIRST, *_ALL)}

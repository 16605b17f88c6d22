"""The models that race: every known one in three sizes, with random weights or a folder's, and its call."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from turnout.models.accelerate import accelerate
from turnout.race import configs
from turnout.routing.device import is_planning
from turnout.routing.names import not_known

Call = Callable[[Any], Tensor]
VOCABULARY = 1024  # of every state-space model: its head is one plain product, and the logits stay small


class Settings(NamedTuple):
    """How a model is built: numbers of its size, dtype, device, and a folder of weights (None: random)."""

    size: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    weights: Path | None = None


MakeCall = Callable[[Any, Settings], Call]


@dataclass(frozen=True)
class Racer:
    """A model that races: its class, its sizes and configurations, and the call to make.

    compiled: the submodule that the call runs, which torch.compile therefore compiles: "decoder" for a VAE's
    `decode`, "" for the model itself.
    """

    title: str
    package: str  # diffusers or transformers
    model: str  # the class
    sizes: dict[str, tuple[int, ...]]
    configs: dict[str, configs.Config]  # by size
    call: MakeCall
    axes: str = ""  # names of a size's numbers
    part: str = ""  # the model's folder in that of a pipeline
    compiled: str = ""
    pictures: bool = False  # whether the output is frames [B, 3, (T,) H, W] in [-1, 1]
    dtypes: tuple[str, ...] = ("bfloat16",)  # of its races; the first is the default
    note: str = ""  # how the full size differs from the published model

    def describe(self, size: str, *, own_weights: bool = False) -> str:
        """The title, the size and its numbers: "Flux VAE decode, tiny: 32 x 32 (height x width)"."""
        shown = f"{self.title}, {size}: {' x '.join(map(str, self.sizes[size]))} {self.axes}".rstrip()
        return f"{shown}, weights and layers of a folder" if own_weights else shown

    def default_dtype(self, device: torch.device) -> str:
        """The first dtype; on a CPU bfloat16 in place of float16, whose kernels there are slow or missing."""
        return "bfloat16" if device.type == "cpu" and self.dtypes[0] == "float16" else self.dtypes[0]

    def load_class(self) -> Any:
        """Import the model's class; raise ValueError if its package is missing or has no such class."""
        return getattr(_package(self.package, self.model), self.model)

    def build(self, size: str, settings: Settings) -> Any:
        """Build the model in evaluation mode, with random weights or those of its or a pipeline's folder."""
        cls = self.load_class()
        if settings.weights is not None:
            model = _from_folder(cls, settings.weights, self.part, settings.dtype)
        else:
            torch.manual_seed(0)
            with torch.device(settings.device):
                model = cls(**self._arguments(size))
        # torch's own `to`: that of diffusers warns that a model keeps some parts in float32.
        return torch.nn.Module.to(model, settings.device, settings.dtype).eval().requires_grad_(False)

    def make(
        self,
        size: str,
        dtype: torch.dtype,
        device: torch.device,
        weights: Path | None = None,
    ) -> tuple[Any, Call]:
        """Build the model in one size, and return it with its call."""
        settings = Settings(self.sizes[size], dtype, device, weights)
        model = self.build(size, settings)
        return model, self.call(model, settings)

    def _arguments(self, size: str) -> dict[str, Any]:
        """The arguments of the model's class: its configuration, for transformers as an object."""
        config = self.configs[size]
        if self.package == "diffusers":
            return config
        config_class = getattr(_package(self.package), self.model.removesuffix("ForCausalLM") + "Config")
        return {"config": config_class(**config, vocab_size=VOCABULARY)}


def racer_named(name: str) -> Racer:
    """Find the race of a model by name; the error for an unknown name lists the nearest one, and all."""
    if name in RACERS:
        return RACERS[name]
    raise not_known("model", name, [*RACERS, "all"])


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


def _package(name: str, class_name: str = "") -> Any:
    """Import a package; raise ValueError if it is missing, cannot be imported, or has no such class."""
    try:
        package = importlib.import_module(name)
        # These packages import a class when it is first looked up.
        has_class = not class_name or hasattr(package, class_name)
    except (ImportError, RuntimeError) as failure:
        if isinstance(failure, ModuleNotFoundError) and failure.name == name:
            raise ValueError(
                f"this race needs {name}, which is not installed; pip install 'turnout[race]'"
            ) from failure
        message = str(failure).split("\n")[0]
        raise ValueError(f"{name} is installed, but cannot be imported: {message}") from failure
    if not has_class:
        version = getattr(package, "__version__", "as installed")
        raise ValueError(f"{name} {version} has no {class_name}; pip install --upgrade {name}")
    return package


def _from_folder(cls: Any, folder: Path, part: str, dtype: torch.dtype) -> Any:
    """Load a model from its folder, or from its part of a pipeline's."""
    inner = folder / part
    source = inner if (inner / "config.json").is_file() else folder
    try:
        with _without_logged_tracebacks(cls.__module__.split(".")[0]):
            return cls.from_pretrained(source, torch_dtype=dtype)
    except (OSError, ValueError, KeyError, RuntimeError) as failure:
        message = str(failure).strip().splitlines()[0] if str(failure).strip() else type(failure).__name__
        raise ValueError(f"--weights {folder}: its {cls.__name__} cannot be loaded: {message}") from failure


@contextlib.contextmanager
def _without_logged_tracebacks(package: str) -> Iterator[None]:
    """Inside this block a package logs no exceptions: diffusers logs those that it raises too."""

    def has_no_traceback(record: logging.LogRecord) -> bool:
        return not record.exc_info

    handlers = list(logging.getLogger(package).handlers)
    for handler in handlers:
        handler.addFilter(has_no_traceback)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(has_no_traceback)


def weight_dtype(model: Any) -> torch.dtype:
    """The dtype of a model's weights, which are all of one: that of the first. `model.dtype` of diffusers and
    transformers walks through all modules, 13 ms of a host for a U-Net of SDXL, and would be part of every
    timed call.
    """
    return next(model.parameters()).dtype


def _random(settings: Settings, *shape: int) -> Tensor:
    # While calls are only planned, the device need not be here.
    generator = None if is_planning() else torch.Generator(settings.device).manual_seed(1)
    return torch.randn(shape, generator=generator, device=settings.device).to(settings.dtype)


# ---- VAEs: their inputs follow from the model's own configuration, so that any folder of weights can race

IMAGE, VIDEO, IMAGES = ("height", "width"), ("height", "width", "frames"), ("images", "height", "width")


def _ratios(model: Any) -> tuple[int, int]:
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


def check_size(name: str, racer: Racer, model: Any, numbers: tuple[int, ...]) -> None:
    """Raise ValueError if a VAE has no latents for a picture of this size."""
    if racer.part != "vae":
        return
    pixels, _ = _ratios(model)
    sides = zip(racer.axes.strip("()").split(" x "), numbers, strict=True)
    unfit = [n for axis, n in sides if axis in IMAGE and n % pixels]
    if unfit:
        shown = " x ".join(map(str, numbers))
        raise ValueError(
            f"{name} of {shown} {racer.axes}: {unfit[0]} is no multiple of {pixels}, "
            "the pixels a side of one latent"
        )


def _decode(axes: Sequence[str], video: bool) -> MakeCall:
    """Decode random latents, `[B, C, H, W]`, of a video's VAE `[B, C, T, H, W]`."""

    def make(model: Any, settings: Settings) -> Call:
        size = dict(zip(axes, settings.size, strict=True))
        pixels, frames = _ratios(model)
        batch = size.get("images", 1)
        channels = model.config.get("latent_channels") or model.config.get("z_dim")
        time = (1 + (size.get("frames", 1) - 1) // frames,) if video else ()
        plane = (size["height"] // pixels, size["width"] // pixels)
        latents = _random(settings, batch, channels, *time, *plane)
        # LTX 0.9.1 and later takes the share of noise that is left.
        noise = [torch.full((batch,), 0.05)] if model.config.get("timestep_conditioning") else []

        def call(model: Any) -> Tensor:
            dtype = weight_dtype(model)
            inputs = (x.to(latents.device, dtype) for x in (latents, *noise))
            return model.decode(*inputs, return_dict=False)[0]

        return call

    return make


def _encode(axes: Sequence[str], video: bool) -> MakeCall:
    """Encode random pictures, `[B, 3, (T,) H, W]` in [-1, 1]; the output is the mean of the latents'
    distribution."""

    def make(model: Any, settings: Settings) -> Call:
        size = dict(zip(axes, settings.size, strict=True))
        time = (size.get("frames", 1),) if video else ()
        shape = (size.get("images", 1), 3, *time, size["height"], size["width"])
        pixels = _random(settings, *shape).clamp(-1, 1)
        return lambda model: model.encode(pixels.to(weight_dtype(model)), return_dict=False)[0].mode()

    return make


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
        name: racer("decode", "decoder", full, _decode(axes, video), True),
        f"{name}-encode": racer("encode", "encoder", full_encode or full, _encode(axes, video), False),
    }


# ---- transformers and U-Nets


def _flux(model: Any, settings: Settings) -> Call:
    *_, side, words = settings.size
    config = model.config
    pixels = torch.arange(side * side, device=settings.device)
    places = torch.stack([torch.zeros_like(pixels), pixels // side, pixels % side], 1).float()
    image = _random(settings, 1, side * side, config.in_channels)
    text, pooled = (
        _random(settings, 1, words, config.joint_attention_dim),
        _random(settings, 1, config.pooled_projection_dim),
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


def _wan(model: Any, settings: Settings) -> Call:
    _, frames, height, width, words = settings.size
    video = _random(settings, 1, model.config.in_channels, frames, height, width)
    text = _random(settings, 1, words, model.config.text_dim)
    step = torch.full((1,), 500, device=settings.device)

    def call(model: Any) -> Tensor:
        dtype = weight_dtype(model)
        inputs = {"hidden_states": video.to(dtype), "encoder_hidden_states": text.to(dtype)}
        return model(**inputs, timestep=step, return_dict=False)[0]

    return call


def _qwen_image(model: Any, settings: Settings) -> Call:
    _, side, words = settings.size
    image = _random(settings, 1, side * side, model.config.in_channels)
    text = _random(settings, 1, words, model.config.joint_attention_dim)
    half = torch.full((1,), 0.5, device=settings.device)

    def call(model: Any) -> Tensor:
        dtype = weight_dtype(model)
        return model(
            hidden_states=image.to(dtype),
            encoder_hidden_states=text.to(dtype),
            timestep=half.to(dtype),
            encoder_hidden_states_mask=torch.ones(1, words, dtype=torch.bool, device=image.device),
            img_shapes=[[(1, side, side)]],
            return_dict=False,
        )[0]

    return call


def _unet(model: Any, settings: Settings) -> Call:
    """One step: a picture with its prompt and without; SDXL's also with a pooled text and six sizes."""
    batch, height, width = settings.size
    config = model.config
    latents = _random(settings, batch, config.in_channels, height // 8, width // 8)
    text = _random(settings, batch, 77, config.cross_attention_dim)  # CLIP's 77 words
    step = torch.tensor(500, device=settings.device)
    added: dict[str, Tensor] = {}
    if config.addition_embed_type == "text_time":
        pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        times = torch.tensor([height, width, 0, 0, height, width], device=settings.device)
        added = {"text_embeds": _random(settings, batch, pooled), "time_ids": times.repeat(batch, 1)}

    def call(model: Any) -> Tensor:
        dtype = weight_dtype(model)
        conditions = {name: value.to(dtype) for name, value in added.items()} or None
        inputs = (latents.to(dtype), step, text.to(dtype))
        return model(*inputs, added_cond_kwargs=conditions, return_dict=False)[0]

    return call


def _by_size(name: str) -> dict[str, configs.Config]:
    base = name.removesuffix("-decode")
    return {"tiny": configs.TINY[base], "small": configs.SMALL[base], "full": configs.FULL[name]}


# ---- state-space models


def _tokens(settings: Settings, batch: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(VOCABULARY, (batch, length), generator=generator).to(settings.device)


def _prefill(model: Any, settings: Settings) -> Call:
    *_, batch, length = settings.size
    tokens = _tokens(settings, batch, length)
    return lambda model: model(tokens, use_cache=False).logits


def _generate(model: Any, settings: Settings) -> Call:
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
        name: racer(name, "prefill", _prefill, prompts),
        f"{name}-decode": racer(f"{name}-decode", "decode", _generate, steps),
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
        {"tiny": (1, 1, 4, 8), "small": (1, 1, 16, 64), "full": (4, 8, 64, 512)}, _by_size("flux"), _flux,
        part="transformer", note="4 of 19 and 8 of 38 blocks, 1024 x 1024 pixels, 512 words",
    ),
    "wan": Racer(
        "Wan transformer", "diffusers", "WanTransformer3DModel",
        {"tiny": (1, 1, 4, 4, 8), "small": (2, 2, 8, 12, 16), "full": (4, 21, 60, 104, 512)},
        _by_size("wan"), _wan,
        part="transformer", note="4 of 30 blocks of Wan 2.1 1.3B, 480 x 832 pixels, 81 frames, 512 words",
    ),
    "qwen-image": Racer(
        "Qwen-Image transformer", "diffusers", "QwenImageTransformer2DModel",
        {"tiny": (1, 4, 8), "small": (1, 16, 64), "full": (4, 83, 512)}, _by_size("qwen-image"), _qwen_image,
        part="transformer", note="4 of 60 blocks, 1328 x 1328 pixels, 512 words",
    ),
    "sdxl-unet": Racer(
        "SDXL U-Net", "diffusers", "UNet2DConditionModel",
        {"tiny": (2, 64, 64), "small": (2, 256, 256), "full": (2, 1024, 1024)}, _by_size("sdxl-unet"), _unet,
        f"({' x '.join(IMAGES)})", "unet", dtypes=_HALF,
    ),
    "sd15-unet": Racer(
        "Stable Diffusion 1.5 U-Net", "diffusers", "UNet2DConditionModel",
        {"tiny": (2, 64, 64), "small": (2, 128, 128), "full": (2, 512, 512)}, _by_size("sd15-unet"), _unet,
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

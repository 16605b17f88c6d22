"""A model that races: how it is described, and built with random weights or those of a folder."""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from turnout.race import configs

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

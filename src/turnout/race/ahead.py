"""List the launches of a model on a card without running it, for `turnout warm`."""

from __future__ import annotations

import re

import torch

from turnout.launch.ahead import Spec, specs_of
from turnout.launch.pretended import PRETENDED, NeedsValuesError
from turnout.models.accelerate import accelerate
from turnout.race.models import check_size, racer_named, size_named
from turnout.race.racer import Racer, Settings
from turnout.routing.device import Device
from turnout.routing.names import dtype_named
from turnout.warming.planning import planning


def specs_of_race(name: str, size: str, dtype: torch.dtype | None, card: Device) -> list[Spec]:
    """Every launch of one call of an accelerated model, each once.

    size: a name ("" is "full"), or numbers such as "480x832x81". dtype: None for the model's own. Raises
    ValueError if there is no such model or size, or if the model cannot be called in this way.
    """
    racer = racer_named(name)
    config, numbers = numbers_of(name, racer, size)
    with planning(card) as launches, torch.no_grad():
        settings = Settings(numbers, dtype or dtype_named(racer.dtypes[0]), PRETENDED)
        model = racer.build(config, settings)
        check_size(name, racer, model, numbers)
        accelerate(model)
        shown = f"{name} of {' x '.join(map(str, numbers))} {racer.axes}".strip()
        try:
            racer.call(model, settings)(model)
        except NeedsValuesError:
            raise
        except (RuntimeError, ValueError, IndexError, AssertionError) as failure:
            message = str(failure).strip().split("\n")[0]
            raise ValueError(f"{shown} cannot be planned: {type(failure).__name__}: {message}") from failure
        return specs_of(launches)


def sized(name: str, size: str, device: torch.device) -> str:
    """A size as it is asked for: "" is the one for this kind of device, numbers stay what they are."""
    return size_named(name, size, device) if size in ("", *racer_named(name).sizes) else size


def numbers_of(name: str, racer: Racer, size: str) -> tuple[str, tuple[int, ...]]:
    """The size whose configuration a model is built with, and the numbers of its call."""
    size = size or "full"
    if size in racer.sizes:
        return size, racer.sizes[size]
    words = [word for word in re.split(r"[x,\s]+", size) if word]
    full = racer.sizes["full"]
    if not words or not all(word.isdigit() for word in words):
        raise ValueError(
            f"{name} has no size {size!r}; give one of {', '.join(racer.sizes)}, "
            f"or numbers such as {'x'.join(map(str, full))}"
        )
    numbers = tuple(map(int, words))
    if len(numbers) != len(full) or 0 in numbers:
        raise ValueError(
            f"size {size!r} has {len(numbers)} numbers{' and a zero' if 0 in numbers else ''}, "
            f"{name} needs {len(full)} from 1 up {racer.axes}: {'x'.join(map(str, full))} is its full one"
        )
    return "full", numbers

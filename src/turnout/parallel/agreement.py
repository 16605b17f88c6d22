"""What all ranks must have alike before any of them sends a tensor."""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from turnout._version import __version__
from turnout.ops.convolution.problem import float32_settings
from turnout.parallel.exchange import Engine
from turnout.parallel.failures import RanksDiffer
from turnout.routing import settings
from turnout.routing.device import Device
from turnout.routing.table import Tables
from turnout.routing.versions import installed

SAMPLED = 16  # values of each weight that are compared


def of_model(model: nn.Module) -> dict[str, str]:
    """The class of a model, and the shapes, dtypes and some values of its weights."""
    named = [*model.named_parameters(), *model.named_buffers()]
    shapes = ", ".join(f"{name} {x.dtype} {list(x.shape)}" for name, x in named)
    sampled = hashlib.sha256()
    for _, x in named:
        sampled.update(_sample(x).encode())
    return {
        "class of the model": type(model).__name__,
        "weights": f"{len(named)} of them, {hashlib.sha256(shapes.encode()).hexdigest()[:12]}",
        "values of the weights": sampled.hexdigest()[:12],
    }


def values_of(x: Tensor) -> str:
    """A digest of some values."""
    return hashlib.sha256(_sample(x).encode()).hexdigest()[:12]


def _sample(x: Tensor) -> str:
    if x.is_meta or not x.numel():
        return ""
    step = max(1, x.numel() // SAMPLED)
    return repr(x.detach().flatten()[::step][:SAMPLED].double().cpu().tolist())


def of_call(name: str, x: Tensor, device: torch.device) -> dict[str, str]:
    """Everything besides the model that decides what a call computes, and by which routes."""
    now = settings.current()
    known = Device.of(device)
    return {
        "method": name,
        "shape and dtype": f"{list(x.shape)} {x.dtype}",
        "turnout": __version__,
        "torch": torch.__version__,
        **_packages(),
        "device": known.name,
        "measured tables": _digest(Tables.for_device(known)),
        "pins": repr(sorted(now.pins.items())),
        "numerics": now.numerics,
        "float32 precision": repr(float32_settings(device.type == "cpu")),
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "threads": str(torch.get_num_threads()) if device.type == "cpu" else "",
    }


@functools.cache
def _packages() -> dict[str, str]:
    return {name: str(installed(name)) for name in ("triton", "numba", "numpy", "diffusers")}


@functools.lru_cache(4)
def _digest(tables: Tables) -> str:
    """Of all rows, in whatever order they are stored."""
    rows = sorted(repr(row) for _, table in tables.authorities for row in table.rows)
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()[:12]


def compare(engine: Engine, mine: dict[str, str]) -> None:
    """Raise on every rank, naming what differs, unless all ranks say the same."""
    all_of_them: list[dict[str, str]] = engine.agree(mine)
    differences = []
    for key in dict.fromkeys(key for said in all_of_them for key in said):
        values: dict[Any, list[int]] = {}
        for rank, said in enumerate(all_of_them):
            values.setdefault(said.get(key), []).append(rank)
        if len(values) > 1:
            differences.append(
                f"{key}: " + ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in values.items())
            )
    if differences:
        raise RanksDiffer(f"ranks must agree, and differ in {'; '.join(differences)}")


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"

"""Wrap the calls of a known model: missing kernels of a call are compiled together (`first_calls`), and
repeated calls are replayed as CUDA graphs (`replays`).

Both wrap the stock method, in one class that is put in front of the model's own. While a graph is traced, or
a call is only planned, the stock method runs alone.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from turnout.models import patch
from turnout.models.first_calls import FirstCalls
from turnout.models.patch import Adapter
from turnout.models.replays import Replays
from turnout.models.state import FIRST_CALLS, REPLAYS
from turnout.routing.device import is_planning


class WholeForward(Adapter):
    """calls are seen as a whole"""

    exact = True

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        stock = super().forward  # pyright: ignore[reportAttributeAccessIssue]
        if torch.compiler.is_compiling() or is_planning():
            return stock(*args, **kwargs)
        with _first_call(self, "forward", args, kwargs):
            replays = vars(self).get(REPLAYS)
            return stock(*args, **kwargs) if replays is None else replays.call(self, stock, args, kwargs)


class WholeAutoencoder(Adapter):
    """decodes and encodes are seen as a whole"""

    exact = True

    def _decode(self: Any, *args: Any, **kwargs: Any) -> Any:
        stock = super()._decode  # pyright: ignore[reportAttributeAccessIssue]
        if torch.compiler.is_compiling() or is_planning():
            return stock(*args, **kwargs)
        with _first_call(self, "_decode", args, kwargs):
            replays = vars(self).get(REPLAYS)
            return stock(*args, **kwargs) if replays is None else replays.call(self, stock, args, kwargs)

    def _encode(self: Any, *args: Any, **kwargs: Any) -> Any:
        stock = super()._encode  # pyright: ignore[reportAttributeAccessIssue]
        if torch.compiler.is_compiling() or is_planning():
            return stock(*args, **kwargs)
        with _first_call(self, "_encode", args, kwargs):
            return stock(*args, **kwargs)


def _first_call(model: nn.Module, method: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    first_calls = vars(model).get(FIRST_CALLS)
    return contextlib.nullcontext() if first_calls is None else first_calls.of(model, method, args, kwargs)


def install(model: nn.Module, *, graph: bool, warm: bool) -> None:
    """Wrap the calls of a model: decode and encode of an autoencoder, forward of any other model.

    graph: replay repeated calls; of an autoencoder only its decodes.
    """
    if graph:
        vars(model)[REPLAYS] = Replays()
    if warm:
        vars(model)[FIRST_CALLS] = FirstCalls()
    patch.apply(model, WholeAutoencoder if hasattr(model, "_decode") else WholeForward, None)


def uninstall(model: object) -> None:
    """Undo `install`, and free the captured graphs."""
    patch.undo(model, (WholeForward, WholeAutoencoder))
    held = getattr(model, "__dict__", {})
    held.pop(FIRST_CALLS, None)
    replays = held.pop(REPLAYS, None)
    if replays is not None:
        replays.release()

"""Peers that need some care to be measured as a user would have them."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch


def compiled(run: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compile(run)`, compiled anew for every set of shapes. One compiled function for all cases would
    give up after eight of them and run eagerly from then on."""
    kept: dict[tuple, Callable[..., Any]] = {}

    def call(*args: Any) -> Any:
        key = tuple((x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x for x in args)
        if key not in kept:
            code = run.__code__.replace(co_name=f"{run.__name__}_{len(kept)}")
            fresh = types.FunctionType(code, run.__globals__, code.co_name, run.__defaults__, run.__closure__)
            fresh.__kwdefaults__ = run.__kwdefaults__
            kept[key] = torch.compile(fresh, dynamic=False)
        return kept[key](*args)

    return call


def replayed(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` as the replay of a CUDA graph: what is left of a call when the host has nothing to decide.

    On a CPU, `run` itself.
    """
    kept: dict[tuple, tuple[torch.cuda.CUDAGraph, Any]] = {}

    def call(*args: Any) -> Any:
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        if tensors[0].device.type != "cuda":
            return run(*args)
        key = tuple(x.data_ptr() for x in tensors)
        if key not in kept:
            run(*args)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                outputs = run(*args)
            kept[key] = graph, outputs
        graph, outputs = kept[key]
        graph.replay()
        return outputs

    return call

"""Wrap peers so that they are measured as a user would run them: compiled, or replayed as CUDA graphs."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch


def compiled(run: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compile(run)`, with a function of its own for every set of shapes.

    One compiled function for all cases would give up after eight of them, and run eagerly from then on.
    """
    by_shapes: dict[tuple, Callable[..., Any]] = {}

    def call(*args: Any) -> Any:
        key = tuple((x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x for x in args)
        if key not in by_shapes:
            code = run.__code__.replace(co_name=f"{run.__name__}_{len(by_shapes)}")
            copy = types.FunctionType(code, run.__globals__, code.co_name, run.__defaults__, run.__closure__)
            copy.__kwdefaults__ = run.__kwdefaults__
            by_shapes[key] = torch.compile(copy, dynamic=False)
        return by_shapes[key](*args)

    return call


def replayed(run: Callable[..., Any]) -> Callable[..., Any]:
    """Replay `run` from a CUDA graph, which leaves the host nothing to do. On a CPU, `run` itself."""
    by_addresses: dict[tuple, tuple[torch.cuda.CUDAGraph, Any]] = {}

    def call(*args: Any) -> Any:
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        if tensors[0].device.type != "cuda":
            return run(*args)
        key = tuple(x.data_ptr() for x in tensors)
        if key not in by_addresses:
            run(*args)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                outputs = run(*args)
            by_addresses[key] = graph, outputs
        graph, outputs = by_addresses[key]
        graph.replay()
        return outputs

    return call

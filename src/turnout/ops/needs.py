"""Reasons that many guards share: what is not installed, what a device cannot do."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Iterator

import torch

from turnout.routing.device import Device

HALF_AND_SINGLE = (torch.float32, torch.float16, torch.bfloat16)


@functools.cache
def installed(package: str) -> bool:
    """Whether a package can be imported, without importing it."""
    if package in sys.modules:
        return sys.modules[package] is not None
    return importlib.util.find_spec(package) is not None


def needs_triton(device: Device) -> Iterator[str]:
    if device.type != "cuda":
        yield f"device {device.name}, this route needs a GPU"
    elif device.capability is not None and device.capability < (8, 0):
        yield f"compute capability {device.capability[0]}.{device.capability[1]}, this route needs 8.0 or newer"
    if not installed("triton"):
        yield "Triton is not installed, this route needs triton>=3.6"


def needs_numba(device: Device) -> Iterator[str]:
    if device.type != "cpu":
        yield f"device {device.name}, this route needs a CPU"
    if not installed("numba"):
        yield "Numba is not installed, this route needs pip install 'turnout[cpu]'"


def needs_half_or_single(**named: torch.dtype | None) -> Iterator[str]:
    """What is there has a type that kernels take; the name says which tensor has not."""
    for name, dtype in named.items():
        if dtype is not None:
            yield from (f"{name} of {reason}" for reason in needs_dtype(dtype, *HALF_AND_SINGLE))


def needs_dtype(dtype: torch.dtype, *allowed: torch.dtype) -> Iterator[str]:
    if dtype not in allowed:
        names = ", ".join(str(d).removeprefix("torch.") for d in allowed)
        yield f"dtype {str(dtype).removeprefix('torch.')}, this route needs one of {names}"

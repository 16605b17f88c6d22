"""Reasons that many guards share: what is not installed, what a device cannot do."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from turnout.routing.device import Device

HALF_AND_SINGLE = (torch.float32, torch.float16, torch.bfloat16)
HOPPER = (9, 0)  # compute capability


def needs_triton(device: Device) -> Iterator[str]:
    """What a plain Triton kernel needs: a card that Triton has a driver for, whoever made it."""
    if device.type == "cpu":
        yield f"device {device.name}, this route needs a GPU"
    elif device.backend is None and device.has("triton"):
        yield f"device {device.name}, this route needs one that Triton has a driver for"
    elif device.backend == "cuda" and device.capability is not None and device.capability < (8, 0):
        major, minor = device.capability
        yield f"compute capability {major}.{minor}, this route needs 8.0 or newer"
    if not device.has("triton"):
        yield "Triton is not installed, this route needs triton>=3.6"


def needs_hopper(device: Device) -> Iterator[str]:
    """What a Gluon kernel for Hopper needs."""
    yield from needs_triton(device)
    if device.type == "cpu":
        return
    if (device.backend, device.capability) != ("cuda", HOPPER):
        yield f"device {device.name}, this route needs compute capability {HOPPER[0]}.{HOPPER[1]}"
        return
    from turnout.launch.support import COMPILED, gluon_problem

    problem = gluon_problem(device)
    if problem is not None:
        yield f"{problem}, this route needs a Triton that does, such as {'.'.join(map(str, COMPILED[-1]))}"


def needs_numba(device: Device) -> Iterator[str]:
    if device.type != "cpu":
        yield f"device {device.name}, this route needs a CPU"
    if not device.has("numba"):
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

"""Cases: real calls, each with where it comes from. Tuning, benchmarks and GPU tests walk them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Case:
    """One call. `make(device, seed)` builds its public arguments on a device, random, of one distribution."""

    name: str
    source: str
    dtype: torch.dtype
    make: Callable[[torch.device, int], tuple]

    def __str__(self) -> str:
        return f"{self.name} {str(self.dtype).removeprefix('torch.')}"


def normal(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """Standard normal values; integers come as small ones, so that their sums are exact."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=dtype, device=device, generator=generator)
    return torch.randint(-4 if dtype.is_signed else 0, 5, shape, dtype=dtype, device=device, generator=generator)


def seeded(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def copies(args: tuple[Any, ...], count: int) -> list[tuple]:
    """That many sets of the same arguments in memory of their own, strides kept."""
    return [args, *(tuple(_copy(x) if isinstance(x, torch.Tensor) else x for x in args) for _ in range(count - 1))]


def _copy(x: torch.Tensor) -> torch.Tensor:
    if any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True)):
        return x.clone()
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)

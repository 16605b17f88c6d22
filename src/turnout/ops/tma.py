"""Descriptors for TMA, Hopper's engine for fetching blocks of tensors, at a tenth of the host time of Triton's own way."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes: what addresses and strides must be multiples of
_kinds: dict[tuple, int] = {}  # a number for all that compiled code knows of a descriptor


def fits(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Whether TMA can walk along a tensor: the last axis dense, steps along the others aligned. Along an axis of one nobody walks.

    >>> fits((2, 8), (8, 1), 2), fits((2, 8), (9, 1), 2)
    (True, False)
    """
    *outer, (size, stride) = zip(shape, strides, strict=True)
    return (size == 1 or stride == 1) and all(n == 1 or (s > 0 and s * itemsize % ALIGNMENT == 0) for n, s in outer)


def aligned(*tensors: Tensor | None) -> bool:
    """Whether all tensors start where TMA can begin."""
    return all(t is None or t.data_ptr() % ALIGNMENT == 0 for t in tensors)


@functools.lru_cache(4096)
def pattern(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, block: tuple[int, ...]) -> Any:
    """All of a descriptor but the tensor: blocks are fetched into the swizzled layout that the tensor cores read."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    size = dtype.itemsize
    layout = NVMMASharedLayout(swizzle_byte_width=min(block[-1] * size, 128), element_bitwidth=8 * size, rank=len(block))
    steps = [ALIGNMENT // size if n == 1 else stride for n, stride in zip(shape[:-1], strides[:-1], strict=True)]
    found: Any = TensorDescriptor(torch.empty(0, dtype=dtype), list(shape), [*steps, 1], list(block), layout)
    found.base = None
    found.kind = _kinds.setdefault((dtype, block, layout), len(_kinds) + 1)
    found.encoded = {}  # by address, of all descriptors of this pattern
    return found


def described(t: Tensor | None, found: Any) -> Any:
    """A descriptor of a tensor. A new one would check itself for 25 us, and the pattern was found right."""
    if t is None or found is None:
        return None
    descriptor = object.__new__(type(found))
    descriptor.__dict__ = {**found.__dict__, "base": t}
    return descriptor

"""How tensors lie in memory, said in few numbers: what kernels of several ops ask of sizes, strides and addresses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

VECTOR_BYTES = 16  # the widest load of one thread


def folded(sizes: Sequence[int], *strides: Sequence[int]) -> tuple[list[int], list[list[int]]]:
    """Sizes and strides (of one or several tensors) with as few dimensions as possible, the widest stride of the first tensor first.

    Dimensions of size 1 go, and two become one where in every tensor the outer walks on where the inner ends.

    >>> folded((2, 4, 1, 6), (48, 12, 99, 1))
    ([8, 6], [[12, 1]])
    >>> folded((2, 6), (6, 1), (8, 1))
    ([2, 6], [[6, 1], [8, 1]])
    """
    kept = sorted((axis for axis, size in enumerate(sizes) if size != 1), key=lambda axis: -strides[0][axis])
    lengths: list[int] = []
    steps: list[list[int]] = [[] for _ in strides]
    for axis in kept:
        if lengths and all(own[-1] == sizes[axis] * given[axis] for own, given in zip(steps, strides, strict=True)):
            lengths[-1] *= sizes[axis]
            for own, given in zip(steps, strides, strict=True):
                own[-1] = given[axis]
        else:
            lengths.append(sizes[axis])
            for own, given in zip(steps, strides, strict=True):
                own.append(given[axis])
    return lengths, steps


def fresh_strides(x: Tensor) -> tuple[int, ...]:
    """The strides of a fresh tensor in x's memory format."""
    return torch.empty_like(x, device="meta").stride()


def in_format_of(y: Tensor, x: Tensor) -> Tensor:
    """y in x's memory format, without gaps; y itself where it has that already."""
    like = torch.empty_like(x)
    if y.stride() == like.stride():
        return y
    return y.new_empty_strided(like.shape, like.stride()).copy_(y)  # made from y: vmap may batch y alone


def side_by_side(*given: Tensor | None) -> tuple[Tensor | None, ...]:
    """Weights as kernels read them, without gaps."""
    return tuple([None if t is None else t.contiguous() for t in given])


def misaligned(*tensors: Tensor | None) -> int:
    """The bits in which the addresses of some tensors are off a multiple of a vector's bytes, together."""
    bits = 0
    for t in tensors:
        if t is not None:
            bits |= t.data_ptr()
    return bits & (VECTOR_BYTES - 1)


def widest_vector(itemsize: int, off: int, *numbers: int) -> int:
    """The widest vector, in elements and a power of two, that divides every number and starts at addresses that are `off`.

    >>> widest_vector(2, 0, 96, 384), widest_vector(2, 0, 12), widest_vector(2, 4, 96)
    (8, 4, 2)
    """
    most = VECTOR_BYTES // itemsize
    while most > 1 and (off % (most * itemsize) or any(n % most for n in numbers)):
        most //= 2
    return most


def flat(x: Tensor) -> Any:
    """The memory from the first to the last element of a CPU tensor as a numpy vector, half types as the integers `common_cpu_kernels`
    tells apart."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    bits = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}.get(x.dtype, x.dtype)
    return x.detach().as_strided((span,), (1,)).view(bits).numpy()

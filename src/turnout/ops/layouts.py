"""Layouts of tensors in few numbers: sizes, strides and alignment, for kernels of several ops."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

VECTOR_BYTES = 16  # the widest load of one thread


def folded(sizes: Sequence[int], *strides: Sequence[int]) -> tuple[list[int], list[list[int]]]:
    """Sizes and strides (of one or several tensors) with as few dimensions as possible, the widest stride of
    the first tensor first.

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
        if lengths and all(
            own[-1] == sizes[axis] * x_strides[axis] for own, x_strides in zip(steps, strides, strict=True)
        ):
            lengths[-1] *= sizes[axis]
            for own, x_strides in zip(steps, strides, strict=True):
                own[-1] = x_strides[axis]
        else:
            lengths.append(sizes[axis])
            for own, x_strides in zip(steps, strides, strict=True):
                own.append(x_strides[axis])
    return lengths, steps


def fresh_strides(x: Tensor) -> tuple[int, ...]:
    """The strides of a fresh tensor in x's memory format."""
    return torch.empty_like(x, device="meta").stride()


def in_format_of(y: Tensor, x: Tensor) -> Tensor:
    """y in x's memory format, without gaps; y itself where it has that already."""
    fresh = torch.empty_like(x)
    if y.stride() == fresh.stride():
        return y
    return y.new_empty_strided(fresh.shape, fresh.stride()).copy_(y)  # of y's kind: vmap may batch y alone


def batch_steps(x: Tensor) -> tuple[int, ...]:
    """The strides of a tensor `[N, ...]`, with 0 for the first where N is 1.

    Nobody takes that step. Of a large picture it would need 64 bits, and kernels would be compiled for those.

    >>> batch_steps(torch.empty(1, 3, 4)), batch_steps(torch.empty(2, 3, 4))
    ((0, 4, 1), (12, 4, 1))
    """
    return (0, *x.stride()[1:]) if x.shape[0] == 1 else x.stride()


def side_by_side(*weights: Tensor | None) -> tuple[Tensor | None, ...]:
    """Weights as kernels read them, without gaps."""
    return tuple([None if t is None else t.contiguous() for t in weights])


def misaligned(*tensors: Tensor | None) -> int:
    """The bits in which the addresses of some tensors are off a multiple of a vector's bytes, together."""
    bits = 0
    for t in tensors:
        if t is not None:
            bits |= t.data_ptr()
    return bits & (VECTOR_BYTES - 1)


def widest_vector(itemsize: int, off: int, *numbers: int) -> int:
    """The widest vector, in elements and a power of two, that divides every number and starts at addresses
    that are `off`.

    >>> widest_vector(2, 0, 96, 384), widest_vector(2, 0, 12), widest_vector(2, 4, 96)
    (8, 4, 2)
    """
    most = VECTOR_BYTES // itemsize
    while most > 1 and (off % (most * itemsize) or any(n % most for n in numbers)):
        most //= 2
    return most


def with_strides(y: Tensor, strides: tuple[int, ...]) -> Tensor:
    """A fresh y with exactly these strides: y itself where it has them, else a copy. No view if y is none."""
    return y if y.stride() == strides else y.new_empty_strided(y.shape, strides).copy_(y)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a fresh tensor.

    >>> contiguous_strides((2, 3, 4)), contiguous_strides((0, 5))
    ((12, 4, 1), (5, 1))
    """
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step = step * max(size, 1)
    return tuple(reversed(strides))


# In numpy's spelling. Half types are the integers that `common_cpu_kernels` tells apart.
_TYPES = {
    torch.float32: "f4",
    torch.float64: "f8",
    torch.bfloat16: "u2",
    torch.float16: "i2",
    torch.complex64: "c8",
    torch.complex128: "c16",
    torch.int8: "i1",
    torch.int16: "i2",
    torch.int32: "i4",
    torch.int64: "i8",
    torch.uint8: "u1",
    torch.uint16: "u2",
    torch.uint32: "u4",
    torch.uint64: "u8",
    torch.bool: "b1",
}
_ORDER = "<" if sys.byteorder == "little" else ">"


class _Memory:
    """Memory of a tensor as numpy asks for it. The array holds on to this, and this to the tensor."""

    __slots__ = ("__array_interface__", "tensor")

    def __init__(self, tensor: Tensor, shape: tuple[int, ...], strides: tuple[int, ...] | None):
        """strides: in bytes; None where there are no gaps."""
        self.tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "typestr": _ORDER + _TYPES[tensor.dtype],
            "data": (tensor.data_ptr(), False),
            "shape": shape,
            "strides": strides,
        }


def array(x: Tensor) -> Any:
    """A CPU tensor as a numpy array of the same memory, half types as integers.

    `Tensor.numpy` would do, but it marks the tensor's storage as one that cannot be resized, for good: a
    parameter that a kernel has read once could not be sharded any more (FSDP resizes storages).

    >>> x = torch.arange(3.0)
    >>> array(x)[1] = 5
    >>> x, x.untyped_storage().resizable()
    (tensor([0., 5., 2.]), True)
    """
    import numpy as np

    size = x.element_size()
    strides = None if x.is_contiguous() else tuple([size * stride for stride in x.stride()])
    return np.asarray(_Memory(x, tuple(x.shape), strides))


def flat(x: Tensor) -> Any:
    """The memory from the first to the last element of a CPU tensor as a numpy vector, as `array` has it."""
    import numpy as np

    span = (
        1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        if x.numel()
        else 0
    )
    return np.asarray(_Memory(x, (span,), None))

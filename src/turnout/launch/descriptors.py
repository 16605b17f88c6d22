"""Make TMA descriptors in a tenth of the host time of Triton's own. TMA is Hopper's engine that copies blocks
of tensors.

All of a descriptor but the address follows from shapes, so each `Prepared` makes it once (`pattern`). Encoded
descriptors are cached by address: an allocator with a cache returns the same addresses again and again.
"""
# pyright: reportMissingModuleSource=false

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from turnout.routing.prepared import worked_out_once

ALIGNMENT = 16  # bytes: what addresses and strides must be multiples of
_MOST_ENCODED = 256  # addresses of one pattern


def fits(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Whether TMA can copy blocks of a tensor: its last axis is dense, and the strides of the others are
    aligned. The stride of an axis of size one does not matter.

    >>> fits((2, 8), (8, 1), 2), fits((2, 8), (9, 1), 2)
    (True, False)
    """
    *outer, (size, stride) = zip(shape, strides, strict=True)
    return (size == 1 or stride == 1) and all(
        n == 1 or (s > 0 and s * itemsize % ALIGNMENT == 0) for n, s in outer
    )


def aligned(*tensors: Tensor | None) -> bool:
    """Whether the addresses of all tensors are aligned for TMA."""
    return all(t is None or t.data_ptr() % ALIGNMENT == 0 for t in tensors)


@worked_out_once
def pattern(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, block: tuple[int, ...]
) -> Any:
    """All of a descriptor but the tensor: blocks are copied into the swizzled layout that the tensor cores
    read.
    """
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    size = dtype.itemsize
    layout = NVMMASharedLayout(
        swizzle_byte_width=min(block[-1] * size, 128), element_bitwidth=8 * size, rank=len(block)
    )
    steps = [
        ALIGNMENT // size if n == 1 else stride for n, stride in zip(shape[:-1], strides[:-1], strict=True)
    ]
    stand_in = torch.empty(0, dtype=dtype, device="cpu")
    descriptor: Any = TensorDescriptor(stand_in, list(shape), [*steps, 1], list(block), layout)
    descriptor.base = None
    descriptor.dtype, descriptor.pattern = dtype, descriptor
    descriptor.encoded = {}  # by address, of all descriptors of this pattern
    return descriptor


def described(t: Tensor | _Address | None, pattern: Any) -> Any:
    """A descriptor of a tensor. A new one would check itself for 25 us, and the pattern was found right."""
    if t is None or pattern is None:
        return None
    descriptor = object.__new__(type(pattern))
    descriptor.__dict__ = {**pattern.__dict__, "base": t}
    return descriptor


def kind(descriptor: Any) -> tuple:
    """All that compiled code knows of a descriptor: its layout follows from these."""
    return descriptor.dtype, *descriptor.block_shape


class _Address(int):
    """The memory that a descriptor is encoded for; nothing but the address is asked for, so no tensor is
    held.
    """

    def data_ptr(self) -> int:
        return self


def encode(pattern: Any, address: int, kernel: Any, index: int) -> list[Any]:
    """What Triton's launcher in C takes for a descriptor of memory, the kernel's `index`-th: the map, sizes,
    strides.

    pattern: of the descriptor, or a descriptor with that pattern.
    """
    encoded = pattern.encoded.get(address)
    if encoded is None:
        if len(pattern.encoded) >= _MOST_ENCODED:
            pattern.encoded.clear()
        make, unused = _encoder()
        encoded = make(described(_Address(address), pattern), kernel.metadata.tensordesc_meta[index], *unused)
        pattern.encoded[address] = encoded
    return encoded


@functools.cache
def _encoder() -> tuple[Any, tuple[None, ...]]:
    """Triton's own encoder, and the arguments that only its other backends need: from 3.8 on one more."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    return make_tensordesc_arg, (None,) * (len(inspect.signature(make_tensordesc_arg).parameters) - 2)

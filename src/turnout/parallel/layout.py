"""Memory of parts and wholes: allocated in one order of dimensions, packed for messages, filled at edges."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

# What stands beyond the first and the last row of all
Edge = Literal["zeros", "replicate", "reflect", "none"]


def empty_resized(like: Tensor, dim: int, size: int) -> Tensor:
    """Allocate a tensor as this one but of another size along one dimension, with the same memory order."""
    shape = list(like.shape)
    shape[dim] = size
    strides = strides_resized(tuple(like.shape), like.stride(), dim, size)
    return torch.empty_strided(shape, strides, dtype=like.dtype, device=like.device)


def dense(part: Tensor, whole: Tensor, axis: int) -> Tensor:
    """A view of some rows of `whole`, in memory of its own and in the same order."""
    return empty_resized(whole, axis, part.shape[axis]).copy_(part)


@lru_cache(4096)
def strides_resized(shape: tuple[int, ...], strides: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    """Strides of a tensor that is longer or shorter along one dimension: outer dimensions move as far apart.
    Those of dimensions of size one count too, since routes are chosen by them; one that is no multiple of
    what lies within stays what it is.

    >>> strides_resized((1, 8, 1, 2, 3), (48, 1, 48, 24, 8), 3, 4)
    (96, 1, 96, 24, 8)
    >>> strides_resized((1, 8, 1, 2, 3), (8, 1, 8, 24, 8), 3, 4)
    (8, 1, 8, 24, 8)
    """
    dim %= len(shape)
    step, found = strides[dim] if shape[dim] > 1 else _step_of_one(shape, strides, dim), list(strides)
    found[dim] = step
    for d, stride in enumerate(strides):
        outer = stride > step or (stride == step and d < dim)
        whole = step and stride % (step * shape[dim]) == 0
        if d != dim and outer and step and (whole or shape[d] > 1):
            found[d] = stride // shape[dim] * size if whole else stride + step * (size - shape[dim])
    return tuple(found)


def _step_of_one(shape: tuple[int, ...], strides: tuple[int, ...], dim: int) -> int:
    """How far apart rows would be where there is one, whose stride may be anything: behind each other within
    the dimensions that are inner ones, all others for the first dimension."""
    if dim == 0:
        inner = range(1, len(shape))
    else:
        inner = [
            d
            for d in range(len(shape))
            if d > dim or (d == 1 and len(shape) in (4, 5) and _is_innermost(shape, strides, 1))
        ]
    return max([strides[d] * shape[d] for d in inner if shape[d] > 1], default=1)


def _is_innermost(shape: tuple[int, ...], strides: tuple[int, ...], dim: int) -> bool:
    return shape[dim] > 1 and all(
        strides[dim] < strides[d] for d in range(len(shape)) if d != dim and shape[d] > 1
    )


def pack(x: Tensor) -> Tensor:
    """x as a contiguous tensor, channels last: no copy where it lies so. gloo takes no others."""
    return _channels_behind(x).contiguous()


def buffer_for(place: Tensor) -> Tensor:
    """A contiguous tensor for what fits into `place`: the very place if it lies so."""
    behind = _channels_behind(place)
    return (
        behind
        if behind.is_contiguous()
        else torch.empty(behind.shape, dtype=place.dtype, device=place.device)
    )


def _channels_behind(x: Tensor) -> Tensor:
    return x.movedim(1, -1) if x.dim() in (4, 5) else x


class Strip(NamedTuple):
    """Where some rows of a tensor lie in its memory, channels last: sizes, strides and the first element.

    is_dense: whether they are contiguous there, and so travel as they are.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    first: int
    is_dense: bool

    @staticmethod
    def of(rows: Tensor, whole: Tensor) -> Strip:
        behind = _channels_behind(rows)
        first = rows.storage_offset() - whole.storage_offset()
        return Strip(tuple(behind.shape), behind.stride(), int(first), behind.is_contiguous())

    def view(self, whole: Tensor) -> Tensor:
        return whole.as_strided(self.sizes, self.strides, whole.storage_offset() + self.first)


def unpack(buffer: Tensor, place: Tensor) -> Tensor:
    """What was received in the buffer for `place`, in the order of its dimensions."""
    return buffer.movedim(-1, 1) if place.dim() in (4, 5) else buffer


def fill_edge(whole: Tensor, dim: int, above: int, size: int, edge: Edge, *, first: bool) -> None:
    """The rows beyond the first or the last one of all."""
    count = above if first else whole.shape[dim] - above - size
    rows = whole.narrow(dim, 0 if first else above + size, count)
    if edge == "zeros":
        rows.zero_()
    elif edge == "replicate":
        rows.copy_(whole.narrow(dim, above if first else above + size - 1, 1).expand_as(rows))
    else:
        inside = whole.narrow(dim, above + 1 if first else above + size - 1 - count, count)
        rows.copy_(inside.flip(dim))

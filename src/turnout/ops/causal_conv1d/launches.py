"""From tensors to launches: what the forward and the backward kernels of causal_conv1d share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from turnout.launch import Launch
from turnout.ops.integers import ceil_div
from turnout.ops.layouts import VECTOR_BYTES


def empty_dense(x: Tensor, last: bool) -> Tensor:
    """A fresh tensor of x's shape, channels side by side or positions side by side."""
    return torch.empty_strided(x.shape, dense_strides(x.shape, last), dtype=x.dtype, device=x.device)


def dense_strides(shape: Sequence[int], last: bool) -> tuple[int, int, int]:
    """The strides of a tensor `[batch, dim, length]` without gaps, channels or positions side by side.

    >>> dense_strides((2, 3, 4), True), dense_strides((2, 3, 4), False)
    ((12, 1, 3), (12, 4, 1))
    """
    dim, length = shape[1] or 1, shape[2] or 1
    return (dim * length, 1, dim) if last else (dim * length, length, 1)


def steps(x: Tensor, along: int) -> tuple[int, ...]:
    """What every vector along an axis of x must divide: its size, and the strides that lead from one row to
    another.
    """
    return (x.shape[along], *(x.stride(axis) for axis in range(3) if axis != along and x.shape[axis] > 1))


def widest(most: int, *walks: tuple[Tensor, Iterable[int]]) -> int:
    """The widest vector, in elements and a power of two, that divides every number given with a tensor and
    the place it starts at.
    """
    while most > 1 and any(
        t.data_ptr() % (most * t.element_size()) or any(n % most for n in numbers) for t, numbers in walks
    ):
        most //= 2
    return most


def vector_of(along: int, seg: Tensor | None, *tensors: Tensor) -> int:
    """The widest vector along an axis of tensors of one shape, 1 where one of them has gaps there."""
    if any(t.stride(along) != 1 and t.shape[along] > 1 for t in tensors):
        return 1
    walks: list[tuple[Tensor, Iterable[int]]] = [(t, steps(t, along)) for t in tensors]
    if seg is not None:
        walks.append((seg, ()))
    return widest(VECTOR_BYTES // tensors[0].element_size(), *walks)


def segments(
    seq_idx: Tensor | None, cu_seqlens: Tensor | None, length: int
) -> tuple[Tensor | None, tuple[Launch, ...]]:
    """The sequence of each position, int32 [batch, length], or None where nothing is packed; and what fills
    it.
    """
    from turnout.ops.causal_conv1d.kernels import segments as kernel

    if cu_seqlens is None:
        return None if seq_idx is None else seq_idx.to(torch.int32).contiguous(), ()
    sequences, block = cu_seqlens.shape[0] - 1, 256
    seg = torch.empty(1, length, dtype=torch.int32, device=cu_seqlens.device)
    numbers = (sequences, length, sequences.bit_length())
    return seg, (Launch(kernel, ceil_div(length, block), (cu_seqlens, seg), numbers, {"BL": block}, 4),)


def rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seg: Tensor | None,
    y: Tensor,
    silu: bool,
    channels: int,
    vectors: int,
    warps: int,
) -> Launch:
    from turnout.ops.causal_conv1d.kernels import rows as kernel

    batch, dim, length = x.shape
    vector = vector_of(2, seg, x, y)
    programs = batch * ceil_div(dim, channels) * ceil_div(length, vectors * vector)
    constants = {
        "W": weight.shape[1],
        "V": vector,
        "BR": channels,
        "BV": vectors,
        "BIAS": bias is not None,
        "SILU": silu,
        "SEG": seg is not None,
    }
    numbers = (dim, length, *x.stride(), *weight.stride(), *y.stride())
    return Launch(kernel, programs, (x, weight, bias, seg, y), numbers, constants, warps)


def cols(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seg: Tensor | None,
    y: Tensor,
    silu: bool,
    groups: int,
    rows: int,
    steps: int,
    channels: int,
    warps: int,
) -> Launch:
    from turnout.ops.causal_conv1d.kernels import cols as kernel

    batch, dim, length = x.shape
    programs = batch * ceil_div(dim, channels) * ceil_div(length, groups * rows * steps)
    numbers = (dim, length, x.stride(0), x.stride(2), *weight.stride(), y.stride(0), y.stride(2))
    constants = {
        "W": weight.shape[1],
        "V": vector_of(1, None, x, y),
        "G": groups,
        "T": rows,
        "STEPS": steps,
        "BD": channels,
        "BIAS": bias is not None,
        "SILU": silu,
        "SEG": seg is not None,
    }
    return Launch(kernel, programs, (x, weight, bias, seg, y), numbers, constants, warps)


def edges(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
    initial: Tensor | None,
    y: Tensor,
    final: Tensor | None,
    silu: bool,
) -> Launch:
    """Both ends of every sequence, after the main kernel: outputs that see initial states, and the states
    that are left.
    """
    from turnout.ops.causal_conv1d.kernels import edges as kernel

    batch, dim, length = x.shape
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    numbers = (dim, length, *x.stride(), *weight.stride(), *y.stride(), *strides(initial), *strides(final))
    constants = {
        "W": weight.shape[1],
        "BD": 128,
        "BIAS": bias is not None,
        "SILU": silu,
        "SEG": seq_idx is not None,
        "PACKED": cu_seqlens is not None,
        "INIT": initial is not None,
        "FINAL": final is not None,
    }
    tensors = (x, weight, bias, seq_idx, cu_seqlens, initial, y, final)
    return Launch(kernel, sequences * ceil_div(dim, 128), tensors, numbers, constants, 4)


def strides(tensor: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if tensor is None else tensor.stride()

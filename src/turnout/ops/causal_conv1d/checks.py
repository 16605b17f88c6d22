"""Check the arguments of causal_conv1d calls before anything runs; errors say what was passed and needed."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor

from turnout.routing.choose import plain
from turnout.routing.device import is_planning
from turnout.routing.fallback import can_read_values, version_of

ACTIVATIONS = (None, "silu")


def check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
    initial_states: Tensor | None,
) -> None:
    """Raise where shapes, dtypes or devices do not fit together. Looks at no values."""
    if x.dim() != 3:
        raise ValueError(f"x is {list(x.shape)}, it needs to be [batch, channels, length]")
    batch, dim, length = x.shape
    check_filter(x, dim, weight, bias, activation)
    if seq_idx is not None and cu_seqlens is not None:
        raise ValueError("seq_idx and cu_seqlens both say where sequences end, give one of them")
    if seq_idx is not None:
        _shape("seq_idx", seq_idx, (batch, length), "[batch, length]")
        _integers("seq_idx", seq_idx, x)
    sequences = batch
    if cu_seqlens is not None:
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
            raise ValueError(
                f"cu_seqlens is {list(cu_seqlens.shape)}, "
                "it needs to be [sequences + 1] with at least one sequence"
            )
        if batch != 1:
            raise ValueError(f"x has batch {batch} and cu_seqlens is given, packed sequences need batch 1")
        _integers("cu_seqlens", cu_seqlens, x)
        sequences = cu_seqlens.shape[0] - 1
    if initial_states is not None:
        _shape(
            "initial_states",
            initial_states,
            (sequences, dim, weight.shape[1] - 1),
            "[sequences, channels, width - 1]",
        )
        _device("initial_states", initial_states, x)
        if initial_states.dtype != x.dtype:
            raise ValueError(
                f"initial_states are {plain(initial_states.dtype)}, they need x's dtype {plain(x.dtype)}"
            )


def check_filter(x: Tensor, dim: int, weight: Tensor, bias: Tensor | None, activation: str | None) -> None:
    """Check the arguments of a step of decoding."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}, it needs to be None or 'silu'")
    if weight.dim() != 2 or weight.shape[0] != dim or weight.shape[1] < 1:
        raise ValueError(
            f"weight is {list(weight.shape)}, "
            f"it needs to be [channels, width] with {dim} channels and a width of at least 1"
        )
    if bias is not None:
        _shape("bias", bias, (dim,), "[channels]")
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        if tensor is not None:
            if not tensor.is_floating_point():
                raise ValueError(f"{name} is {plain(tensor.dtype)}, it needs a floating-point dtype")
            _device(name, tensor, x)


_checked: tuple[Any, int, int] = (lambda: None, 0, 0)


def check_ends(cu_seqlens: Tensor, x: Tensor) -> None:
    """Raise unless cu_seqlens runs from 0 to the length and never down.

    On a GPU this has to wait for the device, so a tensor is looked at once: the layers of a model share
    theirs. One that was made in inference mode may change unnoticed, and is looked at every time. Nothing is
    looked at while a graph is captured or traced, nor in transforms; the kernels stay inside x whatever it
    holds.
    """
    global _checked
    if not isinstance(x, Tensor) or not can_read_values(cu_seqlens) or is_planning():
        return
    if cu_seqlens.dim() != 1 or x.dim() != 3 or cu_seqlens.shape[0] < 2 or cu_seqlens.is_floating_point():
        return  # `check` says what is wrong
    if cu_seqlens.is_cuda:
        seen, version, length = _checked
        now = version_of(cu_seqlens)
        unchanged = now is not None and seen() is cu_seqlens and (version, length) == (now, x.shape[2])
        if unchanged or torch.cuda.is_current_stream_capturing():
            return
        if now is not None:
            _checked = (weakref.ref(cu_seqlens), now, x.shape[2])
    ends = cu_seqlens.tolist()
    if ends[0] != 0 or ends[-1] != x.shape[2] or any(a > b for a, b in itertools.pairwise(ends)):
        _checked = (lambda: None, 0, 0)
        shown = ", ".join(map(str, ends if len(ends) <= 8 else [*ends[:3], "...", *ends[-3:]]))
        raise ValueError(f"cu_seqlens is [{shown}], it needs to rise from 0 to x's length {x.shape[2]}")


def _shape(name: str, tensor: Tensor, needed: tuple[int, ...], meaning: str) -> None:
    if tuple(tensor.shape) != needed:
        raise ValueError(f"{name} is {list(tensor.shape)}, it needs to be {meaning}: {list(needed)}")


def _device(name: str, tensor: Tensor, x: Tensor) -> None:
    if tensor.device != x.device:
        raise ValueError(f"{name} is on {tensor.device}, it needs x's device {x.device}")


def _integers(name: str, tensor: Tensor, x: Tensor) -> None:
    if tensor.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} is {plain(tensor.dtype)}, it needs to be int32 or int64")
    _device(name, tensor, x)

"""Recognize calls that only plain PyTorch can take: under a transform or a mode, with a tensor subclass.

Calls and `explain` ask the same functions, so the two agree. Code that reads the values of a tensor on the
host asks `can_read_values` first: under a transform there are none, and a trace would keep those of its
example.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from turnout.routing.device import is_planning
from turnout.routing.torch_private import (
    FakeTensor,
    autocasting,
    count_dispatch_modes,
    current_dispatch_mode,
    functorch_level,
    functorch_levels,
    in_forward_ad,
    tracing_state,
)

PLAIN_TENSORS = frozenset({Tensor, torch.nn.Parameter, torch.nn.Buffer})


def autocasts(kind: str) -> bool:
    """Whether autocast is on for a type of device.

    torch's own `is_autocast_enabled` raises for types that have no autocast, such as meta.
    """
    return autocasting() and torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


class Blocked(NamedTuple):
    """Why no route may take a call."""

    reason: str
    # False where torch rewrites the program, as vmap does: there a pin has nothing to decide.
    pin_raises: bool


AUTOCAST_ON = Blocked("autocast is on, routes of this op need it off", True)


def blocked(args: Sequence[Any], minds_autocast: bool) -> Blocked | None:
    """Why only plain PyTorch can take a call with these arguments, here and now; None where routes may.

    minds_autocast: under autocast this op is torch's alone.
    """
    transform = rewriting()
    if transform is not None:
        return Blocked(f"{transform}, routes need a plain eager call", False)
    tensors = [x for x in args if isinstance(x, Tensor)]
    for x in tensors:
        if isinstance(x, FakeTensor):
            return Blocked("a fake tensor, routes need values", False)
        if type(x) not in PLAIN_TENSORS:
            return Blocked(f"tensor subclass {type(x).__name__}, routes need plain tensors", True)
        if x.is_neg() or x.is_conj():
            return Blocked("a lazily negated or conjugated tensor, routes need its values in memory", False)
    if minds_autocast and autocasting():
        return AUTOCAST_ON
    devices = dict.fromkeys(x.device for x in tensors)
    if len(devices) > 1:
        return Blocked(f"tensors on {' and '.join(map(str, devices))}, routes need one device", True)
    return None


def rewriting() -> str | None:
    """The transform, mode or trace that rewrites the running program, in words; None if there is none."""
    level = functorch_level()
    if level is not None:
        return f"a torch.func transform ({str(level.key()).rpartition('.')[2].lower()})"
    if in_forward_ad():
        return "forward-mode differentiation"
    if count_dispatch_modes():
        return f"dispatch mode {type(current_dispatch_mode()).__name__}"
    if tracing_state() is not None:
        return "torch.jit.trace"
    return None


def can_read_values(tensor: Tensor) -> bool:
    """Whether the host may read a tensor's values and act on them: an eager call, with real values."""
    return (
        type(tensor) in PLAIN_TENSORS
        and tensor.device.type in ("cpu", "cuda")
        and not (tensor.is_meta and is_planning())
        and not torch.compiler.is_compiling()
        and not _hidden.get()
        and rewriting() is None
    )


_hidden: ContextVar[bool] = ContextVar("turnout_values_hidden", default=False)


@contextlib.contextmanager
def values_hidden() -> Iterator[None]:
    """Inside this block no choice depends on the values of a tensor: the calls become a graph, which is
    replayed with other values."""
    token = _hidden.set(True)
    try:
        yield
    finally:
        _hidden.reset(token)


_derivative_of_backward: ContextVar[bool] = ContextVar("turnout_derivative_of_backward", default=False)


@contextlib.contextmanager
def differentiable_backward() -> Iterator[None]:
    """Inside this block the reference computes a backward that will itself be differentiated."""
    token = _derivative_of_backward.set(True)
    try:
        yield
    finally:
        _derivative_of_backward.reset(token)


def needs_any_derivative() -> bool:
    """Whether more than a first backward is asked of the reference: forward-mode or second derivatives.

    torch's fused kernels, such as those of attention, have neither.
    """
    if in_forward_ad() or _derivative_of_backward.get():
        return True
    if functorch_level() is None:
        return False
    levels = [str(level.key()).rpartition(".")[2] for level in functorch_levels()]
    return "Jvp" in levels or levels.count("Grad") > 1


def version_of(tensor: Tensor) -> int | None:
    """The version of a tensor, which goes up when it is written to; tensors of inference mode have None."""
    return None if tensor.is_inference() else tensor._version

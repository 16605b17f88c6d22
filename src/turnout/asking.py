"""Ask which route a call would take and why (`explain`), and which routes there are (`routes`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor

from turnout.routing.choose import REFERENCE, Verdict
from turnout.routing.device import Device
from turnout.routing.op import OPS, Op
from turnout.routing.public import lower, op_named
from turnout.routing.route import Route


def explain(
    op: str | Callable[..., Any] | Op,
    *args: Any,
    device: str | torch.device | Device | None = None,
    **kwargs: Any,
) -> Verdict:
    """Tell which route a call would take, who decided that, and why the others would not run it.

    No kernel runs. `op` is a public function or its name, and the other arguments are exactly those of the
    call, by position or by name. (An op that has no public function takes its reference's arguments.) The
    answer holds for a call made here and now: under this autocast, inside this transform or mode, with this
    pin. With `device`, it is about a card that need not be in this machine, by name ("h200"); the tensors may
    then be anywhere, also fake or on the meta device. `str()` of the answer is for people, `.json()` for
    reports.

    >>> import torch, turnout
    >>> verdict = turnout.explain("dot", torch.ones(3), torch.ones(3))
    >>> verdict.chosen, verdict.refused["two-stage"][0]
    ('reference', 'device cpu, this route needs a GPU')
    """
    called_op, arguments = lower(op, *args, **kwargs)
    named = device if device is None or isinstance(device, Device) else Device.named(str(device))
    return called_op.explain(arguments, named)


def check_shapes(op: str | Callable[..., Any] | Op, *args: Any, **kwargs: Any) -> None:
    """Raise ValueError, in torch's words, if the shapes of a call do not fit each other.

    All tensors are on the meta device, so nothing is computed.

    >>> import torch
    >>> a, b = torch.empty(3, device="meta"), torch.empty(4, device="meta")
    >>> check_shapes("dot", a, b)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: dot: inconsistent tensor size, expected tensor [3] and src [4] ...
    """
    called_op, arguments = lower(op, *args, **kwargs)
    name = op if isinstance(op, str) else getattr(op, "__name__", called_op.name)
    named = dict(zip(called_op.signature.parameters, arguments, strict=True))
    try:
        _check_numbers(named)
    except ValueError as mistake:
        raise ValueError(f"{name}: {mistake}") from mistake
    try:
        called_op.reference(*arguments)
    except (RuntimeError, ValueError, IndexError, ArithmeticError, AssertionError) as mistake:
        message = " ".join(str(mistake).split())
        if "[" not in message:  # torch names no shape
            shapes = (f"{each} {list(x.shape)}" for each, x in named.items() if isinstance(x, Tensor))
            message = f"{message}; the tensors are {', '.join(shapes)}"
        raise ValueError(f"{name}: {message}") from mistake


LEAST = {"stride": 1, "dilation": 1, "groups": 1, "padding": 0}


def _check_numbers(arguments: dict[str, Any]) -> None:
    """Raise ValueError for what torch refuses on a device but takes, or divides by, on the meta device."""
    for name, least in LEAST.items():
        number = arguments.get(name, least)
        if min(number if isinstance(number, (list, tuple)) else [number], default=least) < least:
            raise ValueError(f"{name} is {number}, it needs to be at least {least}")
    weight, bias = arguments.get("weight"), arguments.get("bias")
    if isinstance(weight, Tensor) and isinstance(bias, Tensor) and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias is {list(bias.shape)}, it needs to be {list(weight.shape[:1])}")


@overload
def routes(op: None = None) -> dict[str, list[str]]: ...
@overload
def routes(op: str | Callable[..., Any] | Op) -> list[Route]: ...
def routes(op: str | Callable[..., Any] | Op | None = None) -> dict[str, list[str]] | list[Route]:
    """List the routes of an op, in the order they were declared; without an op, the names of all ops' routes.

    >>> import turnout
    >>> names = turnout.routes()["dot"]
    >>> names[0], names[-1]
    ('single-launch', 'reference')
    >>> turnout.routes("dot")[0].numerics
    'close'
    """
    if op is not None:
        return list(op_named(op).routes.values())
    return {name: [*declared.routes, REFERENCE] for name, declared in OPS.items()}

"""Register public functions with the ops they call, for `explain`, `tune`, `pin` and the command line.

A public function is declared once, with the ops it may call. How its arguments become those of an op is
written in the function itself and nowhere else: `lower` runs it up to the point where the op would choose a
route.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from turnout.routing import settings
from turnout.routing.declaration import place
from turnout.routing.names import not_known
from turnout.routing.op import OPS, Op

F = TypeVar("F", bound=Callable[..., Any])

PUBLIC: dict[str, Public] = {}


class Lowered(NamedTuple):
    """The op that a public call calls, and the positional arguments of the op's reference."""

    op: Op
    args: tuple


class Public(NamedTuple):
    """A public function and the ops it may call, the one it calls without `out=` first."""

    function: Callable[..., Any]
    ops: tuple[Op, ...]

    @property
    def signature(self) -> inspect.Signature:
        """The function's signature, with annotations as types."""
        return inspect.signature(self.function, eval_str=True)


def public(*ops: Op, of_cases: bool = False) -> Callable[[F], F]:
    """Declare a public function and the ops it may call; each call of it calls one of them once.

    The function is returned unchanged, so its calls cost nothing more. of_cases: the first op's cases make
    this function's arguments, by position.
    """

    if not ops or not all(isinstance(op, Op) for op in ops):
        raise TypeError(
            f"@public({', '.join(map(repr, ops))}) needs the ops that the function calls: @public(OP)"
        )

    def declare(function: F) -> F:
        taken = PUBLIC.get(function.__name__)
        if taken is not None and place(taken.function) != place(function):
            raise ValueError(
                f"{place(taken.function)} is public as {function.__name__!r} already; give "
                f"{place(function)} another name"
            )
        if of_cases:
            ops[0].lowered_by = functools.partial(_lowered_case, function)
        PUBLIC[function.__name__] = Public(function, ops)
        settings.PINNED_TOGETHER[function.__name__] = tuple(op.name for op in ops)
        return function

    return declare


def public_named(op: str | Callable[..., Any] | Op) -> Public | Op:
    """Find the public function of a name, or of the function itself; for an op without one, the op."""
    if isinstance(op, Op):
        return op
    name = op if isinstance(op, str) else getattr(op, "__name__", repr(op))
    if name in PUBLIC:
        return PUBLIC[name]
    if name in OPS:
        return OPS[name]
    raise not_known("op", name, sorted({*OPS, *PUBLIC}))


def op_named(op: str | Callable[..., Any] | Op) -> Op:
    """Find the op of a name or of a public function; of a function with several ops, the first."""
    function = public_named(op)
    return function if isinstance(function, Op) else function.ops[0]


def lower(op: str | Callable[..., Any] | Op, *args: Any, **kwargs: Any) -> Lowered:
    """Find the op of a public call, and the arguments of that op's reference, without running the call.

    An `Op`, or the name of one without a public function, takes its reference's arguments.

    >>> import torch, turnout
    >>> x, residual, gate = torch.ones(1, 2, 4), torch.ones(1, 2, 4), torch.ones(1, 4)
    >>> op, args = lower(turnout.gated_add, residual, gate, x=x)
    >>> op.name, args[0] is x, args[2].shape
    ('gated_add', True, torch.Size([1, 1, 4]))
    """
    public_or_op = public_named(op)
    if isinstance(public_or_op, Op):
        return Lowered(public_or_op, _bound(public_or_op.name, public_or_op.signature, args, kwargs).args)
    function = public_or_op.function
    bound = _bound(function.__name__, inspect.signature(function), args, kwargs)
    return _lowered(function, *bound.args, **bound.kwargs)


def _bound(
    name: str, signature: inspect.Signature, args: tuple, kwargs: dict[str, Any]
) -> inspect.BoundArguments:
    """The arguments of a call by name. Raises TypeError for those that are missing or too many."""
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as mistake:
        raise TypeError(f"{name}: {mistake}; it takes {', '.join(signature.parameters)}") from mistake


def _lowered(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Lowered:
    """Run a public function up to the point where its op would choose a route."""
    with settings.asking():
        try:
            function(*args, **kwargs)
        except settings.Asked as stopped:
            return Lowered(*stopped.call)
    raise AssertionError(f"{function.__name__} returned without calling one of its ops")


def _lowered_case(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple:
    """The reference's arguments of a call whose arguments may all be given by position."""
    names = tuple(inspect.signature(function).parameters)
    if len(args) > len(names):
        raise TypeError(f"{function.__name__} takes {len(names)} arguments, {len(args)} were given")
    return _lowered(function, **dict(zip(names, args, strict=False)), **kwargs).args

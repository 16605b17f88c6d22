"""Routes' functions made of others: with a configuration that is data, or with all arguments as one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Result = TypeVar("Result")


def configured(function: Callable[..., Result], defaults: Mapping[str, Any]) -> Callable[..., Result]:
    """A route's function: `function`, which takes configuration by keyword (`**config`), with these names and
    defaults.

    >>> def scale(x: int, **config: int) -> int:
    ...     return x * config["by"]
    >>> double = configured(scale, {"by": 2})
    >>> inspect.signature(double)
    <Signature (x: 'int', *, by=2) -> 'int'>
    >>> double(3), double(3, by=5)
    (6, 15)
    """

    def route(*args: Any, **config: Any) -> Result:
        return function(*args, **{**defaults, **config})

    signature = inspect.signature(function)
    shared = [p for p in signature.parameters.values() if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)]
    own = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=n) for name, n in defaults.items()]
    # Read by `inspect.signature`, which is how an op learns what a route takes.
    route.__signature__ = signature.replace(parameters=[*shared, *own])  # pyright: ignore[reportFunctionMemberAccess]
    return route


def of_call(call_type: Callable[..., Any], function: Callable[..., Result]) -> Callable[..., Result]:
    """A route's function: `function` of all arguments of the op as one `call_type`, a NamedTuple that names
    them.

    >>> from typing import NamedTuple
    >>> class Call(NamedTuple):
    ...     x: int
    ...     y: int
    >>> def area(call: Call) -> int:
    ...     return call.x * call.y
    >>> inspect.signature(of_call(Call, area)), of_call(Call, area)(2, 3)
    (<Signature (x, y) -> 'int'>, 6)
    """

    def route(*args: Any, **config: Any) -> Result:
        return function(call_type(*args), **config)

    signature = inspect.signature(function)
    config = list(signature.parameters.values())[1:]
    names: tuple[str, ...] = call_type._fields  # pyright: ignore[reportFunctionMemberAccess]
    own = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    route.__signature__ = signature.replace(parameters=[*own, *config])  # pyright: ignore[reportFunctionMemberAccess]
    return route

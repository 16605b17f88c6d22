"""Routes whose configuration is declared as data, for functions that many routes share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Result = TypeVar("Result")


def configured(function: Callable[..., Result], defaults: Mapping[str, Any]) -> Callable[..., Result]:
    """A route's function: `function`, which takes `**config`, with these names and defaults as its
    configuration.

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
    shared = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    own = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=n) for name, n in defaults.items()]
    # Read by `inspect.signature`, which is how an op learns what a route takes.
    route.__signature__ = signature.replace(parameters=[*shared, *own])  # pyright: ignore[reportFunctionMemberAccess]
    return route

"""Prepared: everything that follows from a problem, a route and its configuration, in one object.

It holds what a route works out of shapes, strides and dtypes: the layout of outputs, launch plans,
descriptors, compiled kernels. The dispatch cache of an op has one for each entry that takes a route, and
drops it with the entry, which bounds their number. It holds no tensor of a caller. Threads may share it: what
two of them work out at the same time is equal, and the later result is kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, TypeVar

_MISSING = object()
_MOST_VALUES = 256  # of one Prepared; a call has a handful for each alignment of its tensors
_current: ContextVar[Prepared | None] = ContextVar("turnout_prepared", default=None)
_set_current, _reset_current = _current.set, _current.reset
Value = TypeVar("Value")
Prepare = Callable[["Prepared", tuple], "Callable[..., Any] | None"]


class Prepared:
    """A route with its configuration, for the calls of one entry of the dispatch cache.

    call: runs such a call; the function that the route's `prepare` returned, else `run_route`. function,
    config: the route's own function, and its configuration with all defaults. values: the results that were
    worked out, by the function and the arguments that gave them.
    """

    __slots__ = ("_run", "call", "config", "function", "values")

    def __init__(self, function: Callable[..., Any], config: Mapping[str, Any]):
        self.function, self.config = function, config
        self._run = functools.partial(function, **config) if config else function
        self.values: dict[Any, Any] = {}
        self.call: Callable[..., Any] = self.run_route

    @property
    def is_direct(self) -> bool:
        """Whether calls skip the route's own function."""
        return self.call != self.run_route

    def run_route(self, *args: Any) -> Any:
        """Run the route's own function; results worked out in it are kept here."""
        token = _set_current(self)  # as in `keeping`, without another call in between
        try:
            return self._run(*args)
        finally:
            _reset_current(token)

    def keeping(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function; results worked out in it are kept here."""
        token = _set_current(self)
        try:
            return function(*args)
        finally:
            _reset_current(token)

    def keep(self, key: Any, value: Any) -> Any:
        """Keep a value, which must hold no tensor of the caller, and return it."""
        if len(self.values) >= _MOST_VALUES:
            self.values.clear()
        self.values[key] = value
        return value


def current() -> Prepared | None:
    """The Prepared whose route runs on this thread; None outside of one, where nothing is kept."""
    return _current.get()


def kept(key: Any, work_out: Callable[[], Value]) -> Value:
    """The result of `work_out()`, computed once for this key in each Prepared."""
    prepared = _current.get()
    if prepared is None:
        return work_out()
    value = prepared.values.get(key, _MISSING)
    return prepared.keep(key, work_out()) if value is _MISSING else value


def worked_out_once(function: Callable[..., Value]) -> Callable[..., Value]:
    """Decorate a function of sizes, strides and dtypes so that each Prepared computes each result once.

    >>> @worked_out_once
    ... def elements(shape: tuple[int, ...]) -> int:
    ...     print("counting")
    ...     return shape[0] * shape[1]
    >>> prepared = Prepared(elements, {})
    >>> prepared.call((2, 3)), prepared.call((2, 3))
    counting
    (6, 6)
    """

    @functools.wraps(function)
    def look_up(*args: Any) -> Value:
        prepared = _current.get()
        if prepared is None:
            return function(*args)
        key = (function, args)
        value = prepared.values.get(key, _MISSING)
        return prepared.keep(key, function(*args)) if value is _MISSING else value

    return look_up

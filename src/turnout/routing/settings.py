"""What the user asked for: pins and the numerics level, per thread and per async task."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Iterator, Mapping
from contextvars import ContextVar

LEVELS = ("exact", "close", "lossy")


class Settings:
    """Pins (op to route) and the loosest numerics class that may be taken. Equal settings are one object, so they hash at once."""

    def __init__(self, pins: Mapping[str, str], numerics: str):
        self.pins, self.numerics = dict(pins), numerics


entered: ContextVar[Settings | None] = ContextVar("turnout_settings", default=None)
_known: dict[tuple, Settings] = {}
_MOST_KNOWN = 1024
_lock = threading.Lock()


def current() -> Settings:
    """The settings of this thread or task; where none were entered, those of the environment."""
    return entered.get() or from_environment()


@functools.cache
def from_environment() -> Settings:
    """TURNOUT_PIN and TURNOUT_NUMERICS, read once. A mistake in them raises at every call, never passes quietly."""
    pins = {}
    for part in filter(None, (p.strip() for p in os.environ.get("TURNOUT_PIN", "").split(","))):
        op, equals, route = part.partition("=")
        if not equals:
            raise ValueError(
                f"TURNOUT_PIN has {part!r}, it needs op=route pairs with commas between: TURNOUT_PIN='dot=reference,matmul=as-dot'"
            )
        pins[op.strip()] = route.strip()
    check_pins(pins)
    return _settings(pins, check_level(os.environ.get("TURNOUT_NUMERICS", "close")))


def _settings(pins: Mapping[str, str], numerics: str) -> Settings:
    key = (tuple(sorted(pins.items())), numerics)
    with _lock:
        if len(_known) >= _MOST_KNOWN:  # settings that are in force go on, and are no longer one object with equal ones
            _known.clear()
        return _known.setdefault(key, Settings(pins, numerics))


def check_level(level: str) -> str:
    if level not in LEVELS:
        raise ValueError(f"numerics level {level!r} is not known; one of: {', '.join(LEVELS)}")
    return level


def check_pins(pins: Mapping[str, str]) -> None:
    """Raise unless every pinned op and route exists."""
    from turnout.routing.op import OPS

    for op, route in pins.items():
        if op not in OPS:
            raise ValueError(f"op {op!r} is not known; one of: {', '.join(sorted(OPS))}")
        routes = [*OPS[op].routes, "reference"]
        if route not in routes:
            raise ValueError(f"op {op} has no route {route!r}; one of: {', '.join(routes)}")


@contextlib.contextmanager
def _entered(settings: Settings) -> Iterator[None]:
    token = entered.set(settings)
    try:
        yield
    finally:
        entered.reset(token)


def pin(**routes: str) -> contextlib.AbstractContextManager[None]:
    """Force the route of an op inside a `with` block, in this thread. A route that refuses the call raises with its reasons.

    Pins nest; the inner one wins for its op. The environment variable ``TURNOUT_PIN="matmul=as-dot"`` does the same for a process.

    >>> import torch, turnout
    >>> with turnout.pin(dot="reference"):
    ...     turnout.explain("dot", torch.ones(8), torch.ones(8)).authority
    'pin'
    """
    check_pins(routes)
    now = current()
    return _entered(_settings({**now.pins, **routes}, now.numerics))


def numerics(level: str) -> contextlib.AbstractContextManager[None]:
    """Limit the choice inside a `with` block to routes that are at least this faithful: "exact", "close" (default) or "lossy".

    "exact" takes only routes that are bit-identical to PyTorch on this device; "lossy" lets anything in.

    >>> import torch, turnout
    >>> with turnout.numerics("exact"):
    ...     turnout.explain("matmul", torch.ones(1, 8), torch.ones(8, 1)).chosen
    'reference'
    """
    now = current()
    return _entered(_settings(now.pins, check_level(level)))

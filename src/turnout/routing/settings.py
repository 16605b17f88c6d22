"""Settings of the user: pins and the numerics level, for each thread and async task."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

from turnout.routing.forks import lock_across_forks
from turnout.routing.names import not_known, one_of
from turnout.routing.torch_private import constant_in_graphs

LEVELS = ("exact", "close", "lossy")


class Preference(NamedTuple):
    """Routes of an op that are taken, where they can take a call, in the place of others: the fastest of
    them, unless it takes more than `margin` times as long as what would be chosen."""

    routes: tuple[str, ...]
    margin: float


Preferred = tuple[tuple[str, Preference], ...]  # by the op's name


class Settings:
    """Pins (op to route), the loosest numerics class that may be taken, and the routes of ops that are
    preferred (see `choose`).

    Equal settings are one object, so that they hash fast in cache keys.
    """

    def __init__(self, pins: Mapping[str, str], numerics: str, preferred: Preferred = ()):
        self.pins, self.numerics, self.preferred = dict(pins), numerics, dict(preferred)
        self.levels: dict[str, Settings] = {}  # these settings at other levels, see `at_level`


class Asking(Settings):
    """Settings inside `asking`: a call of an op raises `Asked` with its arguments instead of running."""


class Split(Settings):
    """Settings inside a model that is split over ranks.

    For a call that is not in the dispatch cache, the op asks `plan(op, args)` for the function that runs this
    rank's part of such calls.
    """

    def __init__(
        self,
        pins: Mapping[str, str],
        numerics: str,
        plan: Callable[[Any, tuple], Callable[..., Any]],
        preferred: Preferred = (),
    ):
        super().__init__(pins, numerics, preferred)
        self.plan = plan
        self._variants: dict[tuple, Split] = {}  # with the same plan, by pins and numerics level

    def with_choices(self, pins: Mapping[str, str], numerics: str) -> Split:
        """The same plan under other pins and another level. Equal ones are one object."""
        key = (tuple(sorted(pins.items())), numerics)
        if key not in self._variants:
            self._variants[key] = Split(pins, numerics, self.plan, _preferred(self))
            self._variants[key]._variants = self._variants
        return self._variants[key]

    def with_plan(self, plan: Callable[[Any, tuple], Callable[..., Any]]) -> Split:
        """The same choices by another plan."""
        return Split(self.pins, self.numerics, plan, _preferred(self))


class Asked(Exception):
    """Ends a call inside `asking`; `call` holds the op and the arguments of its reference."""

    def __init__(self, op: Any, args: tuple):
        super().__init__(f"a call of {op.name} inside asking(), which runs nothing")
        self.call = op, args


ROUTES: dict[str, Mapping[str, Any]] = {}  # the routes of each declared op, by the op's name
PINNED_TOGETHER: dict[str, tuple[str, ...]] = {}  # names of ops, by the public function that may call them

entered: ContextVar[Settings | None] = ContextVar("turnout_settings", default=None)
_interned: dict[tuple, Settings] = {}  # by pins, numerics level and preferred routes
_MOST_INTERNED = 1024
_lock = lock_across_forks()


def current() -> Settings:
    """The settings of this thread or task; where none were entered, those of the environment."""
    return entered.get() or from_environment()


@functools.cache
def from_environment() -> Settings:
    """TURNOUT_PIN and TURNOUT_NUMERICS, read once.

    A mistake in them raises at every call, never passes quietly.
    """
    pins = {}
    for part in filter(None, (p.strip() for p in os.environ.get("TURNOUT_PIN", "").split(","))):
        op, equals, route = part.partition("=")
        if not equals:
            raise ValueError(
                f"TURNOUT_PIN has {part!r}, it needs op=route pairs with commas between: "
                "TURNOUT_PIN='dot=reference,matmul=as-dot'"
            )
        pins[op.strip()] = route.strip()
    return _settings(pins_of_ops(pins), check_level(os.environ.get("TURNOUT_NUMERICS", "close")))


def _settings(pins: Mapping[str, str], numerics: str, preferred: Preferred = ()) -> Settings:
    key = (tuple(sorted(pins.items())), numerics, preferred)
    with _lock:
        if len(_interned) >= _MOST_INTERNED:
            _interned.clear()  # settings in force stay valid; equal ones entered later are another object
        return _interned.setdefault(key, Settings(pins, numerics, preferred))


def _changed(now: Settings, pins: Mapping[str, str], numerics: str) -> Settings:
    if isinstance(now, Split):
        return now.with_choices(pins, numerics)
    return _settings(pins, numerics, _preferred(now))


def _preferred(now: Settings) -> Preferred:
    return tuple(now.preferred.items())


def preferring(preferred: Preferred) -> contextlib.AbstractContextManager[None]:
    """Inside this block these routes are preferred, see `choose`; pins take precedence."""
    now = current()
    return entering(_settings(now.pins, now.numerics, preferred))


@constant_in_graphs  # nobody compiles a split model from outside
def splitting() -> Any:
    """The plan of the split model that runs in this thread; None outside of one."""
    now = entered.get()
    return now.plan if isinstance(now, Split) else None


def plainly(now: Split) -> contextlib.AbstractContextManager[None]:
    """Inside this block: the same choices without the split, for what every rank computes whole."""
    return entering(_settings(now.pins, now.numerics, _preferred(now)))


def split_by(plan: Callable[[Any, tuple], Callable[..., Any]]) -> Split:
    """The settings in force now, split by this plan."""
    now = current()
    return Split(now.pins, now.numerics, plan, _preferred(now))


def at_level(now: Settings, level: str) -> Settings:
    """The same settings at another level, looked up: layers that are held to a level ask at every call."""
    return now.levels.get(level) or now.levels.setdefault(level, _changed(now, now.pins, level))


def check_level(level: str) -> str:
    """Return a numerics level; raise ValueError if there is none of that name."""
    if level not in LEVELS:
        raise not_known("numerics level", level, LEVELS)
    return level


def pins_of_ops(pins: Mapping[str, str]) -> dict[str, str]:
    """Convert pins of public functions to pins of ops; raise ValueError unless every op and route exists.

    A public function pins each op it may call that has the route. A pin of the op itself takes precedence.
    """
    by_op: dict[str, str] = {}
    for name, route in sorted(pins.items(), key=lambda pin: pin[0] not in PINNED_TOGETHER):
        ops = PINNED_TOGETHER.get(name, (name,))
        if not all(op in ROUTES for op in ops):
            raise not_known("op", name, sorted({*ROUTES, *PINNED_TOGETHER}))
        routes = dict.fromkeys(name for op in ops for name in (*ROUTES[op], "reference"))
        if not isinstance(route, str) or route not in routes:
            raise ValueError(f"op {name} has no route {route!r}; {one_of(route, routes)}")
        by_op.update({op: route for op in ops if route in (*ROUTES[op], "reference")})
    return by_op


@contextlib.contextmanager
def entering(settings: Settings) -> Iterator[None]:
    """Inside this block these settings are in force."""
    token = entered.set(settings)
    try:
        yield
    finally:
        entered.reset(token)


def asking() -> contextlib.AbstractContextManager[None]:
    """Inside this block a call of an op raises `Asked`.

    The settings are a new object, so that no call in a dispatch cache has them in its key.
    """
    now = current()
    return entering(Asking(now.pins, now.numerics))


def pin(**routes: str) -> contextlib.AbstractContextManager[None]:
    """Force the route of an op inside a `with` block, in this thread: `pin(matmul="as-dot")`.

    The name is that of a public function or of an op; a function that may call several ops (`rms_norm_silu`
    with `out=` calls another) pins all of them. The route runs with the configuration that was measured for
    the call, else with the first that it offers. A route that refuses the call raises `Refused` with its
    reasons, a tensor subclass included. Inside a transform of `torch.func` or a dispatch mode torch rewrites
    the program, and plain PyTorch runs, pinned or not.

    Pins nest; the inner one wins for its op. The environment variable ``TURNOUT_PIN="matmul=as-dot"`` does
    the same for a process.

    >>> import torch, turnout
    >>> with turnout.pin(dot="reference"):
    ...     turnout.explain("dot", torch.ones(8), torch.ones(8)).authority
    'pin'
    """
    pins = pins_of_ops(routes)
    now = current()
    return entering(_changed(now, {**now.pins, **pins}, now.numerics))


def numerics(level: str) -> contextlib.AbstractContextManager[None]:
    """Limit the choice inside a `with` block to routes that are at least this faithful: "exact", "close"
    (default) or "lossy".

    "exact" takes only routes that are bit-identical to PyTorch on this device; "lossy" lets anything in.

    >>> import torch, turnout
    >>> with turnout.numerics("exact"):
    ...     turnout.explain("matmul", torch.ones(1, 8), torch.ones(8, 1)).chosen
    'reference'
    """
    now = current()
    return entering(_changed(now, now.pins, check_level(level)))

"""Failures of a route at launch: what counts as one, and which kernels do not compile on this machine.

Only three things make a call fall through to the next route: no memory, no shared memory, a kernel that does
not compile. Everything else that a route raises is a mistake, and is raised. That a kernel does not compile
is kept on disk for the Triton and the card it was seen with, so nobody waits for it, or is warned of it,
twice. Where memory was
missing, the route is tried again later: there may be more of it then.
"""

from __future__ import annotations

import functools
import hashlib
import json
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from turnout.routing import store, versions
from turnout.routing.device import Device
from turnout.routing.forks import lock_across_forks
from turnout.routing.row import Unreadable

Kind = Literal["memory", "shared memory", "compilation"]

_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED")
_NOT_COMPILED = (
    "CompilationError",
    "CompileTimeAssertionFailure",
    "UnsupportedLanguageConstruct",
    "PTXASError",
)
_NUMBAS_OWN = "NumbaError"  # what all errors of Numba's compiler are

FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0  # seconds until a route for which memory was missing is tried again
_MOST_CALLS = 1024  # of which failures are remembered
_lock = lock_across_forks()


def kind_of(failure: BaseException) -> Kind | None:
    """Which kind of launch failure this is; None for a mistake.

    >>> kind_of(torch.OutOfMemoryError("CUDA out of memory.")), kind_of(MemoryError())
    ('memory', 'memory')
    >>> kind_of(RuntimeError("shape"))
    """
    name, text = type(failure).__name__, str(failure)
    if isinstance(failure, (MemoryError, torch.OutOfMemoryError)):
        return "memory"
    if name == "OutOfResources":  # Triton: shared memory, tensor memory, threads
        return "shared memory"
    if any(cls.__name__ == _NUMBAS_OWN for cls in type(failure).__mro__):
        return "compilation"
    if name in _NOT_COMPILED or (isinstance(failure, RuntimeError) and "PassManager::run failed" in text):
        return "compilation"
    if isinstance(failure, RuntimeError) and any(sign in text for sign in _NO_MEMORY):
        return "memory"
    return None


def in_words(failure: BaseException) -> str:
    """A failure in one line: its type and the first line of its message."""
    return f"{type(failure).__name__}: {(str(failure).strip() or 'no message').splitlines()[0]}"


@dataclass
class _Failure:
    """A launch that failed. `again` is when the route is tried again (`time.monotonic`), None for never."""

    why: str
    wait: float
    again: float | None


class FailedRoutes:
    """The routes of one op that failed at launch, by call. The oldest are forgotten where there are very
    many.

    A route for which memory was missing is tried again after a second. Each time it fails again it waits
    twice as long, up to a minute; after an hour without a failure it begins anew.

    >>> failed = FailedRoutes(clock=lambda: now)
    >>> now = 5.0
    >>> failed.add("one-launch", "a call", torch.OutOfMemoryError("no memory"))
    >>> failed.reasons("a call"), failed.next_try("a call")
    ({'one-launch': 'failed at launch: OutOfMemoryError: no memory'}, 6.0)
    >>> now = 6.5
    >>> failed.reasons("a call"), failed.next_try("a call")
    ({}, None)
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._calls: dict[Hashable, dict[str, _Failure]] = {}
        self._announced: set[tuple[str, Kind | None]] = set()
        self._lock, self.now = _lock, clock

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, route: str, call: Hashable, failure: BaseException) -> None:
        """Remember that a route failed at launch."""
        now, why = self.now(), f"failed at launch: {in_words(failure)}"
        with self._lock:
            routes = self._calls.pop(call, {})  # put back at the end: the newest
            wait, again = FIRST_WAIT, None
            if kind_of(failure) == "memory":
                before = routes.get(route)
                if before is not None and before.again is not None and now - before.again < 60 * LONGEST_WAIT:
                    wait = min(2 * before.wait, LONGEST_WAIT)
                again = now + wait
            self._calls[call] = {**routes, route: _Failure(why, wait, again)}
            while len(self._calls) > _MOST_CALLS:
                del self._calls[next(iter(self._calls))]

    def reasons(self, call: Hashable) -> dict[str, str]:
        """Why routes are not to be tried for a call now, by route."""
        now, failures = self.now(), self._calls.get(call, {})
        return {route: f.why for route, f in failures.items() if f.again is None or f.again > now}

    def next_try(self, call: Hashable) -> float | None:
        """The time at which the next route that waits for memory is tried for a call; None if none waits."""
        now, failures = self.now(), self._calls.get(call, {})
        return min(
            (f.again for f in failures.values() if f.again is not None and f.again > now), default=None
        )

    def is_news(self, route: str, failure: BaseException) -> bool:
        """Whether nobody was told yet that the route fails in this way, with this or another call."""
        key = (route, kind_of(failure))
        with self._lock:
            news = key not in self._announced
            self._announced.add(key)
        return news

    def clear(self) -> None:
        """Forget all failures."""
        with self._lock:
            self._calls.clear()
            self._announced.clear()


def compile_problem(kernels: str, device: Device) -> str | None:
    """Why the kernels with this hash do not compile for a device of this machine, if that was seen before."""
    return _known(device).get(kernels) if device.triton is not None else None


def is_known(kernels: str, device: Device) -> bool:
    """Whether the kernels with this hash were tried on this machine, whatever came of it."""
    return kernels in _known(device)


def remember(kernels: str, device: Device, problem: str | None) -> None:
    """Keep that the kernels with this hash do not compile for a device here, or (None) that they do."""
    _known(device)[kernels] = problem
    store.write_json(_file(device), _known(device))


def forget_problems() -> None:
    """Read from disk anew what compiles."""
    _known.cache_clear()


@functools.cache
def _known(device: Device) -> dict[str, str | None]:
    try:
        content = store.read_json(_file(device))
    except (Unreadable, FileNotFoundError):
        return {}
    entries = content.items() if isinstance(content, dict) else ()
    return {name: problem for name, problem in entries if problem is None or isinstance(problem, str)}


def _file(device: Device) -> Path:
    software = [versions.triton(), device.name, device.capability]
    name = hashlib.sha256(json.dumps(software).encode()).hexdigest()[:16]
    return store.cache_folder() / f"v{store.SCHEMA}" / "compiled" / f"{device.slug}-{name}.json"

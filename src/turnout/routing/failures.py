"""Recognize and remember launch failures: routes to skip for a call, kernels that do not compile here.

Only three failures make a call fall through to the next route: no memory, no shared memory, a kernel that
does not compile. Everything else that a route raises is a mistake, and is raised. Kernels that do not compile
are remembered on disk, for this Triton and this card, so that nobody waits for them or is warned about them
twice. A route for which memory was missing is tried again later, when there may be more.
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
_NUMBA_BASE = "NumbaError"  # the base class of all errors of Numba's compiler

FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0  # seconds until a route for which memory was missing is tried again
_MOST_CALLS = 1024  # whose failures are remembered
_lock = lock_across_forks()


def kind_of(failure: BaseException) -> Kind | None:
    """The kind of launch failure that an exception is; None for a mistake.

    >>> kind_of(torch.OutOfMemoryError("CUDA out of memory.")), kind_of(MemoryError())
    ('memory', 'memory')
    >>> kind_of(RuntimeError("shape"))
    """
    name, text = type(failure).__name__, str(failure)
    if isinstance(failure, (MemoryError, torch.OutOfMemoryError)):
        return "memory"
    if name == "OutOfResources":  # Triton: shared memory, tensor memory, threads
        return "shared memory"
    if any(cls.__name__ == _NUMBA_BASE for cls in type(failure).__mro__):
        return "compilation"
    if name in _NOT_COMPILED or (isinstance(failure, RuntimeError) and "PassManager::run failed" in text):
        return "compilation"
    if isinstance(failure, RuntimeError) and any(sign in text for sign in _NO_MEMORY):
        return "memory"
    return None


def in_words(failure: BaseException) -> str:
    """Describe a failure in one line: its type and the first line of its message."""
    return f"{type(failure).__name__}: {(str(failure).strip() or 'no message').splitlines()[0]}"


@dataclass
class _Failure:
    """A launch that failed: why, the seconds to wait, and when to retry (`time.monotonic`; None: never)."""

    why: str
    wait: float
    retry_at: float | None


class FailedRoutes:
    """The routes of one op that failed at launch, for each call; the oldest calls are forgotten first.

    A route for which memory was missing is tried again after a second. With each further failure the wait
    doubles, up to a minute; after an hour without a failure it is a second again.

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
            wait, retry_at = FIRST_WAIT, None
            if kind_of(failure) == "memory":
                last = routes.get(route)
                if last is not None and last.retry_at is not None and now - last.retry_at < 60 * LONGEST_WAIT:
                    wait = min(2 * last.wait, LONGEST_WAIT)
                retry_at = now + wait
            self._calls[call] = {**routes, route: _Failure(why, wait, retry_at)}
            while len(self._calls) > _MOST_CALLS:
                del self._calls[next(iter(self._calls))]

    def reasons(self, call: Hashable) -> dict[str, str]:
        """The routes that must not be tried for a call now, with the reason of each."""
        now, failures = self.now(), self._calls.get(call, {})
        return {route: f.why for route, f in failures.items() if f.retry_at is None or f.retry_at > now}

    def next_try(self, call: Hashable) -> float | None:
        """When the next route that waits for memory is retried for a call; None if none waits."""
        now, failures = self.now(), self._calls.get(call, {})
        times = (f.retry_at for f in failures.values() if f.retry_at is not None)
        return min((time for time in times if time > now), default=None)

    def is_news(self, route: str, failure: BaseException) -> bool:
        """Whether this is the first failure of its kind of the route, with any call. True only once."""
        key = (route, kind_of(failure))
        with self._lock:
            is_first = key not in self._announced
            self._announced.add(key)
        return is_first

    def clear(self) -> None:
        """Forget all failures."""
        with self._lock:
            self._calls.clear()
            self._announced.clear()


def compile_problem(kernels: str, device: Device) -> str | None:
    """Why the kernels with this hash do not compile for a device of this machine; None if they may."""
    return _compiled(device).get(kernels) if device.triton is not None else None


def is_known(kernels: str, device: Device) -> bool:
    """Whether compiling the kernels with this hash was tried on this machine, with success or without."""
    return kernels in _compiled(device)


def remember(kernels: str, device: Device, problem: str | None) -> None:
    """Store why the kernels with this hash do not compile for a device here, or None: they do."""
    _compiled(device)[kernels] = problem
    store.write_json(_file(device), _compiled(device))


def forget_problems() -> None:
    """Read the results of compiling from disk again when they are next needed."""
    _compiled.cache_clear()


@functools.cache
def _compiled(device: Device) -> dict[str, str | None]:
    """For each hash of kernels that were compiled here, the problem; None for those that compile."""
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

"""The dispatch caches of all ops: bounded together, cleared together.

A dispatch cache is a dict of one op. It maps the cache key of a call to the function that runs such calls.
Looking up takes no lock; adding and clearing do.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

from turnout.routing.forks import lock_across_forks

DispatchCache = dict[tuple, Callable[..., Any]]

MOST_CALLS = 4096  # of all ops together
_caches: list[DispatchCache] = []
_entries: collections.deque[tuple[DispatchCache, tuple]] = collections.deque()  # the oldest first
_lock = lock_across_forks()
_clearings = 0


def new_dispatch_cache() -> DispatchCache:
    """An empty cache, which is bounded and cleared with all others."""
    cache: DispatchCache = {}
    _caches.append(cache)
    return cache


def clearings() -> int:
    """How often the caches were cleared."""
    return _clearings


def add(cache: DispatchCache, key: tuple, run: Callable[..., Any], chosen_at: int) -> Callable[..., Any]:
    """Add the function that runs calls with this key, and return it.

    chosen_at: `clearings()` before it was chosen; if the caches were cleared since, nothing is added. Where
    another thread has added a function for this key, that one stays and is returned.
    """
    with _lock:
        if chosen_at == _clearings:
            ours, run = run, cache.setdefault(key, run)
            if run is ours:
                _entries.append((cache, key))
        while len(_entries) > MOST_CALLS:
            oldest_cache, oldest_key = _entries.popleft()
            oldest_cache.pop(oldest_key, None)
    return run


def forget_choices() -> None:
    """Drop all cached choices, with everything prepared for them: a table changed, or a route failed."""
    global _clearings
    with _lock:
        _clearings += 1
        _entries.clear()
        for cache in _caches:
            cache.clear()

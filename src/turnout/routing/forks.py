"""Locks that are free in a forked process.

A fork copies the memory of all threads and goes on with one of them. A lock that another thread held at that
moment would stay locked in the child for ever, and what it guards half changed.
"""

from __future__ import annotations

import os
import threading
from typing import Any


def lock_across_forks() -> Any:
    """A reentrant lock for a module: a fork waits until no other thread holds it.

    Where one thread may hold two such locks, none may wait for them in another order than that in which they
    were made, the last one first: a fork acquires them so.

    >>> lock = lock_across_forks()
    >>> with lock:
    ...     guarded = 1
    """
    lock = threading.RLock()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock

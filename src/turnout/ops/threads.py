"""Run CPU kernels that release the GIL on torch's OpenMP threads, or on helper threads where those cannot be had.

torch's threads go on spinning for a while after each of its ops, so a pool beside them finds the cores taken:
rms_norm_silu behind an op of torch took 3.7 ms by a pool of two, 3.5 by one thread alone, 2.1 by torch's two.
Numba's own layers would be a second set of threads too, and are not safe to enter from two Python threads.

A call finishes or raises. Python runs signal handlers on the main thread, between any two bytecodes, and that
thread runs a share of the work inside a C callback, where whatever is raised is printed and lost. So:

- A share is a generator that waits inside its `try`. A function would leave a gap between its first bytecode and
  its `try`, and a handler that raises there would be lost. Everything else between the C callback and the kernel
  is C code (`map`, `next`, `functools.partial`), where no handler runs.
- A share that a handler interrupts runs its work all the same. So an op that writes in place has written
  everything or nothing, as with torch's ops, and the call raises afterwards.
- A share says that it has ended as its very last step. If one has not said so, the call raises.
- Nothing is raised before all shares have ended: no thread still writes into memory that is given back.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import os
import queue
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

_Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_forked = False  # whether this process is a fork: OpenMP's threads stayed in the parent, and GNU's runtime waits for them forever


def in_shares(work: Callable[[int, int], object], parts: int) -> None:
    """Call `work(first, last)` over parts 0 to `parts`, in as many even shares as torch has threads, one per thread.

    Raises what a share or a signal handler raised, after all shares have ended. `work` must be a C callable, such as a
    `functools.partial` of a kernel: a Python function could be interrupted before it calls the kernel.
    """
    threads = min(torch.get_num_threads(), parts)
    if threads <= 1 or sys.is_finalizing():  # a thread that asks a finalizing interpreter for the GIL never gets it
        work(0, parts)
        return
    ended: list[int] = []
    failures: list[BaseException] = []
    shares = [_share(work, parts * i // threads, parts * (i + 1) // threads, ended, failures) for i in range(threads)]
    for share in shares:
        next(share)
    calls = map(next, shares)  # each value that is taken runs one share; all threads take from here
    runtime = _runtime()
    if runtime is None:
        _run_on_helpers(calls, threads, failures)
    else:
        try:
            runtime.GOMP_parallel(_Callback(functools.partial(next, calls)), None, threads, 0)
        finally:
            _run_all(calls)  # OpenMP may give fewer threads than asked for: nested regions, OMP_THREAD_LIMIT
    if failures or len(ended) < threads:
        _raise(failures)


def _share(
    work: Callable[[int, int], object], first: int, last: int, ended: list[int], failures: list[BaseException]
) -> Iterator[None]:
    """Run `work(first, last)` when the second value is asked for, and record how it ended."""
    try:
        yield
    except GeneratorExit:  # never asked for
        return
    except BaseException as interruption:  # a signal handler raised as the share began
        failures.append(interruption)
    try:
        work(first, last)
        ended.append(first)
    except BaseException as failure:
        failures.append(failure)
    yield


def _run_all(calls: Iterator[None]) -> None:
    """Run the shares that no thread has taken, without a bytecode in between."""
    collections.deque(calls, maxlen=0)


def _raise(failures: list[BaseException]) -> None:
    """Raise what a share raised. An interruption goes before an error: a launch failure may be followed by another route."""
    if not failures:
        raise KeyboardInterrupt(
            "turnout: a CPU kernel did not finish, because a signal handler raised inside a C callback and Python has lost "
            "that exception (it was printed to stderr); the call has no result and can be repeated"
        )
    failure = min(failures, key=lambda failure: isinstance(failure, Exception))
    failures.clear()  # its traceback holds the list, which would hold the failure and all tensors of the call
    try:
        raise failure
    finally:
        del failure


@functools.cache
def _runtime() -> Any:
    """The OpenMP runtime that torch has loaded, or None if it is not found, may be one of several, or was forked.

    GNU's, LLVM's and Intel's runtimes all have GNU's entry points.
    """
    maps = Path("/proc/self/maps")
    if _forked or not maps.exists():
        return None
    lines = maps.read_text().splitlines()
    loaded = {line.split(maxsplit=5)[-1] for line in lines if re.search(r"/lib(gomp|omp|iomp5)\b[^/]*$", line)}
    home = str(Path(torch.__file__).parent)  # wheels bring theirs along, in torch/lib or torch.libs
    candidates = [path for path in loaded if path.startswith(home)] or list(loaded)
    if len(candidates) != 1:
        return None
    library = ctypes.CDLL(candidates[0])
    return library if hasattr(library, "GOMP_parallel") else None


class _Helpers:
    """Threads of our own that wait for shares to run."""

    def __init__(self) -> None:
        self.tasks: queue.SimpleQueue[tuple[Iterator[None], threading.Lock]] = queue.SimpleQueue()
        self.threads = 0

    def ask(self, calls: Iterator[None], latches: list[threading.Lock]) -> None:
        """Ask one helper per latch to run shares while it holds the latch. Helpers may come late, or never."""
        try:
            while self.threads < len(latches):
                threading.Thread(target=self._serve, name=f"turnout-{self.threads}", daemon=True).start()
                self.threads += 1
        except (RuntimeError, MemoryError):  # no more threads to be had: the caller runs what nobody takes
            pass
        for latch in latches[: self.threads]:
            self.tasks.put((calls, latch))

    def _serve(self) -> None:
        while True:
            calls, latch = self.tasks.get()
            try:
                with latch:
                    _run_all(calls)
            except BaseException:  # a share that could not even record its failure is missing among those that ended
                pass
            del calls, latch


_helpers = _Helpers()


def _run_on_helpers(calls: Iterator[None], threads: int, failures: list[BaseException]) -> None:
    """Run all shares on this thread and on helpers. Returns, or raises, when all have ended."""
    latches = [threading.Lock() for _ in range(threads - 1)]
    # Each repetition is there for one more signal that arrives at the very bytecode between two `try`.
    try:
        _helpers.ask(calls, latches)
    finally:
        try:
            _finish(calls, latches, failures)
        finally:
            try:
                _finish(calls, latches, failures)
            finally:
                _finish(calls, latches, failures)


def _finish(calls: Iterator[None], latches: list[threading.Lock], failures: list[BaseException]) -> None:
    """Run the shares that nobody has taken, then wait for those that helpers have, however many signals arrive meanwhile."""
    while True:
        try:
            _run_all(calls)
            for latch in latches:  # a helper that comes later finds no share left
                with latch:
                    pass
            return
        except BaseException as interruption:
            failures.append(interruption)


def _after_fork() -> None:
    """Use fresh helpers in a forked process, and not OpenMP: none of the parent's threads is there."""
    global _forked, _helpers
    _forked, _helpers = True, _Helpers()
    _runtime.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

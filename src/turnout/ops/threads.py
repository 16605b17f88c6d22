"""Run CPU kernels that release the GIL on torch's OpenMP threads, or on our own where there are none.

torch's threads go on spinning for a while after each of its ops, so a pool beside them finds the cores taken:
rms_norm_silu behind an op of torch took 3.7 ms by a pool of two, 3.5 by one thread alone, 2.1 by torch's two.
Numba's own layers would be a second set of threads too, and are not safe to enter from two Python threads.

A call finishes or raises. Python runs signal handlers on the main thread, between any two bytecodes, and that
thread runs a share of the work inside a C callback, where whatever is raised is printed and lost. So:

- A share is a generator that waits inside its `try`. A function would leave a gap between its first bytecode
  and its `try`, and what a handler raises there would be lost. Everything else between the C callback and the
  kernel is C code (`map`, `next`, `functools.partial`), where no handler runs.
- A share that a handler interrupts runs its work all the same. So an op that writes in place has written
  everything or nothing, as with torch's ops, and the call raises afterwards.
- A share says that it has ended as its very last step. If one has not said so, the call raises.
- Nothing is raised before all shares have ended: no thread still writes into memory that is given back.
"""

from __future__ import annotations

import _thread
import collections
import contextlib
import ctypes
import functools
import importlib
import itertools
import os
import queue
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from turnout.routing.forks import lock_across_forks

_Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
# Whether this process is a fork: OpenMP's threads stayed in the parent, and GNU's runtime waits for them.
_forked = False
_not_forked = lock_across_forks()  # held while Numba compiles or is imported


def in_shares(work: Callable[[int, int], object], parts: int) -> None:
    """Call `work(first, last)` over parts 0 to `parts`, in as many even shares as torch has threads.

    Raises what a share or a signal handler raised, after all shares have ended. `work` must be a C callable,
    such as a `functools.partial` of a kernel: a Python function could be interrupted before its kernel.
    """
    threads = min(torch.get_num_threads(), parts)
    if threads <= 1 or sys.is_finalizing():  # other threads get no GIL while the interpreter ends
        work(0, parts)
        return
    runtime = _runtime()
    ended: list[int] = []
    failures: list[BaseException] = []
    bounds = [parts * i // threads for i in range(threads + 1)]
    shares = [_share(work, first, last, ended, failures) for first, last in itertools.pairwise(bounds)]
    for share in shares:
        next(share, None)
    calls = map(next, shares, itertools.repeat(None))  # threads take values from here; each runs a share
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
    """Run `work(first, last)` when it is resumed, and record how that ended."""
    try:
        yield
    except GeneratorExit:  # never resumed
        return
    except BaseException as interruption:  # a signal handler raised as the share began
        failures.append(interruption)
    try:
        work(first, last)
        ended.append(first)
    except BaseException as failure:
        failures.append(failure)


def _run_all(calls: Iterator[None]) -> None:
    """Run the shares that no thread has taken, without a bytecode in between."""
    collections.deque(calls, maxlen=0)


def _raise(failures: list[BaseException]) -> None:
    """Raise what a share raised. An interruption goes before an error, which another route may follow."""
    if not failures:
        raise KeyboardInterrupt(
            "turnout: a CPU kernel did not finish. Something raised inside a C callback, most likely a "
            "signal handler, and Python lost that after printing it to stderr. The call can be repeated."
        )
    failure = min(failures, key=lambda failure: isinstance(failure, Exception))
    failures.clear()  # its traceback holds the list, which would hold the failure and all tensors of the call
    try:
        raise failure
    finally:
        del failure


@functools.cache
def _runtime() -> Any:
    """The OpenMP runtime that torch has loaded. None if it is not found, or one of several, or in a fork.

    GNU's, LLVM's and Intel's runtimes all have GNU's entry points.
    """
    maps = Path("/proc/self/maps")
    if _forked or not maps.exists():
        return None
    lines = maps.read_text().splitlines()
    openmp = re.compile(r"/lib(gomp|omp|iomp5)\b[^/]*$")
    loaded = {line.split(maxsplit=5)[-1] for line in lines if openmp.search(line)}
    home = str(Path(torch.__file__).parent)  # wheels bring theirs along, in torch/lib or torch.libs
    candidates = [path for path in loaded if path.startswith(home)] or list(loaded)
    if len(candidates) != 1:
        return None
    library = ctypes.CDLL(candidates[0])
    return library if hasattr(library, "GOMP_parallel") else None


class _Task:
    """The shares of one call, for helpers to take from."""

    def __init__(self, calls: Iterator[None], helpers: int):
        self.calls = calls
        self.running = bytearray(helpers)  # 1 while that helper may be running a share
        self.ends: queue.SimpleQueue[None] = queue.SimpleQueue()  # wakes the caller; `running` is what counts

    def help(self, helper: int) -> None:
        """Run shares that nobody has taken; none if the helper comes late."""
        self.running[helper] = 1
        try:
            _run_all(self.calls)
        finally:
            self.running[helper] = 0
            self.ends.put(None)

    def finish(self) -> None:
        """Run the shares that nobody has taken, and wait for those that helpers run."""
        _run_all(self.calls)
        while any(self.running):
            with contextlib.suppress(queue.Empty):
                self.ends.get(timeout=0.001)


class _Helpers:
    """Threads of our own that wait for tasks."""

    def __init__(self) -> None:
        self.tasks: queue.SimpleQueue[tuple[_Task, int]] = queue.SimpleQueue()
        self.threads = 0

    def ask(self, task: _Task, helpers: int) -> None:
        """Ask so many helpers to take part in a task. They may come late, or never."""
        try:
            while self.threads < helpers:
                _thread.start_new_thread(self._serve, ())  # one C call; `threading`'s can be interrupted
                self.threads += 1
        except (RuntimeError, MemoryError):  # no more threads to be had: the caller runs what nobody takes
            pass
        for helper in range(min(helpers, self.threads)):
            self.tasks.put((task, helper))

    def _serve(self) -> None:
        while True:
            task, helper = self.tasks.get()
            with contextlib.suppress(BaseException):  # a failure that is not recorded is missing in `ended`
                task.help(helper)
            del task


_helpers = _Helpers()


def _run_on_helpers(calls: Iterator[None], threads: int, failures: list[BaseException]) -> None:
    """Run all shares on this thread and on helpers. Returns, or raises, when all have ended."""
    task = _Task(calls, threads - 1)
    _finish_after(functools.partial(_helpers.ask, task, threads - 1), task.finish, failures)


def _finish_after(
    begin: Callable[[], object], finish: Callable[[], object], failures: list[BaseException]
) -> None:
    """Call `begin`, then `finish` until it has returned. It may be interrupted anywhere and called again."""
    try:
        try:
            try:
                begin()
            finally:
                _insist(finish, failures)
        finally:  # again, for a signal that arrived between two `try`
            _insist(finish, failures)
    finally:
        _insist(finish, failures)


def _insist(finish: Callable[[], object], failures: list[BaseException]) -> None:
    """Call `finish` until it has returned, however many signals arrive meanwhile."""
    while True:
        try:
            finish()
            return
        except BaseException as interruption:
            failures.append(interruption)


def uninterrupted(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function on a thread of its own, where Python runs no signal handlers, and return its result.

    What a handler raises meanwhile is raised when the function has ended. Numba needs this: a compilation or
    an import that is interrupted halfway leaves it broken for the rest of the process. On another than the
    main thread this is a plain call. A fork waits meanwhile: the child would find Numba's locks taken.
    """
    if threading.current_thread() is not threading.main_thread() or sys.is_finalizing():
        with _not_forked:
            return function(*args, **kwargs)
    results: list[Any] = []
    failures: list[BaseException] = []
    turns, state = iter((None,)), bytearray(1)  # state: 0 not begun, 1 running, 2 ended
    ends: queue.SimpleQueue[None] = queue.SimpleQueue()  # wakes the caller early

    def run() -> None:
        for _ in turns:  # once, whichever thread comes first
            state[0] = 1
            try:
                with _not_forked:
                    results.append(function(*args, **kwargs))
            except BaseException as failure:
                failures.append(failure)
            finally:
                state[0] = 2
                ends.put(None)

    def finish() -> None:
        while state[0] != 2:
            if state[0] == 0:
                try:
                    _thread.start_new_thread(run, ())
                except (RuntimeError, MemoryError):  # no thread to be had
                    run()
            with contextlib.suppress(queue.Empty):
                ends.get(timeout=0.02)

    _finish_after(lambda: None, finish, failures)
    if failures or not results:
        _raise(failures)
    return results[0]


def import_uninterrupted(module: str) -> None:
    """Import a module that was not imported yet, uninterrupted."""
    if module not in sys.modules:
        uninterrupted(importlib.import_module, module)


def _after_fork() -> None:
    """Use fresh helpers in a forked process, and not OpenMP: none of the parent's threads is there."""
    global _forked, _helpers
    _forked, _helpers = True, _Helpers()
    _runtime.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

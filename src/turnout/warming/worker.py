"""The process that compiles: told what by the pickles on its standard input, it answers with pickles on its
output.

It imports torch and Triton once, looks up what is missing, and forks a process for each kernel: they share
what was imported, a compiler that crashes takes one kernel with it, and what one has taken of memory is given
back. It ends, with all of them, when its input ends: so it outlives nobody.
"""

from __future__ import annotations

import os
import pickle
import selectors
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

from turnout.launch.ahead import Spec, compile_ahead, launch_of, look_up
from turnout.routing.device import Device
from turnout.routing.failures import in_words


class Request(NamedTuple):
    """The launches, the device, how many processes may compile, and how many kernels must be missing for
    that to be worth it; None: only look for them."""

    specs: list[Spec]
    device: Device
    jobs: int
    fewest: int | None


class Answer(NamedTuple):
    """What became of one kernel: "cached", "missing", "compiled" or "failed"."""

    name: str
    state: str
    seconds: float = 0.0
    error: str = ""


class _Task(NamedTuple):
    spec: Spec
    size: int


class _Child(NamedTuple):
    process: int
    name: str
    begun: float
    answer: BinaryIO


def main(file: int) -> None:
    """Answer one request into a file that nothing else writes to: Triton and ptxas may print."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who asked decides what Ctrl-C means
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(file, "wb")
    request: Request = pickle.load(requests)
    missing: list[_Task] = []
    for answer in _look_up_all(request, missing):
        _tell(answers, answer)
    _tell(answers, len(missing))
    if request.fewest is None or len(missing) < request.fewest:
        for task in missing:
            _tell(answers, Answer(task.spec.name, "missing"))
    else:
        missing.sort(key=lambda task: -task.size)  # the longest first, so that none is left alone at the end
        run = _in_processes if hasattr(os, "fork") else _one_by_one
        for answer in run(missing, request.device, request.jobs, requests):
            _tell(answers, answer)
    _tell(answers, None)


def _tell(answers: BinaryIO, answer: Any) -> None:
    pickle.dump(answer, answers)
    answers.flush()


def _look_up_all(request: Request, missing: list[_Task]) -> Iterator[Answer]:
    """What is in the cache, or cannot be asked for; the rest is added to `missing`. Each code once."""
    keys = set()
    for spec in request.specs:
        try:
            looked_up = look_up(launch_of(spec), request.device)
        except Exception as failure:  # of one kernel; the others are compiled all the same
            yield Answer(spec.name, "failed", error=in_words(failure))
            continue
        if looked_up.key in keys:
            continue
        keys.add(looked_up.key)
        if looked_up.present:
            yield Answer(spec.name, "cached")
        else:
            missing.append(_Task(spec, looked_up.size))


def _compiled(spec: Spec, device: Device) -> Answer:
    begun = time.perf_counter()
    try:
        compile_ahead(launch_of(spec), device)
    except Exception as failure:
        return Answer(spec.name, "failed", time.perf_counter() - begun, in_words(failure))
    return Answer(spec.name, "compiled", time.perf_counter() - begun)


def _one_by_one(tasks: list[_Task], device: Device, jobs: int, requests: BinaryIO) -> Iterator[Answer]:
    for task in tasks:
        yield _compiled(task.spec, device)


def _in_processes(tasks: list[_Task], device: Device, jobs: int, requests: BinaryIO) -> Iterator[Answer]:
    """Compile in at most `jobs` processes at a time, as long as `requests` is open."""
    left = tasks[::-1]
    with selectors.DefaultSelector() as waiting:
        waiting.register(requests, selectors.EVENT_READ)
        running: dict[int, _Child] = {}
        try:
            while left or running:
                while left and len(running) < jobs:
                    child = _begin(left.pop(), device)
                    running[child.process] = child
                    waiting.register(child.answer, selectors.EVENT_READ, child)
                for key, _ in waiting.select():
                    child = key.data
                    if child is None:  # nobody asks any more
                        raise SystemExit(1)
                    waiting.unregister(child.answer)
                    del running[child.process]
                    yield _end(child)
        finally:
            for process in running:
                os.kill(process, signal.SIGKILL)


def _begin(task: _Task, device: Device) -> _Child:
    read, write = os.pipe()
    with warnings.catch_warnings():  # torch's threads hold no lock here: nothing has been computed
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if process == 0:
        status = 1
        try:
            os.close(read)
            with os.fdopen(write, "wb") as answer:
                pickle.dump(_compiled(task.spec, device), answer)
            status = 0
        finally:
            sys.stderr.flush()
            os._exit(status)
    os.close(write)
    return _Child(process, task.spec.name, time.perf_counter(), os.fdopen(read, "rb"))


def _end(child: _Child) -> Answer:
    with child.answer:
        pickled = child.answer.read()
    _, status = os.waitpid(child.process, 0)
    seconds = time.perf_counter() - child.begun
    if pickled and status == 0:
        return pickle.loads(pickled)
    how = (
        f"by signal {os.WTERMSIG(status)}"
        if os.WIFSIGNALED(status)
        else f"with status {os.WEXITSTATUS(status)}"
    )
    return Answer(child.name, "failed", seconds, f"the compiler's process ended {how}")

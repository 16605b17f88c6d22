"""Ranks as threads of one process on one device: to see on one card, or in a test, that no bit changes.

One thread runs at a time, and hands over where it waits for another rank. So what runs is always the same
program in the same order, and code that was not written for threads does not notice them.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from turnout.parallel.failures import RankFailed


class Lockstep:
    """So many ranks in this process. Stands in for a `DeviceMesh`: `turnout.distribute(vae, Lockstep(4))`.

    timeout: seconds after which a rank that others wait for counts as stuck.

    >>> import torch
    >>> def next_one(engine):
    ...     got = torch.empty(1)
    ...     other = (engine.rank + 1) % engine.ranks
    ...     sends = [(other, torch.tensor([float(engine.rank)]))]
    ...     engine.exchange(sends, [((engine.rank - 1) % engine.ranks, got)])
    ...     return got.item()
    >>> Lockstep(3).run(next_one)
    [2.0, 0.0, 1.0]
    """

    def __init__(self, ranks: int, *, timeout: float = 600.0):
        if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
            raise ValueError(f"Lockstep: {ranks!r} ranks, it needs a number of at least 1")
        self.ranks, self.timeout = ranks, timeout

    def __repr__(self) -> str:
        return f"Lockstep({self.ranks})"

    def run(self, function: Callable[[Rank], Any]) -> list[Any]:
        """`function(engine)` for each rank, and what each returned. The first exception of any is raised."""
        step = _Step(self.ranks, self.timeout)
        engines = [Rank(rank, self.ranks, step) for rank in range(self.ranks)]
        state = _ThreadState()
        threads = [
            threading.Thread(target=step.run, args=(engine, function, state), daemon=True)
            for engine in engines
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if step.failure is not None:
            raise step.failure
        return [step.results[rank] for rank in range(self.ranks)]


class _ThreadState:
    """What of torch's state belongs to a thread, as it is in this one; each rank gets a copy."""

    def __init__(self):
        self.context = contextvars.copy_context()
        self.gradients, self.inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        used = torch.cuda.is_available() and torch.cuda.is_initialized()
        self.stream = torch.cuda.current_stream() if used else None

    def run(self, function: Callable[[], Any]) -> Any:
        with torch.inference_mode(self.inference), torch.set_grad_enabled(self.gradients):
            if self.stream is None:
                return self.context.copy().run(function)
            with torch.cuda.stream(self.stream):
                return self.context.copy().run(function)


class _Step:
    """What the threads of one run share: the turn, and messages that were sent and not yet received."""

    def __init__(self, ranks: int, timeout: float):
        self.turn = threading.Condition()
        self.messages: dict[tuple[int, int, int], Any] = {}  # (sender, receiver, number) to what was sent
        self.ended: set[int] = set()
        self.results: dict[int, Any] = {}
        self.failure: BaseException | None = None
        self.timeout = timeout

    def run(self, engine: Rank, function: Callable[[Rank], Any], state: _ThreadState) -> None:
        with self.turn:
            try:
                if self.failure is None:
                    self.results[engine.rank] = state.run(lambda: function(engine))
            except BaseException as failure:
                if self.failure is None:
                    self.failure = failure
            finally:
                self.ended.add(engine.rank)
                self.turn.notify_all()

    def wait_for(self, key: tuple[int, int, int]) -> Any:
        """What was sent under this key, once it is there; others run meanwhile."""
        sender = key[0]
        in_time = self.turn.wait_for(
            lambda: key in self.messages or self.failure is not None or sender in self.ended, self.timeout
        )
        if self.failure is not None:
            raise RankFailed(
                f"another rank raised {type(self.failure).__name__}: {self.failure}"
            ) from self.failure
        if key not in self.messages:
            how = "has ended" if in_time else f"did not send within {self.timeout:g} s"
            raise RankFailed(f"rank {key[1]} waits for rank {sender}, which {how}")
        return self.messages.pop(key)


class Rank:
    """The engine of one thread."""

    is_alone, compares_all = False, True

    def __init__(self, rank: int, ranks: int, step: _Step):
        self.rank, self.ranks, self._step = rank, ranks, step
        self._sent: dict[int, int] = {}
        self._received: dict[int, int] = {}

    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        for other, x in sends:
            self._send(other, x.detach().clone())
        for other, place in receives:
            got = self._receive(other)
            if not isinstance(got, Tensor) or got.shape != place.shape or got.dtype != place.dtype:
                given = f"{got.dtype} {list(got.shape)}" if isinstance(got, Tensor) else repr(got)
                needed = f"{place.dtype} {list(place.shape)}"
                raise RankFailed(f"rank {self.rank} expects {needed} of rank {other}, which sent {given}")
            place.copy_(got)

    def agree(self, said: Any) -> list[Any]:
        others = [rank for rank in range(self.ranks) if rank != self.rank]
        for other in others:
            self._send(other, said)
        return [said if rank == self.rank else self._receive(rank) for rank in range(self.ranks)]

    def begin(self) -> None:
        """Nothing is opened."""

    def fail(self, failure: BaseException) -> None:
        """Whoever waits is told by the step that this thread belongs to."""
        if self._step.failure is None:
            self._step.failure = failure
        self._step.turn.notify_all()

    def _send(self, other: int, what: Any) -> None:
        number = self._sent[other] = self._sent.get(other, 0) + 1
        self._step.messages[self.rank, other, number] = what
        self._step.turn.notify_all()

    def _receive(self, other: int) -> Any:
        number = self._received[other] = self._received.get(other, 0) + 1
        return self._step.wait_for((other, self.rank, number))

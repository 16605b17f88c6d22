"""Races one after the other, within a budget, each with a row as soon as it is done."""

from __future__ import annotations

import functools
import gc
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from turnout.bench.sweep import keep_row, rows_of_this_code
from turnout.race.models import Racer, check_weights, racer_named, size_named
from turnout.race.run import ACCELERATED, COMPILED, GRAPH, STOCK, Race, race
from turnout.routing.device import Device
from turnout.routing.names import dtype_named


class Entry(NamedTuple):
    """One race that is to be run: a model by name, in one size and one dtype."""

    name: str
    racer: Racer
    size: str
    dtype: torch.dtype

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def title(self) -> str:
        return f"{self.racer.describe(self.size)}, {self.dtype_name}"


@dataclass
class Outcome:
    """What became of an entry: its race, or why there is none."""

    entry: Entry
    race: Race | None
    said: str

    @property
    def title(self) -> str:
        return self.entry.title

    def row(self) -> dict[str, Any]:
        """One line of JSON."""
        if self.race is not None:
            return self.race.row()
        return {
            "model": self.entry.name,
            "size": self.entry.size,
            "dtype": self.entry.dtype_name,
            "failed": self.said,
        }


def entries(
    names: list[str], size: str, dtype: str | None, device: torch.device, weights: Path | None = None
) -> list[Entry]:
    """The races that were asked for. Raises ValueError if one of them cannot be run: a name or a size that is
    not known, a package that is not installed, a folder that holds no such weights. Nothing is built for
    that.

    One model runs in its first dtype; several, in all that each is raced in on this kind of device.
    """
    chosen = []
    for name in dict.fromkeys(names):
        racer = racer_named(name)
        wanted = size_named(name, size, device)
        racer.load_class()
        if weights is not None:
            check_weights(weights, racer)
        others = racer.dtypes[1:] if len(names) > 1 else ()
        dtypes = [dtype] if dtype is not None else [racer.default_dtype(device), *others]
        chosen += [Entry(name, racer, wanted, dtype_named(each)) for each in dtypes]
    return chosen


@dataclass
class Plan:
    """Races to run in this order. `left` names those that the budget left out."""

    entries: list[Entry]
    device: torch.device
    weights: Path | None = None
    numerics: str | None = None
    compiled: bool = False
    rounds: int = 10
    seconds: float = 20.0
    budget: float | None = None
    profiled: bool = True
    out: Path | None = None
    missing: bool = False
    graph: bool = False
    left: list[str] = field(default_factory=list)

    def run(self, on_progress: Callable[[str, str], object] = lambda race, step: None) -> Iterator[Outcome]:
        """Run them; each outcome comes as soon as it is known, and its row is written before that.

        `on_progress` is told which race runs, and which step of it.
        """
        end = None if self.budget is None else time.perf_counter() + self.budget
        done = self._done() if self.missing else set()
        for i, entry in enumerate(self.entries):
            what = entry.racer.describe(entry.size, given=self.weights is not None)
            if (what, entry.dtype_name) in done:
                continue
            left = None if end is None else end - time.perf_counter()
            if left is not None and left <= 0:
                self.left.append(f"{entry.name} ({entry.dtype_name})")
                continue
            which = f"{i + 1} of {len(self.entries)}: " if len(self.entries) > 1 else ""
            seconds = self.seconds if left is None else min(self.seconds, left)
            yield self._one(entry, seconds, functools.partial(on_progress, f"{which}{entry.title}"))
            self._forget()

    def _one(self, entry: Entry, seconds: float, on_progress: Callable[[str], object]) -> Outcome:
        # Thousands of small kernels take the profiler longer than the race: of many models, the one with
        # routes
        lanes = (STOCK, ACCELERATED, COMPILED) if len(self.entries) == 1 else (ACCELERATED,)
        options: dict[str, Any] = {
            "weights": self.weights,
            "numerics": self.numerics,
            "rounds": self.rounds,
            "seconds": seconds,
            "compiled": self.compiled,
            "graph": self.graph,
            "profiled": lanes if self.profiled else (),
            "on_progress": on_progress,
        }
        try:
            found = race(entry.name, entry.size, entry.dtype, self.device, **options)
        except Exception as failure:
            if len(self.entries) == 1 and not isinstance(failure, (ValueError, torch.OutOfMemoryError)):
                raise  # a mistake of ours, or of the model: its traceback says more than a line
            return Outcome(entry, None, _in_a_line(failure))
        if self.out is not None:
            keep_row(found.row(), self.path(), "what", "dtype")
        return Outcome(entry, found, found.headline())

    def _forget(self) -> None:
        """Give memory back before the next model comes."""
        if self.compiled:
            torch.compiler.reset()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def path(self) -> Path:
        """The file of rows for this device."""
        assert self.out is not None
        return self.out / Device.of(self.device).slug / "race.jsonl"

    def _done(self) -> set[tuple[str, str]]:
        """What has a row of this code and this Triton, by description and dtype; with `compiled` or `graph`,
        one of that lane."""
        if self.out is None:
            return set()
        return {
            (row["what"], row["dtype"])
            for row in rows_of_this_code(self.path(), self.device)
            if (not self.compiled or COMPILED in row["lanes"]) and (not self.graph or GRAPH in row["lanes"])
        }


def _in_a_line(failure: BaseException) -> str:
    """What a failure says, and where it happened: rows of many models have no room for a traceback."""
    lines = str(failure).strip().splitlines()
    last = traceback.extract_tb(failure.__traceback__)[-1]
    said = lines[0] if lines else "no message"
    if isinstance(failure, ValueError):  # of what was asked for: the message says it all
        return said
    return f"{type(failure).__name__}: {said} (in {last.name}, {Path(last.filename).name}:{last.lineno})"

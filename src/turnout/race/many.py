"""Run several races one after the other, within a budget; each has its row as soon as it is done."""

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
from turnout.race.models import check_weights, racer_named, size_named
from turnout.race.racer import Racer
from turnout.race.run import ACCELERATED, COMPILED, GRAPH, STOCK, Race, race
from turnout.routing.device import Device
from turnout.routing.names import model_dtype_named


class Entry(NamedTuple):
    """A race to run: a model by name, in one size and one dtype."""

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
    """The outcome of an entry: its race and headline, or None and the reason."""

    entry: Entry
    race: Race | None
    message: str

    @property
    def title(self) -> str:
        return self.entry.title

    def row(self) -> dict[str, Any]:
        """The outcome as a JSON object."""
        if self.race is not None:
            return self.race.row()
        return {
            "model": self.entry.name,
            "size": self.entry.size,
            "dtype": self.entry.dtype_name,
            "failed": self.message,
        }


def entries(
    names: list[str], size: str, dtype: str | None, device: torch.device, weights: Path | None = None
) -> list[Entry]:
    """List the races of some models: in `dtype`; without it one model in its first dtype, several in all.

    Raises ValueError, before a model is built, if one cannot be run: its name or size is not known, its
    package is not installed, the folder does not hold its weights.
    """
    listed = []
    for name in dict.fromkeys(names):
        racer = racer_named(name)
        size_name = size_named(name, size, device)
        racer.load_class()
        if weights is not None:
            check_weights(weights, racer)
        others = racer.dtypes[1:] if len(names) > 1 else ()
        dtypes = [dtype] if dtype is not None else [racer.default_dtype(device), *others]
        listed += [Entry(name, racer, size_name, model_dtype_named(each)) for each in dtypes]
    return listed


@dataclass
class Plan:
    """Races to run in this order, and their options. `left` names those that the budget left out."""

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
        """Run the races; yield each outcome as soon as it is known, after its row was written.

        on_progress: called with the race that runs and the step of it.
        """
        end = None if self.budget is None else time.perf_counter() + self.budget
        done = self._done() if self.missing else set()
        for i, entry in enumerate(self.entries):
            description = entry.racer.describe(entry.size, own_weights=self.weights is not None)
            if (description, entry.dtype_name) in done:
                continue
            seconds_left = None if end is None else end - time.perf_counter()
            if seconds_left is not None and seconds_left <= 0:
                self.left.append(f"{entry.name} ({entry.dtype_name})")
                continue
            count = f"{i + 1} of {len(self.entries)}: " if len(self.entries) > 1 else ""
            seconds = self.seconds if seconds_left is None else min(self.seconds, seconds_left)
            yield self._run_one(entry, seconds, functools.partial(on_progress, f"{count}{entry.title}"))
            self._free_memory()

    def _run_one(self, entry: Entry, seconds: float, on_progress: Callable[[str], object]) -> Outcome:
        # Profiling thousands of small kernels takes longer than the race, so of several models only the lane
        # with routes is profiled.
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
            result = race(entry.name, entry.size, entry.dtype, self.device, **options)
        except Exception as failure:
            if len(self.entries) == 1 and not isinstance(failure, (ValueError, torch.OutOfMemoryError)):
                raise  # a mistake in turnout or in the model: its traceback says more than a line
            return Outcome(entry, None, _in_a_line(failure))
        if self.out is not None:
            keep_row(result.row(), self.path(), "what", "dtype")
        return Outcome(entry, result, result.headline())

    def _free_memory(self) -> None:
        """Free the memory of a model before the next one is built."""
        if self.compiled:
            torch.compiler.reset()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def path(self) -> Path:
        """The file in which the rows of this device lie."""
        assert self.out is not None
        return self.out / Device.of(self.device).slug / "race.jsonl"

    def _done(self) -> set[tuple[str, str]]:
        """The races, by description and dtype, that have a row of this code and this Triton, with the lanes
        that `compiled` and `graph` ask for."""
        if self.out is None:
            return set()
        return {
            (row["what"], row["dtype"])
            for row in rows_of_this_code(self.path(), self.device)
            if (not self.compiled or COMPILED in row["lanes"]) and (not self.graph or GRAPH in row["lanes"])
        }


def _in_a_line(failure: BaseException) -> str:
    """The message of a failure and where it arose: rows of many models have no room for a traceback."""
    lines = str(failure).strip().splitlines()
    last = traceback.extract_tb(failure.__traceback__)[-1]
    message = lines[0] if lines else "no message"
    if isinstance(failure, ValueError):  # a mistake in the options: the message is enough
        return message
    return f"{type(failure).__name__}: {message} (in {last.name}, {Path(last.filename).name}:{last.lineno})"

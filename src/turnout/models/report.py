"""What `accelerate` did to a model, part by part, and why not more."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

LINES = 20  # of a summary: it fits a screen


class Entry(NamedTuple):
    """One instance: where it is in the model, its class, the adapter it got (None: none) and why not.

    fused: the adapter is one of its class, not of its kind of layer. within: the path of the fused part that
    does its work; empty where there is none. Its own adapter runs where that part must call it.
    """

    path: str
    name: str
    adapter: str | None
    reasons: tuple[str, ...] = ()
    fused: bool = False
    within: str = ""


@dataclass
class Report:
    """What `accelerate` patched, what it did not patch, and why.

    `print` gives a summary, `details` a line for every part.
    """

    models: dict[str, str] = field(
        default_factory=dict
    )  # path to "AutoencoderKLWan is known" or "... is not known, ..."
    entries: list[Entry] = field(default_factory=list)
    untouched: dict[str, int] = field(
        default_factory=dict
    )  # classes with weights that have no adapter, and how many of each
    notes: list[str] = field(default_factory=list)  # what else there is to know of the model
    graphs: dict[str, Any] = field(
        default_factory=dict
    )  # a model's path to the counts of its calls, with graph=True
    first_calls: dict[str, Any] = field(default_factory=dict)  # a model's path to its calls that compile

    @property
    def patched(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.adapter is not None]

    @property
    def refused(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.adapter is None]

    @property
    def fused(self) -> list[Entry]:
        return [entry for entry in self.patched if entry.fused and not entry.within]

    @property
    def routed(self) -> list[Entry]:
        return [entry for entry in self.patched if not entry.fused and not entry.within]

    def details(self) -> str:
        """Every part, by its path."""
        lines = [*self._heads(), *map(_line, self.entries), *self._tail(), *self._graphs(1000)]
        for path, first_calls in self.first_calls.items():
            lines += [f"  first calls of {path or 'model'}: {line}" for line in first_calls.lines()]
        return "\n".join(lines)

    def __str__(self) -> str:
        kinds = [
            *_kinds("fused", self.fused),
            *_kinds("routed", self.routed),
            *_kinds("left alone", self.refused),
        ]
        most = LINES - len(self.models) - len(self.notes)
        if len(kinds) > most:
            kinds = [*kinds[:most], f"  and {len(kinds) - most} other kinds, see details()"]
        return "\n".join([*self._heads(), *kinds, *self._tail(), *self._graphs(1)])

    def _heads(self) -> Iterator[str]:
        yield from (f"{path or 'model'}: {message}" for path, message in self.models.items())

    def _graphs(self, most: int) -> Iterator[str]:
        """How many calls of models with graphs were captured, replayed or neither, up to now, and why."""
        for path, replays in self.graphs.items():
            yield from (
                f"  graph of {path or 'model'}: {line}" for line in itertools.islice(replays.lines(), most)
            )

    def _tail(self) -> Iterator[str]:
        if self.untouched:
            yield "  not touched: " + ", ".join(f"{count} x {name}" for name, count in self.untouched.items())
        yield from (f"  note: {note}" for note in self.notes)
        if not self.patched:
            yield "  nothing was patched"


def _kinds(heading: str, entries: Iterable[Entry]) -> Iterator[str]:
    """A line for each kind of part, the most frequent first."""
    kinds = collections.Counter((entry.name, entry.adapter or "; ".join(entry.reasons)) for entry in entries)
    for (name, reason), count in kinds.most_common():
        yield f"  {heading:10s} {count:4d} x {name}: {reason}"


def _line(entry: Entry) -> str:
    if entry.adapter is None:
        return f"  {entry.path or 'model'} ({entry.name}) left alone: {'; '.join(entry.reasons)}"
    manner = f"done by {entry.within}" if entry.within else "fused" if entry.fused else "routed"
    return f"  {entry.path or 'model'} ({entry.name}) {manner}: {entry.adapter}"


def weights_of(part: Any) -> Iterator[str]:
    """What is unusual about where the weights of a module are, and of which dtype."""
    weights = [x for x in part.parameters() if x.is_floating_point()]
    devices = collections.Counter(x.device.type for x in weights)
    dtypes = collections.Counter(str(x.dtype).removeprefix("torch.") for x in weights)
    if devices["meta"] == len(weights) > 0:
        yield "all weights are on the meta device: load them before the model is called"
    elif devices["meta"]:
        yield (
            f"{devices['meta']} of {len(weights)} weights are on the meta device (offloaded): "
            "parts that get theirs by a hook run as stock"
        )
    elif len(devices) > 1:
        yield f"weights on {_listed(devices)}: a part whose weights are not where its input is runs as stock"
    if len(dtypes) > 1:
        yield (
            f"weights of {_listed(dtypes)}: a part whose weights are not of its input's dtype "
            "runs as stock, if its adapter needs that"
        )


def _listed(counts: collections.Counter[str]) -> str:
    return " and ".join(f"{name} ({count})" for name, count in counts.most_common())

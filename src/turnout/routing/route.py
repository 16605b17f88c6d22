"""Route: one implementation of an op, with what is declared about it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from turnout.routing.device import Device
from turnout.routing.prepared import Prepare, Prepared

Numerics = Literal["exact", "close", "lossy"]
Guard = Callable[[Any, Device], Iterable[str]]
Cost = Callable[[Any, Device], "float | None"]
Config = dict[str, "int | float | str | bool"]


class Grain(NamedTuple):
    """Where the input of a route, `[N, C, (D,) H, W]`, may be cut into parts without changing a bit.

    Each part is computed by itself, with its border and in the same configuration. Cuts are allowed at
    multiples of so many samples, frames, rows and columns; None: nothing is known about cuts along that axis.

    >>> Grain(rows=1, columns=2).along(-1), Grain(samples=1).in_frames(4)
    (2, 1)
    """

    samples: int | None = None
    frames: int | None = None
    rows: int | None = None
    columns: int | None = None

    def along(self, axis: int) -> int | None:
        """The grain of rows (axis -2) or of columns (axis -1)."""
        return self.rows if axis == -2 else self.columns

    def in_frames(self, dimensions: int) -> int | None:
        """The grain of frames; in calls with four dimensions frames are the samples."""
        return self.samples if dimensions == 4 else self.frames


ANYWHERE, UNKNOWN = Grain(1, 1, 1, 1), Grain()


@dataclass(frozen=True, eq=False)
class Route:
    """One implementation of an op. `run` has the reference's signature, plus keyword-only configuration with
    defaults.

    kernels: what it launches, each as "package.module:function"; none where it calls torch's only.
    in_place: arguments that may be the very memory that is written, element by element (see `mutation`).
    fails_before_writing: all that may fail at launch (memory, compilation) comes before it writes into an
    argument.
    grain: where the input may be cut without changing a bit, as far as that is known.
    """

    name: str
    run: Callable[..., Any]
    refuses: Guard
    cost: Cost
    numerics: Numerics
    version: int
    configs: Callable[[Any, Device], Sequence[Config]]
    prepare: Prepare | None = None
    kernels: tuple[str, ...] = ()
    in_place: tuple[str, ...] = ()
    fails_before_writing: bool = False
    grain: Grain = UNKNOWN

    @functools.cached_property
    def code_hash(self) -> str:
        """A hash of the kernels' source: what was measured with other kernels does not count."""
        from turnout.routing.code_hash import code_hash

        return code_hash(*self.kernels)

    @functools.cached_property
    def defaults(self) -> Config:
        """The configuration that its function takes where none is given."""
        parameters = inspect.signature(self.run).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}

    def prepared(self, args: tuple, config: Config) -> Prepared:
        """Bind this route to a configuration, for calls with these arguments' cache key (see `Op.route`)."""
        prepared = Prepared(self.run, {**self.defaults, **config})
        call = None if self.prepare is None else prepared.keeping(self.prepare, prepared, args)
        if call is not None and not callable(call):
            raise TypeError(
                f"route {self.name!r}: prepare returned {call!r}, it needs to return a function or None"
            )
        prepared.call = call or prepared.call
        return prepared


class Work(NamedTuple):
    """The fewest bytes a call can move, read and written together, the operations it must do, and how many of
    the bytes are written.
    """

    bytes: int
    flops: int
    written: int = 0


class Key(NamedTuple):
    """All that the choice of one call depends on, besides the settings."""

    problem: Any
    wants_grad: bool
    devices: tuple[torch.device, ...]

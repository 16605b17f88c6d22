"""Look up measured times: in the rows shipped with the package, and those that `tune` made on this machine.

A row is a hint. It counts for the routes that still have the version and the kernels that were measured,
offer the configuration, and do not refuse the call. It counts whichever torch, Triton or driver it was
measured with; the verdict names them. Where a problem was measured with several versions of Triton, the
nearest counts.
"""

from __future__ import annotations

import functools
import math
import typing
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from turnout.routing import store
from turnout.routing.choose import REFERENCE
from turnout.routing.device import Device
from turnout.routing.row import Row, Unreadable, decode
from turnout.routing.versions import Version, in_words

if TYPE_CHECKING:
    from turnout.routing.op import Op


class Measurement(typing.NamedTuple):
    """The microseconds of each route whose row still counts, and its best configuration."""

    us: Mapping[str, float]
    config: Mapping[str, Mapping[str, Any]]
    note: str  # where it was measured, and with which versions


class Index(typing.NamedTuple):
    """The rows of one op: by problem, and by family as (size, row) in order of size."""

    by_problem: dict[Any, Row]
    by_family: dict[Any, list[tuple[int, Row]]]


class Table:
    """The rows of one device from one place."""

    def __init__(
        self, rows: Iterable[Row], device: Device, *, measured_on: str, problems: Iterable[str] = ()
    ):
        self.rows, self.device = list(rows), device
        self.measured_on = measured_on
        self.problems = list(problems)
        self._indexes: dict[str, Index] = {}

    def lookup(self, op: Op, problem: Any) -> Measurement | None:
        """Find the measurement of a problem, or interpolate between the two nearest sizes of its family.
        Where there is none, that of a simpler problem counts, see `Op.simpler`.
        """
        found = self._measured(op, problem, problem, "")
        if found is None and op.simpler is not None:
            simpler = op.simpler(problem)
            if simpler is not None:
                found = self._measured(op, problem, simpler.problem, f"{simpler.lacks}, ")
        return found

    def _measured(self, op: Op, problem: Any, of: Any, words: str) -> Measurement | None:
        """What the rows of the problem `of`, or of its family, say of a problem."""
        index = self.index(op)
        row = index.by_problem.get(of)
        if row is not None:
            note = f"{words}measured {self.measured_on}{_with(row)}"
            return self._usable(op, problem, row, note, nearby=of != problem)
        if op.family is None:
            return None
        family, size = op.family(of)
        sizes = index.by_family.get(family, [])
        above = bisect_left(sizes, size, key=lambda entry: entry[0])
        if above < len(sizes) and sizes[above][0] == size:
            row = sizes[above][1]
            note = f"{words}a call of this size measured {self.measured_on}{_with(row)}"
            return self._usable(op, problem, row, note, nearby=True)
        if not 0 < above < len(sizes):
            return None
        (low, low_row), (high, high_row) = sizes[above - 1], sizes[above]
        note = f"{words}between measured sizes {low} and {high} {self.measured_on}{_with(low_row)}"
        a, b = (self._usable(op, problem, row, note, nearby=True) for row in (low_row, high_row))
        if a is None or b is None:
            return None
        # By logarithms: sizes in a row may be too large for a float's division.
        share = (math.log(size) - math.log(low)) / (math.log(high) - math.log(low))
        us = {name: a.us[name] ** (1 - share) * b.us[name] ** share for name in a.us.keys() & b.us.keys()}
        return Measurement(us, a.config if share < 0.5 else b.config, note)

    def has(self, op: Op, problem: Any) -> bool:
        """Whether exactly this problem was measured, with the kernels as they are now."""
        row = self.index(op).by_problem.get(problem)
        return row is not None and not any(stale_routes(op, row))

    def unusable(self, op: Op) -> int:
        """How many rows of this machine count for no route, although all their kernels are unchanged."""
        return sum(self._is_unusable(op, problem, row) for problem, row in self.index(op).by_problem.items())

    def _is_unusable(self, op: Op, problem: Any, row: Row) -> bool:
        if set(row.us) == {REFERENCE} or any(stale_routes(op, row)):
            return False
        try:
            return self._usable(op, problem, row, "") is None
        except Exception:  # sizes that no call can have
            return True

    def index(self, op: Op) -> Index:
        """The readable rows of an op that were measured on a machine like this one."""
        if op.name not in self._indexes:
            self._indexes[op.name] = self._make_index(op)
        return self._indexes[op.name]

    def _make_index(self, op: Op) -> Index:
        machine = self.device.machine
        by_problem: dict[Any, Row] = {}
        for row in self.rows:
            if row.op != op.name or dict(row.machine) != machine:
                continue
            try:
                problem = decode(op, row.problem)
            except Unreadable as why:
                self.problems.append(f"a row {self.measured_on}: {why}")
                continue
            if problem not in by_problem or self._preference(row) > self._preference(by_problem[problem]):
                by_problem[problem] = row
        by_family: dict[Any, list[tuple[int, Row]]] = {}
        for problem, row in by_problem.items() if op.family is not None else ():
            try:
                family, size = op.family(problem)  # pyright: ignore[reportOptionalCall]
            except Exception as failure:  # a row of sizes that no call can have, such as negative ones
                self.problems.append(
                    f"a row {self.measured_on}: a problem of {op.name} without a family: {failure}"
                )
                continue
            if size > 0:
                by_family.setdefault(family, []).append((size, row))
        for sizes in by_family.values():
            sizes.sort(key=lambda entry: entry[0])
        return Index(by_problem, by_family)

    def _preference(self, row: Row) -> tuple:
        """A sort key: larger for the row whose Triton is nearer to this device's, of two the newer."""
        measured, here = row.triton or (0, 0), self.device.triton
        return (0 if here is None else -abs(_ordinal(measured) - _ordinal(here)), measured)

    def _usable(
        self, op: Op, problem: Any, row: Row, note: str, *, nearby: bool = False
    ) -> Measurement | None:
        """The part of a row that counts for a problem on this device.

        For a problem nearby, or another Triton, a route's first configuration stands in for one that it does
        not offer. None if the fastest route has changed since: the other times then do not tell what is best.
        """
        stale = set(stale_routes(op, row))
        if min(row.us, key=row.us.__getitem__) in stale:
            return None
        us: dict[str, float] = {REFERENCE: row.us[REFERENCE]}
        configs: dict[str, Mapping[str, Any]] = {}
        nearby = nearby or row.triton != self.device.triton
        for name, time in row.us.items():
            if name == REFERENCE or name in stale or any(op.routes[name].refuses(problem, self.device)):
                continue
            config, offered = row.config.get(name, {}), list(op.routes[name].configs(problem, self.device))
            if config not in offered:
                if not nearby or not offered:
                    continue
                config = offered[0]
            us[name], configs[name] = time, config
        return Measurement(us, configs, note) if configs else None


def _ordinal(version: Version) -> int:
    return 100 * version[0] + version[1]


def _with(row: Row) -> str:
    words = in_words(dict(row.versions))
    return f" with {words}" if words else ""


def stale_routes(op: Op, row: Row) -> Iterator[str]:
    """The routes of a row that no longer exist, or whose version or kernels are not those measured."""
    for name in row.us:
        route = op.routes.get(name)
        if name == REFERENCE:
            continue
        if (
            route is None
            or row.version.get(name) != route.version
            or row.code_hash.get(name) != route.code_hash
        ):
            yield name


class Tables:
    """The tables that count for one device: made on this machine, shipped for it, shipped for a sibling."""

    def __init__(self, device: Device):
        self.device = device
        here, shipped = store.load_here(device), store.load_shipped(device.slug)
        self.here = Table(here.rows, device, measured_on="here", problems=here.problems)
        self.shipped = Table(shipped.rows, device, measured_on=f"on {device.name}", problems=shipped.problems)
        self.sibling: Table | None = None
        if device.sibling is not None:
            rows, problems = store.load_shipped(Device.named(device.sibling).slug)
            self.sibling = Table(rows, device, measured_on=f"on {device.sibling}", problems=problems)

    @property
    def authorities(self) -> list[tuple[str, Table]]:
        """The tables by the name of their authority, strongest first."""
        authorities = [("measured here", self.here), ("measured, shipped", self.shipped)]
        return authorities + (
            [(f"measured on a sibling, {self.device.sibling}", self.sibling)] if self.sibling else []
        )

    def lookup(self, op: Op, problem: Any) -> list[tuple[str, Measurement]]:
        """The measurements of a problem, as (authority, measurement), strongest authority first."""
        answers = ((authority, table.lookup(op, problem)) for authority, table in self.authorities)
        return [(authority, measurement) for authority, measurement in answers if measurement is not None]

    def has(self, op: Op, problem: Any) -> bool:
        """Whether exactly this problem was measured on such a device, here or for a shipped table."""
        return self.here.has(op, problem) or self.shipped.has(op, problem)

    @staticmethod
    @functools.cache
    def for_device(device: Device) -> Tables:
        """The tables of a device, read once until `forget_tables`."""
        return Tables(device)


def forget_tables() -> None:
    """Read every table again when it is next used."""
    Tables.for_device.cache_clear()

"""Measured times: rows shipped with the package, entries made by `tune` on this machine. A row is a hint; what cannot be used is a miss.

JSON only. Shipped: `tables/<device>.json`, reviewed in git. This machine's: one file per entry in a folder whose name holds a hash of
the environment, beside a readable manifest; another torch, driver or Triton makes another folder, so nothing stale is ever read.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import math
import os
import tempfile
import typing
import warnings
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs
import torch

from turnout.routing.choose import REFERENCE, plain
from turnout.routing.device import Device

if TYPE_CHECKING:
    from turnout.routing.op import Op

SCHEMA = 1
SHIPPED = Path(__file__).parents[1] / "tables"


@dataclass(frozen=True)
class Row:
    """What `tune` measured for one problem: every route's time, with the code it was measured with. Times in microseconds."""

    op: str
    problem: Mapping[str, Any]
    us: Mapping[str, float]
    iqr: Mapping[str, float] = field(default_factory=dict)
    error: Mapping[str, float] = field(default_factory=dict)
    peak_mib: Mapping[str, float] = field(default_factory=dict)
    config: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    version: Mapping[str, int] = field(default_factory=dict)
    source: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def parse(given: Any) -> Row | None:
        """The row in a JSON object, or None where it is not one."""
        if not isinstance(given, dict) or not isinstance(given.get("op"), str) or not isinstance(given.get("problem"), dict):
            return None
        numbers = ("us", "iqr", "error", "peak_mib", "version")
        parts = {name: given.get(name, {}) for name in (*numbers, "config", "source")}
        kinds = {**dict.fromkeys(numbers, (int, float)), "config": (dict,), "source": (str,)}
        for name, part in parts.items():
            if not isinstance(part, dict) or not all(isinstance(v, kinds[name]) and not isinstance(v, bool) for v in part.values()):
                return None
        if REFERENCE not in parts["us"] or not all(math.isfinite(us) and us > 0 for us in parts["us"].values()):
            return None
        return Row(given["op"], given["problem"], **parts)


class Measurement(typing.NamedTuple):
    """Times of the routes that still are what was measured, in microseconds, and the best configuration of each."""

    us: Mapping[str, float]
    config: Mapping[str, Mapping[str, Any]]
    note: str


class Table:
    """Rows of one device, by problem, and by family and size."""

    def __init__(self, rows: Iterable[Row] = (), origin: str = ""):
        self.rows = list(rows)
        self.origin = origin
        self._indexed: dict[str, tuple[dict, dict]] = {}

    def lookup(self, op: Op, problem: Any, device: Device) -> Measurement | None:
        """The measurement of this problem, or one interpolated between the two nearest sizes of its family."""
        exact, families = self._by_problem(op)
        row = exact.get(problem)
        if row is not None:
            return _usable(op, problem, device, row, f"measured{self.origin}")
        if op.family is None:
            return None
        family, size = op.family(problem)
        sizes = families.get(family, [])
        above = bisect_left(sizes, size, key=lambda entry: entry[0])
        if not 0 < above < len(sizes):
            return None
        (low, low_row), (high, high_row) = sizes[above - 1], sizes[above]
        note = f"between measured sizes {low} and {high}{self.origin}"
        a, b = (_usable(op, problem, device, row, note, nearby=True) for row in (low_row, high_row))
        if a is None or b is None:
            return None
        part = math.log(size / low) / math.log(high / low)
        us = {name: a.us[name] ** (1 - part) * b.us[name] ** part for name in a.us.keys() & b.us.keys()}
        return Measurement(us, a.config if part < 0.5 else b.config, note)

    def has(self, op: Op, problem: Any) -> bool:
        """Whether this very problem was measured, with the code of today."""
        row = self._by_problem(op)[0].get(problem)
        return row is not None and all(_is_of_today(op, row, name) for name in row.us if name != REFERENCE)

    def _by_problem(self, op: Op) -> tuple[dict, dict]:
        if op.name not in self._indexed:
            self._indexed[op.name] = self._index(op)
        return self._indexed[op.name]

    def _index(self, op: Op) -> tuple[dict, dict]:
        exact: dict[Any, Row] = {}
        families: dict[Any, list[tuple[int, Row]]] = {}
        for row in self.rows:
            problem = decode(op, row.problem) if row.op == op.name else None
            if problem is None or problem in exact:
                continue
            exact[problem] = row
            if op.family is not None and (found := op.family(problem))[1] > 0:
                families.setdefault(found[0], []).append((found[1], row))
        for sizes in families.values():
            sizes.sort(key=lambda entry: entry[0])
        return exact, families


def _usable(op: Op, problem: Any, device: Device, row: Row, note: str, *, nearby: bool = False) -> Measurement | None:
    """Only what was measured with the code of today counts, and only configurations the route itself offers; for a problem nearby the
    route's first stands in for one that it does not offer."""
    us: dict[str, float] = {REFERENCE: row.us[REFERENCE]}
    configs: dict[str, Mapping[str, Any]] = {}
    for name, time in row.us.items():
        if name == REFERENCE or not _is_of_today(op, row, name) or any(op.routes[name].refuses(problem, device)):
            continue
        route = op.routes[name]
        config, offered = row.config.get(name, {}), list(route.configs(problem, device))
        if config not in offered:
            if not nearby or not offered:
                continue
            config = offered[0]
        us[name], configs[name] = time, config
    return Measurement(us, configs, note) if configs else None


def _is_of_today(op: Op, row: Row, name: str) -> bool:
    """Whether a route still has the version and the code it was measured with."""
    route = op.routes.get(name)
    return route is not None and row.version.get(name) == route.version and row.source.get(name) == route.source


def decode(op: Op, given: Mapping[str, Any]) -> Any | None:
    """The problem in a row's JSON, or None where fields are missing, unknown or of the wrong type."""
    if set(given) != set(op.problem_type._fields):
        return None
    try:
        problem = _decode(op.problem_type, [given[name] for name in op.problem_type._fields])
    except (TypeError, ValueError):
        return None
    encoded = {name: plain(value) for name, value in problem._asdict().items()}
    return problem if encoded == dict(given) else None


def _decode(hint: Any, value: Any) -> Any:
    if isinstance(value, str) and torch.dtype in (hint, *typing.get_args(hint)):
        return getattr(torch, value, None)
    inner = next((kind for kind in (hint, *typing.get_args(hint)) if hasattr(kind, "_fields")), None)
    if isinstance(value, list) and inner is not None:  # a problem inside a problem
        hints = typing.get_type_hints(inner)
        return inner(*(_decode(hints[name], part) for name, part in zip(inner._fields, value, strict=True)))
    of_parts = next(iter(typing.get_args(hint)), None)  # tuple[X, ...]
    return tuple(_decode(of_parts, part) for part in value) if isinstance(value, list) else value


class Tables:
    """The shipped table and this machine's entries for one device."""

    def __init__(self, device: Device):
        self.device = device
        self.here = Table(_entries(folder(device)), " here")
        self.shipped = Table(_shipped(device), f" on {device.name}")

    def lookup(self, op: Op, problem: Any) -> list[tuple[str, Measurement]]:
        """What is known of this problem, strongest authority first."""
        found = (("measured here", self.here), ("measured, shipped", self.shipped))
        return [(authority, m) for authority, table in found if (m := table.lookup(op, problem, self.device)) is not None]

    def has(self, op: Op, problem: Any) -> bool:
        """Whether this very problem was measured, here or before shipping."""
        return self.here.has(op, problem) or self.shipped.has(op, problem)

    @staticmethod
    @functools.cache
    def for_device(device: Device) -> Tables:
        return Tables(device)


def forget_tables() -> None:
    """Read every table anew at its next use."""
    Tables.for_device.cache_clear()


def _shipped(device: Device) -> list[Row]:
    found = _read(SHIPPED / f"{device.slug}.json")
    rows = found.get("rows") if isinstance(found, dict) and found.get("schema") == SCHEMA else None
    return [row for given in rows if (row := Row.parse(given)) is not None] if isinstance(rows, list) else []


def environment(device: Device) -> dict[str, Any]:
    """What a timing depends on besides the problem: part of the folder's name, and readable in its manifest."""
    cuda = device.type == "cuda"
    return {
        "schema": SCHEMA,
        "device": device.name,
        "units": device.units,
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "hip": torch.version.hip if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda and torch.backends.cudnn.is_available() else None,
        "triton": _version("triton"),
        "numba": _version("numba"),
        "threads": None if cuda else torch.get_num_threads(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        **({} if cuda else {"vectors": torch.backends.cpu.get_cpu_capability(), "one_dnn_limit": _one_dnn_limit()}),
    }


def _one_dnn_limit() -> str | None:
    """The instructions that oneDNN was told to stay with: below AVX-512 it has no kernels for half types."""
    return os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def folder(device: Device) -> Path:
    """Where this machine's entries for a device lie: below TURNOUT_CACHE_DIR, or the user's cache folder."""
    root = os.environ.get("TURNOUT_CACHE_DIR") or platformdirs.user_cache_dir("turnout", appauthor=False)
    digest = hashlib.sha256(json.dumps(environment(device), sort_keys=True).encode()).hexdigest()[:12]
    return Path(root) / f"v{SCHEMA}" / f"{device.slug}-{digest}"


def _entries(place: Path) -> list[Row]:
    try:
        files = sorted(place.glob("*.json"))
    except OSError:
        return []
    return [row for file in files if file.name != "manifest.json" and (row := Row.parse(_read(file))) is not None]


def publish(row: Row, device: Device) -> Path | None:
    """Keep a row for this machine, in one atomically renamed file. None, with a warning, where the folder cannot be written."""
    place = folder(device)
    name = hashlib.sha256(_identity(asdict(row)).encode()).hexdigest()[:16]
    try:
        place.mkdir(parents=True, exist_ok=True)
        if not (place / "manifest.json").exists():
            _write(place / "manifest.json", environment(device))
        _write(place / f"{row.op}-{name}.json", asdict(row))
    except OSError as failure:
        warnings.warn(f"turnout: {place} cannot be written ({failure}); what was measured is not kept", stacklevel=2)
        return None
    return place / f"{row.op}-{name}.json"


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def _write(file: Path, value: Any) -> None:
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=".", suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            json.dump(value, out, indent=1)
        os.replace(temporary, file)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def export(rows: Iterable[Row], device: Device, path: Path) -> None:
    """Write rows as a table to ship, one row a line so that a change reads well; rows of other problems in the file stay."""
    found = _read(path)
    kept = found.get("rows", []) if isinstance(found, dict) and found.get("schema") == SCHEMA else []
    merged = {_identity(row): row for row in (*kept, *map(asdict, rows))}
    head = json.dumps(environment(device))[:-1]
    lines = ",\n".join(json.dumps(merged[key]) for key in sorted(merged))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{head}, "rows": [\n{lines}\n]}}\n', encoding="utf-8")


def _identity(row: Mapping[str, Any]) -> str:
    return json.dumps([row["op"], row["problem"]], sort_keys=True)

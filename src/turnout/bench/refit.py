"""Fit the constants of cost models to measured times.

A cost is a formula with constants of a device (`devices/<device>.toml`). The times in rows, of references and
of routes, are compared with the estimates of the formulas, and one constant after the other is moved to where
the estimates are closest to the times. Formulas do not change, nor do constants that no row depends on.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from turnout.routing import device_files
from turnout.routing.choose import REFERENCE
from turnout.routing.device import Device
from turnout.routing.op import OPS, Op
from turnout.routing.row import Unreadable, decode

FARTHEST = 3.0  # how many times larger or smaller a constant may become in one run
STEPS = (0.33, 0.5, 0.71, 0.84, 0.92, 0.96, 0.98, 0.99, 1.01, 1.02, 1.04, 1.09, 1.19, 1.41, 2.0, 3.0)
SWEEPS = 12  # over the constants of a section, at most: they pull at the same times


class Sample(NamedTuple):
    """One measured time: of an op's reference or of a route, in seconds."""

    op: Op
    route: str
    problem: Any
    seconds: float

    def log_ratio(self, device: Device) -> float | None:
        """The logarithm of estimate over measurement; None where the cost model has no estimate."""
        cost = self.op.cost if self.route == REFERENCE else self.op.routes[self.route].cost
        estimate = cost(self.problem, device)
        return None if estimate is None else math.log(estimate / self.seconds)


class Fit(NamedTuple):
    """A constant as it is, as it would fit best, and how far estimates are off with each.

    off_before, off_after: by what factor estimates are too long or too short, as the geometric mean over the
    `samples` times that depend on the constant's section.
    """

    section: str
    name: str
    old: float
    new: float
    off_before: float
    off_after: float
    samples: int


class _ReadSections(dict[str, Mapping[str, float]]):
    """Constants in place of others, which records in `read` the sections that a cost looks up."""

    def __init__(self, values: Mapping[str, Mapping[str, float]]):
        super().__init__(values)
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)


def samples_of(rows: Iterable[Mapping[str, Any]]) -> list[Sample]:
    """The times in benchmark rows, without peers, removed routes and problems of older versions."""
    samples = []
    for row in rows:
        op = OPS.get(row.get("op", ""))
        if op is None or "problem" not in row:
            continue
        try:
            problem = decode(op, row["problem"])
        except Unreadable:
            continue
        samples += [
            Sample(op, name, problem, 1e-6 * us)
            for name, us in row["us"].items()
            if name in (REFERENCE, *op.routes)
        ]
    return samples


def load_rows(folder: Path, device: Device) -> list[dict[str, Any]]:
    """Read the rows of a device from a folder of results."""
    files = sorted((folder / device.slug).glob("*.jsonl"))
    if not files:
        raise ValueError(
            f"no rows of {device.name}: {folder / device.slug} has no .jsonl files; "
            "name the folder with --results"
        )
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def refit(device: Device, samples: Sequence[Sample]) -> list[Fit]:
    """The constants of a device that samples depend on, as they would fit best."""
    by_section: dict[str, list[Sample]] = {}
    for sample in samples:
        sections = _ReadSections({"": {}})
        if sample.log_ratio(replace(device, refitted=sections)) is not None:
            for section in sections.read:
                by_section.setdefault(section, []).append(sample)
    fits = []
    for section, own in by_section.items():
        fits += _refit_section(device, section, own)
    return fits


def _refit_section(device: Device, section: str, samples: Sequence[Sample]) -> list[Fit]:
    constants = device_files.sections(device.fitted_on)[section]
    old = {name: float(value) for name, value in constants.items() if name != "source"}

    def off(values: Mapping[str, float]) -> float:
        """The mean of the absolute log ratios of estimates to times, with these constants."""
        changed = replace(device, refitted={section: values})
        ratios = [ratio for sample in samples if (ratio := sample.log_ratio(changed)) is not None]
        return statistics.fmean(map(abs, ratios))

    before = best = off(old)
    values = dict(old)
    matters = [
        name for name in old if any(off({**old, name: old[name] * factor}) != before for factor in (0.5, 2.0))
    ]
    for _ in range(SWEEPS):
        last = best
        for name in matters:
            for factor in STEPS:
                moved = {**values, name: _short(values[name] * factor)}
                if not old[name] / FARTHEST <= moved[name] <= _most(old[name]):
                    continue
                new = off(moved)
                if new < best * (1 - 1e-6):
                    values, best = moved, new
        if best > last * (1 - 1e-4):
            break
    return [
        Fit(section, name, old[name], values[name], math.exp(before), math.exp(best), len(samples))
        for name in old
        if name in matters
    ]


def _most(constant: float) -> float:
    """How large a constant may become. One between 0.001 and 1 is taken to be a share, at most 1."""
    is_share = 1e-3 < constant <= 1
    return min(1.0, FARTHEST * constant) if is_share else FARTHEST * constant


def _short(value: float) -> float:
    """Round to three digits: times are not known better.

    >>> _short(0.123456), _short(12.3456e-6)
    (0.123, 1.23e-05)
    """
    return float(f"{value:.3g}")


def write(device: Device, fits: Sequence[Fit]) -> Path:
    """Write new constants into the device's file; comments and everything else stay."""
    path = device_files.FOLDER / f"{device.fitted_on}.toml"
    path.write_text(rewritten(path.read_text(encoding="utf-8"), device, fits), encoding="utf-8")
    device_files.load.cache_clear()
    device_files.sections.cache_clear()
    return path


def rewritten(text: str, device: Device, fits: Sequence[Fit]) -> str:
    """The text of a device's file with new constants; sources then tell the number of times they fit."""
    changed = [fit for fit in fits if fit.new != fit.old]
    for section in dict.fromkeys(fit.section for fit in changed):
        start = text.index(f"[fitted.{section}]\n")
        end = text.find("\n[", start)
        part = text[start:] if end < 0 else text[start:end]
        new = part
        for fit in changed:
            if fit.section == section:
                new = re.sub(rf"(?m)^({fit.name} = )[^\s#]+", rf"\g<1>{fit.new:g}", new)
        count = next(fit.samples for fit in changed if fit.section == section)
        note = rf'\g<1>; refitted to {count} times measured on {device.name}"'
        new = re.sub(r'(?m)^(source = ".*?)(?:; refitted to [^"]*)?"', note, new)
        text = text.replace(part, new)
    return text

"""Examine this machine for `turnout doctor`: versions, known-bad pairs, tables, a check of each route."""

from __future__ import annotations

import importlib.util
import platform
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from turnout._version import __version__
from turnout.launch import support
from turnout.measure.verify import Verifier
from turnout.routing import failures, machine, torch_private, versions
from turnout.routing.device import Device
from turnout.routing.op import OPS, Op
from turnout.routing.route import Route
from turnout.routing.row import brief, printable
from turnout.routing.store import folder
from turnout.routing.table import Table, Tables, stale_routes

_SMALL_CASES = 4  # the first cases of an op are small; the whole report should take seconds
_PACKAGES = ("torch", "numba", "diffusers", "transformers", "flash_attn", "causal_conv1d")


class Check(NamedTuple):
    """One finding."""

    what: str  # what was checked
    state: str  # ok, warning, failed or refused
    note: str


def findings() -> list[Check]:
    """All findings, in the order of the report."""
    return [*compilers(), *known_bad(), *tables(), *shipped_tables(), *routes()]


def environment() -> dict[str, Any]:
    """Versions of the software, devices of this machine, and the folders of the rows that `tune` writes."""
    packages = {package: versions.installed(package) for package in _PACKAGES}
    return {
        "turnout": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **packages,
        "triton": versions.triton(),
        "cuda": torch.version.cuda,
        "cudnn": machine.cudnn(),
        "driver": versions.driver(),
        "devices": [Device.of(d).name for d in _devices()],
        "entries": {Device.of(d).name: printable(str(folder(Device.of(d)))) for d in _devices()},
    }


def _devices() -> list[torch.device]:
    return [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]


def known_bad() -> list[Check]:
    """Pairs of versions and settings that are known to be slow or wrong."""
    checks = []
    cudnn = machine.cudnn()
    if versions.minor(torch.__version__) in ((2, 9), (2, 10)) and cudnn and 90800 <= cudnn < 91500:
        slow = (
            "runs half-precision conv3d without cuDNN: 4x slower, several times the memory (pytorch #166122)"
        )
        note = f"torch {torch.__version__} with cuDNN {cudnn} {slow}; install nvidia-cudnn 9.15 or torch 2.11"
        checks.append(Check("cuDNN", "warning", note))
    if torch.version.hip and torch.backends.cudnn.benchmark:
        note = "it is True: on ROCm, each new shape is then searched for minutes; set it to False"
        checks.append(Check("torch.backends.cudnn.benchmark", "warning", note))
    if importlib.util.find_spec("numba") is None:
        note = "not installed: turnout's own CPU kernels cannot run; pip install 'turnout[cpu]'"
        checks.append(Check("numba", "warning", note))
    lacking = torch_private.missing()
    if lacking:
        names = ", ".join(name.replace(":", ".") for name in lacking)
        note = f"it has no {names}: calls that need one raise; install torch 2.11 to 2.15, or a newer turnout"
        checks.append(Check(f"torch {torch.__version__}", "warning", note))
    return checks or [Check("known-bad pairs", "ok", "none")]


def compilers() -> list[Check]:
    """How far the installed torch and Triton were tested, and whether kernels are launched by address."""
    triton = versions.triton()
    if triton is None:
        note = "not installed: turnout's own GPU kernels cannot run; pip install triton"
        return [Check("triton", "warning", note)]
    pair = f"torch {torch.__version__} with triton {triton}"
    verified = [
        v
        for v in support.verified()
        if _same_minor(v.torch, torch.__version__) and _same_minor(v.triton, triton)
    ]
    on_cards = "; ".join(f"torch {v.torch} with triton {v.triton} ({v})" for v in support.verified())
    elsewhere = f"every route was run on a card with {on_cards}"
    if verified:
        here = "; ".join(map(str, verified))
        checks = [Check(pair, "ok", f"every route was run on a card with this pair: {here}")]
    elif versions.minor(triton) in support.COMPILED:
        checks = [Check(pair, "ok", f"every kernel was compiled with this Triton, not run; {elsewhere}")]
    else:
        compiled = ", ".join(".".join(map(str, version)) for version in support.COMPILED)
        note = f"not tested with this Triton; kernels were compiled with {compiled}; {elsewhere}"
        checks = [Check(pair, "warning", note)]
    problem = support.fast_launch()
    state = "warning" if problem else "ok"
    checks.append(Check("fast launch", state, problem or "kernels are launched by address"))
    for place in _devices()[1:]:
        device = Device.of(place)
        for op in OPS.values():
            for route in op.routes.values():
                problem = failures.compile_problem(route.code_hash, device) if route.kernels else None
                if problem is not None:
                    checks.append(Check(f"{op.name} {route.name} on {place}", "warning", problem))
    return checks


def _same_minor(a: str, b: str) -> bool:
    return versions.minor(a) == versions.minor(b)


def tables() -> list[Check]:
    """The state of the rows for the devices of this machine: measured here, shipped, of a sibling."""
    checks = []
    for place in _devices():
        device = Device.of(place)
        tables = Tables.for_device(device)
        counts = f"{_rows(len(tables.here.rows))} measured here, {len(tables.shipped.rows)} shipped"
        if tables.sibling is not None and not tables.shipped.rows:
            counts += f", {len(tables.sibling.rows)} of its sibling {device.sibling}"
        listed = [table for _, table in tables.authorities]
        checks.append(_table_check(f"rows for {device.name}", counts, listed))
    return checks


def shipped_tables() -> list[Check]:
    """The state of the rows shipped for cards that are not in this machine: what a maintainer looks at."""
    from turnout.routing.store import SHIPPED

    here = {Device.of(place).slug for place in _devices()}
    checks = []
    for file in sorted(SHIPPED.glob("*.json")):
        if file.stem not in here:
            device = Device.named(file.stem)
            table = Tables(device).shipped
            checks.append(
                _table_check(f"rows for {device.name}", f"{_rows(len(table.rows))} shipped", [table])
            )
    return checks


def _table_check(name: str, counts: str, tables: list[Table]) -> Check:
    """How many rows there are, and how many of them do not count, with the reason."""
    for table in tables:
        for op in OPS.values():
            table.index(op)
    problems = [problem for table in tables for problem in table.problems]
    stale: Counter[str] = Counter()
    stale_rows = 0
    for row in (row for table in tables for row in table.rows if row.op in OPS):
        names = list(stale_routes(OPS[row.op], row))
        stale.update(f"{row.op} {name}" for name in names)
        stale_rows += bool(names)
    rows = [(row, table) for table in tables for row in table.rows]
    unknown = Counter(row.op for row, _ in rows if row.op not in OPS)
    others = Counter(
        _machine(row.machine) for row, table in rows if dict(row.machine) != table.device.machine
    )
    unusable = Counter({op.name: sum(table.unusable(op) for table in tables) for op in OPS.values()})
    notes = [counts]
    if unknown:
        notes.append(f"{_rows(unknown.total())} of ops that are not known: {_listed(unknown)}")
    if others:
        notes.append(f"{_rows(others.total())} of another machine or other settings: {_listed(others)}")
    if unusable.total():
        count = _rows(unusable.total())
        notes.append(f"{count} of calls or configurations that no route takes: {_listed(unusable)}")
    if stale:
        listed = ", ".join(f"{name} ({count})" for name, count in sorted(stale.items()))
        remedy = "turnout bench --missing --tune measures them again"
        notes.append(f"{_rows(stale_rows)} measured with kernels that have changed since: {listed}; {remedy}")
    notes += problems[:3]
    if len(problems) > 3:
        notes.append(f"and {len(problems) - 3} more that cannot be read")
    doubtful = stale or problems or unknown or unusable.total()
    return Check(name, "warning" if doubtful else "ok", "; ".join(notes))


def _machine(settings: Mapping[str, int | str]) -> str:
    """Describe the machine of a row in a few words."""
    return brief(
        ", ".join(f"{name} {value}" for name, value in sorted(settings.items())[:3]) or "not recorded"
    )


def _listed(counts: Counter[str]) -> str:
    """List names with how often each occurs, the most frequent first, at most five."""
    listed = [f"{name} ({count})" for name, count in counts.most_common(5) if count]
    more = sum(count > 0 for count in counts.values()) - len(listed)
    return ", ".join(listed) + (f" and {more} more" if more else "")


def _rows(count: int) -> str:
    return f"{count} row" if count == 1 else f"{count} rows"


def routes(ops: Iterable[Op] | None = None) -> list[Check]:
    """Run every route of these ops, or of all, on the first of the op's small cases that it takes, on every
    device here."""
    checks = []
    for place in _devices():
        for op in OPS.values() if ops is None else ops:
            try:
                calls = [op.arguments(*case.make(place, 0)) for case in op.cases()[:_SMALL_CASES]]
            except Exception as failure:  # of any kind: somebody's op must not end the report
                checks.append(Check(f"{op.name} on {place}", "failed", f"its cases: {_in_words(failure)}"))
                continue
            checks += [_check_route(op, route, calls, place) for route in op.routes.values()]
    return checks


def _check_route(op: Op, route: Route, calls: list[tuple], place: torch.device) -> Check:
    """Run a route on the first of these calls that it takes, and compare its output with the reference's."""
    name = f"{op.name} {route.name} on {place}"
    if not calls:
        return Check(name, "refused", f"op {op.name} has no cases, this check needs one")
    try:
        reasons = [list(route.refuses(op.problem(*args), Device.of(place))) for args in calls]
        accepted = next((args for args, why in zip(calls, reasons, strict=True) if not why), None)
        if accepted is None:
            return Check(name, "refused", "; ".join(reasons[0]))
        why = Verifier(op, accepted).mismatch(route.numerics, route.run)
    except Exception as failure:  # of any kind, a broken install too
        why = _in_words(failure)
    return Check(name, "ok" if why is None else "failed", why or "agrees with the reference")


def _in_words(failure: Exception) -> str:
    """A failure with the name of its class."""
    return f"{type(failure).__name__}: {failure}"

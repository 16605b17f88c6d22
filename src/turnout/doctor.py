"""doctor: what is installed, what it was tested with, what is known to be bad, and a small check of every
route.
"""

from __future__ import annotations

import importlib.util
import platform
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from turnout._version import __version__
from turnout.launch import support
from turnout.measure.verify import Trial
from turnout.routing import failures, versions
from turnout.routing.device import Device
from turnout.routing.op import OPS, Op, Route
from turnout.routing.row import brief, printable
from turnout.routing.store import folder
from turnout.routing.table import Table, Tables, stale_routes

_SMALL_CASES = 4  # cases come small ones first; a check that takes a minute is no check
_PACKAGES = ("torch", "numba", "diffusers", "transformers", "flash_attn", "causal_conv1d")


class Check(NamedTuple):
    """One finding: `ok`, `warning`, `failed` or `refused`."""

    what: str
    state: str
    note: str


def findings() -> list[Check]:
    """Everything that is checked, in the order in which it is told."""
    return [*compilers(), *known_bad(), *tables(), *shipped_tables(), *routes()]


def environment() -> dict[str, Any]:
    """Versions and devices of this machine."""
    found: dict[str, Any] = {
        "turnout": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    found |= {package: versions.installed(package) for package in _PACKAGES} | {"triton": versions.triton()}
    found["cuda"] = torch.version.cuda
    found["cudnn"] = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    found["driver"] = versions.driver()
    found["devices"] = [Device.of(d).name for d in _devices()]
    found["entries"] = {Device.of(d).name: printable(str(folder(Device.of(d)))) for d in _devices()}
    return found


def _devices() -> list[torch.device]:
    return [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]


def known_bad() -> list[Check]:
    """Pairs of versions and settings that are known to be slow or wrong."""
    checks = []
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    if versions.minor(torch.__version__) in ((2, 9), (2, 10)) and cudnn and 90800 <= cudnn < 91500:
        slow = (
            "runs half-precision conv3d without cuDNN: 4x slower, several times the memory (pytorch #166122)"
        )
        note = f"torch {torch.__version__} with cuDNN {cudnn} {slow}; take nvidia-cudnn 9.15 or torch 2.11"
        checks.append(Check("cuDNN", "warning", note))
    if torch.version.hip and torch.backends.cudnn.benchmark:
        checks.append(
            Check(
                "cudnn.benchmark",
                "warning",
                "on ROCm it searches for minutes at each new shape; set it to False",
            )
        )
    if importlib.util.find_spec("numba") is None:
        checks.append(
            Check(
                "numba",
                "warning",
                "not installed: CPU routes of our own are refused; pip install 'turnout[cpu]'",
            )
        )
    return checks or [Check("known-bad pairs", "ok", "none")]


def compilers() -> list[Check]:
    """What the installed torch and Triton were tested with, and whether kernels are launched by address."""
    triton = versions.triton()
    if triton is None:
        return [
            Check("triton", "warning", "not installed: GPU routes of our own are refused; pip install triton")
        ]
    pair = f"torch {torch.__version__} with triton {triton}"
    ran = [
        v
        for v in support.verified()
        if _same_minor(v.torch, torch.__version__) and _same_minor(v.triton, triton)
    ]
    on_cards = "; ".join(f"torch {v.torch} with triton {v.triton} ({v})" for v in support.verified())
    elsewhere = f"every route was run on a card with {on_cards}"
    if ran:
        checks = [
            Check(pair, "ok", f"every route was run on a card with this pair: {'; '.join(map(str, ran))}")
        ]
    elif versions.minor(triton) in support.COMPILED:
        checks = [Check(pair, "ok", f"every kernel was compiled with this Triton, not run; {elsewhere}")]
    else:
        known = ", ".join(".".join(map(str, version)) for version in support.COMPILED)
        checks = [
            Check(
                pair,
                "warning",
                f"not tested with this Triton; kernels were compiled with {known}; {elsewhere}",
            )
        ]
    problem = support.fast_launch()
    checks.append(
        Check("fast launch", "warning" if problem else "ok", problem or "kernels are launched by address")
    )
    for where in _devices()[1:]:
        device = Device.of(where)
        for op in OPS.values():
            for route in op.routes.values():
                problem = failures.compile_problem(route.code_hash, device) if route.kernels else None
                if problem is not None:
                    checks.append(Check(f"{op.name} {route.name} on {where}", "warning", problem))
    return checks


def _same_minor(a: str, b: str) -> bool:
    return versions.minor(a) == versions.minor(b)


def tables() -> list[Check]:
    """What was measured for the devices of this machine, and for which cards rows are shipped."""
    checks = []
    for where in _devices():
        device = Device.of(where)
        known = Tables.for_device(device)
        counts = f"{_rows(len(known.here.rows))} measured here, {len(known.shipped.rows)} shipped"
        if known.sibling is not None and not known.shipped.rows:
            counts += f", {len(known.sibling.rows)} of its sibling {device.sibling}"
        checks.append(
            _table_check(f"rows for {device.name}", counts, [table for _, table in known.authorities])
        )
    return checks


def shipped_tables() -> list[Check]:
    """The state of the rows that are shipped for cards that are not here: what a maintainer looks at."""
    from turnout.routing.store import SHIPPED

    here = {Device.of(where).slug for where in _devices()}
    checks = []
    for file in sorted(SHIPPED.glob("*.json")):
        if file.stem not in here:
            device = Device.named(file.stem)
            table = Tables(device).shipped
            checks.append(
                _table_check(f"rows for {device.name}", f"{_rows(len(table.rows))} shipped", [table])
            )
    return checks


def _table_check(what: str, counts: str, known: list[Table]) -> Check:
    for table in known:
        for op in OPS.values():
            table.index(op)
    problems = [problem for table in known for problem in table.problems]
    stale: Counter[str] = Counter()
    stale_rows = 0
    for row in (row for table in known for row in table.rows if row.op in OPS):
        names = list(stale_routes(OPS[row.op], row))
        stale.update(f"{row.op} {name}" for name in names)
        stale_rows += bool(names)
    rows = [(row, table) for table in known for row in table.rows]
    unknown = Counter(row.op for row, _ in rows if row.op not in OPS)
    elsewhere = Counter(
        _machine(row.machine) for row, table in rows if dict(row.machine) != table.device.machine
    )
    unusable = Counter({op.name: sum(table.unusable(op) for table in known) for op in OPS.values()})
    notes = [counts]
    if unknown:
        notes.append(f"{_rows(unknown.total())} of ops that are not known: {_listed(unknown)}")
    if elsewhere:
        notes.append(
            f"{_rows(elsewhere.total())} measured with another machine or other settings: "
            f"{_listed(elsewhere)}"
        )
    if unusable.total():
        notes.append(
            f"{_rows(unusable.total())} of calls or configurations that no route takes: {_listed(unusable)}"
        )
    if stale:
        listed = ", ".join(f"{name} ({count})" for name, count in sorted(stale.items()))
        notes.append(
            f"{_rows(stale_rows)} with other kernels than these: {listed}; "
            "turnout bench --missing measures them"
        )
    notes += problems[:3] + (
        [f"and {len(problems) - 3} more that cannot be read"] if len(problems) > 3 else []
    )
    doubtful = stale or problems or unknown or unusable.total()
    return Check(what, "warning" if doubtful else "ok", "; ".join(notes))


def _machine(machine: Mapping[str, int | str]) -> str:
    """What a row says of its machine, in a few words."""
    return brief(", ".join(f"{name} {value}" for name, value in sorted(machine.items())[:3]) or "not said")


def _listed(counts: Counter[str]) -> str:
    """Names and how often each occurs, the most frequent first, at most five."""
    listed = [f"{name} ({count})" for name, count in counts.most_common(5) if count]
    more = sum(count > 0 for count in counts.values()) - len(listed)
    return ", ".join(listed) + (f" and {more} more" if more else "")


def _rows(count: int) -> str:
    return f"{count} row" if count == 1 else f"{count} rows"


def routes() -> list[Check]:
    """Run every route on the first of the op's small cases that it takes, on every device here."""
    checks = []
    for where in _devices():
        for op in OPS.values():
            calls = [op.arguments(*case.make(where, 0)) for case in op.cases()[:_SMALL_CASES]]
            for route in op.routes.values():
                reasons = [list(route.refuses(op.problem(*args), Device.of(where))) for args in calls]
                taken = next((args for args, why in zip(calls, reasons, strict=True) if not why), None)
                what = f"{op.name} {route.name} on {where}"
                checks.append(
                    Check(what, "refused", "; ".join(reasons[0]))
                    if taken is None
                    else _check(op, route, taken, what)
                )
    return checks


def _check(op: Op, route: Route, args: tuple, what: str) -> Check:
    try:
        why = Trial(op, args).complaint(route.numerics, route.run)
    except Exception as failure:  # a broken install must not end the report
        why = f"{type(failure).__name__}: {failure}"
    return Check(what, "ok" if why is None else "failed", why or "agrees with the reference")

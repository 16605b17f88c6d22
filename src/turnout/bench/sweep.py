"""Benchmark an op's cases: every route and every peer in one run, one JSON object for each case.

Outputs are verified first: a wrong one is not timed.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from turnout.measure.timer import time_variants
from turnout.measure.tune import measure, peak_mib, remember, rotating
from turnout.measure.verify import Verifier
from turnout.routing.case import Case, outline
from turnout.routing.choose import REFERENCE, plain
from turnout.routing.device import Device, assumed
from turnout.routing.op import Op
from turnout.routing.row import Row
from turnout.routing.table import Tables
from turnout.routing.versions import for_device, minor, triton

_CHECKOUT = Path(__file__).parents[3]  # the root of the repository, where this is a checkout


def ceilings(device: torch.device) -> dict[str, float]:
    """The rates that this device reaches in this run.

    read, copy: bytes/s of plain reading and of copying (read plus written). matmul: FLOP/s of a matrix
    product, in bfloat16 on a GPU and in float32 on a CPU.
    """
    cuda = device.type == "cuda"
    big = torch.randn(2**30 if cuda else 2**26, device=device)
    into = torch.empty_like(big)
    half = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) if cuda else torch.randn(1024, 1024)
    timings = time_variants(
        {"read": lambda: big.sum(), "copy": lambda: into.copy_(big), "matmul": lambda: half @ half},
        [()],
        device,
        cache=Device.of(device).cache,
        rounds=10,
    )
    size = 4 * big.numel()
    return {
        "read": 1e6 * size / timings["read"].us,
        "copy": 1e6 * 2 * size / timings["copy"].us,
        "matmul": 1e6 * 2 * half.shape[0] ** 3 / timings["matmul"].us,
    }


@torch.no_grad()
def sweep_case(
    op: Op,
    case: Case,
    device: torch.device,
    ceiling: dict[str, float],
    seconds: float,
    tuned: list[Row] | None = None,
    with_peers: bool = True,
) -> dict[str, Any]:
    """Measure one case: the call as it is routed, every route in the configuration it would get, the peers.

    With `tuned`, the call is tuned first, and a row with the times of both measurements is added to the list.
    """
    args = op.arguments(*case.make(device, 0))
    spec, problem = Device.of(device), op.problem(*args)
    verifier = Verifier(op, args)
    tuned_row: Row | None = None
    if tuned is not None:
        tuned_row, _ = measure(op, args, seconds=seconds, verifier=verifier)
        remember(tuned_row, spec)
    verdict = op.verdict(op.key(args))
    configs = {verdict.chosen: verdict.config} if tuned_row is None else tuned_row.config
    runs: dict[str, Callable[..., Any]] = {}
    wrong: dict[str, str] = {}
    for route in op.routes.values():
        if any(route.refuses(problem, spec)):
            continue
        config = configs.get(route.name) or route.configs(problem, spec)[0]
        run = route.prepared(args, dict(config)).call
        why = verifier.mismatch(route.numerics, run)
        if why is None:
            runs[route.name] = op.with_runtime_checks(run, args)  # as the router runs it
        else:
            wrong[route.name] = why
    runs[REFERENCE] = op.reference
    declared = op.declared_cases
    peers = {f"peer:{name}": run for name, run in declared.peers.items()} if with_peers else {}
    bounds = {f"bound:{name}": run for name, run in declared.bounds.items()}
    numerics = "exact" if verdict.chosen == REFERENCE else op.routes[verdict.chosen].numerics
    why = verifier.mismatch(numerics, op)
    if why is not None:
        return {
            "op": op.name,
            "case": case.name,
            "dtype": plain(case.dtype),
            "chosen": verdict.chosen,
            "wrong": {"turnout": why},
        }
    # Errors come first: timing may write into the arguments.
    error, reference_error = (float(f"{verifier.error(run):.3g}") for run in (op, op.reference))
    timings = time_variants(
        {"turnout": op.call, **runs, **peers, **bounds},
        rotating(args, spec),
        device,
        cache=spec.cache,
        seconds=seconds,
        rounds=max(20, int(200 * seconds)),
    )
    if tuned is not None and tuned_row is not None:
        tuned_row = pooled(tuned_row, {name: timing.us for name, timing in timings.items()})
        remember(tuned_row, spec)
        tuned.append(tuned_row)
    work = op.work(problem)
    bound = max(work.bytes / ceiling["copy" if work.written else "read"], work.flops / ceiling["matmul"])
    row = {
        "op": op.name,
        "case": case.name,
        "source": case.source,
        "problem": {name: plain(value) for name, value in problem._asdict().items()},
        "dtype": plain(case.dtype),
        "chosen": verdict.chosen,
        "authority": verdict.authority,
        "us": {name: round(t.us, 2) for name, t in timings.items()},
        "iqr": {name: round(t.iqr, 2) for name, t in timings.items()},
        "device_us": {name: round(t.device_us, 2) for name, t in timings.items()},
        "host_us": {name: round(t.host_us, 2) for name, t in timings.items()},
        "bound_us": round(1e6 * bound, 3),
        "error": error,
        "reference_error": reference_error,
        "peak_mib": {name: peak_mib(run, args) for name, run in {"turnout": op.call, **peers}.items()}
        if device.type == "cuda"
        else {},
        "device": spec.name,
        "ceilings": {name: float(f"{value:.4g}") for name, value in ceiling.items()},
        "versions": versions(spec.type),
        "commit": commit(),
    }
    return row | ({"wrong": wrong} if wrong else {})


def pooled(row: Row, us: dict[str, float]) -> Row:
    """Average the times of a tuned row with those of the sweep right after it.

    On a card that is hot, two measurements of a large convolution differ by a tenth, so one of them alone may
    name the wrong route as the fastest.

    >>> row = Row("dot", {}, {"reference": 4.0, "two-stage": 2.0})
    >>> pooled(row, {"reference": 6.0, "two-stage": 3.0, "peer:torch.dot": 6.0}).us
    {'reference': 5.0, 'two-stage': 2.5}
    """
    times = {name: round((first + us.get(name, first)) / 2, 3) for name, first in row.us.items()}
    return replace(row, us=times)


def versions(device_type: str) -> dict[str, str]:
    """The versions of the software that a figure depends on."""
    return {"python": platform.python_version(), **for_device(device_type)}


def sweep(
    op: Op,
    cases: Sequence[Case],
    device: torch.device,
    ceiling: dict[str, float],
    *,
    seconds: float = 1.0,
    tuned: list[Row] | None = None,
    with_peers: bool = True,
) -> Iterator[dict[str, Any]]:
    """Measure cases one after the other, and yield a row for each."""
    for case in cases:
        yield sweep_case(op, case, device, ceiling, seconds, tuned, with_peers)


def timed(op: Op, device: torch.device, only: str = "") -> list[Case]:
    """The cases whose name contains `only` and that are worth timing on a device.

    If there is none of that name, those that are only for tests.
    """
    named = [case for case in op.cases() if only in str(case)]
    worth_timing = [case for case in named if case.timed_on(device.type)]
    return worth_timing or [case for case in named if not case.timed]


def missing(op: Op, case: Case, device: torch.device) -> bool:
    """Whether no table has times of a case with today's kernels: it is new, or a kernel has changed."""
    return not Tables.for_device(Device.of(device)).has(op, op.problem(*op.arguments(*case.make(device, 0))))


def absent_cases(op: Op, device: Device, only: str = "") -> list[Case]:
    """The cases that no table has with the kernels as they are, for a card that need not be here."""
    tables = Tables.for_device(device)
    timed = [case for case in op.cases() if only in str(case) and case.timed_on(device.type)]
    with assumed(device):
        return [case for case in timed if not tables.has(op, outline(op, case).problem)]


def keep_row(row: dict[str, Any], path: Path, *same: str) -> None:
    """Write a row into a file of one JSON object a line, at once: a long run that is cut off loses nothing.

    The row replaces the one with the same values of the fields `same` and the same Triton; others stay.
    """
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def key(row: dict[str, Any]) -> tuple:
        return (*(row.get(field) for field in same), minor(row.get("versions", {}).get("triton")))

    index = next((i for i, old in enumerate(rows) if key(old) == key(row)), len(rows))
    rows[index : index + 1] = [row]
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text("".join(json.dumps(each) + "\n" for each in rows))
    part.replace(path)


def rows_of_this_code(path: Path, device: torch.device) -> list[dict[str, Any]]:
    """The rows of a file that were measured with the code as it is, and with the Triton that is here."""
    if not path.exists() or commit() is None:
        return []
    mine = minor(triton()) if device.type == "cuda" else None
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        row
        for row in rows
        if row.get("commit") == commit() and minor(row.get("versions", {}).get("triton")) == mine
    ]


@functools.cache
def commit() -> str | None:
    """The commit of the code that is measured, with a plus if files other than results have changed since.

    TURNOUT_COMMIT names it for code that was copied without its repository. None for an installed package.
    """
    named = os.environ.get("TURNOUT_COMMIT")
    if named or not (_CHECKOUT / ".git").exists():
        return named
    changes = ("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(exclude)benchmarks/results")
    try:
        name, changed = _git("describe", "--always", "--match=", "--abbrev=7"), _git(*changes)
    except (OSError, subprocess.CalledProcessError):
        return None
    return name + ("+" if changed else "")


def _git(*words: str) -> str:
    command = ["git", "-C", str(_CHECKOUT), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

"""A plugin of pytest that keeps what became of each test as soon as it has run, for runs that are cut off.

    pytest -p benchmarks.recorded_tests --recorded FILE.jsonl

Tests that this code has passed with this torch and Triton are not run again. What is known so far is in
`FILE.partial`; once all tests have run, one row of counts goes to FILE, and that file goes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

_KEY = pytest.StashKey["Recorder"]()


def identity() -> dict[str, Any]:
    """What a result is of: the code, and what it ran with."""
    import torch

    from turnout.bench.sweep import commit
    from turnout.routing import versions

    return {"commit": commit(), "torch": torch.__version__, "triton": versions.triton()}


class Recorder:
    """What is known of each test, by its name: whether it passed or was skipped, how long it took."""

    def __init__(self, path: Path):
        self.path, self.partial = path, path.with_name(path.name + ".partial")
        self.identity = identity()
        self.results: dict[str, dict[str, Any]] = {}
        self.collected = 0
        lines = self.partial.read_text(encoding="utf-8").splitlines() if self.partial.exists() else []
        if lines and json.loads(lines[0]) == self.identity:
            self.results = {row["test"]: row for row in map(json.loads, lines[1:])}
        else:
            self.partial.parent.mkdir(parents=True, exist_ok=True)
            self.partial.write_text(json.dumps(self.identity) + "\n", encoding="utf-8")
        self.known = [name for name, row in self.results.items() if row["outcome"] != "failed"]

    def add(self, report: Any) -> None:
        """Take note of one phase of a test."""
        before = self.results.get(report.nodeid, {})
        if report.when != "call" and report.outcome == "passed":
            return
        if report.when == "teardown" and before.get("outcome") == "failed":
            return
        last_line = str(report.longrepr).strip().splitlines()[-1:] if report.outcome == "failed" else []
        row = {
            "test": report.nodeid,
            "outcome": report.outcome,
            "seconds": round(report.duration, 2),
            **({"said": last_line[0][:300]} if last_line else {}),
        }
        self.results[report.nodeid] = row
        with self.partial.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def finish(self) -> str:
        """Write the row of counts once all tests have run; what there is to say of it."""
        if len(self.results) < self.collected + len(self.known):
            return f"{len(self.results)} tests have run so far; run it again for the others"
        from turnout.bench.sweep import keep_row, versions
        from turnout.measure.machine import machine, now

        device = _device()
        row = {
            "suite": "GPU tests",
            "tests": len(self.results),
            **{name: self._count(name) for name in ("passed", "skipped")},
            "failed": [name for name, each in self.results.items() if each["outcome"] == "failed"],
            "seconds": round(sum(each["seconds"] for each in self.results.values()), 1),
            "machine": machine(device),
            "versions": versions(device.type),
            "date": now(),
            "commit": self.identity["commit"],
        }
        keep_row(row, self.path, "suite")
        if not row["failed"]:
            self.partial.unlink()
        return f"{row['passed']} of {row['tests']} tests passed"

    def _count(self, outcome: str) -> int:
        return sum(row["outcome"] == outcome for row in self.results.values())


def _device() -> Any:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--recorded", type=Path, default=None, help="Keep counts of tests in this file.")


def pytest_configure(config: Any) -> None:
    if hasattr(config, "workerinput"):  # a process of pytest-xdist, which is told what is known
        return
    path = config.getoption("--recorded")
    if path is not None:
        config.stash[_KEY] = Recorder(path)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    recorder = node.config.stash.get(_KEY, None)
    if recorder is not None:
        node.workerinput["known_tests"] = recorder.known


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    recorder = node.config.stash.get(_KEY, None)
    if recorder is not None:
        recorder.collected = len(ids)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    recorder = config.stash.get(_KEY, None)
    sent = getattr(config, "workerinput", {}).get("known_tests", ())
    known = set(sent if recorder is None else recorder.known)
    dropped = [item for item in items if item.nodeid in known]
    if dropped:
        items[:] = [item for item in items if item.nodeid not in known]
        config.hook.pytest_deselected(items=dropped)
    if recorder is not None:
        recorder.collected = len(items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: Any) -> None:
    if _recording:
        _recording[-1].add(report)


_recording: list[Recorder] = []


def pytest_sessionstart(session: Any) -> None:
    recorder = session.config.stash.get(_KEY, None)
    if recorder is not None:
        _recording.append(recorder)


def pytest_sessionfinish(session: Any, exitstatus: int) -> None:
    if _recording and session.config.stash.get(_KEY, None) is not None:
        print(f"\n{_recording.pop().finish()}")

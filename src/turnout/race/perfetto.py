"""Write the profiled calls of a race as a file for Perfetto (ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from turnout.race.kernels import kind_of
from turnout.race.run import Race


def events(race: Race) -> list[dict[str, Any]]:
    """The kernels of every profiled lane, in the Trace Event Format.

    Each lane is a process, with times in microseconds from its first kernel. The times are the profiler's
    own, which slows a call down.
    """
    rows: list[dict[str, Any]] = []
    for process, (name, lane) in enumerate(race.lanes.items()):
        if lane.trace is None or not lane.trace.kernels:
            continue
        rows.append(
            {"ph": "M", "pid": process, "name": "process_name", "args": {"name": f"{race.model}, {name}"}}
        )
        first = lane.trace.kernels[0].start
        for kernel in lane.trace.kernels:
            start, length = 1e3 * (kernel.start - first), 1e3 * kernel.length
            kind = kind_of(kernel.name)
            rows.append(
                {
                    "ph": "X",
                    "pid": process,
                    "tid": 0,
                    "name": kernel.name,
                    "cat": kind,
                    "ts": round(start, 3),
                    "dur": round(length, 3),
                }
            )
    return rows


def write(race: Race, path: Path) -> None:
    """Write the trace of a race into a file."""
    content = {"traceEvents": events(race), "displayTimeUnit": "ms", "otherData": {"race": race.headline()}}
    path.write_text(json.dumps(content), encoding="utf-8")

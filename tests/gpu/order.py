"""The order of GPU tests: what takes long comes first, what compiles the same kernels is together.

    python -m tests.gpu.order benchmarks/results/DEVICE/gpu-tests.jsonl.partial

takes the seconds of a run, which `make card` keeps while it goes on, into `seconds.json`.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

SECONDS = Path(__file__).with_name("seconds.json")
LONG = 8.0  # seconds: a test that takes longer has an entry of its own, others have that of their function
UNKNOWN = 1.0


def function_of(name):
    return name.partition("[")[0]


def seconds_of(rows):
    """What is kept of a run: by the names of functions their average, and the tests that take long."""
    by_function = defaultdict(list)
    for row in rows:
        by_function[function_of(row["test"])].append(row["seconds"])
    result = {name: round(sum(times) / len(times), 1) for name, times in by_function.items()}
    result = {name: seconds for name, seconds in result.items() if seconds != UNKNOWN}
    result |= {row["test"]: round(row["seconds"], 1) for row in rows if row["seconds"] > LONG}
    return dict(sorted(result.items()))


def group_of(item):
    """Tests of one route of an op call it with the same arguments: what one of them compiles, others find."""
    arguments = getattr(item, "callspec", None)
    arguments = arguments.params if arguments else {}
    if "op" in arguments and "route" in arguments:
        return arguments["op"].name, arguments["route"].name
    return item.nodeid


def arranged(items, processes, seconds):
    """The tests in an order for so many processes, each of which begins with as large a part of the list.

    Groups are dealt out, the longest first, to the process with the least to do among those with room for it.
    """
    groups = defaultdict(list)
    for item in items:
        groups[group_of(item)].append(item)

    def cost(group):
        return sum(seconds.get(x.nodeid, seconds.get(function_of(x.nodeid), UNKNOWN)) for x in group)

    left = len(items)
    parts = []  # [seconds, room, tests]
    for i in range(processes):  # as pytest-xdist divides them
        parts.append([0.0, left // (processes - i), []])
        left -= parts[-1][1]
    for group in sorted(groups.values(), key=cost, reverse=True):
        fitting = [part for part in parts if part[1] >= len(group)]
        pieces = [group] if fitting else [[item] for item in group]
        for piece in pieces:
            part = min((part for part in parts if part[1] >= len(piece)), key=lambda part: part[0])
            part[0] += cost(piece)
            part[1] -= len(piece)
            part[2] += piece
    return [item for part in parts for item in part[2]]


def stored_seconds():
    return json.loads(SECONDS.read_text(encoding="utf-8"))


if __name__ == "__main__":
    lines = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
    run = [row for row in map(json.loads, lines) if "test" in row]
    SECONDS.write_text(json.dumps(seconds_of(run), indent=0) + "\n", encoding="utf-8")

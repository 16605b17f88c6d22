"""Targets: figures that a card is to reach, and whether the rows of this code reach them.

`targets.json` has them. Each names a `file` of results without its ending, `where` (fields that its rows have
with these values) and a `figure`: the path of a number in a row, "lanes.graph.ms", in which `*` stands for
every item of a list. Of several paths in a list the least counts. `over` and `less` are paths of what the
figure is divided by, and of what is taken from it. `median` is true where the median over all rows counts.
Else every row has to reach it, and `rows` says how many there must be: one if it is left out, one of every
race for "races". What is to be reached is `at_most`, `at_least` or `equal`; `source` says where that comes
from.
"""

from __future__ import annotations

import json
import operator
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).with_name("targets.json")
BOUNDS: dict[str, Callable[[Any, Any], bool]] = {
    "at_most": operator.le,
    "at_least": operator.ge,
    "equal": operator.eq,
}
REACHED, MISSED, UNKNOWN = "reached", "not reached", "not measured"


class Result(NamedTuple):
    """What became of a target. value: the figure, None where it was not measured; rows: how many rows had
    it.
    """

    name: str
    state: str
    value: Any
    bound: str
    rows: int
    note: str = ""

    def __str__(self) -> str:
        value = f"{self.value:g}" if isinstance(self.value, (int, float)) else str(self.value)
        shown = f" ({value})" if self.value is not None else ""
        return f"{self.state:12} {self.name}: {self.bound}{shown}{self.note}"


def load() -> list[dict[str, Any]]:
    """All targets, with numbers for `rows`."""
    from turnout.race.models import RACERS

    races = sum(len(racer.dtypes) for racer in RACERS.values())
    targets = json.loads(FILE.read_text(encoding="utf-8"))
    return [target | ({"rows": races} if target.get("rows") == "races" else {}) for target in targets]


def look_up(row: Any, path: str) -> Any:
    """What stands at a path; None where nothing does. A list where the path has a `*`.

    >>> look_up({"lanes": {"graph": {"ms": 3.5}}}, "lanes.graph.ms")
    3.5
    >>> look_up({"of_ranks": [{"peak_mib": 1}, {"peak_mib": 2}]}, "of_ranks.*.peak_mib")
    [1, 2]
    """
    name, _, rest = path.partition(".")
    if name == "*":
        return [look_up(each, rest) if rest else each for each in row] if isinstance(row, list) else None
    if not isinstance(row, dict) or row.get(name) is None:
        return None
    return look_up(row[name], rest) if rest else row[name]


def figure_of(row: dict[str, Any], target: dict[str, Any]) -> Any:
    """The figure of one row; None where it has none."""
    paths = target["figure"] if isinstance(target["figure"], list) else [target["figure"]]
    values = [value for path in paths if (value := look_up(row, path)) is not None]
    if not values:
        return None
    value = values[0] if len(paths) == 1 else min(values)
    if isinstance(value, list):
        if not value or None in value:
            return None
        value = max(value) if "at_most" in target else min(value)
    for name, combine in (("over", operator.truediv), ("less", operator.sub)):
        if name in target:
            other = look_up(row, target[name])
            if not other and (name == "over" or other is None):
                return None
            value = combine(value, other)
    return round(value, 4) if isinstance(value, float) else value


def judge(target: dict[str, Any], rows: list[dict[str, Any]]) -> Result:
    """Whether rows of its file, all of this code, reach a target."""
    [name] = BOUNDS.keys() & target.keys()
    wanted = "yes" if target[name] is True else f"{target[name]:g}{target.get('unit', '')}"
    bound = f"{name.replace('_', ' ')} {wanted}"
    where = target.get("where", {})
    fitting = [row for row in rows if all(row.get(key) == value for key, value in where.items())]
    figures = [(row, figure) for row in fitting if (figure := figure_of(row, target)) is not None]
    needed = target.get("rows", 1)
    if not figures:
        note = f"; {_why_not(fitting)}" if fitting else ""
        return Result(target["name"], UNKNOWN, None, bound, 0, note)
    if target.get("median"):
        value, worst = statistics.median(figure for _, figure in figures), None
    else:
        least_wanted = name == "at_least" or (name == "equal" and target[name] is True)
        worst, value = (min if least_wanted else max)(figures, key=lambda each: each[1])
    if not BOUNDS[name](value, target[name]):
        note = f"; {_of(worst)}" if worst is not None and len(figures) > 1 else ""
        return Result(target["name"], MISSED, value, bound, len(figures), note)
    if len(figures) < needed:
        note = f"; {len(figures)} of {needed} rows, which reach it"
        return Result(target["name"], UNKNOWN, value, bound, len(figures), note)
    return Result(target["name"], REACHED, value, bound, len(figures))


def _why_not(rows: list[dict[str, Any]]) -> str:
    failed = [lane["failed"] for row in rows for lane in row.get("lanes", {}).values() if "failed" in lane]
    return failed[0] if failed else "its row has no such figure"


def _of(row: dict[str, Any]) -> str:
    return " ".join(str(row[key]) for key in ("model", "what", "op", "case", "dtype") if key in row)


def summary(folder: Path, rows_of: Callable[[Path], list[dict[str, Any]]]) -> list[Result]:
    """What became of each target, by the results of one device."""
    return [judge(target, rows_of(folder / f"{target['file']}.jsonl")) for target in load()]

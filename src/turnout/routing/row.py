"""Rows: the measured times of one problem. Reading one from JSON checks every field."""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch

from turnout.routing.choose import REFERENCE, plain
from turnout.routing.versions import Version, minor

if TYPE_CHECKING:
    from turnout.routing.op import Op

SCHEMA = 2  # 1: rows were identified by all code of a route, host code included
_LONGEST = 1e12  # microseconds: a time of eleven days or more is a mistake
_DEEPEST = 8  # levels of nested lists in a problem
_MOST_CHARACTERS = 200  # in a name or a version


class Unreadable(ValueError):
    """A value is not a row; the message says why."""


@dataclass(frozen=True)
class Row:
    """The times of one problem's routes in microseconds, with all that decides whether they still hold.

    us, iqr: median and interquartile range. error: against float64. peak_mib: memory. config: the fastest
    configuration of each route. version, code_hash: of the routes that were measured. versions: of the
    software. machine: what else must be equal for the times to hold, such as a CPU's number of threads.
    """

    op: str
    problem: Mapping[str, Any]
    us: Mapping[str, float]
    iqr: Mapping[str, float] = field(default_factory=dict)
    error: Mapping[str, float] = field(default_factory=dict)
    peak_mib: Mapping[str, float] = field(default_factory=dict)
    config: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    version: Mapping[str, int] = field(default_factory=dict)
    code_hash: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, int | str] = field(default_factory=dict)

    @property
    def triton(self) -> Version | None:
        """The version of the Triton that compiled the kernels that were measured."""
        return minor(self.versions.get("triton"))

    @property
    def identity(self) -> str:
        """Op, problem, Triton and machine as text; a row replaces an older one with the same identity."""
        return json.dumps([self.op, self.problem, self.triton, self.machine], sort_keys=True)

    def json(self) -> dict[str, Any]:
        """The row as a JSON object."""
        return asdict(self)

    @staticmethod
    def parse(value: Any) -> Row:
        """Read a row from a JSON value; raise `Unreadable`, with the reason, if it is not one."""
        if not isinstance(value, dict):
            raise Unreadable(f"{brief(value)}, a row is an object")
        names = {f.name for f in fields(Row)}
        unknown = [name for name in value if name not in names]
        if unknown:
            raise Unreadable(f"unknown field {brief(unknown[0])}")
        if not _is_text(value.get("op")) or not isinstance(value.get("problem"), dict):
            raise Unreadable("a row needs op, a name, and problem, an object")
        if _is_deeper(value["problem"], _DEEPEST):
            raise Unreadable(f"problem is nested deeper than {_DEEPEST}")
        for name, (kind, is_kind) in _KINDS.items():
            part = value.get(name, {})
            if (
                not isinstance(part, dict)
                or not all(map(is_kind, part.values()))
                or not all(map(_is_text, part))
            ):
                raise Unreadable(f"{name} is {brief(part)}, it needs to be an object of {kind}")
        if REFERENCE not in value.get("us", {}):
            raise Unreadable(f"us has no time of the {REFERENCE}")
        if any(us <= 0 for us in value["us"].values()):
            raise Unreadable("us has a time that is not above zero")
        return Row(**value)


def _is_text(value: Any) -> bool:
    """Whether a value is a short printable text: verdicts and `turnout doctor` print names and versions."""
    return isinstance(value, str) and len(value) <= _MOST_CHARACTERS and value.isprintable()


def _is_deeper(value: Any, levels: int) -> bool:
    if not isinstance(value, (dict, list)):
        return False
    parts = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(part, levels - 1) for part in parts)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < _LONGEST and math.isfinite(value)


def _is_error(value: Any) -> bool:
    return type(value) in (int, float) and (value != value or value >= 0)  # one may be infinite, or NaN


def _is_config(value: Any) -> bool:
    return isinstance(value, dict) and all(type(v) in (int, float, str, bool) for v in value.values())


_KINDS = {
    "us": ("times", _is_number),
    "iqr": ("times", _is_number),
    "error": ("numbers", _is_error),
    "peak_mib": ("numbers", _is_number),
    "config": ("configurations", _is_config),
    "version": ("whole numbers", lambda value: type(value) is int),
    "code_hash": ("texts", _is_text),
    "versions": ("texts", _is_text),
    "machine": ("numbers and texts", lambda value: type(value) is int or _is_text(value)),
}


def brief(value: Any) -> str:
    """Shorten a value for an error message: files may hold a hundred thousand brackets."""
    if isinstance(value, (dict, list)):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    text = str(value) if not isinstance(value, int) or value.bit_length() < 200 else "a huge number"
    return printable(text if len(text) < 40 else text[:37] + "...")


def printable(text: str) -> str:
    """Escape what a terminal cannot show: control characters, and bytes of file names that are no text."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text
    )


def decode(op: Op, problem: Mapping[str, Any]) -> Any:
    """Read a problem from a row's JSON; raise `Unreadable` if fields are missing, unknown or mistyped."""
    names = op.problem_type._fields
    if set(problem) != set(names):
        different = sorted(set(problem) ^ set(names))
        raise Unreadable(f"a problem of {op.name} with other fields: {', '.join(map(brief, different[:3]))}")
    decoded = _decode(op.problem_type, [problem[name] for name in names], op.name)
    encoded = {name: plain(value) for name, value in decoded._asdict().items()}
    if encoded != dict(problem):
        raise Unreadable(f"a problem of {op.name} that does not read as it is written")
    return decoded


def _decode(hint: Any, value: Any, field: str) -> Any:
    """Convert the JSON value of a field to its type, `hint`. `field` names it in errors."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        choices = typing.get_args(hint)
        if value is None and type(None) in choices:
            return None
        for choice in choices:
            try:
                return _decode(choice, value, field)
            except Unreadable:
                continue
        raise _misfit(field, value, hint)
    if typing.get_origin(hint) is typing.Literal:
        literals = typing.get_args(hint)
        if value not in literals or isinstance(value, bool) != isinstance(literals[0], bool):
            raise _misfit(field, value, hint)
        return value
    if hint is torch.dtype:
        dtype = getattr(torch, value, None) if isinstance(value, str) else None
        if not isinstance(dtype, torch.dtype):
            raise _misfit(field, value, hint)
        return dtype
    if hasattr(hint, "_fields"):  # a problem inside a problem
        hints = typing.get_type_hints(hint)
        if not isinstance(value, list) or len(value) != len(hint._fields):
            raise _misfit(field, value, hint)
        parts = zip(hint._fields, value, strict=True)
        return hint(*(_decode(hints[name], part, f"{field}.{name}") for name, part in parts))
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise _misfit(field, value, hint)
        inner = typing.get_args(hint)
        kinds = [inner[0]] * len(value) if inner[-1] is Ellipsis else inner
        if len(kinds) != len(value):
            raise _misfit(field, value, hint)
        return tuple(_decode(kind, part, field) for kind, part in zip(kinds, value, strict=True))
    allowed = (int, float) if hint is float else (hint,)
    if type(value) not in allowed or (type(value) is int and value.bit_length() > 63):
        raise _misfit(field, value, hint)
    return value


def _misfit(field: str, value: Any, hint: Any) -> Unreadable:
    return Unreadable(f"{field} is {brief(value)}, it needs to be {getattr(hint, '__name__', hint)}")

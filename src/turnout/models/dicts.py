"""Whether dictionaries and lists hold what they held, asked once in a call: no loop of Python's."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch

from turnout.routing.torch_private import version_of_dict

everything = itertools.chain.from_iterable
SCALARS = frozenset({
    type(None), bool, int, str, bytes, complex, torch.dtype, torch.device, torch.Size, torch.memory_format,
    torch.layout, type(Ellipsis),
})  # fmt: skip


def described(value: Any) -> Any:
    """A number, by what tells it from every other one: -0.0 from 0.0, and a NaN is itself."""
    return value.hex() if type(value) is float else repr(value) if type(value) is complex else value


def alike(a: Any, b: Any) -> bool:
    """Whether no program could tell two values apart but by identity: plain values, and containers of them.

    `==` will not do: True equals 1 and 1.0, and a class may answer what it likes.
    """
    cls = type(a)
    if a is b or cls is not type(b):
        return a is b
    if cls in SCALARS or cls is float:
        return described(a) == described(b)
    if cls in (list, tuple):
        return len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, dict) and getattr(a, "__dict__", None) == getattr(b, "__dict__", None):
        return len(a) == len(b) and all(map(alike, everything(a.items()), everything(b.items())))
    return False


def are_alike(a: list[Any], b: list[Any]) -> bool:
    """Whether two lists hold the very same objects, or such as are alike."""
    return len(a) == len(b) and (all(map(operator.is_, a, b)) or all(map(alike, a, b)))


class Dicts:
    """Some dictionaries, and what they held.

    Their versions tell at a fourth of the time that none was written to: torch.compile's guards ask CPython
    for those. Where there are none, or one has changed, the values are compared.
    """

    def __init__(self, dicts: Iterable[dict]):
        self.dicts = list(dicts)
        self._versions = versions(self.dicts)
        self._held = self._content()

    def are_same(self) -> bool:
        """Whether they hold the very same objects, or such as are alike."""
        if self.are_identical():
            return True
        sizes, *held = self._content()
        return sizes == self._held[0] and all(map(are_alike, held, self._held[1:]))

    def are_identical(self) -> bool:
        """Whether they hold the very same objects."""
        now = versions(self.dicts)  # before the values are looked at
        if now is not None and now == self._versions:
            return True
        sizes, *held = self._content()
        if sizes != self._held[0]:
            return False
        if all(all(map(operator.is_, a, b)) for a, b in zip(held, self._held[1:], strict=True)):
            self._versions = now
            return True
        return False

    def _content(self) -> tuple[list[int], list[Any], list[Any]]:
        """How many entries each has, all keys and all values."""
        values = list(everything(map(dict.values, self.dicts)))
        return list(map(len, self.dicts)), list(everything(self.dicts)), values


def versions(dicts: list[dict]) -> list[int] | None:
    """Numbers that are others once one of the dictionaries was written to; None where there are none."""
    version_of = _version_of_dicts()
    return None if version_of is None else list(map(version_of, dicts))


@functools.cache
def _version_of_dicts() -> Callable[[dict], int] | None:
    """A number of a dictionary that is another one once it was written to; None where this torch or this
    Python has none."""
    if version_of_dict is None:
        return None
    try:
        probe: dict[str, object] = {"a": 1}
        seen = [version_of_dict(probe), version_of_dict(probe)]
        for change in (lambda: probe.update(a=2), lambda: probe.update(b=3), lambda: probe.pop("a")):
            change()
            seen.append(version_of_dict(probe))
    except (RuntimeError, TypeError):
        return None
    return version_of_dict if seen[0] == seen[1] and len(set(seen)) == len(seen) - 1 else None

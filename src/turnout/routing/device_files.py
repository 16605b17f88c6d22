"""Read the files of `devices/`: the figures of cards and CPUs, each with its source, when first needed."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "devices"
CPU = "cpu"


class Constants:
    """The fitted constants of one section, by name: `device.fitted("dot.two-stage").share`."""

    def __init__(self, section: str, values: Mapping[str, float]):
        self._section, self._values = section, values

    def __getattr__(self, name: str) -> float:
        try:
            return self._values[name]
        except KeyError:
            names = ", ".join(self._values)
            raise AttributeError(f"{self._section} has no constant {name!r}; it has: {names}") from None

    def get(self, name: str, otherwise: float) -> float:
        """A constant, or `otherwise` where none was fitted."""
        return self._values.get(name, otherwise)


@functools.cache
def load(slug: str) -> dict[str, Any]:
    """The content of `devices/<slug>.toml`."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # pyright: ignore[reportMissingImports]
    with (FOLDER / f"{slug}.toml").open("rb") as file:
        return tomllib.load(file)


@functools.cache
def cards() -> tuple[dict[str, Any], ...]:
    """The files of all cards, in the order in which a name that fits several is resolved."""
    slugs = (path.stem for path in FOLDER.glob("*.toml"))
    return tuple(sorted((load(slug) for slug in slugs if slug != CPU), key=lambda card: card["rank"]))


@functools.cache
def sections(slug: str) -> dict[str, dict[str, Any]]:
    """The sections of fitted constants of a device, by their dotted names: "dot.two-stage"."""
    return dict(_leaves(load(slug)["fitted"]))


def _leaves(table: Mapping[str, Any], *names: str) -> list[tuple[str, dict[str, Any]]]:
    values = {name: value for name, value in table.items() if not isinstance(value, dict)}
    tables = {name: value for name, value in table.items() if isinstance(value, dict)}
    own = [(".".join(names), values)] if values else []
    return own + [leaf for name, inner in tables.items() for leaf in _leaves(inner, *names, name)]

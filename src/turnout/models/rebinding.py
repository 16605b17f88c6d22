"""Run a stock function with changed globals: some names lead to functions of turnout, and nothing else
changes.

A model reaches an op through names: `F.scaled_dot_product_attention`, a helper of its module, a table of
attention functions, a function that a decorator keeps in its closure. `rebind` follows them from the code of
a function and makes a copy of it in which they lead to something else. No module and no class is written to.

Every other global is looked up in the function's own module at every call, so later assignments to it take
effect. Replaced names are watched: a copy is current as long as the originals have not changed
(`is_current`).
"""

from __future__ import annotations

import builtins
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from turnout.routing.functions import is_filled, names_in

# From a name and its value to what is to be found instead; None for the value itself.
StandIn = Callable[[str, Any], Any]

_DEEPEST = 5  # functions that call each other
_LARGEST_TABLE = 256  # entries of a table of functions


class Watched(NamedTuple):
    """A name that was replaced, its scope, and its value at that time."""

    scope: Mapping[str, Any]
    name: str
    value: Any

    def __repr__(self) -> str:
        return f"Watched({self.name})"  # a module's globals fill pages

    def as_it_is(self) -> Watched:
        return self._replace(value=self.scope.get(self.name))


class Rebound:
    """A function with changed globals, and the names it depends on."""

    def __init__(self, stock: Callable[..., Any], function: Callable[..., Any], watched: Sequence[Watched]):
        self.stock, self.function, self.watched = stock, function, tuple(watched)

    def is_current(self) -> bool:
        """Whether every name that was replaced is what it was."""
        for scope, name, value in self.watched:  # noqa: SIM110, a generator would take twice the time
            if scope.get(name) is not value:
                return False
        return True


class Rebinder:
    """Follows the names of functions, and makes copies in which `stand_in` answers.

    stand_in: see StandIn. Asked about every global, every variable of a closure and every attribute of a
    module whose name is in a function's code.
    follow: whether to go on into functions that a function calls by name; those in its closure are always
    followed. frozen: globals as they are now instead of a view of the module's, in a plain dict, which
    torch.compile needs.
    """

    def __init__(self, stand_in: StandIn, *, follow: bool = True, frozen: bool = False):
        self.stand_in, self.follow, self.frozen = stand_in, follow, frozen
        self._open: list[types.FunctionType] = []  # those that are being followed
        self._inside: list[types.ModuleType] = []  # likewise

    def anew(self) -> Rebinder:
        """One with nothing open, for a thread of its own."""
        return Rebinder(self.stand_in, follow=self.follow, frozen=self.frozen)

    def rebind(self, function: Any) -> Rebound | None:
        """The copy of a function; None where no name in it, or in what it calls, has a stand-in."""
        if not isinstance(function, types.FunctionType) or is_library(function):
            return None
        if function in self._open or len(self._open) >= _DEEPEST or _writes_globals(function.__code__):
            return None
        watched: list[Watched] = []
        self._open.append(function)
        inside, self._inside = self._inside, []  # a function's names are followed from its own module on
        try:
            replaced = self._replaced(function.__globals__, names_in(function.__code__), watched)
            cells = self._cells(function, watched)
        finally:
            self._open.pop()
            self._inside = inside
        if not replaced and all(a is b for a, b in zip(cells or (), function.__closure__ or (), strict=True)):
            return None
        return Rebound(function, self._copy(function, replaced, cells), watched)

    def _replaced(
        self, scope: Mapping[str, Any], names: Iterable[str], watched: list[Watched]
    ) -> dict[str, Any]:  # fmt: skip
        """What is to be found instead under those of the names that have a stand-in; `watched` gets them."""
        replaced: dict[str, Any] = {}
        for name in names:
            if name not in scope:
                continue
            value = scope[name]
            replacement = self._instead(name, value, names, watched)
            if replacement is not None:
                replaced[name] = replacement
                watched.append(Watched(scope, name, value))
        return replaced

    def _instead(self, name: str, value: Any, names: Iterable[str], watched: list[Watched]) -> Any:
        replacement = self.stand_in(name, value)
        if replacement is not None or not self.follow:
            return replacement
        if isinstance(value, types.FunctionType):
            rebound = self.rebind(value)
            watched.extend(() if rebound is None else rebound.watched)
            return None if rebound is None else rebound.function
        if isinstance(value, types.ModuleType):
            if value in self._inside:
                return None
            self._inside.append(value)
            try:
                replaced = self._replaced(vars(value), names, watched)
            finally:
                self._inside.pop()
            return _namespace(value, replaced) if replaced else None
        if isinstance(value, type) and "super" in names:  # may be given the class, and takes nothing else
            return None
        return Table(value, self) if any(self.rebind(function) for function in _functions_in(value)) else None

    def _cells(self, function: types.FunctionType, watched: list[Watched]) -> tuple[Any, ...] | None:
        """The function's closure; the functions in it, which a decorator has put there, are followed."""
        if function.__closure__ is None:
            return None
        cells = []
        for name, cell in zip(function.__code__.co_freevars, function.__closure__, strict=True):
            value = cell.cell_contents if is_filled(cell) else None
            replacement = None if value is None else self.stand_in(name, value)
            if replacement is None and isinstance(value, types.FunctionType):
                rebound = self.rebind(value)
                replacement = None if rebound is None else rebound.function
                watched.extend(() if rebound is None else rebound.watched)
            cells.append(cell if replacement is None else types.CellType(replacement))
        return tuple(cells)

    def _copy(self, function: types.FunctionType, replaced: dict[str, Any], cells: Any) -> types.FunctionType:
        code = function.__code__
        scope = (_frozen if self.frozen else _live)(function.__globals__, replaced, names_in(code))
        copy = types.FunctionType(code, scope, function.__name__, function.__defaults__, cells)
        copy.__kwdefaults__, copy.__doc__ = function.__kwdefaults__, function.__doc__
        copy.__qualname__, copy.__module__ = function.__qualname__, function.__module__
        copy.__dict__.update(function.__dict__)
        for cell, stock in zip(cells or (), function.__closure__ or (), strict=True):
            if cell is not stock and function.__dict__.get("__wrapped__") is stock.cell_contents:
                copy.__dict__["__wrapped__"] = cell.cell_contents
        return copy


class Table:
    """Wraps an object that returns functions, a dict or a registry, and rebinds those it returns."""

    def __init__(self, stock: Any, rebinder: Rebinder):
        self._stock, self._rebinder = stock, rebinder
        self._rebound: dict[types.FunctionType, Rebound | None] = {}
        self._tables: dict[int, Table] = {}  # by the id of a dict, which the table keeps alive

    def __getattr__(self, name: str) -> Any:
        return self._instead(getattr(self._stock, name))

    def __getitem__(self, key: Any) -> Any:
        return self._instead(self._stock[key])

    def __contains__(self, key: Any) -> bool:
        return key in self._stock

    def __iter__(self) -> Iterator[Any]:
        return iter(self._stock)

    def __len__(self) -> int:
        return len(self._stock)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._instead(self._stock(*args, **kwargs))

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, self._stock)

    def __subclasscheck__(self, subclass: type) -> bool:
        return issubclass(subclass, self._stock)

    def _instead(self, value: Any) -> Any:
        """A function that was handed out, rebound; inside a tuple and behind a method or another table
        too."""
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.MethodType | types.BuiltinMethodType):
            return lambda *args, **kwargs: self._instead(value(*args, **kwargs))
        if type(value) is tuple:
            return tuple(map(self._instead, value))
        if not isinstance(value, dict) or not _functions_in(value):
            return value
        if id(value) not in self._tables:
            self._tables[id(value)] = Table(value, self._rebinder)
        return self._tables[id(value)]

    def _function(self, function: types.FunctionType) -> Callable[..., Any]:
        rebound = self._rebound.get(function)
        if rebound is None and function in self._rebound:
            return function
        if rebound is None or not rebound.is_current():
            rebound = self._rebound[function] = self._rebinder.anew().rebind(function)
        return function if rebound is None else rebound.function


def is_library(function: types.FunctionType) -> bool:
    """Whether a function is torch's or ours: those are not followed."""
    return (function.__module__ or "").partition(".")[0] in ("torch", "turnout")


def _functions_in(value: Any) -> list[types.FunctionType]:
    """The functions that an object hands out: a mapping to them, or a class that holds such mappings."""
    if isinstance(value, type):
        tables = [table for table in vars(value).values() if isinstance(table, dict)]
    else:
        tables = [value] if isinstance(value, Mapping) else []
    functions: list[types.FunctionType] = []
    for table in tables:
        if len(table) <= _LARGEST_TABLE:
            functions += [entry for entry in table.values() if isinstance(entry, types.FunctionType)]
    return functions


def _writes_globals(code: types.CodeType) -> bool:
    """Whether a function assigns globals, which in a copy would be the copy's own."""
    import dis

    if any(step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") for step in dis.get_instructions(code)):
        return True
    return any(_writes_globals(inner) for inner in code.co_consts if isinstance(inner, types.CodeType))


def _live(scope: dict[str, Any], replaced: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The replacements, and for every other name what the module has at that moment."""
    found_in = scope.get("__builtins__", builtins)  # the module or its dict
    every = found_in if isinstance(found_in, dict) else vars(found_in)
    constants = {name: every[name] for name in names if name not in scope and name in every}
    # Not a function of ours: `__missing__` is then found and called without a step in Python.
    view = type("_Globals", (dict,), {"__missing__": scope.__getitem__})
    # A relative import in the function looks for these, past `__missing__`.
    own = {name: scope[name] for name in ("__name__", "__package__", "__spec__", "__path__") if name in scope}
    return view({"__builtins__": every, **own, **constants, **replaced})


def _frozen(scope: dict[str, Any], replaced: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The globals as they are now. Without the module's name: torch.compile would look the rest up there."""
    return {name: value for name, value in scope.items() if name != "__name__"} | dict(replaced)


def _namespace(module: types.ModuleType, replaced: Mapping[str, Any]) -> Any:
    """A module with some attributes replaced; every other one is the module's at that moment."""
    kind = type(f"{module.__name__} with attributes replaced", (), {"__getattr__": module.__getattribute__})
    namespace = kind()
    vars(namespace).update(replaced)
    return namespace

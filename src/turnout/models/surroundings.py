"""What the code of a model reads outside of its instances, and whether it is still so.

From the methods by which classes are called, names are followed: to other methods of these classes, to
functions among the globals, to those that decorators keep. Code of torch and of turnout is not followed;
which of their functions other code, and torch's layers, find under a name is watched.
"""

from __future__ import annotations

import builtins
import dis
import functools
import gc
import operator
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from turnout.models.dicts import are_alike, everything, versions
from turnout.models.rebinding import is_library
from turnout.routing.functions import is_filled, names_in

_ENTRIES = ("forward", "__call__", "_decode", "_encode")
# Nobody edits their functions while a program runs, and their closures hold what decorators were given.
_LIBRARIES = frozenset({"diffusers", "transformers", "peft", "accelerate"})
_PYTHONS = frozenset(sys.stdlib_module_names) - {"__main__"} | {"builtins"}
_CONTAINERS = (dict, list, tuple, set, frozenset)
_LARGEST = 1_000  # entries of a container among the globals that is looked into
_MOST_FUNCTIONS = 5_000
# What Python itself writes to a class when it is asked for, or when an instance is copied.
_MADE_BY_PYTHON = frozenset({
    "__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__", "__slotnames__",
    "__static_attributes__", "__abstractmethods__", "_abc_impl", "__doc__", "__weakref__", "__dict__",
})  # fmt: skip
# Settings: a call is another one under another (`replays`), and the model is the same.
_SETTINGS = frozenset({"scaled_dot_product_attention", "_active_backend"})
_NOT_WATCHED = _MADE_BY_PYTHON | _SETTINGS
_code_of = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")
_contents = operator.attrgetter("cell_contents")


class _Scope(NamedTuple):
    """Where names are looked up, and the names that code looks up there. inside: names of attributes, which
    it may look up in what it finds."""

    label: str
    held: dict[str, Any]
    names: set[str]
    inside: frozenset[str] | set[str] = frozenset()


class Surroundings:
    """What the methods of some classes, some functions, and users of some modules read besides attributes of
    instances.

    Watched are all attributes of the classes; globals, and attributes of modules, classes and objects among
    them, under the names that the code has; and of functions that belong to no library also their code,
    defaults and closures. values: containers, tensors and objects among these, by name; whoever makes this
    looks into them.
    """

    def __init__(
        self,
        classes: Iterable[type],
        functions: Iterable[types.FunctionType] = (),
        modules: Iterable[types.ModuleType] = (),
    ):
        # by id: a class of ours may say that it equals the one that it was made of
        bases = {id(cls): cls for cls in everything(each.__mro__ for each in classes)}.values()
        self._classes = [
            _Scope(cls.__qualname__, held, _own_names(held))
            for cls, held in ((cls, _dict_of(cls)) for cls in bases if cls.__module__ != "builtins")
        ]
        self._functions: list[types.FunctionType] = []
        self._cells: list[types.CellType] = []
        self.values: dict[str, Any] = {}
        scopes = {id(scope.held): scope for scope in self._classes}
        for scope in self._follow(functions, modules, _methods_of(scope.held for scope in self._classes)):
            self._watch(scope, scopes)
        self._scopes = list(scopes.values())
        self._dicts = [scope.held for scope in self._scopes]
        self._where = [scope.held for scope in self._scopes for _ in scope.names]
        self._names = [name for scope in self._scopes for name in scope.names]
        self._were = self._now()
        self._versions = versions(self._dicts)
        self._codes = list(map(_code_of, self._functions))
        self._held = list(map(_contents, self._cells))

    def are_same(self) -> bool:
        """Whether nothing that is watched has changed, or all was written anew as it was."""
        written = versions(self._dicts)  # before the values are looked at
        if written is None or written != self._versions:
            if not are_alike(self._now(), self._were) or self._added() is not None:
                return False
            self._versions = written
        return are_alike(list(map(_code_of, self._functions)), self._codes) and self._has_same_cells()

    def change(self) -> str | None:
        """The name of the first thing that is not as it was."""
        for function, code in zip(self._functions, self._codes, strict=True):
            if not are_alike([_code_of(function)], [code]):
                return f"the code of {function.__qualname__}"
        if not self._has_same_cells():
            return "a variable of a closure"
        labels = [f"{scope.label}.{name}" for scope in self._scopes for name in scope.names]
        for label, now, was in zip(labels, self._now(), self._were, strict=True):
            if not are_alike([now], [was]):
                return label
        return self._added()

    def _now(self) -> list[Any]:
        return list(map(dict.get, self._where, self._names))

    def _added(self) -> str | None:
        """An attribute that a class has got since."""
        for scope in self._classes:
            if len(scope.held) != len(scope.names):
                for name in _own_names(scope.held) - scope.names:
                    return f"{scope.label}.{name}"
        return None

    def _has_same_cells(self) -> bool:
        try:
            return are_alike(list(map(_contents, self._cells)), self._held)
        except ValueError:  # one is empty now
            return False

    def _follow(
        self,
        functions: Iterable[types.FunctionType],
        modules: Iterable[types.ModuleType],
        methods: dict[str, list[types.FunctionType]],
    ) -> Iterator[_Scope]:
        """Read the code of functions and of all that they lead to; where it looks for globals."""
        scopes: dict[int, _Scope] = {}
        seen: dict[int, types.FunctionType] = {}
        pending = [*functions, *everything(methods.get(entry, ()) for entry in _ENTRIES)]
        while pending and len(seen) < _MOST_FUNCTIONS:
            function = pending.pop()
            torchs_layer = (function.__module__ or "").startswith("torch.nn.modules.")
            foreign = is_library(function) or _package(function) in _PYTHONS
            if id(function) in seen or (foreign and not torchs_layer):
                continue
            seen[id(function)] = function
            names, found_in = names_in(function.__code__), function.__globals__
            label = f"{function.__module__}"
            scope = scopes.setdefault(id(found_in), _Scope(label, found_in, set(), set()))
            scope.names.update(_globals_in(function.__code__))
            assert isinstance(scope.inside, set)
            scope.inside.update(names)
            if torchs_layer:
                continue
            for name in names:
                pending += methods.get(name, ())
                pending += _functions_under(found_in.get(name), names)
            pending += _functions_kept(function)
            if _package(function) not in _LIBRARIES:
                self._own(function)
        yield from scopes.values()
        every = frozenset().union(*(scope.inside for scope in scopes.values()))
        yield from (_Scope(each.__name__, vars(each), set(every), every) for each in modules)

    def _own(self, function: types.FunctionType) -> None:
        """Of a function whose code, defaults and closure may change."""
        self._functions.append(function)
        place = f"{function.__module__}.{function.__qualname__}"
        for value in (function.__defaults__, function.__kwdefaults__):
            self.values.setdefault(f"defaults of {place}", value)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if is_filled(cell):
                self._cells.append(cell)
                self.values.setdefault(f"{name} of {place}", cell.cell_contents)

    def _watch(self, root: _Scope, scopes: dict[int, _Scope]) -> None:
        """Watch the names of a scope in it, and in the modules, classes and objects that it has by them."""
        pending, seen = [(root.label, root.held)], set[int]()
        while pending:
            label, held = pending.pop()
            if id(held) in seen:
                continue
            seen.add(id(held))
            shadowing = root.names & vars(builtins).keys() if held is root.held else set[str]()
            names = ((root.names if held is root.held else root.inside) & held.keys()) | shadowing
            scopes.setdefault(id(held), _Scope(label, held, set())).names.update(names - _NOT_WATCHED)
            for name in names & held.keys():
                place, value = f"{label}.{name}", held[name]
                if isinstance(value, types.ModuleType):
                    pending.append((value.__name__, vars(value)))
                elif isinstance(value, types.FunctionType) or label.partition(".")[0] in _NOT_LOOKED_INTO:
                    continue
                elif isinstance(value, type):
                    if value.__module__.partition(".")[0] not in _NOT_LOOKED_INTO:
                        pending.append((place, _dict_of(value)))
                elif not isinstance(value, _CONTAINERS) or len(value) <= _LARGEST:
                    self.values.setdefault(place, value)
                    if isinstance(getattr(value, "__dict__", None), dict):
                        pending.append((place, vars(value)))


_NOT_LOOKED_INTO = _PYTHONS | {"torch", "turnout"}


@functools.lru_cache(4096)
def _globals_in(code: types.CodeType) -> frozenset[str]:
    """The names that a code object, and those inside it, look up among the globals: not those of attributes,
    which may be names of other things there."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    loaded = (step.argval for step in dis.get_instructions(code) if step.opname in _LOADING)
    return frozenset(loaded).union(*map(_globals_in, inner))


_LOADING = ("LOAD_GLOBAL", "LOAD_NAME")


def _package(function: types.FunctionType) -> str:
    return (function.__module__ or "").partition(".")[0]


def _dict_of(cls: type) -> dict[str, Any]:
    """The attributes of a class itself: `vars` gives a view of them, which has no version."""
    [attributes] = (each for each in gc.get_referents(vars(cls)) if isinstance(each, dict))
    return attributes


def _own_names(attributes: dict[str, Any]) -> set[str]:
    return set(attributes) - _NOT_WATCHED


def _methods_of(classes: Iterable[dict[str, Any]]) -> dict[str, list[types.FunctionType]]:
    """The functions behind the attributes of classes, by name."""
    methods: dict[str, list[types.FunctionType]] = {}
    for attributes in classes:
        for name, value in list(attributes.items()):
            methods.setdefault(name, []).extend(_functions_behind(value))
    return methods


def _functions_behind(value: Any) -> Iterator[types.FunctionType]:
    """The functions behind a function, a method of any kind, a property, or a decorator of functools."""
    inner = () if isinstance(value, type) else ("__func__", "__wrapped__", "fget", "func")
    for each in (value, *(getattr(value, name, None) for name in inner)):
        if isinstance(each, types.FunctionType):
            yield each


def _functions_under(value: Any, names: frozenset[str]) -> Iterator[types.FunctionType]:
    """A function among the globals, and those that a module, a class or an object there has under some
    names."""
    pending, seen = [value], set[int]()
    while pending:
        each = pending.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield from _functions_behind(each)
        owner = each if isinstance(each, types.ModuleType | type) else type(each)
        name = owner.__name__ if isinstance(owner, types.ModuleType) else owner.__module__
        if name.partition(".")[0] not in _NOT_LOOKED_INTO:
            pending += [vars(owner)[name] for name in names & vars(owner).keys()]


def _functions_kept(function: types.FunctionType) -> Iterator[types.FunctionType]:
    """Those that a decorator keeps."""
    for cell in function.__closure__ or ():
        if is_filled(cell):
            yield from _functions_behind(cell.cell_contents)
    yield from _functions_behind(vars(function).get("__wrapped__"))

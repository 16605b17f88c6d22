"""What a captured graph, or a decode stream, takes for granted of its model, and what is no longer so."""

from __future__ import annotations

import enum
import functools
import gc
import itertools
import operator
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from turnout.routing.torch_private import storage_id, version_of_dict

_version, _is_training = attrgetter("_version"), attrgetter("training")
_everything = itertools.chain.from_iterable
PLAIN_TENSORS = (Tensor, nn.Parameter, nn.Buffer)  # others, made of several, have no address
# Attributes of a model that are no part of its state: its graphs, and what became of its first calls.
REPLAYS, FIRST_CALLS = "_turnout_replays", "_turnout_first_calls"
_HOOKED = "a hook or a forward, which a CUDA graph does not run, was given to or taken from a module"


class ModelSnapshot:
    """Remembers what is relied on of a model; `change` says what is no longer so.

    Compared are, for every module: its class (`accelerate` and `restore` change it), its children, whether it
    is in training mode, its parameters and buffers, and their version counters (an optimizer,
    `load_state_dict` and every operation in place change those). parts: the names of the modules in the model
    that are relied on; empty: all of it.

    for_graph: also what a captured graph would not notice. Where the weights lie, hooks, replaced `forward`
    methods of classes and instances, and every other attribute of every module: numbers, strings, tensors
    that are no buffers, and the lists, dicts and plain objects (attention processors, configurations, LoRA's
    scales) that they lead to. They are compared by value: an attribute that is written anew as it was counts
    as the same. The memory of the weights is kept, so that a graph never reads what has become another's, and
    no address is used twice.

    Not noticed: inference-mode parameters that are written to (they have no version), and weights on the meta
    device, where offloading puts them between calls. Without for_graph also what is written or assigned to
    `parameter.data` (`.to()` does that; eager steps read the weights where they are). With it what is reached
    only through closures or arrays of other libraries.

    It is asked once in a call, so there is no loop of Python's in what is asked: `benchmarks/snapshot.py`.
    """

    def __init__(self, model: nn.Module, parts: tuple[str, ...] = (), *, for_graph: bool):
        # Not held itself: what replays a graph belongs to the model.
        self._model, self._parts, self.for_graph = weakref.ref(model), parts, for_graph
        self._take(model)

    def _take(self, model: nn.Module) -> None:
        self.parts = [getattr(model, name) for name in self._parts]
        named = self._named(model)
        self.state = _State(model, named) if self.for_graph else None
        named = named if self.state is None else self.state.named
        inside = [(path, module) for path, module in named if module is not model]
        self.paths, self.modules = [path for path, _ in inside], [module for _, module in inside]
        # dictionaries that hold nothing are left out; a scripted module has others
        self.child_dicts = [m._modules for _, m in named if m._modules and isinstance(m._modules, dict)]
        held = [(path, x) for path, module in named for x in (module._parameters, module._buffers)]
        held = [(path, x) for path, x in held if x and isinstance(x, dict)]
        self.tensor_paths, self.tensor_dicts = [path for path, _ in held], [x for _, x in held]

        self.classes, self.model_class = list(map(type, self.modules)), type(model)
        self.children = list(_everything(map(dict.values, self.child_dicts)))
        self.training = self._training()
        self.tensors = list(_everything(map(dict.values, self.tensor_dicts)))
        names = zip(self._names(), self.tensors, strict=True)
        watched = [(name, x) for name, x in names if x is not None and not x.is_meta]
        if self.state is not None:
            watched += self.state.tensors.items()
        self.watched_names, self.watched = [name for name, _ in watched], [x for _, x in watched]
        self.versions = self._versions()
        if self.state is not None:
            self.inside = _Dicts([*self.child_dicts, *self.tensor_dicts])
            self.hook_dicts = [x for m in self.modules for x in (m._forward_pre_hooks, m._forward_hooks)]
            self.with_address = [x for x in self.watched if type(x) in PLAIN_TENSORS]
            self.addresses, self.hooks, self.forwards = self._addresses(), self._hooks(), self._forwards()
            self.alive = [x.detach() for x in self.with_address]

    def _named(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        if not self._parts:
            return list(model.named_modules())
        return [
            x
            for name, part in zip(self._parts, self.parts, strict=True)
            for x in part.named_modules(prefix=name)
        ]

    def change(self) -> str | None:
        """The first thing that is not as it was, "<what> was <changed>"; None where all is."""
        if self.state is not None and self._is_same():
            return None
        change = self._first_change()
        if change is None and self.state is not None:  # something was written anew as it was
            model = self._model()
            assert model is not None
            self._take(model)
        return change

    def _is_same(self) -> bool:
        """Whether nothing at all has been touched."""
        model, state = self._model(), self.state
        assert state is not None
        return (
            all(
                getattr(model, name, None) is part for part, name in zip(self.parts, self._parts, strict=True)
            )
            and type(model) is self.model_class
            and list(map(type, self.modules)) == self.classes
            and self.inside.are_same()
            and state.is_same()
            and self._versions() == self.versions
            and self._addresses() == self.addresses
            and self._hooks() == self.hooks
        )

    def _first_change(self) -> str | None:
        model = self._model()
        for part, name in zip(self.parts, self._parts, strict=True):
            if getattr(model, name, None) is not part:
                return f"{name} was replaced by another module"
        if (classes := list(map(type, self.modules))) != self.classes:
            path = _first(self.paths, classes, self.classes)
            return f"{path} was accelerated, restored or given another class"
        if list(_everything(map(dict.values, self.child_dicts))) != self.children:
            return "a module was added, removed or replaced"
        if (training := self._training()) != self.training:
            path = _first(self.paths, training, self.training)
            mode = "training" if training[self.paths.index(path)] else "evaluation"
            return f"{path} was switched to {mode} mode"
        if self.state is not None:
            if self._hooks() != self.hooks or self._forwards() != self.forwards:
                return _HOOKED
            if type(model) is not self.model_class:
                return "the model was accelerated, restored or given another class"
            assert model is not None
            change = self.state.difference(_State(model, self._named(model)))
            if change is not None:
                return f"{change} was changed"
        tensors = list(_everything(map(dict.values, self.tensor_dicts)))
        if len(tensors) != len(self.tensors) or not all(map(operator.is_, tensors, self.tensors)):
            replaced = self._replaced(tensors)
            if replaced is not None:
                return f"{replaced} was replaced by another tensor"
        if (versions := self._versions()) != self.versions:
            return f"{_first(self.watched_names, versions, self.versions)} was changed in place"
        if self.state is not None and (addresses := self._addresses()) != self.addresses:
            with_address = zip(self.watched_names, self.watched, strict=True)
            names = [name for name, x in with_address if type(x) in PLAIN_TENSORS]
            moved = _first(names, addresses, self.addresses)
            return f"{moved}, which a CUDA graph reads where it lay, was moved"
        return None

    def unfit(self, device: torch.device) -> str | None:
        """Why no graph may be captured of the model as it is, on this device; None where one may."""
        state = self.state
        assert state is not None
        for path, module in zip(self.paths, self.modules, strict=True):
            if module._forward_pre_hooks or module._forward_hooks or "forward" in vars(module):
                return f"{path} has a hook or a forward of its own, which a graph would not run"
        if state.unwatchable is not None:
            return state.unwatchable
        for name, x in zip(self._names(), self.tensors, strict=True):
            if x is None:
                continue
            if type(x) not in PLAIN_TENSORS or x.layout is not torch.strided:
                return f"{name} is a {type(x).__name__} of layout {x.layout}, whose memory cannot be watched"
            if isinstance(x, nn.Parameter) and x.device != device:
                return f"{name} is on {x.device}, the call on {device}"
        return None

    def storages(self) -> set[int]:
        """The memory of the weights, and of other tensors of the model."""
        return {storage_id(x) for x in self.with_address}

    def wants_gradients(self) -> bool:
        """Whether any parameter does; asked only where gradients are enabled."""
        return any(x.requires_grad for x in self.tensors if x is not None)

    def _training(self) -> list[bool]:
        return list(map(_is_training, self.modules))

    def _versions(self) -> list[int]:
        try:
            return list(map(_version, self.watched))
        except RuntimeError:  # an inference-mode tensor has none
            return [0 if x.is_inference() else x._version for x in self.watched]

    def _addresses(self) -> list[int]:
        return list(map(Tensor.data_ptr, self.with_address))

    def _hooks(self) -> list[list[Any]]:
        return [list(hooks.values()) for hooks in self.hook_dicts if hooks] if any(self.hook_dicts) else []

    def _forwards(self) -> list[Any]:
        return [vars(module)["forward"] for module in self.modules if "forward" in vars(module)]

    def _replaced(self, tensors: list[Tensor | None]) -> str | None:
        """The name of a tensor that is another one now. None: only such as come and go with offloading."""
        if len(tensors) != len(self.tensors):
            return "a parameter of the model"
        for name, now, was in zip(self._names(), tensors, self.tensors, strict=True):
            offloaded = now is not None and was is not None and now.is_meta and was.is_meta
            if now is not was and not offloaded:
                return name
        return None

    def _names(self) -> list[str]:
        paths = zip(self.tensor_paths, self.tensor_dicts, strict=True)
        return [".".join(filter(None, (path, name))) for path, tensors in paths for name in tensors]


def _first(names: list[str], now: list[Any], was: list[Any]) -> str:
    return next(name for name, a, b in zip(names, now, was, strict=True) if a != b)


_SCALARS = (
    type(None), bool, int, str, bytes, complex, torch.dtype, torch.device, torch.Size, torch.memory_format,
    torch.layout, type(Ellipsis),
)  # fmt: skip
# What has no state that a forward could read, or is watched elsewhere.
_OPAQUE = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    functools.partial,
    weakref.ref,
    torch.cuda.Stream,
    torch.cuda.Event,
)
_OF_MODULES = frozenset(vars(nn.Module()))  # attributes that every module has
_MOST_HELD = 100_000  # containers and objects


class _Dicts:
    """Some dictionaries, and what they held.

    Their versions tell at a fourth of the time that none was written to: torch.compile's guards ask CPython
    for those. Where there are none, or one has changed, the values are compared.
    """

    def __init__(self, dicts: Iterable[dict]):
        self.dicts = list(dicts)
        self._versions = self._written()
        self._values = self._held()

    def are_same(self, *, by_value: bool = False) -> bool:
        """Whether they hold the very same objects, or, `by_value`, objects that equal them."""
        versions = self._written()  # before the values are looked at
        if versions is not None and versions == self._versions:
            return True
        held = self._held()
        if len(held) == len(self._values) and all(map(operator.is_, held, self._values)):
            self._versions = versions
            return True
        return by_value and held == self._values

    def _held(self) -> list[Any]:
        return list(_everything(map(dict.values, self.dicts)))

    def _written(self) -> list[int] | None:
        version_of = _version_of_dicts()
        return None if version_of is None else list(map(version_of, self.dicts))


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


class _State:
    """Every attribute of some modules, and what they lead to.

    description: by path, what a value is. tensors: those that are no parameters or buffers. named: the
    modules, those behind attributes that are no children included. unwatchable: a reason to capture nothing.
    """

    def __init__(self, model: nn.Module, named: Iterable[tuple[str, nn.Module]]):
        self.named = list(named)
        self.description: dict[str, Any] = {}
        self.tensors: dict[str, Tensor] = {}
        self.unwatchable: str | None = None
        self._dicts: list[dict] = []
        self._lists: list[Any] = []
        self._held: dict[int, Any] = {id(module): module for _, module in self.named}
        self._held[id(model)] = model
        classes: dict[type, None] = {}
        for path, module in self.named:  # grows meanwhile
            held = vars(module)
            self._dicts.append(held)
            self._own(path, held)
            if module is model:  # of the others the snapshot asks
                self.description["training"] = held.get("training")
            classes[type(module)] = None
        for value in self._held.values():
            classes[type(value)] = None
        del self._held[id(model)]  # the model holds this
        self._classes = [cls for cls in classes if "forward" in dir(cls) or "__call__" in dir(cls)]
        self._entries = self._entry_points()
        self._attributes = _Dicts(self._dicts)
        self._elements = list(_everything(self._lists))

    def is_same(self) -> bool:
        """Whether no attribute was written, and nothing put into a container or taken from it."""
        # Lists compare by identity first, and then ask the values, of which some raise or are no truth.
        try:
            return (
                self._attributes.are_same(by_value=True)
                and list(_everything(self._lists)) == self._elements
                and self._entry_points() == self._entries
            )
        except Exception:
            return False

    def difference(self, other: _State) -> str | None:
        """The path of the first value that is another one in the other state."""
        if self._entry_points() != self._entries:
            return "a method of a class"
        for path in self.description.keys() | other.description.keys():
            if self.description.get(path) != other.description.get(path):
                return path or "the model"
        return None

    def _entry_points(self) -> list[Any]:
        return [getattr(cls, "forward", None) or cls.__call__ for cls in self._classes]

    def _own(self, path: str, held: dict[str, Any]) -> None:
        for name, value in held.items():
            if name not in _OF_MODULES and name not in (REPLAYS, FIRST_CALLS, "forward"):
                self._describe(f"{path}.{name}" if path else name, value)

    def _describe(self, path: str, value: Any) -> None:
        cls = type(value)
        if cls in _SCALARS:
            self.description[path] = cls, value
        elif cls is float:
            self.description[path] = cls, value.hex()  # tells -0.0 from 0.0, and a NaN is itself
        elif isinstance(value, (enum.Enum, *_OPAQUE)):
            self.description[path] = cls, id(value)
            self._held.setdefault(id(value), value)
        elif isinstance(value, Tensor):
            self.description[path] = cls, id(value)
            self.tensors[path] = value
            if cls not in PLAIN_TENSORS or value.layout is not torch.strided:
                self.unwatchable = f"{path} is a {cls.__name__}, whose memory cannot be watched"
        elif isinstance(value, torch.Generator):
            self.description[path] = cls, id(value)
            self.unwatchable = f"{path} draws random numbers"
        else:
            self._look_inside(path, value)

    def _look_inside(self, path: str, value: Any) -> None:
        """Of modules and containers, and of objects with attributes."""
        cls, seen = type(value), id(value) in self._held
        self._held.setdefault(id(value), value)
        if isinstance(value, nn.Module):
            self.description[path] = cls, id(value)
            if not seen:
                inside = [
                    (f"{path}.{inner}" if inner else path, each) for inner, each in value.named_modules()
                ]
                self.named += [
                    (inner, each) for inner, each in inside if inner == path or id(each) not in self._held
                ]
                self._held.update((id(each), each) for _, each in inside)
            return
        self.description[path] = (
            cls,
            len(value) if isinstance(value, dict | list | tuple | set | frozenset) else None,
        )
        if seen:
            return
        if len(self._held) > _MOST_HELD:
            self.unwatchable = f"{path} leads to more than {_MOST_HELD} objects"
            return
        if isinstance(value, dict):
            self._dicts.append(value)
            for key, each in list(value.items()):
                self._describe(f"{path}[{key!r}]", each)
        elif isinstance(value, list | tuple):
            if isinstance(value, list):  # a tuple stays what it is
                self._lists.append(value)
            for i, each in enumerate(value):
                self._describe(f"{path}[{i}]", each)
        elif isinstance(value, set | frozenset):
            self._lists.append(value)
            self.description[path] = cls, frozenset(repr(each) for each in value)
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            self._dicts.append(attributes)
            for name, each in list(attributes.items()):
                self._describe(f"{path}.{name}", each)
        elif not isinstance(value, dict | list | tuple | set | frozenset):
            self.description[path] = cls, id(value)


def remembered_tensors(classes: Iterable[type]) -> Iterator[Tensor]:
    """Tensors in the `functools.lru_cache`s that the code of these classes, and of ours, may read.

    A graph reads them where they lie, so it keeps them: a cache that forgets one would free it.
    """
    owners: list[Any] = [cls for each in dict.fromkeys(classes) for cls in each.__mro__]
    modules = {cls.__module__ for cls in owners}
    modules |= {name for name in list(sys.modules) if name.startswith("turnout.")}
    owners += [sys.modules[name] for name in modules if name in sys.modules]
    for owner in owners:
        for value in list(vars(owner).values()):
            function = getattr(value, "__func__", value)
            for _ in range(8):  # decorators around each other
                if isinstance(function, functools._lru_cache_wrapper):
                    yield from _tensors_behind(function)
                inner = getattr(function, "__wrapped__", None)
                closure = getattr(function, "__closure__", None) or ()
                cells = [x for cell in closure if _is_lru_cache(x := _content(cell))]
                for each in cells:
                    yield from _tensors_behind(each)
                if inner is None:
                    break
                function = inner


def _is_lru_cache(value: Any) -> bool:
    return isinstance(value, functools._lru_cache_wrapper)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _tensors_behind(cache: Any) -> Iterator[Tensor]:
    """A cache refers to its entries, and the garbage collector knows what refers to what."""
    pending, seen = [cache], {id(cache)}
    while pending:
        value = pending.pop()
        if isinstance(value, Tensor):
            yield value
        elif value is cache or isinstance(value, dict | list | tuple) or "lru_list" in type(value).__name__:
            inner = [x for x in gc.get_referents(value) if id(x) not in seen]
            seen.update(map(id, inner))
            pending += inner

"""Every attribute of the modules of a model, what they lead to, and what the model's code reads elsewhere."""

from __future__ import annotations

import collections
import enum
import functools
import random
import sys
import types
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from turnout.models.dicts import SCALARS, Dicts, alike, are_alike, described, everything
from turnout.models.surroundings import Surroundings

PLAIN_TENSORS = (Tensor, nn.Parameter, nn.Buffer)  # others, made of several, have no address
# Attributes of a model that are no part of its state: its graphs, and what became of its first calls.
REPLAYS, FIRST_CALLS = "_turnout_replays", "_turnout_first_calls"
# What has no state that a forward could read, or is watched elsewhere.
_OPAQUE = (enum.Enum, types.BuiltinFunctionType, torch.cuda.Stream, torch.cuda.Event)
_SEQUENCES = (list, tuple, set, frozenset, collections.deque, bytearray)
_OF_MODULES = frozenset(vars(nn.Module()))  # attributes that every module has
_MOST_HELD = 100_000  # containers and objects
_LARGEST_ARRAY = 2**16  # bytes of an array whose values are compared


class State:
    """Every attribute of some modules, and what they lead to.

    description: by path, what a value is. tensors: those that are no parameters or buffers. named: the
    modules, those behind attributes that are no children included. unwatchable: a reason to capture nothing.
    before: an earlier state of the same model, whose code need not be read again.
    """

    def __init__(self, model: nn.Module, named: Iterable[tuple[str, nn.Module]], before: State | None = None):
        self.named = list(named)
        self.description: dict[str, Any] = {}
        self.tensors: dict[str, Tensor] = {}
        self.unwatchable: str | None = None
        self._dicts: list[dict] = []
        self._sequences: list[Any] = []
        self._objects: list[Any] = []
        self._slots: list[tuple[Any, str]] = []
        self._arrays: list[Any] = []
        self._functions: list[types.FunctionType] = []
        self._python_modules: list[types.ModuleType] = []
        self._held: dict[int, Any] = {id(module): module for _, module in self.named}
        self._held[id(model)] = model
        for path, module in self.named:  # grows meanwhile
            held = vars(module)
            self._dicts.append(held)
            self._own(path, held)
            if module is model:  # of the others the snapshot asks
                self.description["training"] = held.get("training")
        # by id: a class of ours may say that it equals the one that it was made of
        classes = {id(cls): cls for cls in map(_class_of, self._held.values())}
        del self._held[id(model)]  # the model holds this
        self._read = list(classes.values()), self._functions, self._python_modules
        if before is not None and alike(before._read, self._read) and before.surroundings.are_same():
            self.surroundings = before.surroundings
        else:
            self.surroundings = Surroundings(*self._read)
        for name, value in list(self.surroundings.values.items()):
            self._describe(name, value, follow=False)
        self._attributes = Dicts(self._dicts)
        self._elements = list(everything(self._sequences))
        self._in_slots, self._in_arrays = self._slotted(), self._bytes()
        self._classes = self._classes_now()

    def is_same(self) -> bool:
        """Whether no attribute was written, and nothing put into a container or taken from it."""
        return (
            self._attributes.are_same()
            and are_alike(list(everything(self._sequences)), self._elements)
            and (not self._slots or are_alike(self._slotted(), self._in_slots))
            and (not self._arrays or self._bytes() == self._in_arrays)
            and self._classes_now() == self._classes
            and self.surroundings.are_same()
        )

    def difference(self, other: State) -> str | None:
        """The path of the first value that is another one in the other state, which is the present one."""
        change = self.surroundings.change()
        if change is not None:
            return change
        for path in self.description.keys() | other.description.keys():
            if self.description.get(path) != other.description.get(path):
                return path or "the model"
        return "the class of an object" if other._classes != self._classes else None

    def _classes_now(self) -> list[int]:
        return list(map(id, map(type, self._objects)))

    def _slotted(self) -> list[Any]:
        return [getattr(value, name, None) for value, name in self._slots]

    def _bytes(self) -> list[bytes]:
        return [array.tobytes() for array in self._arrays]

    def _own(self, path: str, held: dict[str, Any]) -> None:
        for name, value in list(held.items()):
            if name not in _OF_MODULES and name not in (REPLAYS, FIRST_CALLS, "forward"):
                self._describe(f"{path}.{name}" if path else name, value)

    def _describe(self, path: str, value: Any, *, follow: bool = True) -> None:
        """follow: whether to look inside modules and objects, too; containers are always looked into."""
        cls = type(value)
        if cls in SCALARS or cls is float:
            self.description[path] = cls, described(value)
        elif isinstance(value, Tensor):
            self.description[path] = cls, id(value)
            self.tensors[path] = value
            if cls not in PLAIN_TENSORS or value.layout is not torch.strided:
                self.unwatchable = f"{path} is a {cls.__name__}, whose memory cannot be watched"
        elif isinstance(value, (dict, types.MappingProxyType, *_SEQUENCES)):
            self._look_into(path, value, follow=follow)
        else:
            self.description[path] = cls, id(value)
            if id(value) in self._held:
                return
            self._held[id(value)] = value
            if len(self._held) > _MOST_HELD:
                self.unwatchable = f"{path} leads to more than {_MOST_HELD} objects"
            elif _is_array(value):
                self._look_at_array(path, value)
            elif follow:
                self._follow(path, value)

    def _look_into(self, path: str, value: Any, *, follow: bool) -> None:
        """Of containers."""
        cls, seen = type(value), id(value) in self._held
        self._held.setdefault(id(value), value)
        self.description[path] = cls, tuple(map(repr, value)) if isinstance(value, dict) else len(value)
        if seen:
            return
        if len(self._held) > _MOST_HELD:
            self.unwatchable = f"{path} leads to more than {_MOST_HELD} objects"
            return
        if isinstance(value, dict):
            self._dicts.append(value)
            if isinstance(value, collections.OrderedDict):  # whose order is not that of a dict's entries
                self._sequences.append(value)
        elif not isinstance(value, tuple | frozenset):  # those stay what they are
            self._sequences.append(value.values() if isinstance(value, types.MappingProxyType) else value)
        if isinstance(value, dict | types.MappingProxyType):
            for key, each in list(value.items()):
                self._describe(f"{path}[{key!r}]", each, follow=follow)
        elif isinstance(value, set | frozenset):
            self.description[path] = cls, frozenset(repr(each) for each in value)
        else:
            for i, each in enumerate(list(value)):
                self._describe(f"{path}[{i}]", each, follow=follow)
        self._attributes_of(path, value, follow=follow)

    def _look_at_array(self, path: str, array: Any) -> None:
        if array.nbytes > _LARGEST_ARRAY:
            self.unwatchable = f"{path} is an array of {array.nbytes} bytes, which cannot be watched"
        else:
            self._arrays.append(array)
            self.description[path] = type(array), id(array), array.shape, str(array.dtype), array.tobytes()

    def _follow(self, path: str, value: Any) -> None:
        """Of modules, functions and objects with attributes."""
        if isinstance(value, nn.Module):
            inside = [(f"{path}.{inner}" if inner else path, each) for inner, each in value.named_modules()]
            self.named += [
                (inner, each) for inner, each in inside if inner == path or id(each) not in self._held
            ]
            self._held.update((id(each), each) for _, each in inside)
        elif isinstance(value, types.FunctionType):
            self._functions.append(value)
        elif isinstance(value, types.ModuleType):
            self._python_modules.append(value)
        elif isinstance(value, types.MethodType):
            self._describe(f"{path}.__func__", value.__func__)
            self._describe(f"{path}.__self__", value.__self__)
        elif isinstance(value, functools.partial):
            self._describe(f"{path}.func", value.func)
            self._describe(f"{path}.args", value.args)
            self._describe(f"{path}.keywords", value.keywords)
        elif isinstance(value, weakref.ref):
            self._describe(f"{path}()", value())
        elif _draws_random_numbers(value):
            self.unwatchable = f"{path} draws random numbers"
        elif not isinstance(value, (type, *_OPAQUE)):
            self._attributes_of(path, value, follow=True)

    def _attributes_of(self, path: str, value: Any, *, follow: bool) -> None:
        self._objects.append(value)
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            self._dicts.append(attributes)
            for name, each in list(attributes.items()):
                self._describe(f"{path}.{name}", each, follow=follow)
        for name in _slots_of(type(value)):
            self._slots.append((value, name))
            self._describe(f"{path}.{name}", getattr(value, name, None), follow=follow)


def _class_of(value: Any) -> type:
    return value if isinstance(value, type) else type(value)


def _slots_of(cls: type) -> list[str]:
    """The attributes for which instances of a class have no dictionary."""
    if cls.__module__ == "builtins":
        return []
    return [
        name
        for base in cls.__mro__
        if base.__module__ != "builtins"
        for name, value in vars(base).items()
        if isinstance(value, types.MemberDescriptorType) and name not in ("__weakref__", "__dict__")
    ]


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _draws_random_numbers(value: Any) -> bool:
    numpy = sys.modules.get("numpy.random")
    of_numpy = () if numpy is None else (numpy.Generator, numpy.RandomState, numpy.BitGenerator)
    return isinstance(value, (torch.Generator, random.Random, *of_numpy))

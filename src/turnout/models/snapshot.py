"""What a captured graph, or a decode stream, takes for granted of its model, and what is no longer so."""

from __future__ import annotations

import functools
import gc
import operator
import sys
import types
import weakref
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from turnout.models.dicts import Dicts, everything
from turnout.models.state import PLAIN_TENSORS, State
from turnout.routing.torch_private import TensorGuards, storage_id

_version, _is_training = attrgetter("_version"), attrgetter("training")
_layout = attrgetter("shape", "dtype")
_HOOKED = "a hook or a forward, which a CUDA graph does not run, was given to or taken from a module"


class ModelSnapshot:
    """Remembers what is relied on of a model; `change` says what is no longer so.

    Compared are, for every module: its class (`accelerate` and `restore` change it), its children, whether it
    is in training mode, its parameters and buffers, and their version counters (an optimizer,
    `load_state_dict` and every operation in place change those). parts: the names of the modules in the model
    that are relied on; empty: all of it.

    for_graph: also what a captured graph would not notice. Where and how the weights lie, hooks, replaced
    `forward` methods, and every other attribute of every module: numbers, strings, tensors that are no
    buffers, and the containers, functions and objects (attention processors, configurations, LoRA's scales)
    that they lead to (`State`); classes, and globals that the code of the model reads (`Surroundings`). They
    are compared by value: an attribute that is written anew as it was counts as the same. The memory of the
    weights is kept, so that a graph never reads what has become another's, and no address is used twice.

    Not noticed: inference-mode parameters that are written to (they have no version), and weights on the meta
    device, where offloading puts them between calls. Without for_graph also what is written or assigned to
    `parameter.data` (`.to()` does that; eager steps read the weights where they are).

    It is asked once in a call, so there is no loop of Python's in what is asked: `benchmarks/snapshot.py`.
    """

    def __init__(self, model: nn.Module, parts: tuple[str, ...] = (), *, for_graph: bool):
        # Not held itself: what replays a graph belongs to the model.
        self._model, self._parts, self.for_graph = weakref.ref(model), parts, for_graph
        self.state: State | None = None
        self._take(model)

    def _take(self, model: nn.Module) -> None:
        self.parts = [getattr(model, name) for name in self._parts]
        named = self._named(model)
        self.state = State(model, named, self.state) if self.for_graph else None
        named = named if self.state is None else self.state.named
        inside = [(path, module) for path, module in named if module is not model]
        self.paths, self.modules = [path for path, _ in inside], [module for _, module in inside]
        # a scripted module has others
        children = [m._modules for _, m in named if isinstance(m._modules, dict)]
        self.child_dicts = [x for x in children if x]
        held = [(path, x) for path, module in named for x in (module._parameters, module._buffers)]
        held = [(path, x) for path, x in held if isinstance(x, dict)]
        self.empty_dicts = [x for x in (*children, *(x for _, x in held)) if not x]
        held = [(path, x) for path, x in held if x]
        self.tensor_paths, self.tensor_dicts = [path for path, _ in held], [x for _, x in held]

        self.classes, self.model_class = list(map(type, self.modules)), type(model)
        self.children = Dicts(self.child_dicts)
        self.training = self._training()
        self.tensors = list(everything(map(dict.values, self.tensor_dicts)))
        names = zip(self._names(), self.tensors, strict=True)
        watched = [(name, x) for name, x in names if x is not None and not x.is_meta]
        if self.state is not None:
            watched += self.state.tensors.items()
        self.watched_names, self.watched = [name for name, _ in watched], [x for _, x in watched]
        self.versions = self._versions()
        if self.state is not None:
            self.inside = Dicts([*self.child_dicts, *self.tensor_dicts])
            self.hook_dicts = [x for m in self.modules for x in (m._forward_pre_hooks, m._forward_hooks)]
            plain = {id(x): (name, x) for name, x in watched if type(x) in PLAIN_TENSORS}  # tied ones once
            self.plain_names = [name for name, _ in plain.values()]
            self.with_address = [x for _, x in plain.values()]
            self.addresses, self.hooks, self.forwards = self._addresses(), self._hooks(), self._forwards()
            self.layouts = self._layouts()
            self.guards: dict[bool, Any] = {}
            # a kernel of a card is given these by value
            self.host_numbers = [x for x in self.with_address if x.is_cpu and x.dim() == 0]
            self.host_values = self._host_values()
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
            and self._has_same_layouts()
            and self._hooks() == self.hooks
            and not any(self.empty_dicts)
            and self._host_values() == self.host_values
        )

    def _first_change(self) -> str | None:
        model = self._model()
        for part, name in zip(self.parts, self._parts, strict=True):
            if getattr(model, name, None) is not part:
                return f"{name} was replaced by another module"
        if (classes := list(map(type, self.modules))) != self.classes:
            path = _first(self.paths, classes, self.classes)
            return f"{path} was accelerated, restored or given another class"
        if any(self.empty_dicts) or not self.children.are_same():
            return "a module, a parameter or a buffer was added, removed or replaced"
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
            change = self.state.difference(State(model, self._named(model), self.state))
            if change is not None:
                return f"{change} was changed"
        tensors = list(everything(map(dict.values, self.tensor_dicts)))
        if len(tensors) != len(self.tensors) or not all(map(operator.is_, tensors, self.tensors)):
            replaced = self._replaced(tensors)
            if replaced is not None:
                return f"{replaced} was replaced by another tensor"
        if (versions := self._versions()) != self.versions:
            return f"{_first(self.watched_names, versions, self.versions)} was changed in place"
        if self.state is not None and (addresses := self._addresses()) != self.addresses:
            moved = _first(self.plain_names, addresses, self.addresses)
            return f"{moved}, which a CUDA graph reads where it lay, was moved"
        if self.state is not None and (layouts := self._layouts()) != self.layouts:
            return f"{_first(self.plain_names, layouts, self.layouts)} was given another shape or dtype"
        if self.state is not None and self._host_values() != self.host_values:
            return "a number on the host was changed in place"
        return None

    def unfit(self, device: torch.device) -> str | None:
        """Why no graph may be captured of the model as it is, on this device; None where one may."""
        state = self.state
        assert state is not None
        for path, module in zip(self.paths, self.modules, strict=True):
            if module._forward_pre_hooks or module._forward_hooks or "forward" in vars(module):
                return f"{path} has a hook or a forward of its own, which a graph would not run"
            if not isinstance(module._parameters, dict):
                return f"{path} is a {type(module).__name__}, whose weights cannot be watched"
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
        """Whether any weight or other tensor does; asked only where gradients are enabled."""
        return any(x.requires_grad for x in self.watched)

    def _training(self) -> list[bool]:
        return list(map(_is_training, self.modules))

    def _versions(self) -> list[int]:
        try:
            return list(map(_version, self.watched))
        except RuntimeError:  # an inference-mode tensor has none
            return [0 if x.is_inference() else x._version for x in self.watched]

    def _addresses(self) -> list[int]:
        return list(map(Tensor.data_ptr, self.with_address))

    def _layouts(self) -> list[Any]:
        return list(zip(map(_layout, self.with_address), map(Tensor.stride, self.with_address), strict=True))

    def _has_same_layouts(self) -> bool:
        """torch.compile's guards compare them at a third of the time; they mind whether gradients are on."""
        if TensorGuards is None:
            return self._layouts() == self.layouts
        wanted = torch.is_grad_enabled()
        guards = self.guards.get(wanted)
        if guards is not None and guards.check(*self.with_address):
            return True
        if self._layouts() != self.layouts:
            return False
        sizes = {
            "dynamic_dims_sizes": [list(x.shape) for x in self.with_address],
            "dynamic_dims_strides": [list(x.stride()) for x in self.with_address],
        }
        self.guards[wanted] = TensorGuards(*self.with_address, **sizes)
        return True

    def _host_values(self) -> list[Any]:
        return list(map(Tensor.item, self.host_numbers))

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
            if isinstance(value, type):  # that of functions has a `__closure__`, which is none
                continue
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

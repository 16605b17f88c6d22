"""The arguments of a call that a CUDA graph may replay: what makes two calls equal, and what is copied in."""

from __future__ import annotations

import copy
import enum
import sys
from typing import Any

import torch
from torch import Tensor

from turnout.models import graphs
from turnout.models.state import PLAIN_TENSORS
from turnout.routing.torch_private import copy_all

MOST_CARRIED = 2**26  # bytes of a cache that is copied into a graph and back, 0.1 ms of an H200's memory
_MOST_VALUES = 64  # elements of a tensor on the host whose values tell one call from another
_PLAIN_TENSORS = frozenset(PLAIN_TENSORS)


class Refused(Exception):
    """Why a call is not captured."""


class Arguments:
    """The arguments of a call: a key that is equal for calls alike, and what a graph replaces.

    tensors: those that are copied into a graph, each once. caches: objects that a call goes on with and
    writes to. The tensors of small ones are among `tensors`, at `carried`, and are copied back; those of
    large ones, `states`, are read and written where they lie.
    """

    def __init__(self, args: tuple, kwargs: dict[str, Any], device: torch.device):
        self.args, self.kwargs, self.device = args, kwargs, device
        self.tensors: list[Tensor] = []
        self.caches: list[Any] = []
        self.carried: list[int] = []
        self.states: list[Tensor] = []
        self.containers: set[int] = set()  # ids of those that can be written to
        self._in_place: set[int] = set()
        self._places: dict[int, int] = {}
        self.key = self._key(args), self._key(kwargs)

    def _key(self, value: Any) -> Any:
        cls = type(value)
        if cls in PLAIN_TENSORS:
            return self._tensor(value)
        if cls in BY_VALUE:
            return cls, value
        if cls is float:
            return cls, value.hex()
        if cls in (list, dict):
            self.containers.add(id(value))
        if cls in (tuple, list):
            return cls, *map(self._key, value)
        if cls is dict:
            return cls, *((self._key(name), self._key(each)) for name, each in value.items())
        if isinstance(value, enum.Enum):
            return cls, value.name
        if isinstance(value, tuple) and hasattr(cls, "_fields"):
            return cls, *map(self._key, value)
        if is_cache(value):
            return self._cache(value)
        raise Refused(f"an argument of type {cls.__name__}, graphs need tensors, plain values and caches")

    def _tensor(self, x: Tensor) -> Any:
        place = self._places.get(id(x))
        if place is not None:
            return "same", place
        if x.layout is not torch.strided or x.is_conj() or x.is_neg():
            raise Refused(f"a tensor of layout {x.layout}, or one that is lazily conjugated or negated")
        if x.device != self.device:
            if x.device.type != "cpu" or x.numel() > _MOST_VALUES:
                raise Refused(f"a tensor {list(x.shape)} on {x.device} for a model on {self.device}")
            return "values", x.shape, x.dtype, repr(x.detach().tolist())
        self._places[id(x)] = len(self.tensors)
        self.tensors.append(x)
        return "tensor", x.shape, x.stride(), x.dtype, x.device, x.requires_grad

    def _cache(self, value: Any) -> Any:
        self.caches.append(value)
        held: list[Tensor] = []
        structure = walked(value, held)
        if sum(x.nbytes for x in held) > MOST_CARRIED:
            self._in_place.add(id(value))
            self.states += held
            return "cache", structure, *((x.data_ptr(), x.shape, x.stride(), x.dtype, x.device) for x in held)
        layouts = [self._tensor(x) for x in held]
        self.carried += [self._places[id(x)] for x in held if id(x) in self._places]
        return "carried cache", structure, *layouts

    def is_same_after(self) -> bool:
        """Whether the call has changed nothing but values in its tensors: no container, no cache's memory."""
        now = Arguments(self.args, self.kwargs, self.device)
        return now.key == self.key and list(map(id, now.tensors)) == list(map(id, self.tensors))

    def with_tensors(self, tensors: list[Tensor]) -> tuple[tuple, dict[str, Any], list[Any]]:
        """The arguments with others in the place of `tensors`, in containers and caches of their own, and
        these caches."""
        memo: Any = {key: tensors[place] for key, place in self._places.items()}
        caches: list[Any] = []

        def replaced(value: Any) -> Any:
            cls = type(value)
            if cls in PLAIN_TENSORS:
                place = self._places.get(id(value))
                return value.detach().clone() if place is None else tensors[place]
            if cls in (tuple, list):
                return cls(map(replaced, value))
            if cls is dict:
                return {name: replaced(each) for name, each in value.items()}
            if is_cache(value):
                caches.append(value if id(value) in self._in_place else copy.deepcopy(value, memo))
                return caches[-1]
            return (
                cls(*map(replaced, value)) if isinstance(value, tuple) and hasattr(cls, "_fields") else value
            )

        return replaced(self.args), replaced(self.kwargs), caches


BY_VALUE = frozenset(
    {
        type(None),
        bool,
        int,
        str,
        bytes,
        torch.dtype,
        torch.device,
        torch.Size,
        torch.memory_format,
        torch.layout,
        type(Ellipsis),
    }
)


def is_cache(value: Any) -> bool:
    """Whether a value is a cache of transformers, whose tensors are written in place at fixed addresses."""
    module = sys.modules.get("transformers.cache_utils")
    return module is not None and isinstance(value, module.Cache)


def walked(value: Any, tensors: list[Tensor]) -> tuple:
    """What a cache holds, but for its tensors; `tensors` gets those."""
    found: list[Any] = []
    pending, seen = [value], set[int]()
    while pending:
        each = pending.pop()
        cls = type(each)
        found.append(cls)
        if cls is dict:
            found += each
            inside = each.values()
        elif cls in (list, tuple):
            found.append(len(each))
            inside = each
        elif isinstance(getattr(each, "__dict__", None), dict) and not callable(each):
            if id(each) in seen:
                continue
            seen.add(id(each))
            found += vars(each)
            inside = vars(each).values()
        else:
            raise Refused(f"a cache that holds a {cls.__name__}")
        for x in inside:  # most are these, for which there is no need to wait
            kind = type(x)
            found.append(kind)
            if kind in BY_VALUE or kind is float:
                found.append(x)
            elif kind in _PLAIN_TENSORS:
                tensors.append(x)
            else:
                pending.append(x)
    return tuple(found)


class Distinct:
    """The elements of some tensors that are places of their own in memory: one step of each expanded axis."""

    def __init__(self, like: list[Tensor]):
        self._parts: list[tuple[int, list[int], tuple[int, ...]]] = []
        for i, x in enumerate(like):
            layout = zip(x.shape, x.stride(), strict=True)
            sizes = [1 if stride == 0 else size for size, stride in layout]
            reach = 1
            for stride, size in sorted(
                (n, size) for n, size in zip(x.stride(), sizes, strict=True) if size > 1
            ):
                if stride < reach:
                    given = f"a tensor {list(x.shape)} of strides {list(x.stride())}"
                    raise Refused(f"{given}, which overlaps itself")
                reach += stride * (size - 1)
            if sizes != list(x.shape):
                self._parts.append((i, sizes, x.stride()))

    def of(self, tensors: list[Tensor]) -> list[Tensor]:
        """Those elements of tensors with the same layouts."""
        if not self._parts:
            return tensors
        found = list(tensors)
        for i, sizes, strides in self._parts:
            found[i] = found[i].as_strided(sizes, strides)
        return found


class Buffers:
    """Memory for the tensors of a call, from which a graph reads them."""

    def __init__(self, like: list[Tensor]):
        self._distinct = Distinct(like)
        self.tensors = [graphs.buffer_like(x) for x in like]
        self._written = self._distinct.of(self.tensors)
        self.fill(like)

    def fill(self, given: list[Tensor]) -> None:
        """Copy in the tensors of a call."""
        if given:
            copy_all(self._written, self._distinct.of(given))

    def give_back(self, given: list[Tensor], places: list[int]) -> None:
        """Copy out to those tensors of a call that it has written into."""
        if places:
            into = self._distinct.of(given)
            copy_all([into[i] for i in places], [self._written[i] for i in places])

    def versions(self) -> list[int]:
        return [x._version for x in self.tensors]

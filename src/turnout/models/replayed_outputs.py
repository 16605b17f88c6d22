"""The outputs of a call that a CUDA graph replays: tensors that are copied out, and what holds them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from turnout.models.replayed_arguments import BY_VALUE, Arguments, Distinct, Refused
from turnout.models.state import PLAIN_TENSORS
from turnout.routing.torch_private import (
    copy_all,
    storage_id,
)


class Outputs:
    """What a call returned: its structure, and the tensors in it that the caller is to have of his own.

    given, caches: the arguments that may be among it. foreign: storages of which no view may be.
    containers: ids of the arguments' own.
    """

    def __init__(
        self,
        value: Any,
        given: list[Tensor],
        caches: list[Any],
        foreign: Iterable[int] = (),
        containers: Iterable[int] = (),
    ):
        self.tensors: list[Tensor] = []
        self._given = {id(x): i for i, x in enumerate(given)}
        self._caches = {id(x): i for i, x in enumerate(caches)}
        self._foreign = {*foreign, *map(storage_id, given)}
        self._places: dict[int, int] = {}
        self._containers = set(containers)
        self.spec = self._describe(value)
        _check_disjoint(self.tensors)
        self._distinct = Distinct(self.tensors)
        self._written = self._distinct.of(self.tensors)
        self.layouts = [(x.shape, x.stride(), x.dtype, x.device) for x in self.tensors]

    def _describe(self, value: Any) -> Any:
        cls = type(value)
        if id(value) in self._given:
            return "given", self._given[id(value)]
        if id(value) in self._caches:
            return "cache", self._caches[id(value)]
        if id(value) in self._places:
            return "tensor", self._places[id(value)]
        if cls in PLAIN_TENSORS:
            if value.requires_grad or value.layout is not torch.strided or value.is_conj() or value.is_neg():
                raise Refused("it returns a tensor that graphs cannot copy")
            if storage_id(value) in self._foreign:
                raise Refused("it returns a view of an argument or of a weight")
            self._places[id(value)] = len(self.tensors)
            self.tensors.append(value)
            return "tensor", len(self.tensors) - 1
        if cls in BY_VALUE or cls is float:
            return "value", value
        if cls is list or isinstance(value, dict):
            if id(value) in self._containers:
                raise Refused("it returns a container twice, or one of its arguments")
            self._containers.add(id(value))
        if cls in (tuple, list) or (isinstance(value, tuple) and hasattr(cls, "_fields")):
            return "sequence", cls, *map(self._describe, value)
        if isinstance(value, dict) and cls is dict:
            return "dict", *((self._describe(name), self._describe(each)) for name, each in value.items())
        if isinstance(value, dict) and dataclasses.is_dataclass(value) and _has_its_fields_alone(value):
            return "mapping", cls, *((name, self._describe(each)) for name, each in value.items())
        raise Refused(
            f"it returns a {cls.__name__}, graphs need tensors, plain values and containers of them"
        )

    def is_like(self, other: Outputs) -> bool:
        return self.spec == other.spec and self.layouts == other.layouts

    def allocated(self) -> list[Tensor]:
        """Memory for the tensors of one call."""
        return [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in self.tensors
        ]

    def copy_to(self, tensors: list[Tensor]) -> None:
        """Give a caller what is in the tensors."""
        if tensors:
            copy_all(self._distinct.of(tensors), self._written)

    def handed_out(self, tensors: list[Tensor], call: Arguments) -> Any:
        """The outputs of a call, with these tensors; what it returned of its arguments is the caller's."""
        return _built(self.spec, tensors, call)


def _has_its_fields_alone(value: Any) -> bool:
    """Whether an output of a library holds nothing but what its class declares."""
    return vars(value).keys() <= {each.name for each in dataclasses.fields(value)}


def _check_disjoint(tensors: list[Tensor]) -> None:
    """Raise `Refused` where one tensor may lie in the memory of another: copies would not."""
    spans: dict[int, list[tuple[int, int, Tensor]]] = {}
    for x in tensors:
        if x.numel():
            reach = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
            begin, end = x.data_ptr(), x.data_ptr() + (reach + 1) * x.element_size()
            spans.setdefault(storage_id(x), []).append((begin, end, x))
    for shared in spans.values():
        shared.sort(key=lambda span: span[:2])
        for (begin, end, x), (next_begin, _, y) in itertools.combinations(shared, 2):
            if next_begin < end and not _are_parts_of_one(x, y, (next_begin - begin) // x.element_size()):
                raise Refused("it returns tensors that share memory")


def _are_parts_of_one(x: Tensor, y: Tensor, offset: int) -> bool:
    """Whether two tensors are parts of one along an axis, as `chunk` makes them. offset: elements from x to
    y."""
    if x.stride() != y.stride() or x.dtype is not y.dtype:
        return False
    layout = list(zip(map(max, zip(x.shape, y.shape, strict=True)), x.stride(), strict=True))
    for axis, (_, step) in enumerate(layout):
        others = [(size, stride) for i, (size, stride) in enumerate(layout) if i != axis and size > 1]
        inner = sum((size - 1) * stride for size, stride in others if stride < step)
        outer = [stride for _, stride in others if stride >= step]
        begins_behind = step > 0 and offset % step == 0 and x.shape[axis] * step <= offset
        ends_before = all(offset + y.shape[axis] * step <= stride for stride in outer)
        if begins_behind and ends_before and inner < step:
            return True
    return False


def _built(spec: tuple, tensors: list[Tensor], call: Arguments) -> Any:
    kind, *rest = spec
    if kind == "tensor":
        return tensors[rest[0]]
    if kind == "value":
        return rest[0]
    if kind == "given":
        return call.tensors[rest[0]]
    if kind == "cache":
        return call.caches[rest[0]]
    if kind == "dict":
        return {_built(name, tensors, call): _built(each, tensors, call) for name, each in rest}
    cls, *inner = rest
    if kind == "mapping":
        return cls(**{name: _built(each, tensors, call) for name, each in inner})
    values = [_built(each, tensors, call) for each in inner]
    return cls(*values) if hasattr(cls, "_fields") else cls(values)

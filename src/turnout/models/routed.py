"""The stock code of a layer with `scaled_dot_product_attention` routed: what adapters of attention call.

How the code reaches that function is found out from its names, by way of helper functions, decorators, tables of
attention functions (diffusers' backends, transformers' interface) and methods of its own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F

from turnout.models import sdpa
from turnout.models.patch import Adapter
from turnout.models.rebinding import Rebinder, Rebound, is_library, names_in


def _instead(name: str, value: Any) -> Any:
    """Our function in place of torch's, or of whatever stands in torch's place: ours then calls that one."""
    named = name == "scaled_dot_product_attention" and value is F.scaled_dot_product_attention
    return sdpa.scaled_dot_product_attention if named or value is sdpa.STOCK else None


def _stock_method(cls: type, name: str) -> Any:
    """What a class that an adapter stands before has under a name; None for an adapter alone."""
    owners = [owner for owner in cls.__mro__ if not issubclass(owner, Adapter) and owner is not object]
    return next((vars(owner)[name] for owner in owners if name in vars(owner)), None)


def _ways(cls: type, entry: str) -> dict[str, Rebound]:
    """The methods of a class, `entry` and those that it calls, that reach scaled_dot_product_attention, rebound."""
    found = _followed(cls, entry)
    if not all(rebound.is_current() for rebound in found.values()):
        _followed.cache_clear()
        found = _followed(cls, entry)
    return found


@functools.lru_cache(128)
def _followed(cls: type, entry: str) -> dict[str, Rebound]:
    found: dict[str, Rebound] = {}
    seen: set[str] = set()
    names = [entry]
    while names:
        name = names.pop()
        method = None if name in seen else _stock_method(cls, name)
        seen.add(name)
        method = method.__func__ if isinstance(method, staticmethod) else method
        if inspect.isfunction(method) and not is_library(method):
            rebound = Rebinder(_instead).rebind(method)
            found |= {} if rebound is None else {name: rebound}
            inner = inspect.unwrap(method)
            names += names_in(inner.__code__) if inspect.isfunction(inner) else ()
    return found


def _install(cls: type) -> Rebound:
    """Give the class of patched instances its routed stock methods; returns the one it begins with."""
    patched: Any = cls
    entry: str = patched._turnout_entry
    ways = _ways(next(owner for owner in cls.__mro__ if not issubclass(owner, Adapter)), entry)
    for name, rebound in ways.items():
        if name != entry:
            method = _unless_traced(rebound)
            setattr(cls, name, staticmethod(method) if isinstance(_stock_method(cls, name), staticmethod) else method)
    stock = _stock_method(cls, entry)
    function = ways[entry].function if entry in ways else stock
    patched._turnout_rebound = Rebound(stock, function, [one for rebound in ways.values() for one in rebound.watched])
    return patched._turnout_rebound


def _unless_traced(rebound: Rebound) -> Callable[..., Any]:
    @functools.wraps(rebound.stock)
    def method(*args: Any, **kwargs: Any) -> Any:
        return (rebound.stock if torch.compiler.is_compiling() else rebound.function)(*args, **kwargs)

    return method


class Routed(Adapter):
    """The stock forward with `scaled_dot_product_attention` routed, for adapters to call: `self._routed_stock(...)`.

    It is the stock code with other globals, made when the class of the patched instances is made (`rebinding`). While
    a graph is traced, and where the stock code does not reach that function by name, it is the stock code itself.
    """

    _turnout_entry = "forward"
    _turnout_rebound: Rebound

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if _stock_method(cls, cls._turnout_entry) is not None:
            _install(cls)

    def _routed_stock(self: Any, *args: Any, **kwargs: Any) -> Any:
        rebound = self._turnout_rebound
        if torch.compiler.is_compiling():
            return rebound.stock(self, *args, **kwargs)
        if not rebound.is_current():
            rebound = _install(type(self))
        return rebound.function(self, *args, **kwargs)


class RoutedProcessor(Routed):
    """The stock call of an attention processor with its attention routed, for adapters of processors."""

    _turnout_entry = "__call__"


def needs_a_way(instance: object, entry: str) -> Iterable[str]:
    if not _ways(type(instance), entry):
        yield (
            f"its {entry} reaches scaled_dot_product_attention under no name that can be followed, "
            "this adapter needs one: a global, a helper function, a method of its own"
        )

"""The stock code of a layer with `scaled_dot_product_attention` routed: what adapters of attention call.

How the code reaches that function is found out from its names, by way of helper functions, decorators, tables
of attention functions (diffusers' backends, transformers' interface) and methods of its own.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from turnout.models import sdpa, worth
from turnout.models.patch import Adapter
from turnout.models.rebinding import Rebinder, Rebound, is_library
from turnout.ops.attention import ATTENTION
from turnout.routing.functions import names_in

is_traced = torch.compiler.is_dynamo_compiling


def _instead(name: str, value: Any) -> Any:
    """Our function in place of torch's, or of whatever stands in torch's place: ours then calls that one."""
    named = name == "scaled_dot_product_attention" and value is F.scaled_dot_product_attention
    return sdpa.scaled_dot_product_attention if named or value is sdpa.STOCK else None


def _stock_method(cls: type, name: str) -> Any:
    """What a class that an adapter stands before has under a name; None for an adapter alone."""
    owners = [owner for owner in cls.__mro__ if not issubclass(owner, Adapter) and owner is not object]
    return next((vars(owner)[name] for owner in owners if name in vars(owner)), None)


def _ways(cls: type, entry: str) -> dict[str, Rebound]:
    """The methods of a class, `entry` and those that it calls, that reach scaled_dot_product_attention,
    rebound."""
    rebound_methods = _followed(cls, entry)
    if not all(rebound.is_current() for rebound in rebound_methods.values()):
        _followed.cache_clear()
        rebound_methods = _followed(cls, entry)
    return rebound_methods


@functools.lru_cache(128)
def _followed(cls: type, entry: str) -> dict[str, Rebound]:
    rebound_methods: dict[str, Rebound] = {}
    seen: set[str] = set()
    names = [entry]
    while names:
        name = names.pop()
        methods = [] if name in seen else _stock_methods(cls, name)
        seen.add(name)
        rebound = Rebinder(_instead).rebind(methods[0]) if methods else None
        rebound_methods |= {} if rebound is None else {name: rebound}
        # Those of parents too: super() may call them, and they call other methods of this instance.
        for method in methods:
            names += names_in(method.__code__)
    return rebound_methods


def _stock_methods(cls: type, name: str) -> list[types.FunctionType]:
    """The functions behind a method, what decorators hold included, the one that is called first."""
    owners = [owner for owner in cls.__mro__ if name in vars(owner) and not issubclass(owner, Adapter)]
    entries = [vars(owner)[name] for owner in owners]
    functions = [entry.__func__ if isinstance(entry, staticmethod) else entry for entry in entries]
    if not functions or not inspect.isfunction(functions[0]):
        return []
    inner = [inspect.unwrap(function) for function in functions if inspect.isfunction(function)]
    every = dict.fromkeys([functions[0], *inner])
    return [one for one in every if inspect.isfunction(one) and not is_library(one)]


def _install(cls: type) -> Rebound:
    """Give the class of patched instances its routed stock methods; returns the one it begins with."""
    patched: Any = cls
    entry: str = patched._turnout_entry
    ways = _ways(next(owner for owner in cls.__mro__ if not issubclass(owner, Adapter)), entry)
    for name, rebound in ways.items():
        if name != entry:
            method = _unless_traced(rebound)
            setattr(
                cls,
                name,
                staticmethod(method) if isinstance(_stock_method(cls, name), staticmethod) else method,
            )
    stock = _stock_method(cls, entry)
    function = ways[entry].function if entry in ways else stock
    watched = [one for rebound in ways.values() for one in rebound.watched]
    # Where the way was cut: look again when one of its names changes.
    if not watched and "_turnout_rebound" in vars(cls):
        watched = [one.as_it_is() for one in patched._turnout_rebound.watched]
    patched._turnout_rebound = Rebound(stock, function, watched)
    return patched._turnout_rebound


def _unless_traced(rebound: Rebound) -> Callable[..., Any]:
    @functools.wraps(rebound.stock)
    def method(*args: Any, **kwargs: Any) -> Any:
        return (rebound.stock if torch.compiler.is_compiling() else rebound.function)(*args, **kwargs)

    return method


class Routed(Adapter):
    """The stock forward with `scaled_dot_product_attention` routed, for adapters to call:
    `self._routed_stock(...)`.

    It is the stock code with other globals, made when the class of the patched instances is made
    (`rebinding`). While a graph is traced, where the stock code does not reach that function by name, and for
    calls whose attention is known to be torch's (`worth`), it is the stock code itself.
    """

    sees_for_itself = True
    _turnout_entry = "forward"
    _turnout_rebound: Rebound

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if _stock_method(cls, cls._turnout_entry) is not None:
            _install(cls)

    def _routed_stock(self: Any, *args: Any, **kwargs: Any) -> Any:
        rebound = self._turnout_rebound if isinstance(self, Routed) else None
        if rebound is None:  # a bound method that has outlived `restore`
            return getattr(type(self), "forward" if isinstance(self, nn.Module) else "__call__")(
                self, *args, **kwargs
            )
        if is_traced() or worth.knows_call(self, ATTENTION, args, kwargs) or torch.compiler.is_compiling():
            return rebound.stock(self, *args, **kwargs)
        kind = worth.kind_of_call(args, kwargs)
        if not rebound.is_current():
            _followed.cache_clear()
            rebound = _install(type(self))
        before = sdpa.undecided[0]
        result = rebound.function(self, *args, **kwargs)
        if sdpa.undecided[0] == before and rebound.is_current():
            worth.remember(self, ATTENTION, kind)
        return result


class RoutedProcessor(Routed):
    """The stock call of an attention processor with its attention routed, for adapters of processors."""

    _turnout_entry = "__call__"


def needs_a_way(instance: object, entry: str) -> Iterable[str]:
    if not _ways(type(instance), entry):
        yield (
            f"its {entry} reaches scaled_dot_product_attention under no name that can be followed, "
            "this adapter needs one: a global, a helper function, a method of its own"
        )

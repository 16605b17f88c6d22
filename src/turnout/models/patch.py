"""One instance takes another track: its class becomes a subclass of itself, and back.

Nothing else of the instance changes, so `state_dict`, `__dict__`, hooks and devices are what they were, `isinstance` still holds, and
undoing it is assigning the old class. No class or module is ever written to: other instances do not notice. The one exception is where
the weight of a convolution lies in memory: channels-last while its model runs so, for else every call would have to copy it.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from turnout.routing import settings


class Patch(NamedTuple):
    """What a patched instance is: its own class, the adapter in front of it, the numerics level its calls are held to, and whether its
    weight was laid out anew."""

    base: type
    adapter: type[Adapter]
    numerics: str | None
    relaid: bool = False


class Adapter:
    """The methods of an adapter stand before those of the class it is put in front of; `super()` is the stock behaviour.

    `refuses` gives every reason why an instance cannot be patched. `exact` says that the adapter keeps every bit of the stock output as
    long as the ops it calls do; `covers` that it reads the weights of the modules inside, which then need no patch of their own;
    `channels_last` that all convolutions inside see their input so, and are to have their weights so too.
    """

    exact = False
    covers = False
    channels_last = False

    @staticmethod
    def refuses(instance: Any) -> Iterable[str]:
        return ()


def needs_silu(activation: nn.Module) -> Iterable[str]:
    """The reason of every adapter that fuses the activation into the norm."""
    if not isinstance(activation, nn.SiLU):
        yield f"activation {type(activation).__name__}, this adapter needs SiLU"


def patched(instance: object) -> Patch | None:
    """How an instance was patched; None for a stock one."""
    return type(instance).__dict__.get("_turnout_patch")


def apply(instance: Any, adapter: type, numerics: str | None, *, relay: bool = False) -> None:
    """Put an adapter in front of the instance's class; `relay` lays out its weight channels-last as well."""
    if relay:
        weight = instance.weight.data
        instance.weight.data = weight.contiguous(memory_format=_LAST[weight.dim()])
    instance.__class__ = _in_front(type(instance), adapter, numerics, relay)


def undo(instance: Any) -> bool:
    """Give an instance its own class, and its weight the old place in memory, back; False where it has it."""
    patch = patched(instance)
    if patch is None:
        return False
    if patch.relaid:
        instance.weight.data = instance.weight.data.contiguous()
    instance.__class__ = patch.base
    return True


class ChannelsLast(Adapter):
    """weight kept channels-last"""


_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def can_relay(instance: object) -> bool:
    """Whether an instance is a convolution whose weight is a plain tensor that lies in another order than channels-last, and kernels for
    its device and dtype like that one."""
    if not isinstance(instance, nn.Conv2d | nn.Conv3d) or "weight" not in instance._parameters:
        return False
    weight = instance.weight.data
    plain = type(weight) is torch.Tensor and weight.device.type != "meta" and not weight.is_inference()
    liked = likes_channels_last(weight)
    return plain and liked and weight.is_contiguous() and not weight.is_contiguous(memory_format=_LAST[weight.dim()])


def likes_channels_last(x: torch.Tensor) -> bool:
    """oneDNN's float32 kernels are no faster with channels last (a small Wan decode on a CPU: 1.0x of stock, 1.3x as it comes)."""
    return x.device.type != "cpu" or x.dtype is not torch.float32


_classes: weakref.WeakValueDictionary[tuple, type] = weakref.WeakValueDictionary()  # as long as they have instances


def _in_front(base: type, adapter: type, numerics: str | None, relaid: bool = False) -> type:
    """The class of patched instances: one for each class and kind of patch, as long as there is an instance."""
    key = (base, adapter, numerics, relaid)
    cls = _classes.get(key)
    if cls is None:
        cls = _classes.setdefault(key, _make_in_front(*key))
    return cls


def _make_in_front(base: type, adapter: type, numerics: str | None, relaid: bool) -> type:
    body: dict[str, Any] = {
        "__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__,
        "__reduce_ex__": _reduce, "_turnout_patch": Patch(base, adapter, numerics, relaid),
    }  # fmt: skip
    for name, method in _methods(adapter):
        kinds = {parameter.kind for parameter in inspect.signature(method).parameters.values()}
        if inspect.Parameter.VAR_POSITIONAL in kinds and hasattr(base, name):
            body[name] = method = _seen_as(getattr(base, name), method)
        if numerics is not None:
            body[name] = _held_to(numerics, method)
    return type(base.__name__, (adapter, base), body)


def _methods(adapter: type) -> Iterable[tuple[str, Callable[..., Any]]]:
    for owner in reversed(adapter.__mro__[:-1]):
        if owner is not Adapter:
            yield from ((name, value) for name, value in vars(owner).items() if inspect.isfunction(value))


def _seen_as(stock: Any, method: Any) -> Any:
    """A method that passes on whatever it is given, with the stock signature: diffusers looks there for what a processor takes."""
    seen = types.FunctionType(method.__code__, method.__globals__, method.__name__, method.__defaults__, method.__closure__)
    seen.__kwdefaults__, seen.__doc__ = method.__kwdefaults__, method.__doc__
    seen.__signature__ = inspect.signature(stock)  # pyright: ignore[reportFunctionMemberAccess]
    return seen


def _held_to(level: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with settings.numerics(level):
            return method(*args, **kwargs)

    return run


def _reduce(self: Any, protocol: Any) -> Any:
    """Pickle and copy by what the class was made of: the class itself has no name to be found under."""
    patch = type(self)._turnout_patch
    make, arguments, *rest = super(patch.adapter, self).__reduce_ex__(max(2, protocol))
    if make is not copyreg.__newobj__:  # pyright: ignore[reportAttributeAccessIssue]
        return (make, arguments, *rest)
    return (_remade, (*patch, *arguments[1:]), *rest)


def _remade(base: type, adapter: type, numerics: str | None, relaid: bool, *arguments: Any) -> Any:
    cls = _in_front(base, adapter, numerics, relaid)
    return cls.__new__(cls, *arguments)

"""Patch single instances: the class of an instance becomes a subclass of itself, with an adapter's methods.

Nothing else of the instance changes: `state_dict`, `__dict__`, hooks and devices stay, `isinstance` still
holds, and assigning the old class undoes the patch. Classes and Python modules are never written to, so
other instances are not affected. One thing in memory changes: the weight of a convolution is laid out
channels-last while its model runs in that format. Otherwise every call would have to copy it.

The bare-child rule
-------------------
An adapter is fast because it reads the weights of the modules inside instead of calling them. It may do so
only where nobody can notice: where each of these modules is *bare* (`bare.py`). This is checked here, at
every call of every adapter. Where a module is not bare, the stock method runs, which calls all of them. So a
model gives its stock results, whatever a user does to a part of it.
"""

from __future__ import annotations

import copyreg
import inspect
import types
import weakref
from collections.abc import Callable, Container, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from turnout.models.bare import Inside, is_bare
from turnout.models.diffusers_private import show_to_caches
from turnout.routing import settings
from turnout.routing.torch_private import TracingContext

is_compiling = torch.compiler.is_compiling


class Patch(NamedTuple):
    """How an instance was patched.

    base: its own class. adapter: the class whose methods come first. numerics: the level of its calls.
    relaid: whether its weight was laid out channels-last.
    """

    base: type
    adapter: type[Adapter]
    numerics: str | None
    relaid: bool = False


class Adapter:
    """Methods that override those of one class of a library; `super()` is the stock behaviour.

    summary: what it makes faster, or which function it routes to, for the report.
    refuses: yields every reason why an instance cannot be patched.
    exact: the adapter keeps every bit of the stock output, as long as the ops it calls do.
    channels_last: all convolutions inside get channels-last inputs, so their weights are laid out so too.
    inside: which modules inside the adapter calls, and of which it reads the weights without a call. Its
    methods run only while the latter are bare; otherwise the stock methods run. None: it uses no modules.
    sees_for_itself: its methods find out whether they are called on a patched instance, and whether its class
    has the stock method still; `_while_patched` would be one more call of Python for each call of a layer.
    splits: in a distributed model, where it gets a part of each frame, it gathers what it needs by itself.
    """

    summary = ""
    exact = False
    splits = False
    channels_last = False
    sees_for_itself = False
    inside: Inside | None = None

    @staticmethod
    def refuses(instance: Any) -> Iterable[str]:
        return ()


def needs_silu(activation: nn.Module) -> Iterable[str]:
    """The reason of every adapter that fuses the activation into the norm."""
    if not isinstance(activation, nn.SiLU):
        yield f"activation {type(activation).__name__}, this adapter needs SiLU"


def needs_plain(*convolutions: Any) -> Iterable[str]:
    """The reasons of an adapter that reads nothing of convolutions but their weights and paddings."""
    for conv in convolutions:
        if {*conv.stride, *conv.dilation, conv.groups} != {1}:
            yield (
                f"a convolution of stride {tuple(conv.stride)}, dilation {tuple(conv.dilation)} and "
                f"{conv.groups} groups, this adapter needs 1 of each"
            )


def drops(dropout: Any) -> bool:
    """Whether a dropout layer would drop anything. It has a mode of its own: some users train it alone."""
    return dropout.training and dropout.p > 0


def patched(instance: object) -> Patch | None:
    """How an instance was patched; None for a stock one."""
    return getattr(type(instance), "_turnout_patch", None)


def patches_of(instance: object) -> list[Patch]:
    """How an instance was patched, the foremost patch first; empty for a stock one."""
    patches: list[Patch] = []
    patch = patched(instance)
    while patch is not None:
        patches.append(patch)
        patch = getattr(patch.base, "_turnout_patch", None)
    return patches


def apply(instance: Any, adapter: type, numerics: str | None, *, relay: bool = False) -> None:
    """Let an adapter override the methods of an instance; `relay` lays out its weight channels-last too."""
    if relay:
        weight = instance.weight.data
        instance.weight.data = weight.contiguous(memory_format=_LAST[weight.dim()])
    front = take_front(instance)
    instance.__class__ = _in_front(type(instance), adapter, numerics, relay)
    if front is not None:
        put_front(instance, *front)


# A front overrides the methods of an instance and of its adapter, if it has one: `distribute` uses it.


def put_front(instance: Any, behaviour: type, attributes: dict[str, Any]) -> None:
    """Override the methods of an instance with those of `behaviour`, and set class attributes."""
    base = type(instance)
    body = {
        "__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__,
        "__reduce_ex__": _reduce_without_front, "_turnout_front": (behaviour, attributes), **attributes,
    }  # fmt: skip
    instance.__class__ = type(base.__name__, (behaviour, base), body)


def take_front(instance: Any) -> tuple[type, dict[str, Any]] | None:
    """Undo `put_front`, and return its arguments; None where there is no front."""
    front = vars(type(instance)).get("_turnout_front")
    if front is not None:
        instance.__class__ = type(instance).__bases__[1]
    return front


def _reduce_without_front(self: Any, protocol: Any) -> Any:
    """Copy and pickle an instance without its front: copies are not distributed."""
    twin = object.__new__(type(self).__bases__[1])
    twin.__dict__ = self.__dict__
    return twin.__reduce_ex__(protocol)


def undo(instance: Any, adapters: Container[type] | None = None) -> bool:
    """Give an instance its own class back, and its weight its old layout; False where it was not patched.

    adapters: remove only the foremost adapter, and only if it is one of these.
    """
    patch = patched(instance)
    if patch is None or (adapters is not None and patch.adapter not in adapters):
        _put_back_methods(instance)
        return False
    if patch.relaid and isinstance(instance.weight, Tensor):
        instance.weight.data = instance.weight.data.contiguous()
    front = take_front(instance)
    instance.__class__ = _without(type(instance))
    _put_back_methods(instance)
    if adapters is None:
        undo(instance)  # a model whose calls are seen as a whole is patched twice
    if front is not None:
        put_front(instance, *front)
    return True


def _without(cls: type) -> type:
    """A class without its adapter. What was derived from it since (FSDP, a parametrisation) stays."""
    if "_turnout_patch" in vars(cls):
        return cls._turnout_patch.base  # pyright: ignore[reportAttributeAccessIssue]
    if not hasattr(cls, "_turnout_patch"):
        return cls
    own = types.CellType()  # what `super()` in a method of the class looks at
    body = {
        name: _with_class(value, cls, own)
        for name, value in vars(cls).items()
        if name not in ("__dict__", "__weakref__")
    }
    own.cell_contents = made = type(cls)(cls.__name__, tuple(map(_without, cls.__bases__)), body)
    return made


def _with_class(value: Any, cls: type, own: types.CellType) -> Any:
    """A method whose `super()` begins at another class than `cls`; anything else as it is."""
    if not isinstance(value, types.FunctionType) or "__class__" not in value.__code__.co_freevars:
        return value
    cells = [
        own if name == "__class__" and cell.cell_contents is cls else cell
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
    ]
    return _copied(value, value.__code__, tuple(cells))


def _copied(function: types.FunctionType, code: types.CodeType, cells: Any) -> types.FunctionType:
    copy = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__, copy.__doc__ = function.__kwdefaults__, function.__doc__
    copy.__qualname__ = function.__qualname__
    copy.__dict__.update(function.__dict__)
    return copy


def _put_back_methods(instance: Any) -> None:
    """Methods that an instance holds of itself become those of its class. Offloading keeps the `forward` that
    it replaces, and leaves it on the instance when it ends."""
    held = getattr(instance, "__dict__", {})
    for name, value in list(held.items()):
        if (
            isinstance(value, types.MethodType)
            and value.__self__ is instance
            and "_turnout_method" in vars(value.__func__)
        ):
            held[name] = getattr(type(instance), value.__func__.__name__).__get__(instance)


class ChannelsLast(Adapter):
    summary = "weight kept channels-last"


_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def can_relay(instance: object) -> bool:
    """Whether an instance is a convolution whose weight is a plain tensor in memory of its own that lies in
    another order than channels-last, and kernels for its device and dtype like that one."""
    if (
        not isinstance(instance, nn.Conv2d | nn.Conv3d)
        or "weight" not in instance._parameters
        or "forward" in vars(instance)
    ):
        return False
    weight = instance.weight.data
    plain = type(weight) is Tensor and weight.device.type != "meta" and not weight.is_inference()
    if (
        not plain or not likes_channels_last(weight) or weight.untyped_storage().nbytes() != weight.nbytes
    ):  # a part of FSDP's memory
        return False
    return weight.is_contiguous() and not weight.is_contiguous(memory_format=_LAST[weight.dim()])


def likes_channels_last(x: Tensor) -> bool:
    """oneDNN's float32 kernels are no faster with channels last (a small Wan decode on a CPU: 1.0x of stock,
    1.3x as it comes).
    """
    return x.device.type != "cpu" or x.dtype is not torch.float32


_classes: weakref.WeakValueDictionary[tuple, type] = (
    weakref.WeakValueDictionary()
)  # as long as they have instances


def _in_front(base: type, adapter: type, numerics: str | None, relaid: bool = False) -> type:
    """The class of patched instances: one for each class and kind of patch, while there is an instance."""
    key = (base, adapter, numerics, relaid)
    cls = _classes.get(key)
    if cls is None:
        cls = _classes.setdefault(key, _make_in_front(*key))
    return cls


def _make_in_front(base: type, adapter: type[Adapter], numerics: str | None, relaid: bool) -> type:
    body: dict[str, Any] = {
        "__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__,
        "__reduce_ex__": _reduce, "_turnout_patch": Patch(base, adapter, numerics, relaid),
    }  # fmt: skip
    made: list[type] = []
    for name, method in methods_of(adapter):
        stock = getattr(base, name, None)
        if stock is None:
            continue
        if numerics is not None:
            method = _held_to(numerics, method)
        if adapter.inside is not None:
            method = _where_bare(made, base, name, method, adapter.inside)
        elif not adapter.sees_for_itself:
            method = _while_patched(made, base, name, method)
        body[name] = _seen_as(stock, method)
    made.append(_metaclass(base)(base.__name__, (adapter, base), body))
    show_to_caches(base, made[0])
    return made[0]


class _Alike(type):
    """A metaclass whose classes equal the class they were made of, and hash like it.

    diffusers tells processors apart by `processor.__class__ in CROSS_ATTENTION_PROCESSORS`, by tables with
    classes as keys, and so do others: with this they treat patched instances as stock ones. Not while
    torch.compile traces: it searches for a class among its bases by `==`.
    """

    def __eq__(cls, other: object) -> bool:
        if cls is other or not isinstance(other, type) or TracingContext.try_get() is not None:
            return cls is other
        return _made_of(cls) is _made_of(other)

    def __hash__(cls) -> int:
        return type.__hash__(_made_of(cls))


def _made_of(cls: type) -> type:
    """The class before it was patched; a class that others derived from a patched one is returned itself."""
    while "_turnout_patch" in vars(cls) or "_turnout_front" in vars(cls):
        cls = cls.__bases__[1]
    return cls


def _metaclass(base: type) -> type:
    """Of the classes put in front of this one: modules are found by `isinstance`, and compilers know their
    classes.
    """
    if issubclass(base, nn.Module):
        return type(base)
    return _Alike if type(base) is type else type(_Alike.__name__, (_Alike, type(base)), {})


def methods_of(adapter: type) -> Iterable[tuple[str, Callable[..., Any]]]:
    """What an adapter defines, its own helpers too, those of its parents first."""
    for owner in reversed(adapter.__mro__[:-1]):
        if owner is not Adapter:
            yield from ((name, value) for name, value in vars(owner).items() if inspect.isfunction(value))


def _while_patched(made: list[type], base: type, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Runs the method on instances of the patched class, which will be the only element of `made`.

    On others it is the method of `base`: bound methods outlive `restore`, as offloading, casting and caches
    keep the `forward` that they replace. So it is while another function stands in the place of the stock
    one in its class.
    """
    stock = getattr(base, name)

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        current = getattr(base, name)
        if current is stock and isinstance(self, made[0]):
            return method(self, *args, **kwargs)
        return current(self, *args, **kwargs)

    return run


def _where_bare(
    made: list[type], base: type, name: str, method: Callable[..., Any], inside: Inside
) -> Callable[..., Any]:
    """As `_while_patched`, and only while all modules whose weights the method reads are bare. The module is
    an argument of attention processors.
    """
    stock, of_argument = getattr(base, name), not issubclass(base, nn.Module)

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        current = getattr(base, name)
        if current is not stock or not isinstance(self, made[0]):
            return current(self, *args, **kwargs)
        root = self if not of_argument else args[0] if args else kwargs["attn"]
        for x in (*args, *kwargs.values()):
            if isinstance(x, Tensor):
                if is_bare(root, inside, x.dtype, x.device):
                    break
                return stock(self, *args, **kwargs)
        return method(self, *args, **kwargs)

    return run


def _seen_as(stock: Any, method: Any) -> Any:
    """A method with the stock signature: diffusers looks there for what a block or a processor takes."""
    method_like_stock = types.FunctionType(
        method.__code__, method.__globals__, stock.__name__, method.__defaults__, method.__closure__
    )
    method_like_stock.__kwdefaults__, method_like_stock.__doc__ = method.__kwdefaults__, stock.__doc__
    method_like_stock.__signature__ = inspect.signature(stock)  # pyright: ignore[reportFunctionMemberAccess]
    method_like_stock.__dict__["_turnout_method"] = True
    return method_like_stock


def _held_to(level: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            with settings.numerics(level):
                return method(*args, **kwargs)
        now = settings.current()
        if now.numerics == level:
            return method(*args, **kwargs)
        token = settings.entered.set(settings.at_level(now, level))
        try:
            return method(*args, **kwargs)
        finally:
            settings.entered.reset(token)

    return run


def _reduce(self: Any, protocol: Any) -> Any:
    """Pickle and copy by what the class was made of: the class itself has no name to be found under."""
    patches = patches_of(self)
    make, arguments, *rest = super(patches[-1].adapter, self).__reduce_ex__(max(2, protocol))
    if make is not copyreg.__newobj__:  # pyright: ignore[reportAttributeAccessIssue]
        return (make, arguments, *rest)
    layers = tuple((each.adapter, each.numerics, each.relaid) for each in reversed(patches))
    return (_remade, (patches[-1].base, layers, *arguments[1:]), *rest)


def _remade(base: type, layers: tuple[tuple[type, str | None, bool], ...], *arguments: Any) -> Any:
    """An instance of a class with adapters in front of it, the innermost first."""
    cls = base
    for layer in layers:
        cls = _in_front(cls, *layer)
    return cls.__new__(cls, *arguments)

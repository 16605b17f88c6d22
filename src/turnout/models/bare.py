"""The bare-child rule: when may an adapter read the weights of a module, instead of calling it?

Only where that cannot be noticed. A module is *bare* if

- its class is one that the adapter knows: not a replacement (LoRA, quantised layers), nor a class derived
  from it at run time (parametrisations, FSDP), nor one whose `forward` somebody has replaced;
- it has no forward, pre-forward or backward hooks, and no replaced `forward` (offloading, casting and caches
  use these) or other method on the instance; a convolution has a padding mode that its adapter knows
  (seamless pictures use `padding_mode = "circular"`);
- its weights are plain tensors, on the device and in the dtype of the call.

Nothing is bare while somebody watches every call: with global hooks, under a `TorchFunctionMode`, with
another function in the place of one of `torch.nn.functional`. And an adapter must
still not refuse the module that it stands before: attributes may have been set since `accelerate`.

The answer is cached, and computed again only when the state of the modules has changed. Checking for a change
takes 2 to 5 us of host time for the 1 to 7 modules of a block (`benchmarks/bare.py`).
"""

from __future__ import annotations

import collections
import ctypes
import fnmatch
import functools
import inspect
import itertools
import operator
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from turnout.models.dicts import Dicts
from turnout.routing.fallback import PLAIN_TENSORS, autocasts
from turnout.routing.torch_private import (
    GLOBAL_HOOKS,
    constant_in_graphs,
    count_function_modes,
    function_mode_at,
    in_function_mode,
    is_default_device,
)

is_compiling = torch.compiler.is_compiling
_everything = itertools.chain.from_iterable
_dtype, _device = operator.attrgetter("dtype"), operator.attrgetter("device")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_forward = operator.attrgetter("forward")
_SCALARS = (bool, int, float, str, tuple, type(None))


class Inside(NamedTuple):
    """What an adapter does with the modules inside an instance.

    reads: classes of those whose weights it reads, or whose call it leaves out; torch's as they are, others
    by name.
    calls: paths of those that it calls as the stock method does, `*` for any part of a path. Whatever is
    inside them is their own business.
    any_dtype: the ops take weights of another dtype than that of x, as the stock modules do.
    padding_modes: of convolutions, that it knows.
    """

    reads: tuple[type | str, ...] = ()
    calls: tuple[str, ...] = ()
    any_dtype: bool = False
    padding_modes: tuple[str, ...] = ("zeros",)


def _is_bare(root: nn.Module, inside: Inside, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether all modules inside `root` that are read past are bare, for a call with a tensor of this dtype
    on this device.
    """
    if calls_are_watched():
        return False
    key = id(root), id(inside)
    watch = _watches.get(key)
    fits = None if watch is None or watch.root() is not root else watch.fits(dtype, device)
    if fits is None:
        watch = _watches[key] = _Watch(root, inside, key)
        fits = watch.fits(dtype, device)
    return bool(fits)


_FUNCTIONS = operator.itemgetter(
    "linear", "conv2d", "conv3d", "silu", "gelu", "group_norm", "layer_norm", "rms_norm", "normalize",
    "interpolate", "pad", "dropout",
)  # fmt: skip
_functions = vars(F)
_STOCK_FUNCTIONS = _FUNCTIONS(_functions)


def calls_are_watched() -> bool:
    """Whether somebody wants to see the calls of all modules, or of torch's functions."""
    return (
        any(GLOBAL_HOOKS)
        or (in_function_mode() and has_function_mode_of_others())
        or _FUNCTIONS(_functions) != _STOCK_FUNCTIONS
    )


def has_function_mode_of_others() -> bool:
    """Whether a function mode is active that is neither ours nor torch's default device."""
    modes = map(function_mode_at, range(count_function_modes()))
    return not all(is_default_device(mode) or type(mode).__module__.startswith("turnout.") for mode in modes)


def _is_bare_by_id(root: int, inside: Inside, dtype: torch.dtype, device: torch.device) -> bool:
    """`is_bare` of the module with this id; the caller keeps the module alive."""
    return _is_bare(ctypes.cast(root, ctypes.py_object).value, inside, dtype, device)


def _is_bare_to_old_compilers(
    root: nn.Module, inside: Inside, dtype: torch.dtype, device: torch.device
) -> bool:
    """`is_bare` for torch before 2.13, whose compiler passes no modules to functions marked as constant."""
    if is_compiling():
        return _is_bare_by_id(id(root), inside, dtype, device)
    return _is_bare(root, inside, dtype, device)


# A graph of torch.compile keeps the answer from when it was traced.
for _function in (_is_bare, _is_bare_by_id, calls_are_watched):
    constant_in_graphs(_function)

is_bare = _is_bare if torch.__version__ >= "2.13" else _is_bare_to_old_compilers


class _Watch:
    """The state of the modules inside one module, and whether they are bare in that state.

    Used at every call, so it has no Python loops.
    """

    def __init__(self, root: nn.Module, inside: Inside, key: tuple[int, int]):
        self.root = weakref.ref(root, lambda _: _watches.pop(key, None))
        self.modules = list(read_past(root, inside))
        self.types = list(map(type, self.modules))
        parents = _stock_parents(root)
        every = (cls.__mro__ for cls in map(_stock_class, self.modules))
        self.classes = [
            cls for cls in dict.fromkeys([*parents, *_everything(every)]) if "forward" in vars(cls)
        ]
        self.forwards = list(map(_forward, self.classes))
        self.dicts = Dicts(
            [
                root._modules,
                *_everything((vars(m), m._modules, m._parameters, m._buffers) for m in self.modules),
            ]
        )
        # Of the root's attributes only those that are no objects, which may lead back to it.
        self.root_attributes = vars(root)
        own = [name for name, value in self.root_attributes.items() if type(value) in _SCALARS]
        self.own = operator.itemgetter("training", *own)
        self.own_values = self.own(self.root_attributes)
        self.hooks = [hooks for module in self.modules for hooks in _hooks(module)]
        tensors = [x for m in self.modules for x in (*m._parameters.values(), *m._buffers.values())]
        tensors = [x for x in tensors if x is not None]
        pads = {m.padding_mode for m in self.modules if isinstance(m, _CONVOLUTIONS)}
        self.bare = (
            all(_known(m, inside.reads) for m in self.modules)
            and all(type(x) in PLAIN_TENSORS for x in tensors)
            and pads <= set(inside.padding_modes)
            and not any(map(_shadowed, self.modules))
            and all(map(is_as_written, self.classes))
            and not _is_refused(root, inside)
        )
        self.weights = [x for x in tensors if x.is_floating_point()] if self.bare else []
        self.any_dtype = inside.any_dtype
        self.cached: dict[Any, Any] = {}

    def fits(self, dtype: torch.dtype, device: torch.device) -> bool | None:
        """Whether there are no hooks, and the weights are on the device of a call and in its dtype; None
        where the state of the modules is another one.

        Under autocast the dtype may differ: ops cast the weights.
        """
        if (
            not self.dicts.are_identical()
            or list(map(type, self.modules)) != self.types
            or list(map(_forward, self.classes)) != self.forwards
            or not self._has_own_values()
        ):
            return None
        if not self.bare or any(self.hooks):
            return False
        if list(map(_device, self.weights)).count(device) != len(self.weights):
            return False
        dtypes = list(map(_dtype, self.weights))
        if dtypes.count(dtype) == len(dtypes):
            return True
        wide = all(kind.itemsize > 1 for kind in dtypes)
        return wide and (self.any_dtype or autocasts(device.type))

    def _has_own_values(self) -> bool:
        try:
            return self.own(self.root_attributes) == self.own_values
        except KeyError:  # one was deleted
            return False


_watches: dict[tuple[int, int], _Watch] = {}


def remembered(root: nn.Module, inside: Inside, make: Callable[[Any], Any]) -> Any:
    """The result of `make(root)`, cached until one of the modules whose weights are read, or a parameter of
    one, is replaced. Call `is_bare` first: it checks for that.

    Looking up a parameter through its module costs 0.4 us of host time.
    """
    watch = _watches.get((id(root), id(inside)))
    if watch is None or watch.root() is not root:
        return make(root)
    if make not in watch.cached:
        watch.cached[make] = make(root)
    return watch.cached[make]


def forget(modules: Iterable[object]) -> None:
    """Drop what is cached for these modules, and with it references to weights that were replaced."""
    gone = {id(module) for module in modules}
    for key in [key for key in _watches if key[0] in gone]:
        _watches.pop(key, None)


def read_past(root: nn.Module, inside: Inside) -> Iterator[nn.Module]:
    """The modules inside that the adapter does not call, but may read the weights of."""
    for path, module in root.named_modules():
        parts = path.split(".")
        above = [".".join(parts[: i + 1]) for i in range(len(parts))]
        if path and not any(fnmatch.fnmatchcase(each, call) for each in above for call in inside.calls):
            yield module


def strangers(root: nn.Module, inside: Inside) -> Iterator[str]:
    """The classes inside that an adapter does not know, as a reason to leave `root` alone."""
    for cls in dict.fromkeys(type(m) for m in read_past(root, inside) if not _known(m, inside.reads)):
        yield f"a {cls.__module__}.{cls.__qualname__} inside, which this adapter does not know"


def _stock_class(module: nn.Module) -> type:
    """The class of a module without what `accelerate` puts in front."""
    cls: Any = type(module)
    while "_turnout_patch" in vars(cls):
        cls = cls._turnout_patch.base
    return cls


def _stock_parents(root: nn.Module) -> Iterable[type]:
    """The classes that the stock class of a patched module comes from, whose forward its own may call."""
    cls = next((cls for cls in type(root).__mro__ if "_turnout_patch" in vars(cls)), type(root))
    while "_turnout_patch" in vars(cls) or "_turnout_front" in vars(cls):
        cls = cls.__bases__[1]
    return cls.__mro__[1:]


def is_as_written(cls: type, name: str = "forward") -> bool:
    """Whether a method that a class defines is of its own file, or of a decorator in its library: nobody has
    put another there."""
    code = getattr(vars(cls)[name], "__code__", None)
    return code is not None and (
        code.co_filename == _file_of(cls.__module__)
        or code.co_filename.startswith(_folder_of(cls.__module__.partition(".")[0]))
    )


@functools.cache
def _file_of(module: str) -> str | None:
    """The file that the methods of most classes of a Python module stand in, as their code names it."""
    inside = [x for x in getattr(sys.modules.get(module), "__dict__", {}).values() if inspect.isclass(x)]
    classes = [cls for cls in inside if cls.__module__ == module]
    methods = [x for cls in classes for x in vars(cls).values() if inspect.isfunction(x)]
    files = collections.Counter(x.__code__.co_filename for x in methods)
    return max(files, key=files.__getitem__, default=None)


@functools.cache
def _folder_of(library: str) -> tuple[str, ...]:
    """The folders of a library whose methods may be decorated; none for others. torch decorates none of its
    layers' methods, and has decorators that users put around them."""
    known = f"{library}.models." in _LIBRARIES
    return tuple(f"{path}{os.sep}" for path in sys.modules[library].__path__) if known else ()


def _is_refused(root: nn.Module, inside: Inside) -> bool:
    """Whether the adapter in front of `root` that reads past these modules would refuse it as it is now."""
    patch: Any = getattr(type(root), "_turnout_patch", None)
    while patch is not None and patch.adapter.inside is not inside:
        patch = getattr(patch.base, "_turnout_patch", None)
    try:
        return patch is not None and any(True for _ in patch.adapter.refuses(root))
    except AttributeError:  # of a module that was replaced
        return True


def hooked(module: nn.Module) -> bool:
    """Whether a module has hooks, or a `forward` of its own."""
    return "forward" in vars(module) or any(_hooks(module))


def bare_layer(layer: Any, cls: type, x: Tensor) -> bool:
    """The rule for a single layer with a weight, of exactly this class, that is called with x."""
    if type(layer) is not cls or hooked(layer) or calls_are_watched():
        return False
    tensors = (layer.weight,) if layer.bias is None else (layer.weight, layer.bias)
    return all(
        type(each) in PLAIN_TENSORS and each.dtype is x.dtype and each.device == x.device for each in tensors
    )


def _shadowed(module: nn.Module) -> bool:
    """Whether an instance has an attribute that replaces a method of its class."""
    return any(inspect.isfunction(getattr(type(module), name, None)) for name in vars(module))


def _hooks(module: nn.Module) -> list[dict]:
    held = vars(module)
    return [held[kind] for kind in _HOOKS if kind in held]


def _known(module: nn.Module, reads: tuple[type | str, ...]) -> bool:
    """Whether a module is of one of these classes: itself, not a class derived from one, but for what
    `accelerate` puts in front.
    """
    cls = _stock_class(module)
    return (
        cls in _CONTAINERS
        or cls in reads
        or (cls.__module__.startswith(_LIBRARIES) and cls.__qualname__ in reads)
    )


_LIBRARIES = ("diffusers.models.", "transformers.models.", "torch.nn.modules.")

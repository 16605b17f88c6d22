"""The bare-child rule: when may an adapter read the weights of a module, instead of calling it?

Only where that cannot be noticed. A module is *bare* if

- its class is one that the adapter knows: not a replacement (LoRA, quantised layers), nor a class derived
  from it at run time (parametrisations, FSDP);
- it has no forward, pre-forward or backward hooks, and no replaced `forward` (offloading, casting and caches
  use these) or other method on the instance; a convolution has a padding mode that its adapter knows
  (seamless pictures use `padding_mode = "circular"`);
- its weights are plain tensors, on the device and in the dtype of the call.

The answer is cached, and computed again only when the state of the modules has changed. Checking for a change
takes 2 to 5 us of host time for the 1 to 7 modules of a block (`benchmarks/bare.py`).
"""

from __future__ import annotations

import ctypes
import fnmatch
import inspect
import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from turnout.routing.fallback import autocasts
from turnout.routing.torch_private import GLOBAL_HOOKS, constant_in_graphs

is_compiling = torch.compiler.is_compiling
_everything = itertools.chain.from_iterable
_dtype, _device = operator.attrgetter("dtype"), operator.attrgetter("device")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_padding_mode = operator.attrgetter("padding_mode")
_PLAIN = (Tensor, nn.Parameter)


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
    if any(GLOBAL_HOOKS):
        return False
    key = id(root), id(inside)
    watch = _watches.get(key)
    if watch is None or watch.root() is not root or watch.changed():
        watch = _watches[key] = _Watch(root, inside, key)
    return watch.fits(dtype, device)


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
for _function in (_is_bare, _is_bare_by_id):
    constant_in_graphs(_function)

is_bare = _is_bare if torch.__version__ >= "2.13" else _is_bare_to_old_compilers


class _Watch:
    """The state of the modules inside one module, and whether they are bare in that state.

    Used at every call, so it has no Python loops.
    """

    def __init__(self, root: nn.Module, inside: Inside, key: tuple[int, int]):
        self.root = weakref.ref(root, lambda _: _watches.pop(key, None))
        self.modules = list(read_past(root, inside))
        self.classes = list(map(type, self.modules))
        self.attributes = list(map(vars, self.modules))
        self.lengths = list(map(len, self.attributes))
        self.hooks = [hooks for module in self.modules for hooks in _hooks(module)]
        self.dicts = [
            held
            for m in (root, *self.modules)
            for held in (m._modules, {} if m is root else m._parameters)
            if held
        ]
        self.held = list(_everything(map(dict.values, self.dicts)))
        parameters = [x for m in self.modules for x in m._parameters.values() if x is not None]
        all_known = all(_known(m, inside.reads) for m in self.modules) and all(
            type(x) in _PLAIN for x in parameters
        )
        self.convolutions = [m for m in self.modules if isinstance(m, _CONVOLUTIONS)]
        self.padding_modes = list(map(_padding_mode, self.convolutions))
        pads = set(self.padding_modes) <= set(inside.padding_modes)
        self.bare = all_known and pads and not any(map(_shadowed, self.modules))
        self.weights = [x for x in parameters if x.is_floating_point()] if self.bare else []
        self.any_dtype = inside.any_dtype
        self.cached: dict[Any, Any] = {}

    def changed(self) -> bool:
        held = list(_everything(map(dict.values, self.dicts)))
        return (
            list(map(len, self.attributes)) != self.lengths
            or list(map(type, self.modules)) != self.classes
            or list(map(_padding_mode, self.convolutions)) != self.padding_modes
            or len(held) != len(self.held)
            or not all(map(operator.is_, held, self.held))
        )

    def fits(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether there are no hooks, and the weights are on the device of a call and in its dtype.

        Under autocast the dtype may differ: ops cast the weights.
        """
        if not self.bare or any(self.hooks):
            return False
        if list(map(_device, self.weights)).count(device) != len(self.weights):
            return False
        dtypes = list(map(_dtype, self.weights))
        if dtypes.count(dtype) == len(dtypes):
            return True
        wide = all(kind.itemsize > 1 for kind in dtypes)
        return wide and (self.any_dtype or autocasts(device.type))


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


def hooked(module: nn.Module) -> bool:
    """Whether a module has hooks, or a `forward` of its own."""
    return "forward" in vars(module) or any(_hooks(module))


def bare_layer(layer: Any, cls: type, x: Tensor) -> bool:
    """The rule for a single layer with a weight, of exactly this class, that is called with x."""
    if type(layer) is not cls or hooked(layer) or any(GLOBAL_HOOKS):
        return False
    weight = layer.weight
    return type(weight) in _PLAIN and weight.dtype is x.dtype and weight.device == x.device


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
    patch: Any = vars(type(module)).get("_turnout_patch")
    cls = type(module) if patch is None else patch.base
    return (
        cls in _CONTAINERS
        or cls in reads
        or (cls.__module__.startswith(_LIBRARIES) and cls.__qualname__ in reads)
    )


_LIBRARIES = ("diffusers.models.", "transformers.models.", "torch.nn.modules.")

"""Tensors without memory that claim to be on a card, to find out without one what a model's call would
launch.

A `TorchFunctionMode` intercepts torch's functions. Tensors on the meta device claim to be on a card, and
tensors that the program creates on the card, or moves there, are created on the meta device. So all code
takes the branches it takes on the card, and `launch.recording` lists the launches. There are no values: a
program that reads one is stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from turnout.routing.torch_private import TensorBase, storage_id

# No machine has this card: what anybody remembers by device is never taken for something real.
PRETENDED = torch.device("cuda", 127)
_META = torch.device("meta")
_CPU = torch.device("cpu")
_MOST_KNOWN = 2**16  # elements
_SPACING = (
    2**32
)  # bytes of address between two objects that lie one byte apart on the host: more than a card has


class NeedsValuesError(RuntimeError):
    """A program asked for the values of a tensor that has none."""


def twin(x: Tensor) -> Tensor:
    """A tensor without memory that replaces another one: the same sizes, strides, dtype and alignment."""
    offset = x.data_ptr() % 16 // x.element_size()
    if offset == 0:
        on_meta = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=_META)
    else:
        span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        on_meta = torch.empty(offset + span, dtype=x.dtype, device=_META).as_strided(
            x.shape, x.stride(), offset
        )
    if isinstance(x, nn.Parameter):
        return nn.Parameter(on_meta, requires_grad=x.requires_grad)
    return on_meta.requires_grad_(x.requires_grad)


def on_card(x: Tensor) -> Tensor:
    """A tensor as it passes for one on the card; small ones of integers have their values there."""
    small = _is_small(x) and not x.is_meta
    return _known(x.detach().to(_CPU, copy=True)) if small else twin(x)


class Pretended(TorchFunctionMode):
    """While this is entered, tensors on the meta device pass for tensors on `PRETENDED`, in this thread.

    Small tensors of integers whose values the program itself wrote down (positions, tokens, masks) keep them.

    >>> with Pretended():
    ...     x = torch.empty(4, device="cuda")
    ...     x.device.type, x.is_cuda, (x + 1).shape, torch.arange(3, device="cuda").tolist()
    ('cuda', True, torch.Size([4]), [0, 1, 2])
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        first = args[0] if args else None
        if isinstance(first, Tensor):
            answer = _PLACES.get(func) if first.is_meta or is_known(first) else None
            answer = _READS.get(func) if answer is None and first.is_meta else answer
            if answer is not None:
                return answer(first)
        named = dict(kwargs or {})
        if func is torch.device:
            return func(*args, **named)
        if func is Tensor.__deepcopy__ and isinstance(first, Tensor) and _is_real_on_card(first):
            return args[1].setdefault(id(first), on_card(first))  # no memory of the card is taken
        tensors = list(_tensors((*args, *named.values())))
        if func is Tensor.cuda:
            func, args, named = Tensor.to, (first, PRETENDED), {}
        to_card = _is_card(named.get("device")) or any(map(_is_place, args))
        to_card = to_card or (func is Tensor.to and any(map(_is_card, args[1:])))
        if any(x.is_meta for x in tensors):
            if func not in _INDEXES:
                args, named = _replaced((args, named), is_known, twin)
            result = func(*_on_meta(func, args), **_named_on_meta(named))
            if func in _CONVOLUTIONS:
                result = _as_cudnn_lays_out(result, *tensors[:2])
            return first if isinstance(first, Tensor) and is_known(first) and _writes(func) else result
        if to_card:
            on_meta = func(*_on_meta(func, args), **_named_on_meta(named))
            if not isinstance(on_meta, Tensor) or not _is_small(on_meta):
                return on_meta
            return _known(func(*_on_meta(func, args, _CPU), **_named_on_meta(named, _CPU)))
        result = func(*args, **named)
        return _replaced(result, _is_plain, _known) if any(map(is_known, tensors)) else result


def _as_cudnn_lays_out(y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """The output of a convolution: channels last where its input or its weight is. torch's meta kernel asks
    for the device to know, and knows nothing of 3d (2.13)."""
    last = _CHANNELS_LAST.get(y.dim())
    if last is None or not any(_suggests(t, last) for t in (x, weight)):
        return y
    return y.contiguous(memory_format=last)


def _suggests(x: Tensor, last: torch.memory_format) -> bool:
    """Whether torch takes a tensor for channels last.

    Where all orders are the same one, it is what the strides say.
    """
    if not x.is_contiguous(memory_format=last):
        return False
    return not x.is_contiguous() or (x.stride(1) == 1 and x.shape[1] > 1)


def _is_real_on_card(x: Tensor) -> bool:
    return not (x.is_meta or is_known(x) or x.is_cpu)


def is_known(x: Any) -> bool:
    """Whether a tensor passes for one on the card and has its values all the same."""
    return isinstance(x, Tensor) and hasattr(x, "_turnout_known")


def _known(x: Tensor) -> Tensor:
    if not _is_small(x):
        return twin(x)
    x._turnout_known = True  # pyright: ignore[reportAttributeAccessIssue]
    return x


def _is_small(x: Tensor) -> bool:
    return not x.is_floating_point() and not x.is_complex() and x.numel() <= _MOST_KNOWN


def _is_plain(x: Any) -> bool:
    return isinstance(x, Tensor) and not x.is_meta


def _writes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return func is Tensor.__setitem__ or (name.endswith("_") and not name.endswith("__"))


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among arguments, and those in lists and tuples."""
    for x in values:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, list | tuple):
            yield from _tensors(x)


def _replaced(value: Any, which: Callable[[Any], bool], by: Callable[[Any], Any]) -> Any:
    """Copies of lists, tuples and dicts with some of their items replaced."""
    if which(value):
        return by(value)
    if type(value) in (list, tuple) or hasattr(type(value), "n_fields"):  # what torch.sort returns has those
        return type(value)(_replaced(x, which, by) for x in value)
    if type(value) is dict:
        return {name: _replaced(x, which, by) for name, x in value.items()}
    return value


def _on_meta(func: Any, args: tuple, device: torch.device = _META) -> tuple:
    return tuple(
        device if _is_place(x) or (func is Tensor.to and i and _is_card(x)) else x for i, x in enumerate(args)
    )


def _named_on_meta(named: dict[str, Any], device: torch.device = _META) -> dict[str, Any]:
    if not _is_card(named.get("device")):
        return named
    return {**{name: x for name, x in named.items() if name != "generator"}, "device": device}


def _is_place(x: Any) -> bool:
    return isinstance(x, torch.device) and x.type == "cuda"


def _is_card(device: Any) -> bool:
    """Whether an argument names a card: a `torch.device`, "cuda:0", or its number."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.split(":")[0] == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def _address(x: Tensor) -> int:
    """An address of its own for each storage, aligned as an allocator's are."""
    return storage_id(x) * _SPACING + int(x.storage_offset()) * x.element_size() if x.numel() else 0


def _no_values(name: str) -> Callable[[Tensor], Any]:
    def stop(x: Tensor) -> Any:
        raise NeedsValuesError(
            f"`{name}` of a tensor {list(x.shape)} on the card: its values are not known ahead"
        )

    return stop


def _getter(name: str) -> Any:
    """What torch hands to a mode where an attribute is looked up."""
    return vars(TensorBase)[name].__get__


_PLACES: dict[Any, Callable[[Tensor], Any]] = {
    _getter("device"): lambda x: PRETENDED,
    _getter("is_cuda"): lambda x: True,
    _getter("is_cpu"): lambda x: False,
    Tensor.get_device: lambda x: PRETENDED.index,
    Tensor.data_ptr: _address,
}
_READS: dict[Any, Callable[[Tensor], Any]] = {
    getattr(Tensor, name): _no_values(name.strip("_"))
    for name in (
        "item",
        "tolist",
        "numpy",
        "cpu",
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "__array__",
    )
}
_INDEXES = {Tensor.__getitem__, Tensor.__setitem__}  # by tensors on the host too
_CONVOLUTIONS = {torch.conv2d, torch.conv3d}
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}

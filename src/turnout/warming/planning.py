"""Find every launch of a call without running it: the model and its arguments are copied to where they have
no memory.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from turnout.launch.ahead import Spec, specs_of
from turnout.launch.pretended import NeedsValuesError, Pretended, on_card
from turnout.launch.recording import Launch, recorded
from turnout.routing.device import Device, planning_calls
from turnout.routing.fallback import PLAIN_TENSORS
from turnout.routing.functions import is_filled, names_in
from turnout.routing.torch_private import is_compiled

Prepare = Callable[[nn.Module], object]


@contextlib.contextmanager
def planning(device: Device) -> Iterator[list[Launch]]:
    """While this is entered, this thread's tensors on "cuda" have no memory, and its launches are listed.

    Raises NeedsValuesError for a program that looks at a value: nobody knows what it would do next.
    """
    with contextlib.ExitStack() as entered:
        if not torch.cuda.is_available():  # then nobody else asks
            capability = mock.Mock(return_value=device.capability)
            entered.enter_context(mock.patch.object(torch.cuda, "get_device_capability", capability))
        entered.enter_context(Pretended())
        launches = entered.enter_context(recorded(device))
        entered.enter_context(planning_calls())
        try:
            yield launches
        except NotImplementedError as failure:  # of torch's meta kernels: the result's size is in the values
            message = str(failure).split("\n")[0]
            raise NeedsValuesError(
                f"the call reads values of tensors, which are not known ahead ({message})"
            ) from failure


def specs_of_call(
    call: Callable[..., Any], args: tuple, kwargs: dict[str, Any], device: Device, prepare: Prepare
) -> list[Spec]:
    """What `call(*args, **kwargs)` would launch on a device, each once. Nothing that is handed in changes.

    call: a model, a method of one, or a function that uses some. Models are copied, as they are;
    `prepare` is called with each copy.
    """
    with planning(device) as launches:
        moved: dict[int, Any] = {}
        run = _moved_call(call, moved, prepare)
        arguments = _moved(args, moved, prepare), _moved(kwargs, moved, prepare)
        models = [x for x in moved.values() if isinstance(x, nn.Module)]
        if not models:
            raise TypeError(
                f"{call!r} is no model, no method of one, and uses none by name; give turnout.warm the model"
            )
        if any(is_compiled(module) for model in models for module in model.modules()):
            raise ValueError(
                "a model that torch.compile has compiled cannot be planned; give turnout.warm the model that "
                "was compiled (kernels that torch.compile makes itself are compiled on the first call)"
            )
        run(*arguments[0], **arguments[1])
        return specs_of(launches)


def _moved_call(call: Any, moved: dict[int, Any], prepare: Prepare) -> Any:
    """Copy a callable with the models it uses: its own, those of its closure, its defaults, its globals, and
    of the functions that it finds there."""
    if isinstance(call, functools.partial):
        keywords = _moved(call.keywords, moved, prepare)
        return functools.partial(
            _moved_call(call.func, moved, prepare), *_moved(call.args, moved, prepare), **keywords
        )
    if isinstance(call, types.MethodType):
        return getattr(
            _moved(call.__self__, moved, prepare), call.__func__.__name__
        )  # the adapter's, where there is one
    return _moved(call, moved, prepare)


def _moved_function(function: types.FunctionType, moved: dict[int, Any], prepare: Prepare) -> Any:
    """Copy a function that uses models; one that uses none is returned as it is."""
    if not _leads_to_models(function):
        return function
    scope, cells = function.__globals__, function.__closure__ or ()
    names, variables = dict(scope), tuple(types.CellType() for _ in cells)
    twin = types.FunctionType(function.__code__, names, function.__name__, None, variables)
    moved[id(function)] = twin  # it may call itself
    for name in names_in(function.__code__) & scope.keys():
        if _leads_to_models(scope[name]):
            names[name] = _moved(scope[name], moved, prepare)
    for cell, variable in zip(cells, variables, strict=True):
        if is_filled(cell):
            variable.cell_contents = _moved(cell.cell_contents, moved, prepare)
    twin.__defaults__ = _moved(function.__defaults__, moved, prepare)
    twin.__kwdefaults__ = _moved(function.__kwdefaults__, moved, prepare)
    return twin


def _content(cell: types.CellType) -> Any:
    return cell.cell_contents if is_filled(cell) else None


def _leads_to_models(value: Any) -> bool:
    """Whether a call that finds this value may find a model or a tensor by it."""
    pending, seen = [value], set[int]()
    while pending and len(seen) < _MOST_SEEN:
        each = pending.pop()
        if isinstance(each, nn.Module | Tensor):
            return True
        if id(each) not in seen:
            seen.add(id(each))
            pending += _inside(each)
    return False


def _inside(value: Any) -> Iterator[Any]:
    """What a container, a function or an object holds, or finds by name."""
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list | tuple):
        yield from value
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.MethodType):
        yield value.__self__
    elif isinstance(value, types.FunctionType):
        if (value.__module__ or "").partition(".")[0] not in _OTHERS:
            yield from (value.__globals__.get(name) for name in names_in(value.__code__))
            yield from map(_content, value.__closure__ or ())
            yield from (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    elif _holds_state(value):
        yield from vars(value).values()


_MOST_SEEN = 10_000  # functions, containers and objects
_OTHERS = {"diffusers", "transformers", "turnout"}  # whose functions use no model of a program


def _moved(value: Any, moved: dict[int, Any], prepare: Prepare) -> Any:
    """A value with its models and tensors where they have no memory."""
    if id(value) in moved:
        return moved[id(value)]
    if isinstance(value, nn.Module):
        return _moved_model(value, moved, prepare)
    if isinstance(value, Tensor):
        return moved.setdefault(id(value), _moved_tensor(value))
    if type(value) in (list, tuple):
        return type(value)(_moved(x, moved, prepare) for x in value)
    if type(value) is dict:
        return {name: _moved(x, moved, prepare) for name, x in value.items()}
    if isinstance(value, types.FunctionType):
        return _moved_function(value, moved, prepare)
    if isinstance(value, functools.partial | types.MethodType):
        return _moved_call(value, moved, prepare) if _leads_to_models(value) else value
    if not _holds_state(value):
        return value
    for part in list(_parts_of(value)):
        _moved(part, moved, prepare)
    return copy.deepcopy(value, moved)


def _holds_state(value: Any) -> bool:
    """Whether a call may write to a value that is no tensor and no container: a cache of keys and values."""
    stateless = (type, types.FunctionType, types.MethodType, types.ModuleType, functools.partial)
    return isinstance(getattr(value, "__dict__", None), dict) and not isinstance(
        value, (*stateless, torch.Generator)
    )


def _parts_of(value: Any) -> Iterator[Tensor | nn.Module]:
    """The tensors and models that an object holds, or others that it holds do."""
    pending, seen = [value], set[int]()
    while pending:
        each = pending.pop()
        if isinstance(each, Tensor | nn.Module):
            yield each
        elif each is value or (id(each) not in seen and not callable(each)):
            seen.add(id(each))
            pending += _inside(each)


def _moved_tensor(x: Tensor) -> Tensor:
    if type(x) not in PLAIN_TENSORS:
        raise ValueError(
            f"a tensor of class {type(x).__name__} cannot be planned with, only plain tensors can"
        )
    return on_card(x)


def _moved_model(model: nn.Module, moved: dict[int, Any], prepare: Prepare) -> nn.Module:
    for module in model.modules():
        held = [*module._parameters.values(), *module._buffers.values()]
        beside = [x for x in vars(module).values() if isinstance(x, Tensor) and not x.is_cpu]
        moved.update(
            {id(x): _moved_tensor(x) for x in (*held, *beside) if x is not None and id(x) not in moved}
        )
    moved_model = copy.deepcopy(model, moved)
    prepare(moved_model)
    return moved_model

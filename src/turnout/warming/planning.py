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
        if not any(isinstance(x, nn.Module) for x in moved.values()):
            raise TypeError(
                f"{call!r} is no model, no method of one, and uses none by name; give turnout.warm the model"
            )
        run(*_moved(args, moved, prepare), **_moved(kwargs, moved, prepare))
        return specs_of(launches)


def _moved_call(call: Any, moved: dict[int, Any], prepare: Prepare) -> Any:
    """Copy a callable with the models it uses: its own, those of its closure, its defaults, its globals."""
    if isinstance(call, functools.partial):
        keywords = _moved(call.keywords, moved, prepare)
        return functools.partial(
            _moved_call(call.func, moved, prepare), *_moved(call.args, moved, prepare), **keywords
        )
    if isinstance(call, types.MethodType):
        return getattr(
            _moved(call.__self__, moved, prepare), call.__func__.__name__
        )  # the adapter's, where there is one
    if isinstance(call, types.FunctionType):
        used = {name: call.__globals__[name] for name in call.__code__.co_names if name in call.__globals__}
        models = {name: value for name, value in used.items() if isinstance(value, nn.Module | Tensor)}
        cells = tuple(
            types.CellType(_moved(cell.cell_contents, moved, prepare)) for cell in call.__closure__ or ()
        )
        names = {**call.__globals__, **_moved(models, moved, prepare)}
        function = types.FunctionType(
            call.__code__, names, call.__name__, _moved(call.__defaults__, moved, prepare), cells or None
        )
        function.__kwdefaults__ = _moved(call.__kwdefaults__, moved, prepare)
        return function
    return _moved(call, moved, prepare)


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
    if not _holds_state(value):
        return value
    moved.update({id(x): _moved_tensor(x) for x in _tensors_in(value, set()) if id(x) not in moved})
    return copy.deepcopy(value, moved)


def _holds_state(value: Any) -> bool:
    """Whether a call may write to a value that is no tensor and no container: a cache of keys and values."""
    return isinstance(getattr(value, "__dict__", None), dict) and not (
        callable(value) or isinstance(value, types.ModuleType | torch.Generator)
    )


def _tensors_in(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """The tensors that an object holds, or others that it holds do."""
    if isinstance(value, Tensor):
        yield value
    elif id(value) not in seen:
        seen.add(id(value))
        inside = (
            value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        )
        for x in (*inside, *(vars(value).values() if _holds_state(value) else ())):
            yield from _tensors_in(x, seen)


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

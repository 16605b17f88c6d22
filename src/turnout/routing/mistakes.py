"""Name the argument of a call that is of the wrong kind: a NumPy array, a list, None, a module.

Nothing is checked before a call, which would take time. Where a call has failed, `raise_clearer` looks
for the argument that explains it.
"""

from __future__ import annotations

import inspect
import operator
import typing
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import torch
from torch import Tensor

# What an argument of the wrong kind raises where nobody has asked for its kind.
UNCLEAR = (AttributeError, TypeError, IndexError, ValueError, RuntimeError, AssertionError)
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_WORDS = {
    Tensor: "a Tensor",
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "a text",
    NoneType: "None",
}


def raise_clearer(
    call: str,
    function: Callable[..., Any],
    given: Iterable[tuple[str, Any]],
    failure: Exception | None = None,
) -> None:
    """Raise an error that names the first argument that is of the wrong kind; return where all are right.

    given: names and values of arguments. function: its annotations tell what each needs to be. failure: what
    the call has raised.

    >>> def double(x: Tensor, times: int) -> Tensor: ...
    >>> raise_clearer("double", double, [("x", [1.0]), ("times", 2)], AttributeError("no dim"))
    Traceback (most recent call last):
    TypeError: double: x is [1.0], it needs to be a Tensor: torch.tensor(x)
    """
    hints = typing.get_type_hints(function)
    arguments = dict(given)
    for name, value in arguments.items():
        if not _fits(value, hints.get(name, Any)):
            wants_tensor = Tensor in (hints[name], *get_args(hints[name]))
            if isinstance(failure, ValueError) and name in str(failure) and not wants_tensor:
                return  # it says already which values are accepted
            needed = " or ".join(dict.fromkeys(_words(hints[name])))
            hint = _hint(name, value) if hints[name] in (Tensor, Tensor | None) else ""
            message = f"{call}: {name} is {_described(value)}, it needs to be {needed}{hint}"
            raise TypeError(message) from failure
    for name, value in arguments.items():
        problem = _undense(value) if isinstance(value, Tensor) else None
        if problem is not None and failure is not None:
            raise type(failure)(f"{call}: {name} is {problem}") from failure


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of the kind of an annotation; of one that is not understood, every value is."""
    if get_origin(hint) in (Union, UnionType):
        return any(_fits(value, each) for each in get_args(hint))
    if hint is Tensor:
        return isinstance(value, Tensor)
    if hint is NoneType:
        return value is None
    if hint is str:
        return isinstance(value, str)
    if isinstance(value, _SYMBOLS):
        return hint in (int, float, bool)
    if hint is float:
        return isinstance(value, Real) or (isinstance(value, Tensor) and value.dim() == 0)
    if hint in (int, bool):
        return is_index(value) or (hint is bool and type(value).__name__ in ("bool", "bool_"))
    if get_origin(hint) in (list, Sequence):
        is_list = isinstance(value, Sequence) or getattr(value, "ndim", 0) > 0  # NumPy's and torch's too
        return is_list and not isinstance(value, str) and all(_fits(each, *get_args(hint)) for each in value)
    return True


def is_index(value: Any) -> bool:
    """Whether a value is a whole number: Python's, NumPy's, or a tensor of one."""
    try:
        operator.index(value)
    except (TypeError, RuntimeError, ValueError):
        return False
    return True


def _words(hint: Any) -> list[str]:
    """An annotation in words, each of a union by itself."""
    if get_origin(hint) in (Union, UnionType):
        return [word for each in get_args(hint) for word in _words(each)]
    if get_origin(hint) in (list, Sequence):
        inner = _words(get_args(hint)[0])[0].removeprefix("a ")
        return [f"a list of {'lists' + inner.removeprefix('list') if inner[:4] == 'list' else inner + 's'}"]
    return [_WORDS.get(hint, inspect.formatannotation(hint))]


def _described(value: Any) -> str:
    """What a value is, in a few words."""
    if value is None or isinstance(value, (bool, int, float, str, complex)):
        return repr(value)[:60]
    if isinstance(value, (list, tuple)) and not any(isinstance(each, Tensor) for each in value):
        text = repr(value)
        return text if len(text) <= 60 else f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, Tensor):
        return f"a Tensor {list(value.shape)}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    kind = type(value)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _hint(name: str, value: Any) -> str:
    """How a value becomes a tensor."""
    if type(value).__name__ == "ndarray":
        return f": torch.from_numpy({name})"
    if isinstance(value, torch.nn.Module):
        return f": its weight, say {name}.weight"
    return f": torch.tensor({name})" if isinstance(value, (list, tuple, int, float)) else ""


def _undense(x: Tensor) -> str | None:
    """What keeps a tensor from having strides, and what to do; None for a dense one."""
    if x.is_nested:
        return "a nested tensor, it needs to be dense: torch.nested.to_padded_tensor"
    if x.is_quantized:
        return (
            f"quantized ({str(x.dtype).removeprefix('torch.')}), it needs to be floating-point: dequantize()"
        )
    if x.layout is not torch.strided:
        return f"{str(x.layout).removeprefix('torch.').strip('_')}, it needs to be dense: to_dense()"
    return None

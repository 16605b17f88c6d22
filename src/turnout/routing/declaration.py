"""Check what ops, routes and public functions are declared with, so that a mistake is told where it is made.

What a guard, a cost or `configs` returns is known only when a call is dispatched. It is checked there, and
the error names the function that is wrong.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import keyword
import math
import operator
import re
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from pathlib import Path
from types import FunctionType, NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Union, get_args, get_origin

import torch
from torch import Tensor

from turnout.routing.choose import REFERENCE
from turnout.routing.mistakes import is_index
from turnout.routing.names import not_known
from turnout.routing.settings import LEVELS

if TYPE_CHECKING:
    from turnout.routing.op import Op
    from turnout.routing.route import Route

AUTOCAST = ("cast", "ignore", "reference")
_NAME = re.compile(r"[^\s,=]+")  # TURNOUT_PIN has commas and equal signs between names
_VALUES = (bool, int, float, str)
_END: Any = object()


class Argument(NamedTuple):
    """What an argument of a reference is, and whether it may be None. kind: None for what no op can take."""

    kind: Literal["tensor", "list", "value"] | None
    optional: bool


def checked_route(op: Op, route: Route) -> Route:
    """The route, with functions whose answers are checked. Raises TypeError or ValueError if the op cannot
    have it.
    """
    label = f"route {route.name!r} of {op.name}"
    if not isinstance(route.name, str) or not _NAME.fullmatch(route.name):
        raise ValueError(f"{label}: its name needs to be a text without spaces, commas and equal signs")
    if route.name in op.routes or route.name == REFERENCE:
        raise ValueError(f"op {op.name} has a route {route.name!r} already")
    names = _check_function(op, route, label)
    for field in ("refuses", "cost", "configs"):
        _check_takes(f"{label}: {field}", getattr(route, field), "problem", "device")
    if not isinstance(route.grain, tuple) or not hasattr(route.grain, "along"):
        raise TypeError(f"{label}: grain is {route.grain!r}, it needs to be a turnout.routing.route.Grain")
    if route.prepare is not None:
        _check_takes(f"{label}: prepare", route.prepare, "prepared", "args")
    if type(route.version) is not int or route.version < 1:
        raise ValueError(f"{label}: version {route.version!r}, it needs to be a whole number from 1 up")
    if route.numerics not in LEVELS:
        raise ValueError(f"{label}: {not_known('numerics', route.numerics, LEVELS)}")
    _check_names(f"{label}: kernels", route.kernels)
    for kernel in route.kernels:
        _check_kernel(label, kernel)
    _check_names(f"{label}: in_place", route.in_place)
    if not op.mutates and (route.in_place or route.fails_before_writing):
        raise TypeError(f"{label}: in_place and fails_before_writing need an op that writes (mutates=)")
    if not set(route.in_place) <= set(op.signature.parameters) - set(op.mutates):
        raise TypeError(
            f"{label}: in_place {list(route.in_place)} needs to name arguments that are only read"
        )
    return replace(
        route,
        refuses=checked_guard(label, route.refuses),
        cost=checked_cost(label, route.cost),
        configs=checked_configs(label, names, route.configs),
        kernels=tuple(route.kernels),
        in_place=tuple(route.in_place),
    )


def _check_function(op: Op, route: Route, label: str) -> list[str]:
    """The names of a route's configuration. Raises TypeError unless its function takes the reference's
    arguments, and configuration by keyword.
    """
    parameters = list(signature_of(label, route.run).parameters.values())
    wanted = list(op.signature.parameters)
    if [p.name for p in parameters[: len(wanted)]] != wanted or any(
        p.kind is not p.POSITIONAL_OR_KEYWORD for p in parameters[: len(wanted)]
    ):
        raise TypeError(f"{label} takes {_shown(route.run)}, it needs the reference's {_shown(op.reference)}")
    extra = parameters[len(wanted) :]
    if any(p.kind is not p.KEYWORD_ONLY or p.default is p.empty for p in extra):
        raise TypeError(
            f"{label}: configuration ({', '.join(map(str, extra))}) must be keyword-only with defaults"
        )
    return [p.name for p in extra]


def _check_names(label: str, names: Any) -> None:
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{label} is {names!r}, it needs to be a tuple of texts, such as ('{names}',)")


def _check_kernel(label: str, kernel: str) -> None:
    """Raise unless a kernel is named as "package.module:function", in a module that is there.

    The module is not imported, as that would import Triton.
    """
    module, colon, function = kernel.partition(":")
    if not (colon and function.isidentifier()):
        raise ValueError(f'{label}: kernel {kernel!r}, it needs to be "package.module:function"')
    defined = _defined_in(module)
    if defined is None:
        raise ValueError(f"{label}: kernel {kernel!r}: there is no module {module} with Python code")
    if function not in defined:
        raise ValueError(f"{label}: kernel {kernel!r}: {module} does not define {function}")


@functools.cache
def _defined_in(module: str) -> frozenset[str] | None:
    """The names that a module's code defines at its top level; None if there is no such code."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # its package is missing, or no package
        return None
    if spec is None or not (spec.origin or "").endswith(".py"):
        return None
    text = Path(spec.origin or "").read_text(encoding="utf-8")
    return frozenset(re.findall(r"^(?:def |class )?(\w+)(?= *[(:=])", text, re.MULTILINE))


def _check_takes(label: str, function: Any, *names: str) -> None:
    """Raise TypeError unless a function may be called with as many arguments by position."""
    if type(function) is FunctionType:
        code = function.__code__
        if code.co_argcount == len(names) and not code.co_kwonlyargcount:
            return  # most are so, and asking for a signature takes 20 us
    try:
        signature_of(label, function).bind(*names)
    except TypeError as mistake:
        if not callable(function):
            raise
        raise TypeError(f"{label} needs to take ({', '.join(names)}): {mistake}") from mistake


def signature_of(label: str, function: Any) -> inspect.Signature:
    """The signature of a function. Raises TypeError if it is none; `label` names it."""
    if not callable(function):
        raise TypeError(f"{label} is {function!r}, it needs to be a function")
    try:
        return inspect.signature(function)
    except ValueError as mistake:  # of C, without a signature
        raise TypeError(
            f"{label} is {function!r}, whose arguments are not known: wrap it in a def"
        ) from mistake


def _shown(function: Callable[..., Any]) -> str:
    """A signature without the quotes of annotations that are text."""
    return str(inspect.signature(function)).replace("'", "")


# ---- what a route's functions return


def checked_guard(route: str, refuses: Callable[..., Any]) -> Callable[..., Iterator[str]]:
    """A guard whose answer is checked: an iterable of reasons in words, none of them empty."""

    def whose() -> str:
        return f"the guard of {route} ({place(refuses)})"

    @functools.wraps(refuses)
    def reasons(problem: Any, device: Any) -> Iterator[str]:
        with_whose = functools.partial(_raised_by, whose)
        answer = with_whose(refuses, problem, device)
        if isinstance(answer, str) or not isinstance(answer, Iterable):
            raise TypeError(f"{whose()} returned {answer!r}, it needs to yield reasons")
        remaining = iter(answer)
        while (reason := with_whose(next, remaining, _END)) is not _END:
            if not isinstance(reason, str) or not reason:
                needed = "a reason is a text: '<fact>, this route needs <limit>'"
                raise TypeError(f"{whose()} yielded {reason!r}, {needed}")
            yield reason

    return reasons


def checked_cost(whose: str, cost: Callable[..., Any]) -> Callable[..., float | None]:
    """A cost whose answer is checked: seconds, finite and not negative, or None."""

    def whose_cost() -> str:
        return f"the cost of {whose} ({place(cost)})"

    @functools.wraps(cost)
    def seconds(problem: Any, device: Any) -> float | None:
        answer = _raised_by(whose_cost, cost, problem, device)
        if answer is None:
            return None
        if isinstance(answer, Real) and 0 <= float(answer) < math.inf:
            return float(answer)
        needed = "it needs to be a number of seconds from 0 up, or None where you cannot say"
        raise ValueError(f"{whose_cost()} is {answer!r} for {problem}, {needed}")

    return seconds


def _raised_by(whose: Callable[[], str], function: Callable[..., Any], *args: Any) -> Any:
    """Call a function; what it raises says whose it is (in Python 3.11)."""
    try:
        return function(*args)
    except Exception as failure:
        getattr(failure, "add_note", str)(f"raised by {whose()}")
        raise


def checked_configs(
    route: str, names: Collection[str], configs: Callable[..., Any]
) -> Callable[..., Sequence[dict[str, Any]]]:
    """A route's `configs` whose answer is checked: configurations of the names that its function takes."""

    def whose() -> str:
        return f"configs of {route} ({place(configs)})"

    @functools.wraps(configs)
    def offered(problem: Any, device: Any) -> Sequence[dict[str, Any]]:
        answer = _raised_by(whose, configs, problem, device)
        if isinstance(answer, (str, Mapping)) or not isinstance(answer, Iterable):
            raise TypeError(f"{whose()} returned {answer!r}, it needs to return a list of dicts")
        listed = tuple(answer)
        if not listed:
            needed = "it needs one at least: a guard refuses what no configuration fits"
            raise TypeError(f"{whose()} returned nothing, {needed}")
        for config in listed:
            if not isinstance(config, dict) or not config.keys() <= set(names):
                takes = f"the route's function takes {', '.join(sorted(names)) or 'no configuration'}"
                raise TypeError(f"{whose()} returned {config!r}, it needs dicts of names and values: {takes}")
            if not all(isinstance(value, _VALUES) for value in config.values()):
                needed = "values need to be numbers, texts, True or False"
                raise TypeError(f"{whose()} returned {config!r}, {needed}")
        return listed

    return offered


def place(function: Any) -> str:
    """Where a function stands: "in_float32.refuses"."""
    named = getattr(function, "func", function)  # of a partial
    return f"{getattr(named, '__module__', '')}.{getattr(named, '__qualname__', named)}"


# ---- ops


def check_op(op: Op, taken: Iterable[str]) -> None:
    """Raise TypeError or ValueError if an op cannot be declared so. taken: the names of other ops."""
    name, label = op.name, f"op {op.name!r}"
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"{label}: its name needs to be one that a function may have")
    if name in taken:
        raise ValueError(
            f"there is an op {name!r} already; give this one another name, or start Python anew to declare "
            "it again"
        )
    parameters = list(op.signature.parameters.values())
    shown = f"{label}: its reference takes {_shown(op.reference)}"
    if not parameters:
        raise TypeError(f"{shown}, it needs a tensor")
    if any(p.kind is not p.POSITIONAL_OR_KEYWORD or p.default is not p.empty for p in parameters):
        raise TypeError(f"{shown}, it needs arguments that may be given by position, without defaults")
    arguments = arguments_of(op.reference)
    for each, argument in arguments.items():
        if argument.kind is None:
            raise TypeError(
                f"{shown}: {each} needs an annotation, one of Tensor, int, float, bool, str, "
                "list[int], list[float], list[bool]; or one of these | None"
            )
    if next(iter(arguments.values())) != ("tensor", False):
        raise TypeError(f"{shown}; the first needs to be a Tensor, whose device is that of the call")
    _check_return(op, shown)
    for field in ("cost", "work"):
        _check_takes(f"{label}: {field}", getattr(op, field), *("problem", "device")[: 1 + (field == "cost")])
    _check_problem_type(op, label)
    _check_names(f"{label}: mutates", op.mutates)
    unknown = [each for each in op.mutates if arguments.get(each, (None,))[0] != "tensor"]
    if unknown:
        raise ValueError(f"{shown}; mutates names {unknown[0]!r}, which is no tensor among these")
    if op.autocast not in AUTOCAST:
        raise ValueError(f"{label}: {not_known('autocast', op.autocast, AUTOCAST)}")


def _check_return(op: Op, shown: str) -> None:
    """Raise unless the reference returns a tensor, several in a tuple, or nothing where it writes."""
    hint = _hints(op.reference).get("return", inspect.Signature.empty)
    if not (hint is Tensor or returns_several(op.reference) or (hint is NoneType and op.mutates)):
        raise TypeError(
            f"{shown}; its return annotation needs to be Tensor, or tuple[Tensor, Tensor] and so on"
        )


@functools.cache
def _hints(reference: Callable[..., Any]) -> dict[str, Any]:
    """The types of a reference's arguments and of what it returns."""
    try:
        return typing.get_type_hints(reference)
    except NameError as mistake:
        raise TypeError(
            f"the reference {place(reference)}: {mistake}; its annotations need to be names of its module"
        ) from mistake


def returns_several(reference: Callable[..., Any]) -> bool:
    """Whether a reference returns a tuple of tensors."""
    hint = _hints(reference).get("return")
    return get_origin(hint) is tuple and set(get_args(hint)) == {Tensor}


def _check_problem_type(op: Op, label: str) -> None:
    kind = op.problem_type
    if not (isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")):
        raise TypeError(f"{label}: problem_type is {kind!r}, it needs to be a NamedTuple")
    of = inspect.getattr_static(kind, "of", None)
    if not isinstance(of, (classmethod, staticmethod)):
        raise TypeError(
            f"{label}: {kind.__name__} needs a classmethod `of`, which makes one of the reference's arguments"
        )
    _check_takes(f"{label}: {kind.__name__}.of", op.problem_type.of, *op.signature.parameters)


def checked_problem(op: Op) -> Callable[..., Any]:
    """The function that makes a problem of the reference's arguments; its answer is checked.

    Numbers of other libraries, such as `numpy.int64`, become Python's.
    """
    of, kind = op.problem_type.of, op.problem_type

    @functools.wraps(of)
    def problem(*args: Any) -> Any:
        made = of(*args)
        if not hasattr(made, "_fields"):
            wrong = f"{place(of)} of op {op.name!r} returned {made!r}"
            raise TypeError(f"{wrong}, it needs to return a {kind.__name__}")
        if _is_plain(made):
            return made
        values = {name: _made_plain(value) for name, value in zip(made._fields, made, strict=True)}
        wrong = next((name for name, value in values.items() if not _is_plain(value)), None)
        if wrong is not None:
            raise TypeError(
                f"op {op.name!r}: field {wrong} of {kind.__name__} is {getattr(made, wrong)!r}; fields "
                "need to be numbers, texts, dtypes, None, or tuples of these: choices are remembered by them"
            )
        return made._replace(**values)

    return problem


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (*_VALUES, torch.dtype))


def _made_plain(value: Any) -> Any:
    """A number of another library as Python's; anything else as it is."""
    if isinstance(value, tuple) and not _is_plain(value):
        parts = map(_made_plain, value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, (*_VALUES, torch.dtype, tuple)) or value is None:
        return value
    if is_index(value):
        return operator.index(value)
    if isinstance(value, Real):
        return float(value)
    return bool(value) if type(value).__name__ in ("bool", "bool_") else value


def arguments_of(reference: Callable[..., Any]) -> dict[str, Argument]:
    """What each argument of a reference is.

    >>> def pad(x: Tensor, sizes: list[int], mode: str | None, more: dict) -> Tensor: ...
    >>> arguments_of(pad)["mode"], arguments_of(pad)["more"].kind
    (Argument(kind='value', optional=True), None)
    """
    names = list(inspect.signature(reference).parameters)
    return {name: _argument(_hints(reference).get(name)) for name in names}


def _argument(hint: Any) -> Argument:
    inner = [each for each in get_args(hint) if each is not NoneType]
    optional = get_origin(hint) in (Union, UnionType) and NoneType in get_args(hint)
    if optional:
        hint = inner[0] if len(inner) == 1 else None
    if hint is Tensor:
        return Argument("tensor", optional)
    if hint in _VALUES:
        return Argument("value", optional)
    if get_origin(hint) in (list, Sequence) and get_args(hint)[0] in _VALUES[:3]:
        return Argument("list", optional)
    return Argument(None, optional)

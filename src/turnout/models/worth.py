"""Which calls of a routed layer are torch's own, because no route is worth its host time there.

Asking the router takes `ASKING_US` of host time per call, whatever the answer. Where a route gains less than
that, by the estimates and measured times that choose routes, the layer runs torch's own function, now and for
all later calls like this one. Looking that up takes one comparison, and reading parameters faster than
torch's layer does (`layers`) makes up for it. Nothing is measured at run time.

A cached answer can be wrong in one way only: torch runs where a route would have been faster. Answers are
dropped with the dispatch caches: when a table changes, a route fails, or calls are watched.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from turnout.models.bare import has_function_mode_of_others
from turnout.routing import settings
from turnout.routing.choose import REFERENCE, Verdict
from turnout.routing.fallback import autocasting, blocked, tracing_state
from turnout.routing.op import Op, is_watching
from turnout.routing.public import lower
from turnout.routing.torch_private import in_function_mode

# us that a host takes more than for torch's own function, to ask the router and be told "the reference":
# convolutions 3.2, group norms 2.6. By benchmarks/layers.py, 2-core Xeon at 2.8 GHz, torch 2.13, Python 3.11.
ASKING_US = 3.2

_MOST = 16  # kinds of calls that a layer remembers

_WORTH = (
    "worth",
)  # under this an op's dispatch cache holds a mark, as long as what was learned of the op holds
_PLAIN = (Tensor, nn.Parameter)
_entered, _grad_enabled = settings.entered.get, torch.is_grad_enabled


class _Learned:
    """The kinds of calls of one layer that torch takes, and those that take a route."""

    def __init__(self, layer: Any, op: Op):
        gone = id(layer)
        self.layer = weakref.ref(layer, lambda _: _learned.pop(gone, None))
        self.torchs: list[tuple] = []
        self.routed: list[tuple] = []
        self.mark = op.dispatch_cache.setdefault(_WORTH, object())  # pyright: ignore[reportArgumentType, reportCallIssue]
        self.call = op.call  # whoever watches the calls of an op puts another one there


_learned: dict[int, _Learned] = {}
_answers: dict[tuple, bool] = {}  # whether calls of any layer pay
_MOST_ANSWERS = 4096


def _kind(x: Tensor) -> tuple:
    settings = (_grad_enabled(), autocasting(), in_function_mode(), _entered())
    return (x.shape, x.dtype, x.stride(), x.get_device(), *settings)


def is_torch(layer: Any, op: Op, x: Any) -> bool | None:
    """Whether torch takes a layer's call with x; None where that is not known. Not for compiled graphs."""
    learned = _learned.get(id(layer))
    if learned is None or type(x) not in _PLAIN:
        return None
    kind = (
        x.shape, x.dtype, x.stride(), x.get_device(),
        _grad_enabled(), autocasting(), in_function_mode(), _entered(),
    )  # fmt: skip
    is_torchs = True if kind in learned.torchs else False if kind in learned.routed else None
    return is_torchs if op.dispatch_cache.get(_WORTH) is learned.mark and op.call is learned.call else None


def learn(layer: Any, function: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether a call of a layer that looks like none before, `function(x, *args, **kwargs)`, is torch's; if
    so, that is remembered. False also where it cannot be told: the function then does what is right."""
    if type(x) not in _PLAIN or tracing_state() is not None or x.device.type not in ("cpu", "cuda"):
        return False
    if in_function_mode() and has_function_mode_of_others():  # it may want to see torch's call
        return True
    if is_watching():  # `tune(during=)` measures the calls that reach ops
        return False
    try:
        op, lowered = lower(function, x, *args, **kwargs)
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return False  # the function says what is wrong with its arguments
    if blocked(lowered, False) is not None or op.failed.next_try(op.key(lowered)) is not None:
        return False
    split = settings.splitting()
    try:
        pays = _pays(op, lowered) if split is None else gains(split.verdict(op, lowered))
    except (ValueError, NotImplementedError):  # of a call that no rank can make
        return False
    remember(layer, op, _kind(x), routed=pays)
    return not pays


def knows_call(layer: Any, op: Op, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether it is cached for a layer that torch takes such calls."""
    learned = _learned.get(id(layer))
    return (
        learned is not None
        and op.dispatch_cache.get(_WORTH) is learned.mark  # pyright: ignore[reportArgumentType, reportCallIssue]
        and op.call is learned.call
        and kind_of_call(args, kwargs) in learned.torchs
    )


def remember(layer: Any, op: Op, kind: tuple, *, routed: bool = False) -> None:
    """Cache for a layer whether torch takes such calls."""
    learned = _learned.get(id(layer))
    if learned is None or learned.mark is not op.dispatch_cache.get(_WORTH) or learned.call is not op.call:  # pyright: ignore[reportArgumentType, reportCallIssue]
        learned = _learned[id(layer)] = _Learned(layer, op)
    if routed:
        learned.routed = [kind, *learned.routed[: _MOST - 1]]
    else:
        learned.torchs = [kind, *learned.torchs[: _MOST - 1]]


def kind_of_call(args: tuple, kwargs: dict[str, Any]) -> tuple:
    """What the choices inside a layer follow from, nearly: the shapes of tensors, and which arguments there
    are.
    """
    kind: list[Any] = [_grad_enabled(), autocasting(), in_function_mode(), _entered(), *kwargs]
    first = None
    for x in (*args, *kwargs.values()):  # not a comprehension, which is a call
        if type(x) in _PLAIN:
            first = x if first is None else first
            kind.append(x.shape)
        else:
            kind.append(type(x))
    return (*kind,) if first is None else (*kind, first.dtype, first.get_device())


def _pays(op: Op, lowered: tuple) -> bool:
    """Whether a route of the op gains more than its host time; cached for all layers with such calls."""
    facts = tuple(
        (x.shape, x.stride(), x.dtype, x.requires_grad)
        if isinstance(x, Tensor)
        else tuple(x)
        if isinstance(x, list)
        else x
        for x in lowered
    )
    mark = op.dispatch_cache.setdefault(_WORTH, object())  # pyright: ignore[reportArgumentType, reportCallIssue]
    key = (mark, *facts, *_kind(lowered[0])[3:])
    pays = _answers.get(key)
    if pays is None:
        if len(_answers) >= _MOST_ANSWERS:
            _answers.clear()
        pays = _answers[key] = gains(op.explain(lowered))
    return pays


def gains(verdict: Verdict) -> bool:
    """Whether the chosen route gains more than the host time of asking; a pin always does.

    >>> import torch, turnout
    >>> x, weight = torch.ones(1, 2, 4, 4), torch.ones(2, 2, 1, 1)
    >>> gains(turnout.explain(turnout.conv2d, x, weight))
    False
    """
    if verdict.chosen == REFERENCE:
        return verdict.authority == "pin"
    ours, torchs = verdict.microseconds.get(verdict.chosen), verdict.microseconds[REFERENCE]
    return verdict.authority == "pin" or ours is None or torchs is None or torchs - ours >= ASKING_US


def forget(layers: Any) -> None:
    """Drop what is cached for these layers."""
    for layer in layers:
        _learned.pop(id(layer), None)

"""`scaled_dot_product_attention` inside an accelerated model: torch's own function, unless a route is faster.

A call is torch's, with the very same arguments, wherever `turnout.attention` cannot take it (masks of another
dtype, k and v that broadcast, dropout, other than four dimensions, tensor subclasses), wherever no route
beats torch, and wherever the user has decided: by a `sdpa_kernel` context or another change of the backends
that torch may use, by another function in place of torch's, by a `TorchFunctionMode`. Errors are torch's too.

The decision follows from shapes, strides, dtypes and settings, and is cached by them: a call that torch's
kernel takes costs one look-up more, about 2 us of host time (2-core Xeon at 2.8 GHz).
"""

from __future__ import annotations

import collections
import contextlib
import enum
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from turnout import ops
from turnout.launch.pretended import Pretended
from turnout.ops.attention import ATTENTION, Attention, arguments, padding
from turnout.routing import choose, settings, torch_private
from turnout.routing.device import Device, is_planning
from turnout.routing.entry import raise_if_interrupted
from turnout.routing.fallback import PLAIN_TENSORS, autocasting, autocasts, blocked, tracing_state
from turnout.routing.torch_private import (
    attention_flags,
    attention_order,
    attention_replacements,
    count_function_modes,
    function_mode_at,
    in_function_mode,
    is_default_device,
)

# torch's own function, also where somebody has put another one into torch.nn.functional.
STOCK = torch_private.scaled_dot_product_attention

# Seconds. Reading a mask's values on a CPU takes the host 60 us; torch's own call must take 16 times as long.
_WORTH_READING = 1e-3

_MOST_REMEMBERED = 1024

# How many calls were not torch's by their shapes and dtypes alone, of all threads.
undecided = [0]
_op_call = ATTENTION.call


class _Choice(enum.Enum):
    """The decision about a call, where it is not a function to run."""

    UNSEEN = enum.auto()
    TORCH = enum.auto()  # the op cannot take it
    REFERENCE = enum.auto()  # the op can, and torch is as fast
    READ_MASK = enum.auto()  # it depends on the values of the mask


UNSEEN, TORCH, REFERENCE, READ_MASK = _Choice

# Decisions are kept in the op's dispatch cache, and dropped with it.
_cache: dict[Any, Any] = ATTENTION.dispatch_cache
_keys: collections.deque[tuple] = collections.deque()  # of ours, the oldest first


class _Call(NamedTuple):
    """The arguments of a call by name, its cache key, and the decision about it."""

    choice: Any
    key: tuple
    query: Tensor
    key_states: Tensor
    value: Tensor
    mask: Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool


def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`: the same arguments, results and errors.

    >>> import torch
    >>> q = torch.ones(1, 2, 3, 8)
    >>> scaled_dot_product_attention(q, q, q).shape
    torch.Size([1, 2, 3, 8])
    """
    try:
        call = _look_up(*args, **kwargs)
    except (TypeError, AttributeError, RuntimeError) as failure:
        # Arguments that cannot be looked at: nested or sparse tensors, none at all. torch knows what to say.
        raise_if_interrupted(failure, functools.partial(_look_up, *args, **kwargs))
        call = None
    if call is None:
        return F.scaled_dot_product_attention(*args, **kwargs)
    undecided[0] += 1
    result = _routed(call)
    return F.scaled_dot_product_attention(*args, **kwargs) if result is None else result


Answer = Callable[[Callable[..., Tensor], Tensor, Tensor, Tensor], Tensor]
_answer: ContextVar[Answer | None] = ContextVar("turnout_attention", default=None)


@contextlib.contextmanager
def answering(answer: Answer) -> Iterator[None]:
    """Inside this block `attend` without a mask is `answer(function, q, k, v)`, where `function` is what it
    would be: how a rank of a split model computes its own rows only."""
    token = _answer.set(answer)
    try:
        yield
    finally:
        _answer.reset(token)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention as adapters call it, in place of torch's function: q, k, v `[B, H, S, D]`.

    While a graph is traced, this is `turnout.attention`, which chooses a route when the graph runs.

    >>> import torch
    >>> q = torch.ones(1, 2, 3, 8, dtype=torch.bfloat16)
    >>> attend(q, q, q, mask=torch.zeros(3, 3)).dtype
    torch.bfloat16
    """
    if not torch.compiler.is_compiling():
        answer = _answer.get()
        if answer is not None and mask is None:
            return answer(scaled_dot_product_attention, q, k, v)
        return scaled_dot_product_attention(q, k, v, attn_mask=mask)
    if mask is not None and (mask.dtype not in (torch.bool, q.dtype) or mask.dim() < 2):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return ops.attention(q, k, v, mask=mask)


def _look_up(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> _Call | None:  # fmt: skip
    """The call with the cached decision about calls like it; None where torch takes it."""
    # Autocast, and the dtypes of key and value, are asked about when the call may take a route.
    device = query.get_device()
    cache_key = (
        "sdpa", entered(), device, threads() if device < 0 else 0, query.shape, query.stride(), query.dtype,
        key.shape, key.stride(), value.shape, value.stride(),
        None if attn_mask is None else (attn_mask.shape, attn_mask.stride(), attn_mask.dtype),
        dropout_p, is_causal, scale, enable_gqa,
        grad_enabled() and (
            query.requires_grad or key.requires_grad or value.requires_grad
            or (attn_mask is not None and attn_mask.requires_grad)
        ),
    )  # fmt: skip
    choice = remembered(cache_key, UNSEEN)
    if choice is TORCH or (choice is REFERENCE and ATTENTION.call is _op_call):
        return None
    return _Call(choice, cache_key, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


# Looked up in every call: a global is found sooner than an attribute.
entered, remembered, threads, grad_enabled = (
    settings.entered.get,
    _cache.get,
    torch.get_num_threads,
    torch.is_grad_enabled,
)


def _routed(call: _Call) -> Tensor | None:
    """The output of the op for a call; None where torch takes the call."""
    if not _is_ours(call):
        return None
    q, k, v, mask = call.query, call.key_states, call.value, call.mask
    key, choice, cast = call.key, call.choice, autocasting() and _autocast_dtype(call)
    if cast:
        key = (*key, cast, k.dtype, v.dtype)
        choice = remembered(key, UNSEEN)
    if choice is UNSEEN:
        choice = _dispatch_uncached(call, key)
    lengths: list[int] = []
    ends = None
    if choice is READ_MASK:
        _, _, _, mask, _, _, ends, lengths = arguments(q, k, v, mask, call.is_causal, call.scale)
        key = (*key, tuple(lengths))
        choice = remembered(key, UNSEEN)
        if choice is UNSEEN:
            choice = _remember(key, _choose(call, mask, lengths))
    watched = ATTENTION.call is not _op_call
    if choice is TORCH or (choice is REFERENCE and not watched):
        return None
    # Whoever watches the op's calls, as `turnout race` does, sees this one too, also where torch runs it.
    run = ATTENTION if choice is REFERENCE or watched or autocasting() else choice
    return run(q, k, v, mask, call.is_causal, _scale(call), ends, lengths)


def _autocast_dtype(call: _Call) -> torch.dtype | None:
    """What autocast casts the tensors of a call to; None where they stay as they are."""
    kind = call.query.device.type
    if not autocasts(kind):
        return None
    dtype = torch.get_autocast_dtype(kind)
    tensors = (call.query, call.key_states, call.value, call.mask)
    casts = any(x is not None and x.is_floating_point() and x.dtype is not dtype for x in tensors)
    return dtype if casts else None


def _scale(call: _Call) -> float:
    return call.query.shape[-1] ** -0.5 if call.scale is None else float(call.scale)


def _is_ours(call: _Call) -> bool:
    """Whether a route may take this call: checks what the cache key does not hold."""
    if F.scaled_dot_product_attention is not STOCK or not _all_backends_allowed():
        return False
    if tracing_state() is not None:
        return False
    if in_function_mode() and has_foreign_function_mode():
        return False
    # 1 and True are one fact, and two things to torch.
    if type(call.is_causal) is not bool or type(call.enable_gqa) is not bool:
        return False
    if type(call.dropout_p) not in (float, int) or type(call.scale) not in (float, int, type(None)):
        return False
    tensors = (call.query, call.key_states, call.value)
    if not call.query.dtype is call.key_states.dtype is call.value.dtype and not autocasting():
        return False
    if call.mask is not None and type(call.mask) not in PLAIN_TENSORS:
        return False
    return all(type(x) in PLAIN_TENSORS for x in tensors)


def has_foreign_function_mode() -> bool:
    """Whether a function mode is active that may want to see torch's call.

    A default device does not count, as attention creates no tensors, nor does the mode that plans calls.
    """
    modes = map(function_mode_at, range(count_function_modes()))
    return not all(isinstance(mode, Pretended) or is_default_device(mode) for mode in modes)


_flash, _efficient, _math, _cudnn, _overrideable = attention_flags


def _orders() -> list[list[int]]:
    """The orders in which torch itself tries its backends: the one it starts with, and cuDNN first, which it
    takes at the first call on a card that likes that better."""
    first, cudnn = attention_order(), 3
    return [first, [cudnn, *(backend for backend in first if backend != cudnn)]]


_ORDERS = _orders()


def _all_backends_allowed() -> bool:
    """Whether the choice of a backend is left to torch: no `sdpa_kernel`, no
    `torch.backends.cuda.enable_*_sdp`, no `torch.nn.attention.activate_flash_attention_impl`.

    >>> from torch.nn.attention import SDPBackend, sdpa_kernel
    >>> with sdpa_kernel(SDPBackend.MATH):
    ...     _all_backends_allowed()
    False
    """
    enabled = _flash() and _efficient() and _math() and _cudnn() and _overrideable()
    for is_in_use in attention_replacements:
        if is_in_use():
            return False
    return enabled and attention_order() in _ORDERS


def _remember(key: tuple, choice: Any) -> Any:
    if is_planning():
        return choice
    _cache[key] = choice
    _keys.append(key)
    if len(_keys) > _MOST_REMEMBERED:
        with contextlib.suppress(IndexError):  # another thread may have taken the last one
            _cache.pop(_keys.popleft(), None)
    return choice


def _dispatch_uncached(call: _Call, key: tuple) -> Any:
    """Decide about a call whose key is not in the cache."""
    q, k, v, mask = call.query, call.key_states, call.value, call.mask
    tensors = (q, k, v) if mask is None else (q, k, v, mask)
    if any(x.device.type not in ("cpu", "cuda") for x in tensors) or blocked(tensors, False) is not None:
        return TORCH  # not remembered: a plain call has the same key
    cast: Any = ATTENTION.cast((q, k, v, mask), _as_meta)
    if not _takes(call, *cast):
        return _remember(key, TORCH)
    if padding.key_mask(mask, q.shape[0], k.shape[2]) is None:
        return _remember(key, _choose(call, mask, []))
    return _remember(key, READ_MASK if _is_worth_reading(call, cast) else TORCH)


def _is_worth_reading(call: _Call, cast: tuple) -> bool:
    """Whether to look at the values of a mask over keys. On a GPU they are read once for all layers."""
    if not call.query.is_cpu:
        return True
    q, k, v, mask = cast
    problem = Attention.of(q, k, v, mask, call.is_causal, _scale(call), None, [])
    seconds = ATTENTION.cost(problem, Device.of(call.query.device))
    return seconds is not None and seconds >= _WORTH_READING


def _choose(call: _Call, mask: Tensor | None, lengths: list[int]) -> Any:
    """The function to run: a route as the op runs it, or REFERENCE where torch's own attention is as fast."""
    args = (call.query, call.key_states, call.value, mask, call.is_causal, _scale(call), None, lengths)
    if not autocasting():
        run = ATTENTION._chosen(args)  # pyright: ignore[reportPrivateUsage]
        return REFERENCE if run is ATTENTION.plain else run
    key = ATTENTION.key(ATTENTION.cast(args, _as_meta))
    devices = tuple(x.device for x in args if isinstance(x, Tensor))
    chosen = ATTENTION.verdict(key._replace(devices=devices)).chosen
    return REFERENCE if chosen == choose.REFERENCE else ATTENTION


def _as_meta(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=dtype, device="meta")


def _takes(call: _Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Whether `turnout.attention` means the same by this call as torch does."""
    if not (q.dim() == k.dim() == v.dim() == 4) or 0 in (*q.shape, *k.shape, *v.shape):
        return False
    if call.dropout_p != 0.0 or not 0.0 < _scale(call) < float("inf"):
        return False
    if mask is not None and call.is_causal:
        return False
    if not q.is_floating_point() or not (q.dtype is k.dtype is v.dtype):
        return False
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or k.shape[:3] != v.shape[:3]:
        return False
    if q.shape[1] != k.shape[1] and not (call.enable_gqa and q.shape[1] % k.shape[1] == 0):
        return False
    if mask is None:
        return True
    scores = (*q.shape[:3], k.shape[2])
    fits = all(n in (1, size) for n, size in zip(mask.shape[::-1], scores[::-1], strict=False))
    return mask.dtype in (torch.bool, q.dtype) and 2 <= mask.dim() <= 4 and fits

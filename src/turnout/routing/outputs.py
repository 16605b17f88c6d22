"""Make a route's result a tensor of its own, never a view, so that the caller may write into it.

torch refuses to write into a view that was made inside an op or under `no_grad`. Its own ops return no such
views, as nothing inside them is recorded as a view. Most routes make their outputs in the final shape and
layout, which costs nothing; the others are decorated with `@returns_own`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from turnout.routing.torch_private import key_set, recording_key, without_dispatch_keys

F = TypeVar("F", bound=Callable[..., Any])

_RECORDING: Any = None  # the set of keys, made when it is first needed


def views_unrecorded() -> AbstractContextManager[Any]:
    """Inside this block torch records neither views nor changed versions of tensors that are written.

    For calls that record no gradients, or whose gradients are recorded outside of the block.
    """
    global _RECORDING
    if _RECORDING is None:
        _RECORDING = key_set(recording_key)
    return without_dispatch_keys(_RECORDING)


def returns_own(run: F) -> F:
    """Run a route, or a part of one, so that no result is a view. It must not write into its arguments.

    >>> import torch
    >>> with torch.no_grad():
    ...     y = returns_own(lambda x: (x + 1).t())(torch.zeros(2, 3))
    >>> y._is_view(), y.mul_(torch.ones(3, 2, requires_grad=True)).requires_grad
    (False, True)
    """

    @functools.wraps(run)
    def below(*args: Any, **kwargs: Any) -> Any:
        with views_unrecorded():
            return run(*args, **kwargs)

    return below  # pyright: ignore[reportReturnType]

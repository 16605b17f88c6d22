"""Find out what a call would launch, on a card that need not be here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

from turnout.routing.device import Device, assumed


class Launch(NamedTuple):
    """One launch, as `launch` is asked for it."""

    kernel: Any
    programs: int
    tensors: tuple[Any, ...]
    numbers: tuple
    constants: Mapping[str, Any]
    warps: int
    options: Mapping[str, Any]


# Where the launches of this thread go instead of to a card.
recording: ContextVar[list[Launch] | None] = ContextVar("turnout_recording", default=None)


@contextlib.contextmanager
def recorded(device: Device) -> Iterator[list[Launch]]:
    """While this is entered, the launches of this thread are listed instead of launched.

    Routes plan as if all tensors were on `device`. Tensors on the meta device will do; outputs stay unwritten.

    >>> import torch
    >>> from turnout.ops.dot import DOT
    >>> a = torch.empty(50_000_000, device="meta")
    >>> with recorded(Device.named("h200")) as launches:
    ...     _ = DOT.routes["two-stage"].run(a, a)
    >>> [(launch.kernel.__name__, launch.programs) for launch in launches]
    [('dot_chunks', 1056)]
    """
    launches: list[Launch] = []
    token = recording.set(launches)
    try:
        with assumed(device):
            yield launches
    finally:
        recording.reset(token)

"""Find out what a call would launch, on a card that need not be here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from turnout.launch import launcher
from turnout.launch.launcher import Launch
from turnout.routing.device import Device, assumed


@contextlib.contextmanager
def recorded(device: Device) -> Iterator[list[Launch]]:
    """While this is entered, the launches of this thread are listed instead of launched.

    Routes plan as if all tensors were on `device`. Tensors on the meta device will do; outputs stay
    unwritten.

    >>> import torch
    >>> from turnout.ops.dot import DOT
    >>> a = torch.empty(50_000_000, device="meta")
    >>> with recorded(Device.named("h200")) as launches:
    ...     _ = DOT.routes["two-stage"].run(a, a)
    >>> [(launch.kernel.__name__, launch.programs) for launch in launches]
    [('dot_chunks', 1056)]
    """
    launches: list[Launch] = []
    token = launcher.recording.set(launches)
    try:
        with assumed(device):
            yield launches
    finally:
        launcher.recording.reset(token)

"""How calls of one kind run on a rank: on its part, or whole; and by which route."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from turnout.routing.choose import REFERENCE
from turnout.routing.device import Device
from turnout.routing.op import Op
from turnout.routing.route import UNKNOWN, Grain


class Way(NamedTuple):
    """How calls of one kind run here, on this rank's part and whole; `whole` gives this rank's part of it.

    is_known: that both give the same bits. written: which argument the result is written into; None where it
    is returned. taken: the route and its configuration. in_frames: the route's grain along the frames.
    """

    part: Callable[..., Any]
    whole: Callable[..., Any]
    is_known: bool
    written: int | None = None
    taken: tuple = ()
    in_frames: int | None = None


class Chosen(NamedTuple):
    """What runs a call on a part as the whole call would be run: by route and configuration `taken`."""

    run: Callable[[tuple], Any]
    taken: tuple
    grain: Grain


def cut_anywhere(op: Op) -> tuple[str, ...]:
    """The routes of an op whose parts are known to have the bits of the whole, wherever rows or columns are
    cut."""
    return tuple(name for name, route in op.routes.items() if route.grain[-2:] == (1, 1))


class PartRefused(RuntimeError):
    """The route of the whole call cannot take a rank's part."""


def choose(op: Op, key: Any, chosen: str | None) -> Chosen:
    """The route of the whole call that `key` is of, and what runs it on a part. chosen: "reference" takes
    torch's function, whatever would be chosen.
    """
    verdict = None if chosen is not None else op.verdict(key)
    if verdict is None or verdict.chosen == REFERENCE:
        return Chosen(lambda args: op.plain(*args), (REFERENCE,), UNKNOWN)
    route = op.routes[verdict.chosen]
    config = dict(verdict.config)
    ready: dict[Any, Callable[..., Any]] = {}
    device = Device.of(key.devices[0])

    def run(args: tuple) -> Any:
        facts = tuple(
            (x.shape, x.stride()) if isinstance(x, Tensor) else tuple(x) if isinstance(x, list) else x
            for x in args
        )
        prepared = ready.get(facts)
        if prepared is None:
            reasons = list(route.refuses(op.problem(*args), device))
            if reasons:
                raise PartRefused(
                    f"turnout.{op.name}: route {route.name!r} takes the whole call, "
                    f"and refuses this rank's part: {'; '.join(reasons)}"
                )
            prepared = ready[facts] = route.prepared(args, config).call
        return prepared(*args)

    return Chosen(run, (route.name, *sorted(config.items())), route.grain)


def same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return torch.equal(*(x.contiguous().view(kinds[x.element_size()]) for x in (a, b)))


def relaid(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """x with these strides; copied unless they differ for dimensions of size one only."""
    if x.stride() == strides:
        return x
    if all(size == 1 or a == b for size, a, b in zip(x.shape, x.stride(), strides, strict=True)):
        return x.as_strided(x.shape, strides)
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)

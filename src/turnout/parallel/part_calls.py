"""Calls of an op on a rank: on its part by the route of the whole call, or whole on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from turnout.routing.choose import REFERENCE
from turnout.routing.device import Device
from turnout.routing.op import Op
from turnout.routing.route import UNKNOWN, Grain


class PartCall(NamedTuple):
    """The two functions that compute this rank's part of the result, for all calls of one kind.

    part: from this rank's part of the input. whole: from the whole input, gathered from all ranks.
    keeps_bits: whether the route declares that both give the same bits. written: the index of the argument
    that the result is written into; None where it is returned. route: its name and configuration.
    frame_grain: the route's grain along the frames; None where it declares none.
    """

    part: Callable[..., Any]
    whole: Callable[..., Any]
    keeps_bits: bool
    written: int | None = None
    route: tuple = ()
    frame_grain: int | None = None


class WholeRoute(NamedTuple):
    """The route of a whole call, as it runs on a part.

    run: calls the route with a rank's arguments. route: its name and configuration.
    """

    run: Callable[[tuple], Any]
    route: tuple
    grain: Grain


def cut_anywhere(op: Op) -> tuple[str, ...]:
    """The routes of an op that declare: rows and columns may be cut anywhere without changing a bit."""
    return tuple(name for name, route in op.routes.items() if route.grain[-2:] == (1, 1))


class PartRefused(RuntimeError):
    """The route of the whole call cannot take a rank's part."""


def choose_for_whole(op: Op, key: Any, chosen: str | None) -> WholeRoute:
    """Choose the route of the whole call with this key. chosen: "reference" takes torch's function, whatever
    would be chosen.
    """
    verdict = None if chosen is not None else op.verdict(key)
    if verdict is None or verdict.chosen == REFERENCE:
        return WholeRoute(lambda args: op.plain(*args), (REFERENCE,), UNKNOWN)
    route = op.routes[verdict.chosen]
    config = dict(verdict.config)
    prepared: dict[Any, Callable[..., Any]] = {}
    device = Device.of(key.devices[0])

    def run(args: tuple) -> Any:
        key = tuple(
            (x.shape, x.stride()) if isinstance(x, Tensor) else tuple(x) if isinstance(x, list) else x
            for x in args
        )
        call = prepared.get(key)
        if call is None:
            reasons = list(route.refuses(op.problem(*args), device))
            if reasons:
                raise PartRefused(
                    f"turnout.{op.name}: route {route.name!r} takes the whole call, "
                    f"and refuses this rank's part: {'; '.join(reasons)}"
                )
            call = prepared[key] = route.prepared(args, config).call
        return call(*args)

    return WholeRoute(run, (route.name, *sorted(config.items())), route.grain)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits; NaN equals itself."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return torch.equal(*(x.contiguous().view(kinds[x.element_size()]) for x in (a, b)))


def relaid(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Give x these strides. It is copied unless they differ for dimensions of size one only."""
    if x.stride() == strides:
        return x
    if all(size == 1 or a == b for size, a, b in zip(x.shape, x.stride(), strides, strict=True)):
        return x.as_strided(x.shape, strides)
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)

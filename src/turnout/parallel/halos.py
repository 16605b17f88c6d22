"""What stands around a rank's part: rows of its neighbours, kept as long as they are of use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from turnout import ops
from turnout.parallel.exchange import EDGES, Exchange, Halo
from turnout.parallel.layout import dense, empty_resized, fill_edge, strides_resized
from turnout.routing.torch_private import without_function_modes


class Halos:
    """The rows around parts of one rank.

    halos: of tensors that were padded with rows of other ranks. caches: halo rows of cached frames, by the
    tensor that stands in a model's list of caches and holds this rank's own rows: what was received once is
    not sent again. rooms: memory that holds a part and has room for a row before and after it, by the part.
    padded: inputs that got a halo, and what they became; None where nobody asks.
    """

    def __init__(self, exchange: Exchange):
        self.exchange = exchange
        self.halos: Any = WeakIdKeyDictionary()
        self.caches: Any = WeakIdKeyDictionary()
        self.rooms: Any = WeakIdKeyDictionary()
        self.padded: list[tuple[Tensor, Tensor]] | None = None

    def pad(
        self,
        pad: Callable[..., Tensor],
        x: Tensor,
        sides: Any,
        mode: str = "constant",
        value: float | None = None,
    ) -> Tensor:
        """torch's padding: of the split axis it is the rows of the neighbours."""
        exchange = self.exchange
        at = 2 * (-1 - exchange.axis)  # of the axis' two numbers, the last axis first
        sides = list(sides)
        if len(sides) <= at or not any(sides[at : at + 2]) or x.dim() < 4:
            return pad(x, sides, mode, value)
        before, after = sides[at : at + 2]
        if min(before, after) < 0 or mode not in EDGES or value:
            raise NotImplementedError(f"padding {sides} by {mode!r} with {value} in a distributed model")
        sides[at : at + 2] = 0, 0
        x = pad(x, sides, mode, value) if any(sides) else x
        whole = exchange.halo(x, before, after, edge=EDGES[mode])
        self.halos[whole] = Halo(before, after, EDGES[mode])
        return whole

    def reshaped(self, x: Tensor, y: Tensor) -> None:
        """y is x in another shape: what stands around the part stands around it still."""
        halo, axis = self.halos.get(x), self.exchange.axis
        if halo is not None and y.dim() > 3 and y.shape[axis] == x.shape[axis]:
            self.halos[y] = halo

    def fill_border(self, body: Tensor, axis: int, edge: int, mode: str) -> bool:
        """Write the `edge` pixels on each side of this rank's part into a buffer that has room for them."""
        if axis != 5 + self.exchange.axis:
            return False
        if edge:
            with without_function_modes():  # this is not stock code
                self.exchange.fill_halo(body, edge, edge, before=edge, after=edge, edge=EDGES[mode])
        return True

    def is_bordered(self, buffer: Tensor, edges: tuple[int, int], mode: str) -> None:
        """Remember what stands around the part in a buffer, rows and columns."""
        rows = edges[self.exchange.axis]
        if rows:
            self.halos[buffer] = Halo(rows, rows, "reflect" if mode == "reflect" else "replicate")

    def with_halo(self, x: Tensor, before: int, after: int) -> Tensor:
        strips = self.caches.get(x)
        if strips is not None and [strip.shape[self.exchange.axis] for strip in strips] == [before, after]:
            return torch.cat([strips[0], x, strips[1]], self.exchange.axis)
        room = self.rooms.get(x)
        if room is None or max(before, after) > 1:
            whole = self.exchange.halo(x, before, after)
        else:  # x stands where it is read
            whole = room.narrow(self.exchange.axis, 1 - before, before + x.shape[self.exchange.axis] + after)
            self.exchange.fill_halo(whole, before, after, before=before, after=after, edge="zeros")
        if self.padded is not None:
            self.padded.append((x, whole))
        return whole

    def with_room(self, x: Tensor) -> Tensor:
        """Memory for a tensor like x, with room for a row before and after it where that changes no stride: a
        convolution then reads it where it stands, with the rows of the neighbours around it."""
        axis, like = self.exchange.axis, torch.empty_like(x, device="meta")
        shape = list(x.shape)
        shape[axis] += 2
        strides = strides_resized(tuple(x.shape), like.stride(), axis, shape[axis])
        if any(size > 1 and a != b for size, a, b in zip(x.shape, like.stride(), strides, strict=True)):
            return torch.empty_like(x)
        room = torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device)
        own = room.as_strided(x.shape, like.stride(), strides[axis])
        self.rooms[own] = room
        return own

    @contextlib.contextmanager
    def watching_halos(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Inside this block inputs that get a halo are listed."""
        padded = self.padded = []
        try:
            yield padded
        finally:
            self.padded = None

    def causal_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        cache: Tensor | None,
        padding: tuple[int, int],
        residual: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """A convolution behind cached frames, whose halo rows are kept with them; and the frames to keep."""
        with self.watching_halos() as padded:
            y, kept = ops.causal_conv3d(
                x, weight, bias, cache=cache, padding=padding, residual=residual, return_cache=True
            )
        kept = kept.clone() if x.shape[2] > kept.shape[2] else kept
        self.keep_halo(kept, cache, x, padded, padding[self.exchange.axis])
        return y, kept

    def keep_halo(
        self, kept: Tensor, cache: Tensor | None, x: Tensor, padded: list[tuple[Tensor, Tensor]], rows: int
    ) -> None:
        """Keep the halo rows of cached frames, which are the last of `cache` and of x, where x got a halo."""
        around = next((whole for part, whole in reversed(padded) if part is x), None)
        if around is None or not rows:
            return
        axis, frames = self.exchange.axis, x.shape[2]
        new = min(kept.shape[2], frames)
        around = around[:, :, frames - new :]
        strips = around.narrow(axis, 0, rows), around.narrow(axis, around.shape[axis] - rows, rows)
        held = kept.shape[2] - new
        if held:
            before = None if cache is None else self.caches.get(cache)
            if before is None:
                return
            strips = tuple(
                torch.cat([old[:, :, old.shape[2] - held :], each], 2)
                for old, each in zip(before, strips, strict=True)
            )
        self.caches[kept] = tuple(strip.clone() for strip in strips)

    def gathered(self, x: Tensor) -> Tensor:
        """The whole of which x is a part, in its order of dimensions, without gaps."""
        own = torch.empty_like(x)
        return self.exchange.all_gather(x if own.stride() == x.stride() else own.copy_(x))

    def room_of_all(self, x: Tensor) -> Tensor:
        """Memory for the whole of which x is a part."""
        return empty_resized(
            torch.empty_like(x), self.exchange.axis, self.exchange.global_size(x.shape[self.exchange.axis])
        )

    def whole_of(self, x: Tensor) -> Tensor:
        """The whole of a part, or of a part with a halo, which is then that of the whole."""
        halo = self.halos.get(x)
        if halo is None:
            return self.exchange.all_gather(x)
        axis = self.exchange.axis
        own = x.narrow(axis, halo.before, x.shape[axis] - halo.before - halo.after)
        whole = self.exchange.all_gather(dense(own, x, axis))
        size = whole.shape[axis]
        padded = empty_resized(
            x, axis, halo.before + size + halo.after
        )  # in x's order, by which routes are chosen
        padded.narrow(axis, halo.before, size).copy_(whole)
        for rows, first in ((halo.before, True), (halo.after, False)):
            if rows:
                fill_edge(padded, axis % x.dim(), halo.before, size, halo.edge, first=first)
        return padded

    def own_of(self, y: Any) -> Any:
        if not isinstance(y, Tensor):
            raise NotImplementedError(f"a {type(y).__name__} returned by a part of a distributed model")
        return dense(self.exchange.own(y), y, self.exchange.axis)

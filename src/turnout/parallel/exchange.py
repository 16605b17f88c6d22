"""What the ranks of a split model tell each other: halo rows, gathered parts, small statistics.

A tensor is split along one axis, its rows or its columns, in whole multiples of the latents' rows or columns:
at every resolution of a model the parts are where the latents' parts are. So each rank knows the sizes of all
parts without asking. How messages travel is an engine's business (`dist`, `lockstep`, `fake`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from turnout.parallel.layout import Edge, Strip, buffer_for, empty_resized, fill_edge, pack, unpack

AXES = {"height": -2, "width": -1}
EDGES: dict[str, Edge] = {
    "constant": "zeros",
    "replicate": "replicate",
    "reflect": "reflect",
}  # of torch's padding


class Halo(NamedTuple):
    """What stands around a part that was padded: rows before and after it, and what the outermost are."""

    before: int
    after: int
    edge: Edge


class _Messages(NamedTuple):
    """The other rank and the rows of each message, in order."""

    sends: list[tuple[int, Strip]]
    receives: list[tuple[int, Strip]]


class Engine(Protocol):
    """Moves tensors between ranks. Every rank makes the same calls in the same order.

    >>> from turnout.parallel.lockstep import Lockstep
    >>> Lockstep(2).run(lambda engine: engine.agree(engine.rank + 1))
    [[1, 2], [1, 2]]
    """

    rank: int
    ranks: int
    is_alone: bool  # no other rank is there: nothing can be compared
    compares_all: bool  # calls of routes that declare their grain too, to see that it is true

    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        """Send contiguous tensors to ranks, and fill contiguous tensors with what ranks send."""
        ...

    def agree(self, said: Any) -> list[Any]:
        """What each rank says, in the order of ranks. Small, picklable, of the host."""
        ...

    def begin(self) -> None:
        """Before the first message of a call: what can fail for want of a rank fails here."""
        ...

    def fail(self, failure: BaseException) -> None:
        """End this call on all ranks, because of what this one raises."""
        ...


def parts_of(size: int, ranks: int, grain: int = 1) -> list[tuple[int, int]]:
    """Where each rank's part of an axis begins and ends, at multiples of `grain`, as even as these allow; the
    first are the longer.

    >>> parts_of(13, 4), parts_of(13, 3, grain=2)
    ([(0, 4), (4, 7), (7, 10), (10, 13)], [(0, 6), (6, 10), (10, 13)])
    """
    least, longer = divmod(-(-size // grain), ranks)
    ends = [min(size, grain * (least * (rank + 1) + min(rank + 1, longer))) for rank in range(ranks)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def levels_of(pixels: int, per_unit: int, *, up: bool) -> dict[int, int]:
    """How many rows a picture of so many has where 8, 4, 2 and 1 of them stand for one of the latents: an
    encoder halves them again and again, and drops what is left over, or, with `up`, rounds up.

    >>> levels_of(36, 8, up=False), levels_of(36, 8, up=True)
    ({8: 36, 4: 18, 2: 9, 1: 4}, {8: 36, 4: 18, 2: 9, 1: 5})
    """
    levels = {per_unit: pixels}
    while per_unit > 1:
        pixels, per_unit = (pixels + 1) // 2 if up else pixels // 2, per_unit // 2
        levels[per_unit] = pixels
    return levels


class Exchange:
    """One rank's view of a split model during one call: which part it has, and how to get what others have.

    axis: the dimension of `[B, C, T, H, W]` and `[B, C, H, W]` that is split, -2 (height) or -1 (width).
    units: how many rows (columns) the latents have in all; parts are multiples of these.
    grain: of so many of them at a time, where norms sum blocks of that size (see
    `ops.group_norm_silu.blocks`).
    levels: where a picture is no multiple of the latents, how many rows (columns) the whole has where so many
    stand for one of the latents, as `levels_of` has them. The last rank then has those that are left over, or
    misses those that are not there.

    >>> import torch
    >>> from turnout.parallel.lockstep import Lockstep
    >>> x = torch.arange(6.0).view(1, 1, 6, 1)
    >>> def run(engine):
    ...     exchange = Exchange(engine, axis=-2, units=3)
    ...     return exchange.halo(exchange.own(x), 1, 1).flatten().tolist()
    >>> Lockstep(2).run(run)
    [[0.0, 0.0, 1.0, 2.0, 3.0, 4.0], [3.0, 4.0, 5.0, 0.0]]
    """

    def __init__(
        self,
        engine: Engine,
        axis: int,
        units: int,
        grain: int = 1,
        levels: Mapping[int, int] = MappingProxyType({}),
    ):
        if -(-units // grain) < engine.ranks:
            least = "one" if grain == 1 else str(grain)
            raise ValueError(
                f"{units} rows or columns of latents for {engine.ranks} ranks; each needs at least {least}"
            )
        self.engine, self.axis, self.units = engine, axis, units
        self.rank, self.ranks = engine.rank, engine.ranks
        self.parts = parts_of(units, engine.ranks, grain)
        self.sizes = [end - begin for begin, end in self.parts]
        self.levels = levels
        self._messages: dict[tuple, _Messages] = {}

    def spans(self, size: int) -> list[tuple[int, int]]:
        """`[begin, end)` of each rank's part of an axis of this global size."""
        if self.levels:
            times = next((times for times, whole in self.levels.items() if whole == size), 0)
        else:
            times = 0 if size % self.units else size // self.units
        if not times:
            sizes = f"one of {sorted(self.levels.values())}" if self.levels else "a multiple of them"
            raise ValueError(f"an axis of {size}, which is split in {self.units} units, needs {sizes}")
        return self._spans(times)

    def _spans(self, times: int) -> list[tuple[int, int]]:
        """Those where so many rows stand for one of the latents."""
        spans = [(begin * times, end * times) for begin, end in self.parts]
        return [*spans[:-1], (spans[-1][0], self.levels.get(times, spans[-1][1]))]

    def times(self, size: int) -> int | None:
        """How many rows stand for one of the latents where this rank's part has so many; None where no number
        does.
        """
        if not self.levels:
            times, rest = divmod(size, self.sizes[self.rank])
            return times if times and not rest else None
        for times in self.levels:
            begin, end = self._spans(times)[self.rank]
            if end - begin == size:
                return times
        return None

    def global_size(self, size: int) -> int:
        """The size of an axis of which this rank has so many."""
        times = self.times(size)
        if times is None:
            own = self.sizes[self.rank]
            raise ValueError(
                f"a part of {size} rows or columns on a rank with {own} of the latents, it needs a multiple"
            )
        return self._spans(times)[-1][1]

    def own(self, x: Tensor, dim: int | None = None) -> Tensor:
        """This rank's part of a whole tensor: a view."""
        dim = self.axis if dim is None else dim
        begin, end = self.spans(x.shape[dim])[self.rank]
        return x.narrow(dim, begin, end - begin)

    def halo(
        self, x: Tensor, before: int, after: int, *, edge: Edge = "zeros", dim: int | None = None
    ) -> Tensor:
        """This rank's part with rows (columns) of its neighbours around it, in x's memory format.

        Beyond the first and the last row of all stand zeros, the row itself (`"replicate"`), those mirrored
        in it (`"reflect"`), or nothing (`"none"`: the part is then shorter there).
        """
        dim = (self.axis if dim is None else dim) % x.dim()
        first, last = self.rank == 0, self.rank == self.ranks - 1
        above = 0 if first and edge == "none" else before
        below = 0 if last and edge == "none" else after
        size = x.shape[dim]
        whole = empty_resized(x, dim, above + size + below)
        whole.narrow(dim, above, size).copy_(x)
        self.fill_halo(whole, above, below, before=before, after=after, edge=edge, dim=dim)
        return whole

    def fill_halo(
        self,
        whole: Tensor,
        above: int,
        below: int,
        *,
        before: int,
        after: int,
        edge: Edge,
        dim: int | None = None,
    ) -> None:
        """Fill the first `above` and the last `below` rows of a tensor that holds this rank's part between
        them.
        """
        dim = (self.axis if dim is None else dim) % whole.dim()
        key = (whole.shape, whole.stride(), dim, above, below, before, after)
        messages = self._messages.get(key)
        if messages is None:
            messages = self._messages[key] = self._halo_messages(whole, dim, above, below, before, after)
        sends, receives, copied = [], [], []
        for other, strip in messages.sends:
            rows = strip.view(whole)
            sends.append((other, rows if strip.is_dense else rows.contiguous()))
        for other, strip in messages.receives:
            place = buffer = strip.view(whole)
            if not strip.is_dense:
                buffer = torch.empty(strip.sizes, dtype=whole.dtype, device=whole.device)
                copied.append((place, buffer))
            receives.append((other, buffer))
        self.engine.exchange(sends, receives)
        for place, buffer in copied:
            place.copy_(buffer)
        rank, last, size = self.rank, self.ranks - 1, whole.shape[dim] - above - below
        if rank == 0 and above:
            fill_edge(whole, dim, above, size, edge, first=True)
        if rank == last and below:
            fill_edge(whole, dim, above, size, edge, first=False)

    def _halo_messages(
        self, whole: Tensor, dim: int, above: int, below: int, before: int, after: int
    ) -> _Messages:
        """Which rows `fill_halo` sends and receives."""
        rank, last, size = self.rank, self.ranks - 1, whole.shape[dim] - above - below
        self._need_rows(size, max(before, after))
        sends, receives = [], []
        if rank > 0 and after:
            sends.append((rank - 1, whole.narrow(dim, above, after)))
        if rank < last and before:
            sends.append((rank + 1, whole.narrow(dim, above + size - before, before)))
        if rank > 0 and before:
            receives.append((rank - 1, whole.narrow(dim, 0, before)))
        if rank < last and after:
            receives.append((rank + 1, whole.narrow(dim, above + size, after)))
        return _Messages(
            *([(other, Strip.of(rows, whole)) for other, rows in each] for each in (sends, receives))
        )

    def _need_rows(self, size: int, rows: int) -> None:
        times = self.times(size)
        least = 0 if times is None else min(end - begin for begin, end in self._spans(times))
        if least < rows:
            raise ValueError(
                f"a halo of {rows} rows or columns where the smallest part has {least}; use fewer ranks"
            )

    def all_gather(self, part: Tensor, dim: int | None = None) -> Tensor:
        """The whole of a tensor that is split along `dim` as the latents are, in the part's memory format."""
        dim = (self.axis if dim is None else dim) % part.dim()
        whole = empty_resized(part, dim, self.global_size(part.shape[dim]))
        spans = self.spans(whole.shape[dim])
        places = [whole.narrow(dim, begin, end - begin) for begin, end in spans]
        places[self.rank].copy_(part)
        packed = pack(part)
        others = [rank for rank in range(self.ranks) if rank != self.rank]
        receives = [(rank, buffer_for(places[rank])) for rank in others]
        self.engine.exchange([(rank, packed) for rank in others], receives)
        for rank, got in receives:
            if got.data_ptr() != places[rank].data_ptr():
                places[rank].copy_(unpack(got, places[rank]))
        return whole

    def gather_first(self, part: Tensor, dim: int | None = None) -> Tensor | None:
        """The whole of a tensor, on the first rank; None on all others."""
        dim = (self.axis if dim is None else dim) % part.dim()
        if self.rank > 0:
            self.engine.exchange([(0, pack(part))], [])
            return None
        whole = empty_resized(part, dim, self.global_size(part.shape[dim]))
        places = [whole.narrow(dim, begin, end - begin) for begin, end in self.spans(whole.shape[dim])]
        places[0].copy_(part)
        receives = [(rank, buffer_for(places[rank])) for rank in range(1, self.ranks)]
        self.engine.exchange([], receives)
        for rank, got in receives:
            if got.data_ptr() != places[rank].data_ptr():
                places[rank].copy_(unpack(got, places[rank]))
        return whole

    def all_gather_stats(self, stats: Tensor, counts: Sequence[int] | None = None) -> list[Tensor]:
        """A small tensor of each rank, in the order of ranks. counts: the sizes of their first dimensions,
        where they differ."""
        counts = [stats.shape[0] if stats.dim() else 1] * self.ranks if counts is None else list(counts)
        stats = stats.contiguous()
        shapes = [(count, *stats.shape[1:]) if stats.dim() else () for count in counts]
        found = [stats if rank == self.rank else stats.new_empty(shape) for rank, shape in enumerate(shapes)]
        others = [rank for rank in range(self.ranks) if rank != self.rank]
        self.engine.exchange([(rank, stats) for rank in others], [(rank, found[rank]) for rank in others])
        return found


def broadcast(
    engine: Engine, x: Tensor, owner: int, receivers: Sequence[int], device: torch.device
) -> Tensor | None:
    """A tensor of one rank on those that receive it, None on others.

    x: on the owner the tensor, elsewhere any of its shape, strides and dtype, such as a meta tensor. What is
    received lies on `device`.

    >>> from turnout.parallel.lockstep import Lockstep
    >>> def run(engine):
    ...     x = torch.tensor([[1.0, 2.0]]) if engine.rank else torch.empty(1, 2, device="meta")
    ...     return broadcast(engine, x, 1, [0], torch.device("cpu"))
    >>> Lockstep(2).run(run)
    [tensor([[1., 2.]]), None]
    """
    if engine.rank == owner:
        packed = pack(x)
        engine.exchange([(other, packed) for other in receivers if other != owner], [])
        return x if owner in receivers else None
    if engine.rank not in receivers:
        return None
    got = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    buffer = buffer_for(got)
    engine.exchange([], [(owner, buffer)])
    if buffer.data_ptr() != got.data_ptr():
        got.copy_(unpack(buffer, got))
    return got

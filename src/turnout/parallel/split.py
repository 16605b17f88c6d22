"""What runs in the place of an op, or of a function of torch, on a rank that has a part of the rows or
columns.

The rule of exactness: what is chosen is chosen for the *whole* call, on every rank alike, and the part takes
the same route in the same configuration. So no choice by size can differ from one process. Whether a route's
result on a part is that of the whole, bit for bit, is known where the route declares its grain; where it does
not, a call of each kind is computed both ways when it is first seen, on all ranks, and compared. Where the
two differ, and wherever pixels are mixed by more than a window (a stock group norm, attention), the parts are
gathered and every rank computes the whole: slower, never different.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from turnout import ops
from turnout.ops.conv2d import CONV2D
from turnout.ops.conv3d import CONV3D
from turnout.ops.convolution.problem import arguments
from turnout.parallel.attention import OwnQueries
from turnout.parallel.exchange import EDGES, Exchange, Halo, dense, empty_resized, fill_edge, strides_resized
from turnout.parallel.norms import NORMS, Norm
from turnout.routing import settings
from turnout.routing.choose import REFERENCE, Verdict
from turnout.routing.device import Device
from turnout.routing.fallback import blocked
from turnout.routing.op import Op
from turnout.routing.route import UNKNOWN, Grain
from turnout.routing.torch_private import without_function_modes

CONVOLUTIONS = ("conv2d", "conv3d", "causal_conv3d")
POINTWISE = ("rms_norm_silu", "rms_norm_silu_into")  # every pixel by itself
ACTIVATIONS = ("input", "x", "out", "cache", "residual")  # arguments of ops that are split; weights are not


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


class PartRefused(RuntimeError):
    """The route of the whole call cannot take a rank's part."""


class Split:
    """The plan of one rank for one size of latents; kept from call to call.

    halos: of tensors that were padded with rows of other ranks. caches: halo rows of cached frames, by the
    tensor that stands in a model's list of caches and holds this rank's own rows: what was received once is
    not sent again. counts: how many calls ran on a part and how many whole. latents: the most that a decoder
    which works latent by latent takes at a time. calls: how many calls of one process this one stands for.
    """

    calls = 1

    def __init__(self, exchange: Exchange, latents: int = 1):
        self.exchange, self.latents = exchange, latents
        self.halos: Any = WeakIdKeyDictionary()
        self.caches: Any = WeakIdKeyDictionary()
        self.counts: collections.Counter[str] = collections.Counter()
        self.runs_whole: dict[tuple, bool] = {}  # kinds of calls that were compared
        self.rings: dict[tuple, Callable[..., Any]] = {}
        self.strides: dict[
            tuple, tuple[int, ...]
        ] = {}  # of what these return: where an axis is short, torch has others
        self.latest: tuple[Tensor, Tensor] | None = None  # the last input that got a halo, and what it became
        self.queries = OwnQueries(exchange)
        self.settings: settings.Split | None = None
        self.of_several: dict[int, Split] = {}  # by number of calls
        self.layouts: Any = WeakIdKeyDictionary()  # strides of one call's frames, by those of several calls

    def __call__(self, op: Op, args: tuple) -> Callable[..., Any]:
        """What runs calls of an op like this one."""
        why = blocked(args, op.autocast == "reference")
        if why is not None:
            raise RuntimeError(
                f"turnout.{op.name} in a distributed model: {why.reason}; restore() the model to run it"
            )
        return self.known(op.name, self.way(op, args))

    def way(self, op: Op, args: tuple) -> tuple[tuple, Way]:
        """The kind of a call, and how calls of that kind run."""
        if op.name in CONVOLUTIONS:
            return self._convolution(op, args)
        if op.name == "upsample_conv2d":
            return self._upsampling(op, args)
        if op.name in POINTWISE:
            return self._pointwise(op, args)
        if op.name in NORMS:
            return self._norm(op, args)
        raise NotImplementedError(
            f"turnout.{op.name} is not known to a distributed model; restore() the model to run it"
        )

    def verdict(self, op: Op, args: tuple) -> Verdict:
        """What is chosen for the whole call of which this is a rank's part."""
        (*_, problem), _ = self.way(op, args)
        return op.verdict(op.key(args)._replace(problem=problem))

    def of(self, calls: int) -> Split:
        """The plan for calls that stand for so many of one process, behind each other in the frames."""
        from turnout.parallel.latents import Together

        alone: Split = getattr(self, "alone", self)
        if calls not in alone.of_several:
            alone.of_several[calls] = alone if calls == 1 else Together(alone, calls)
        return alone.of_several[calls]

    def entered(self) -> contextlib.AbstractContextManager[None]:
        """Inside this block calls go by this plan; pins and the numerics level stay as they are."""
        now = settings.current()
        assert self.settings is not None
        return settings.entering(self.settings.with_choices(now.pins, now.numerics))

    def ring_margins(self) -> tuple[int, int]:
        """Rows and columns of room that a ring needs on each side of its frames."""
        return (1, 0) if self.exchange.axis == -2 else (0, 1)

    def ring_convolution(
        self,
        x: Tensor,
        newest: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        padding: tuple[int, int, int],
        residual: Tensor | None,
    ) -> Tensor:
        """A convolution over the frames of a ring, `[1, C, H, 3, W]` with a margin around them, of which the
        newest has no halo yet."""
        axis = -3 if self.exchange.axis == -2 else -1
        margin = padding[axis]
        self.exchange.fill_halo(newest, margin, margin, before=margin, after=margin, edge="zeros", dim=axis)
        resized = _resized(padding, axis, 0)
        args = arguments(F.conv3d, 3, x, weight, bias, padding=resized, residual=residual)
        key = (
            x.shape,
            x.stride(),
            x.dtype,
            weight.shape,
            weight.stride(),
            bias is None,
            residual is None or residual.stride(),
            padding,
        )
        if key not in self.rings:
            self.rings[key] = self.known("conv3d", self._convolution(CONV3D, args, axis=axis, margin=margin))
        return self.rings[key](*args)

    def torch_convolution(self, convolve: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
        """torch's own convolution: the reference, whatever would be chosen."""
        op = CONV2D if "2d" in convolve.__name__ else CONV3D
        unbatched = (args[0] if args else kwargs["input"]).dim() == (3 if op is CONV2D else 4)
        if unbatched:
            raise NotImplementedError("a convolution without a batch in a distributed model")
        lowered = arguments(convolve, 2 if op is CONV2D else 3, *args, **kwargs)
        return self.known(convolve.__name__, self._convolution(op, lowered, REFERENCE))(*lowered)

    def everywhere(self, function: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """`function` of the whole x on every rank, and of what it returns this rank's part."""
        self.counts["whole"] += 1
        with without_function_modes(), self.plainly():
            return self._own(function(self._whole(x), *args, **kwargs))

    def attention(self, function: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The same of a function whose last step that mixes pixels is attention: of it only own pixels are
        computed.
        """
        self.counts["whole"] += 1
        with without_function_modes(), self.plainly():
            whole = self._whole(x)
            with self.queries.of_frames(*whole.shape[-2:]):
                return self._own(function(whole, *args, **kwargs))

    def plainly(self) -> Any:
        assert self.settings is not None
        now = settings.current()
        return settings.plainly(now if isinstance(now, settings.Split) else self.settings)

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
            self.exchange.fill_halo(body, edge, edge, before=edge, after=edge, edge=EDGES[mode])
        return True

    def is_bordered(self, buffer: Tensor, edges: tuple[int, int], mode: str) -> None:
        """Remember what stands around the part in a buffer, rows and columns."""
        rows = edges[self.exchange.axis]
        if rows:
            self.halos[buffer] = Halo(rows, rows, "reflect" if mode == "reflect" else "replicate")

    def pixels_of_frame(self, x: Tensor) -> int:
        axis = self.exchange.axis
        others = x.shape[3] * x.shape[4]
        return others // x.shape[axis] * self.exchange.global_size(x.shape[axis])

    # What runs

    def known(self, name: str, way: tuple[Any, Way]) -> Callable[..., Any]:
        """A call: known to be the same, or compared when it is first seen."""
        kind, (part, whole, *_) = way

        def run(*args: Any) -> Any:
            with without_function_modes():
                runs_whole = self.runs_whole.get(kind)
                if runs_whole is None:
                    return self._first(name, kind, way[1], args)
                self.counts["whole" if runs_whole else "part"] += 1
                if runs_whole:
                    return whole(*args)
                y, strides = part(*args), self.strides.get(kind)
                return y if strides is None else _relaid(y, strides)

        return run

    def _first(self, name: str, kind: tuple, way: Way, args: tuple) -> Any:
        """The first call of a kind: on all ranks, find out whether parts may be computed by themselves."""
        of_part: Any = None
        expected: Any = None
        engine = self.exchange.engine
        known = engine.is_alone or (way.is_known and not engine.compares_all)
        tried = list(args)
        if not known and way.written is not None:
            tried[way.written] = args[way.written].clone()  # what is read may be what is written
        declared = way.is_known and way.taken[:1] != (REFERENCE,)
        try:
            of_part, same = way.part(*tried), True
        except PartRefused:
            same, declared = False, False
        if not known:
            expected = way.whole(*args)
            results = (of_part, expected) if way.written is None else (tried[way.written], args[way.written])
            same = same and same_bits(*results)
            if isinstance(expected, Tensor):
                self.strides[kind] = expected.stride()
        if declared and not known and not same:
            raise RuntimeError(
                f"turnout.{name}: route {way.taken[0]!r} declares where cuts change nothing (grain), and a "
                "part has other bits than the whole; pin another route"
            )
        flag = torch.tensor([float(same)], device=next(x.device for x in args if isinstance(x, Tensor)))
        same = all(bool(x.item()) for x in self.exchange.all_gather_stats(flag))
        self.runs_whole[kind] = not same
        self.counts["first seen"] += 1
        if not same:
            self.counts[f"whole: {name}"] += 1
        if known:
            return of_part if same else way.whole(*args)
        return expected

    def _convolution(
        self, op: Op, args: tuple, chosen: str | None = None, *, axis: int | None = None, margin: int = 0
    ) -> tuple[Any, Way]:
        """axis: of the split, where it is not the usual one. margin: halo rows that stand around the input in
        the place of so much padding."""
        exchange, names = self.exchange, list(op.signature.parameters)
        axis = exchange.axis if axis is None else axis
        at = {name: names.index(name) for name in names}
        x, weight, residual = args[at["input"]], args[at["weight"]], args[at["residual"]]
        stride, padding, dilation = (args[at[name]][axis] for name in ("stride", "padding", "dilation"))
        reach = dilation * (weight.shape[axis] - 1)
        is_padded = reach > 0 and not padding
        rows = x.shape[axis]
        outputs, halo = ((rows - reach - 1) // stride + 1 if is_padded else None), self.halos.get(x)
        if outputs is not None and halo is not None:  # whose last rows a stride may leave out
            own = rows - halo.before - halo.after
            whole_rows = exchange.global_size(own) + halo.before + halo.after
            if exchange.global_size(outputs) != (whole_rows - reach - 1) // stride + 1:
                raise ValueError(
                    f"a convolution of {own} rows or columns with stride {stride}, which gives {outputs}"
                )
        elif outputs is not None:
            whole_rows = exchange.global_size(outputs) * stride + reach + 1 - stride
            if (outputs - 1) * stride + reach + 1 != rows:
                raise ValueError(
                    f"a convolution of {rows} rows or columns with stride {stride}, which leaves some out"
                )
        else:
            whole_rows = exchange.global_size(rows)
        key = op.key(args)
        beside = None if residual is None else exchange.global_size(residual.shape[axis])
        problem = _scaled(key.problem, axis, whole_rows - 2 * margin, beside)
        if margin:
            problem = problem._replace(padding=_resized(problem.padding, axis, margin))
        run, taken, grains = self._chosen(op, key._replace(problem=problem), chosen)
        along = grains.along(exchange.axis)
        is_alone = exchange.ranks == 1 and not is_padded  # the call is that of one process
        is_known, grain = along is not None or is_alone, along or 1
        before, after = padding, reach + 1 - stride - padding
        outer = (whole_rows + 2 * padding - reach - 1) // stride + 1
        own_size = None if is_padded else exchange.spans(outer)[exchange.rank]
        off_grain = (
            grain > 1 and own_size is not None and any(begin % grain for begin, _ in exchange.spans(outer))
        )
        if grain > 1 and (is_padded or stride > 1):
            is_known = False
        cache_at = at.get("cache")
        seen = [at["input"], *([] if cache_at is None else [cache_at])]  # what a window slides over

        def part(*args: Any) -> Tensor:
            operands = list(args)
            if not is_padded and not is_alone and (reach or padding):
                extra = grain - 1 if off_grain else 0
                for i in seen:
                    if operands[i] is not None:
                        operands[i] = self._with_halo(operands[i], before + extra, after + extra)
                numbers = list(operands[at["padding"]])
                numbers[axis] = 0
                operands[at["padding"]] = numbers
                if off_grain:
                    assert own_size is not None
                    begin, end = own_size
                    early = begin % grain
                    late = min(-(-end // grain) * grain, outer) - end
                    for i in seen:
                        if operands[i] is not None:
                            size = operands[i].shape[axis]
                            operands[i] = operands[i].narrow(
                                axis, extra - early, size - 2 * extra + early + late
                            )
                    beside = operands[at["residual"]]
                    if beside is not None:
                        wide = exchange.halo(beside, extra, extra)
                        operands[at["residual"]] = wide.narrow(
                            axis, extra - early, beside.shape[axis] + early + late
                        )
                    y = run(tuple(operands))
                    return dense(y.narrow(axis, early, end - begin), y, axis)
            return run(tuple(operands))

        def whole(*args: Any) -> Tensor:
            operands = list(args)
            for i in seen:
                if margin:
                    x = operands[i].narrow(axis, margin, operands[i].shape[axis] - 2 * margin)
                    operands[i] = exchange.all_gather(dense(x, operands[i], axis), axis)
                elif operands[i] is not None:
                    operands[i] = self._whole(operands[i])
            if margin:
                operands[at["padding"]] = list(_resized(operands[at["padding"]], axis, margin))
            if operands[at["residual"]] is not None:
                operands[at["residual"]] = exchange.all_gather(operands[at["residual"]], axis)
            with self.plainly():
                y = op.reference(*operands) if chosen == REFERENCE else op(*operands)
            return dense(exchange.own(y, axis), y, axis)

        return (op.name, chosen, problem), Way(part, whole, is_known, None, taken, grains.in_frames(x.dim()))

    def _upsampling(self, op: Op, args: tuple) -> tuple[Any, Way]:
        exchange, axis = self.exchange, self.exchange.axis
        x, weight, _, scale, padding = args
        rows = x.shape[axis]
        key = op.key(args)
        problem = _scaled(key.problem, axis, exchange.global_size(rows))
        run, taken, grains = self._chosen(op, key._replace(problem=problem), None)
        high = padding[axis]
        if weight.shape[axis] != 2 * high + 1 or high > scale:
            raise NotImplementedError(
                f"an upsampling with a kernel of {weight.shape[axis]} and padding {high} "
                "in a distributed model"
            )
        before, after = (
            0 if rank == end else 1 for rank, end in ((exchange.rank, 0), (exchange.rank, exchange.ranks - 1))
        )

        def part(x: Tensor, *rest: Any) -> Tensor:
            size = scale * x.shape[axis]
            # the pixels that are computed beside the own ones see the edge of what is known, and are dropped
            y = run((exchange.halo(x, 1, 1, edge="none") if exchange.ranks > 1 else x, *rest))
            return dense(y.narrow(axis, scale * before, size), y, axis) if before or after else y

        def whole(x: Tensor, *rest: Any) -> Tensor:
            with self.plainly():
                return self._own(op(exchange.all_gather(x), *rest))

        is_known = grains.along(axis) == 1 or exchange.ranks == 1
        return (op.name, problem), Way(part, whole, is_known, None, taken, grains.in_frames(x.dim()))

    def _pointwise(self, op: Op, args: tuple) -> tuple[Any, Way]:
        exchange, axis, names = self.exchange, self.exchange.axis, list(op.signature.parameters)
        split = [i for i, name in enumerate(names) if name in ACTIVATIONS and isinstance(args[i], Tensor)]
        rows = args[split[0]].shape[axis]
        key = op.key(args)
        problem = _scaled(key.problem, axis, exchange.global_size(rows))
        run, taken, grains = self._chosen(op, key._replace(problem=problem), None)
        written = names.index("out") if op.mutates else None

        def part(*args: Any) -> Any:
            return run(args)

        def whole(*args: Any) -> Any:
            operands = list(args)
            for i in split:
                operands[i] = self.room_of_all(operands[i]) if i == written else self.gathered(operands[i])
            with self.plainly():
                y = op(*operands)
            if written is None:
                return self._own(y)
            args[written].copy_(exchange.own(operands[written]))
            return None

        of_frames = grains.in_frames(args[split[0]].dim())
        is_known = grains.along(axis) == 1 or exchange.ranks == 1
        return (op.name, problem), Way(part, whole, is_known, written, taken, of_frames)

    def _norm(self, op: Op, args: tuple) -> tuple[Any, Way]:
        norm = Norm(self, op, args)
        kind = (op.name, norm.problem)
        if not norm.in_blocks:
            self.runs_whole[kind] = True
        written = norm.names.index("out") if op.mutates else None
        return kind, Way(norm.part, norm.whole, True, written, (norm.route,))

    def _chosen(self, op: Op, key: Any, chosen: str | None) -> Chosen:
        verdict = None if chosen is not None else op.verdict(key)
        if verdict is None or verdict.chosen == REFERENCE:
            return Chosen(lambda args: op.plain(*args), (REFERENCE,), UNKNOWN)
        route = op.routes[verdict.chosen]
        config = dict(verdict.config)
        ready: dict[Any, Callable[..., Any]] = {}
        device = Device.of(key.devices[0])

        def run(args: tuple) -> Any:
            facts = tuple((x.shape, x.stride()) if isinstance(x, Tensor) else str(x) for x in args)
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

    def _with_halo(self, x: Tensor, before: int, after: int) -> Tensor:
        strips = self.caches.get(x)
        if strips is not None and [strip.shape[self.exchange.axis] for strip in strips] == [before, after]:
            return torch.cat([strips[0], x, strips[1]], self.exchange.axis)
        whole = self.exchange.halo(x, before, after)
        self.latest = x, whole
        return whole

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
        self.latest = None
        y, kept = ops.causal_conv3d(
            x, weight, bias, cache=cache, padding=padding, residual=residual, return_cache=True
        )
        latest, self.latest = self.latest, None
        kept = kept.clone() if x.shape[2] > kept.shape[2] else kept
        if latest is not None and latest[0] is x and padding[self.exchange.axis]:
            self.keep_halo(kept, cache, latest[1], x.shape[2], padding[self.exchange.axis])
        return y, kept

    def keep_halo(self, kept: Tensor, cache: Tensor | None, around: Tensor, frames: int, rows: int) -> None:
        """Keep the halo rows of cached frames, which are the last of `cache` and of `around` with so many
        frames.
        """
        axis, new = self.exchange.axis, min(kept.shape[2], frames)
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

    def _whole(self, x: Tensor) -> Tensor:
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

    def _own(self, y: Any) -> Any:
        if not isinstance(y, Tensor):
            raise NotImplementedError(f"a {type(y).__name__} returned by a part of a distributed model")
        return dense(self.exchange.own(y), y, self.exchange.axis)


def same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return torch.equal(*(x.contiguous().view(kinds[x.element_size()]) for x in (a, b)))


def _relaid(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """x with these strides; copied unless they differ for dimensions of size one only."""
    if x.stride() == strides:
        return x
    if all(size == 1 or a == b for size, a, b in zip(x.shape, x.stride(), strides, strict=True)):
        return x.as_strided(x.shape, strides)
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def _scaled(problem: Any, axis: int, whole: int, residual: int | None = None) -> Any:
    """A problem of a part as that of the whole, with so many rows, and so many in what is added to the
    result.
    """
    changed: dict[str, Any] = {}
    fields = problem._asdict()
    for name, strides in (("input", ("input_strides",)), ("shape", ("strides", "out_strides"))):
        if name in fields and isinstance(fields[name], tuple):
            shape = fields[name]
            changed[name] = _resized(shape, axis, whole)
            changed |= {s: strides_resized(shape, fields[s], axis, whole) for s in strides if s in fields}
    for name, value in fields.items():
        if name in ("cache", "residual") and value is not None:
            size = whole if name == "cache" or residual is None else residual
            changed[name] = value._replace(
                shape=_resized(value.shape, axis, size),
                strides=strides_resized(value.shape, value.strides, axis, size),
            )
        elif {"input", "shape"} & set(getattr(value, "_fields", ())):
            changed[name] = _scaled(value, axis, whole, residual)
    return problem._replace(**changed)


def _resized(shape: tuple, axis: int, size: int) -> tuple:
    sizes = list(shape)
    sizes[axis] = size
    return tuple(sizes)

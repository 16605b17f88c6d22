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
from math import inf
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from turnout.ops.conv2d import CONV2D
from turnout.ops.conv3d import CONV3D
from turnout.ops.convolution.problem import arguments
from turnout.parallel.attention import OwnQueries
from turnout.parallel.convolution import convolution
from turnout.parallel.exchange import Exchange
from turnout.parallel.halos import Halos
from turnout.parallel.norms import BLOCKS, NORMS, Norm
from turnout.parallel.part_calls import PartCall, PartRefused, cut_anywhere, relaid, same_bits
from turnout.parallel.pointwise import pointwise
from turnout.parallel.upsampling import upsampling
from turnout.parallel.whole_problem import resized
from turnout.routing import settings
from turnout.routing.choose import REFERENCE, Verdict
from turnout.routing.fallback import blocked
from turnout.routing.op import OPS, Op
from turnout.routing.torch_private import without_function_modes

CONVOLUTIONS = ("conv2d", "conv3d", "causal_conv3d")
_SLOWER = 1.5  # times as long as the fastest route that a convolution may take whose parts are known
POINTWISE = ("rms_norm_silu", "rms_norm_silu_into")  # every pixel by itself


def routes_of_parts() -> settings.Preferred:
    """Routes that ranks compute of their parts, without looking whether the bits are those of the whole. A
    norm takes one in any case: by another route every rank gathers and reads all of its input."""
    windows = {
        name: settings.Preference(cut_anywhere(OPS[name]), _SLOWER)
        for name in (*CONVOLUTIONS, "upsample_conv2d")
    }
    return (*windows.items(), *((name, settings.Preference(BLOCKS, inf)) for name in NORMS))


class Split(Halos):
    """The plan of one rank for one size of latents; kept from call to call.

    counts: how many calls ran on a part and how many whole. latents: the most that a decoder which works
    latent by latent takes at a time. calls: how many calls of one process this one stands for.
    """

    calls = 1

    def __init__(self, exchange: Exchange, latents: int = 1):
        super().__init__(exchange)
        self.latents = latents
        self.counts: collections.Counter[str] = collections.Counter()
        self.runs_whole: dict[tuple, bool] = {}  # kinds of calls that were compared
        self.rings: dict[tuple, Callable[..., Any]] = {}
        self.strides: dict[
            tuple, tuple[int, ...]
        ] = {}  # of what these return: where an axis is short, torch has others
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
        return self.runner(op.name, *self.part_call(op, args))

    def part_call(self, op: Op, args: tuple) -> tuple[tuple, PartCall]:
        """The kind of a call, and the functions for calls of that kind."""
        if op.name in CONVOLUTIONS:
            return convolution(self, op, args)
        if op.name == "upsample_conv2d":
            return upsampling(self, op, args)
        if op.name in POINTWISE:
            return pointwise(self, op, args)
        if op.name in NORMS:
            return self._norm(op, args)
        raise NotImplementedError(
            f"turnout.{op.name} is not known to a distributed model; restore() the model to run it"
        )

    def verdict(self, op: Op, args: tuple) -> Verdict:
        """The verdict on the whole call of which this is a rank's part."""
        (*_, problem), _ = self.part_call(op, args)
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
        of_ring = resized(padding, axis, 0)
        args = arguments(F.conv3d, 3, x, weight, bias, padding=of_ring, residual=residual)
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
            self.rings[key] = self.runner(
                "conv3d", *convolution(self, CONV3D, args, axis=axis, margin=margin)
            )
        return self.rings[key](*args)

    def torch_convolution(self, convolve: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
        """torch's own convolution: the reference, whatever would be chosen."""
        op = CONV2D if "2d" in convolve.__name__ else CONV3D
        unbatched = (args[0] if args else kwargs["input"]).dim() == (3 if op is CONV2D else 4)
        if unbatched:
            raise NotImplementedError("a convolution without a batch in a distributed model")
        lowered = arguments(convolve, 2 if op is CONV2D else 3, *args, **kwargs)
        return self.runner(convolve.__name__, *convolution(self, op, lowered, REFERENCE))(*lowered)

    def everywhere(self, function: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """`function` of the whole x on every rank, and of what it returns this rank's part."""
        self.counts["whole"] += 1
        with without_function_modes(), self.plainly():
            return self.own_of(function(self.whole_of(x), *args, **kwargs))

    def attention(self, function: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The same of a function whose last step that mixes pixels is attention: of it only own pixels are
        computed.
        """
        self.counts["whole"] += 1
        with without_function_modes(), self.plainly():
            whole = self.whole_of(x)
            with self.queries.of_frames(*whole.shape[-2:]):
                return self.own_of(function(whole, *args, **kwargs))

    def plainly(self) -> Any:
        assert self.settings is not None
        now = settings.current()
        return settings.plainly(now if isinstance(now, settings.Split) else self.settings)

    def pixels_of_frame(self, x: Tensor) -> int:
        axis = self.exchange.axis
        others = x.shape[3] * x.shape[4]
        return others // x.shape[axis] * self.exchange.global_size(x.shape[axis])

    # What runs

    def runner(self, name: str, kind: tuple, call: PartCall) -> Callable[..., Any]:
        """The function that runs calls of a kind on this rank's part, or whole where parts have other bits.

        The first call finds out which, unless that is known.
        """
        part, whole = call.part, call.whole

        def run(*args: Any) -> Any:
            with without_function_modes():
                runs_whole = self.runs_whole.get(kind)
                if runs_whole is None:
                    return self._first(name, kind, call, args)
                self.counts["whole" if runs_whole else "part"] += 1
                if runs_whole:
                    return whole(*args)
                y, strides = part(*args), self.strides.get(kind)
                return y if strides is None else relaid(y, strides)

        return run

    def _first(self, name: str, kind: tuple, call: PartCall, args: tuple) -> Any:
        """The first call of a kind: on all ranks, find out whether parts may be computed by themselves."""
        of_part: Any = None
        expected: Any = None
        engine = self.exchange.engine
        known = engine.is_alone or (call.keeps_bits and not engine.compares_all)
        tried = list(args)
        if not known and call.written is not None:
            tried[call.written] = args[call.written].clone()  # what is read may be what is written
        declared = call.keeps_bits and call.route[:1] != (REFERENCE,)
        try:
            of_part, same = call.part(*tried), True
        except PartRefused:
            same, declared = False, False
        if not known:
            expected = call.whole(*args)
            results = (
                (of_part, expected) if call.written is None else (tried[call.written], args[call.written])
            )
            same = same and same_bits(*results)
            if isinstance(expected, Tensor):
                self.strides[kind] = expected.stride()
        if declared and not known and not same:
            raise RuntimeError(
                f"turnout.{name}: route {call.route[0]!r} declares where cuts change nothing (grain), and a "
                "part has other bits than the whole; pin another route"
            )
        flag = torch.tensor([float(same)], device=next(x.device for x in args if isinstance(x, Tensor)))
        same = all(bool(x.item()) for x in self.exchange.all_gather_stats(flag))
        self.runs_whole[kind] = not same
        self.counts["first seen"] += 1
        if not same:
            self.counts[f"whole: {name}"] += 1
        if known:
            return of_part if same else call.whole(*args)
        return expected

    def _norm(self, op: Op, args: tuple) -> tuple[Any, PartCall]:
        norm = Norm(self, op, args)
        kind = (op.name, norm.problem)
        if not norm.in_blocks:
            self.runs_whole[kind] = True
        written = norm.names.index("out") if op.mutates else None
        return kind, PartCall(norm.part, norm.whole, True, written, (norm.route,))

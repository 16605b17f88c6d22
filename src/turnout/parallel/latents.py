"""Several latents in one call of a decoder that works latent by latent, with the bits of one after the other.

One latent leaves a large GPU with too few pixels while frames are small, and a rank with many small messages.
So behind the first latent several go through the decoder at once. What is chosen is chosen for each latent's
own call, as one process makes it; where all of these calls take the same route in the same configuration, it
runs once for all frames. Where the route does not declare that cuts between frames change nothing, that is
compared with one call after the other when a call of its kind is first seen; where the bits differ, or routes
do, and for whatever mixes the pixels of a frame, the calls stay apart.

How many go at once is limited by memory: `frames_at_once`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from turnout import ops
from turnout.ops.causal_conv3d import next_cache
from turnout.parallel.layout import empty_resized
from turnout.parallel.norms import NORMS
from turnout.parallel.part_calls import PartCall
from turnout.parallel.split import Split
from turnout.routing.choose import Verdict
from turnout.routing.op import Op
from turnout.routing.torch_private import without_function_modes

_FRAMES = ("input", "x", "out", "residual", "scale", "shift")  # arguments with the frames of all calls


class Together(Split):
    """A plan for calls each of which stands for `calls` of one process, with the same number of frames.

    Frames are dimension 2 of `[B, C, T, H, W]`, and samples of `[T, C, H, W]`. `alone` is the plan for single
    calls; what is known of calls, halos and caches is shared with it.
    """

    def __init__(self, alone: Split, calls: int):
        vars(self).update(vars(alone))
        self.alone, self.calls = alone, calls
        assert alone.settings is not None
        self.settings = alone.settings.with_plan(self)
        self.returned: dict[tuple, tuple[int, ...]] = {}  # strides of what one call returns, by kind

    def runner(self, name: str, kind: tuple, call: PartCall) -> Callable[..., Any]:
        run = super().runner(name, kind, call)

        def run_and_note_layout(*args: Any) -> Any:
            y = run(*args)
            if kind in self.returned:
                self.layouts[y] = self.returned[kind]
            return y

        return run_and_note_layout

    def part_call(self, op: Op, args: tuple) -> tuple[tuple, PartCall]:
        _refuse_depth(op.name, args)
        calls = [self.arguments(op, args, call) for call in range(self.calls)]
        part_calls = [self.alone.part_call(op, each) for each in calls]
        runs = [self.alone.runner(op.name, *each) for each in part_calls]
        first_kind, first = part_calls[0]
        kind = ("together", self.calls, first_kind)
        names = list(op.signature.parameters)
        written = None if first.written is None else names[first.written]

        def apart(*args: Any) -> Any:
            results = []
            for call, run in enumerate(runs):
                own = self.arguments(op, args, call)
                results.append(run(*own))
                if written is not None:
                    self.frames(args[names.index(written)], call).copy_(own[names.index(written)])
            if written is not None:
                return None
            self.returned[kind] = results[0].stride()
            return self.joined(results)

        if op.name in NORMS or any(each.route != first.route for _, each in part_calls):
            self.runs_whole[kind] = True
        x = next(args[names.index(name)] for name in ("input", "x") if name in names)
        frames = x.shape[_axis(x)] // self.calls
        keeps_bits = all(
            each.keeps_bits and each.frame_grain is not None and frames % each.frame_grain == 0
            for _, each in part_calls
        )
        if keeps_bits and written is None:  # may never be computed apart
            with without_function_modes():  # the reference may call what a rank's mode takes over
                self.returned[kind] = op.reference(*map(_meta, calls[0])).stride()
        return kind, PartCall(first.part, apart, keeps_bits, first.written)

    def verdict(self, op: Op, args: tuple) -> Verdict:
        return self.alone.verdict(op, self.arguments(op, args, 0))

    def arguments(self, op: Op, args: tuple, call: int) -> tuple:
        """The arguments of one of the calls: its own frames, and the cached ones before them."""
        of_all = dict(zip(op.signature.parameters, args, strict=True))
        own = {
            name: self.own_frames(value, call) if name in _FRAMES and isinstance(value, Tensor) else value
            for name, value in of_all.items()
        }
        if "cache" in of_all:
            before = (of_all["weight"].shape[2] - 1) * of_all["dilation"][0]
            own["cache"] = self.cache(of_all["input"], of_all["cache"], before, call)
        return tuple(own.values())

    def cache(self, x: Tensor, cache: Tensor | None, before: int, call: int) -> Tensor | None:
        """The frames that a call is given of those before it, as one process keeps them."""
        frames = x.shape[2] // self.calls
        seen = max(1, -(-before // frames))  # calls whose frames fill the cache
        for earlier in range(max(0, call - seen), call):
            own = self.own_frames(x, earlier)
            kept = next_cache(own, cache, before)
            cache = kept.clone() if own.shape[2] > kept.shape[2] else kept
        return cache

    def frames(self, x: Tensor, call: int) -> Tensor:
        """The frames of one call: a view."""
        each, rest = divmod(x.shape[_axis(x)], self.calls)
        if rest:
            raise RuntimeError(
                f"{x.shape[_axis(x)]} frames for {self.calls} latents in a distributed decoder; "
                "call distribute(..., latents=1)"
            )
        return x.narrow(_axis(x), call * each, each)

    def own_frames(self, x: Tensor, call: int) -> Tensor:
        """The same in memory of their own, laid out as one process has them."""
        frames, strides = self.frames(x, call), self.layouts.get(x)
        if strides is None:
            own = empty_resized(x, _axis(x), frames.shape[_axis(x)])
        else:
            own = torch.empty_strided(frames.shape, strides, dtype=x.dtype, device=x.device)
        own.copy_(frames)
        if x in self.halos:
            self.halos[own] = self.halos[x]
        return own

    def gather(self, latents: Tensor, begin: int) -> Tensor:
        """The latents of all calls, of `[1, C, T, h, w]`: each laid out as one process has it."""
        alone = latents[:, :, begin : begin + 1].clone()
        return empty_resized(alone, 2, self.calls).copy_(latents[:, :, begin : begin + self.calls])

    def apart(self, latents: Tensor) -> list[Tensor]:
        """What `gather` gathered, each by itself."""
        return [self.own_frames(latents, call) for call in range(self.calls)]

    def pieces(
        self, x: Tensor, calls: int, most: int, elements: float, room: float
    ) -> list[tuple[Tensor, int]]:
        """How frames `[1, C, T, H, W]` of `calls` calls go on, and for how many calls each piece stands.

        One process passes on at most `most` frames at a time, with `elements` elements each; more of them go
        together as far as there is room. The first piece is a view, the others have memory of their own.
        """
        each = min(most, x.shape[2] // calls)
        count = x.shape[2] // each
        at_once = frames_at_once(count, each * elements, room)
        pieces = []
        for begin in range(0, count, at_once):
            piece = x[:, :, begin * each : (begin + at_once) * each]
            piece = regrouped(piece.clone() if begin else piece, calls, piece.shape[2] // each)
            if x in self.layouts:
                self.layouts[piece] = self.layouts[x]
            pieces.append((piece, piece.shape[2] // each))
        return pieces

    def joined(self, results: list[Tensor]) -> Tensor:
        """Results of all calls as that of one."""
        axis = _axis(results[0])
        whole = empty_resized(results[0], axis, self.calls * results[0].shape[axis])
        for call, result in enumerate(results):
            self.frames(whole, call).copy_(result)
        self.layouts[whole] = results[0].stride()
        return whole

    def each(self, function: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """`function` of each call's frames by themselves."""
        frames = [self.own_frames(x, call) for call in range(self.calls)]
        return self.joined([function(own, *args, **kwargs) for own in frames])

    def everywhere(self, function: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.each(functools.partial(self.alone.everywhere, function), x, *args, **kwargs)

    def attention(self, function: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.each(functools.partial(self.alone.attention, function), x, *args, **kwargs)

    def torch_convolution(self, convolve: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError(
            f"{convolve.__name__} of torch where several latents are decoded at once; "
            "call distribute(..., latents=1)"
        )

    def causal_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        cache: Tensor | None,
        padding: tuple[int, int],
        residual: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        with self.alone.watching_halos() as padded:
            y = ops.causal_conv3d(x, weight, bias, cache=cache, padding=padding, residual=residual)
        kept = self.cache(x, cache, weight.shape[2] - 1, self.calls)
        assert kept is not None
        self.keep_halo(kept, cache, x, padded, padding[self.exchange.axis])
        return y, kept


def _meta(x: Any) -> Any:
    return torch.empty_like(x, device="meta") if isinstance(x, Tensor) else x


def _axis(x: Tensor) -> int:
    """That of the frames."""
    return 2 if x.dim() == 5 else 0


def _refuse_depth(name: str, args: tuple) -> None:
    """A convolution over frames that knows nothing of what came before would see those of another latent."""
    if name == "conv3d" and args[1].shape[2] > 1:
        raise NotImplementedError(
            f"turnout.conv3d with a kernel of depth {args[1].shape[2]} where several latents are decoded at "
            "once; call distribute(..., latents=1)"
        )


def regrouped(x: Tensor, before: int, after: int) -> Tensor:
    """Frames of `before` calls that from here on go on in `after`: the stride of the samples, of which there
    is one, leads nowhere, but routes are chosen by it. It becomes such that each call has the same as ever.
    """
    strides = (x.stride(0) // before * after, *x.stride()[1:])
    return x if strides == x.stride() else x.as_strided(x.shape, strides)


def frames_at_once(calls: int, elements: float, room: float) -> int:
    """How many of so many calls go on together, each of so many elements (of what goes in or comes out,
    whichever is more) where there is room for `room`.

    >>> frames_at_once(4, 100.0, 250.0), frames_at_once(4, 100.0, 50.0)
    (2, 1)
    """
    return max(1, min(calls, int(room / elements)))

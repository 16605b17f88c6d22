"""One VAE on several ranks: what they agree on, which part of a call each computes, and where results go."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from turnout.parallel import agreement
from turnout.parallel.clips import check_clips, deal, gather_results, map_tensors
from turnout.parallel.cuts import Cut, Cuts
from turnout.parallel.exchange import AXES, Engine, Exchange
from turnout.parallel.fronts import Distributed, twin_of
from turnout.parallel.lockstep import Lockstep
from turnout.parallel.mode import SplitMode
from turnout.parallel.part_calls import same_bits
from turnout.parallel.split import Split, routes_of_parts
from turnout.parallel.vaes import refuse_captured, refuse_compiled, refuse_swapped, refuse_tiling, why_whole
from turnout.routing import settings
from turnout.routing.op import TurnoutWarning


class Distribution:
    """How one VAE is split. The ranks of a `Lockstep` share it."""

    def __init__(
        self, vae: Any, engine: Lockstep | Engine, split: str, gather: str, routes: str, latents: int
    ):
        self.engine, self.ranks, self.split, self.gather = engine, engine.ranks, split, gather
        self.latents, self.routes = latents, routes
        self.model = agreement.of_model(vae)
        self.how = {
            "split": split,
            "gather": gather,
            "routes": routes,
            "ranks": str(engine.ranks),
            "latents": str(latents),
        }
        self.splits: dict[tuple, Split] = {}  # of each rank, axis, size and settings
        self.agreed: set[tuple] = set()
        sums_blocks = any(isinstance(module, nn.GroupNorm) for module in vae.modules())
        self.cuts = Cuts(split, engine.ranks, sums_blocks)
        # kinds of calls: whether samples by themselves have the bits of all together
        self.alike: dict[tuple, bool] = {}
        self.warned = False
        self._running = threading.Lock()

    def meet(self) -> None:
        """Compare models before anything is changed."""
        if not isinstance(self.engine, Lockstep):
            agreement.compare(self.engine, {**self.model, **self.how})

    def call(self, vae: Any, name: str, x: Any, run: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """`vae.decode` or `vae.encode` of the whole x; `run` is what would run without a distribution."""
        refuse_compiled()
        with self._one_call(vae):
            return self._call(vae, name, x, run, args, kwargs)

    @contextlib.contextmanager
    def _one_call(self, vae: nn.Module) -> Iterator[None]:
        """Around a call on all ranks: what it raises on one of them is raised on all, and no other call runs
        meanwhile, whose messages would be taken for those of this one."""
        if not self._running.acquire(blocking=False):
            raise RuntimeError(
                "another call of this distributed model is running, in another thread or around the hook "
                "that made this one; ranks make one call after the other: wait for it"
            )
        try:
            with self._preferring(vae), self._ended_everywhere():
                refuse_captured(vae)
                yield
        finally:
            self._running.release()

    def _preferring(self, vae: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Inside this block a call takes the routes that this distribution wants, however it is computed."""
        in_parts = self.routes == "parts"
        if self.routes == "auto":
            in_parts = any(weight.device.type == "cuda" for weight in vae.parameters())
        return settings.preferring(routes_of_parts()) if in_parts else contextlib.nullcontext()

    def _call(self, vae: Any, name: str, x: Any, run: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        if isinstance(x, list | tuple):
            return self._of_clips(vae, name, x, run, args, kwargs)
        if not isinstance(x, Tensor) or x.dim() not in (4, 5):
            return run(x, *args, **kwargs)  # the model's own error, on every rank

        def on_part(rank: int, own: Tensor) -> Any:
            twin = twin_of(vae) if isinstance(self.engine, Lockstep) else vae
            return getattr(super(Distributed, twin), name)(own, *args, **kwargs)

        return self._run(vae, name, x, lambda: run(x, *args, **kwargs), on_part)

    def _of_clips(
        self, vae: Any, name: str, clips: Sequence[Any], run: Callable[..., Any], args: tuple, kwargs: dict
    ) -> list[Any]:
        """The same of several clips: whole ones for each rank where there are as many as ranks."""
        check_clips(name, clips)
        engine = self.engine
        of_all_ranks = self.gather == "none" and isinstance(engine, Lockstep)
        is_whole = any(why_whole(vae, clip) for clip in clips)  # gradients, autocast
        if is_whole or self.split in AXES or len(clips) < self.ranks:
            results = [self._call(vae, name, clip, run, args, kwargs) for clip in clips]
            if of_all_ranks and not is_whole:
                return [list(of_rank) for of_rank in zip(*results, strict=True)]
            return results

        def on_rank(engine: Engine) -> list[Any]:
            twin = twin_of(vae) if isinstance(self.engine, Lockstep) else vae

            def compute(clip: Tensor) -> Any:
                return getattr(super(Distributed, twin), name)(clip, *args, **kwargs)

            return self._dealt_out(engine, vae, name, clips, compute)

        if not isinstance(engine, Lockstep):
            return on_rank(engine)
        results = self._in_lockstep(engine, vae, on_rank)
        return results if of_all_ranks else results[0]

    def _dealt_out(
        self, engine: Engine, vae: Any, name: str, clips: Sequence[Tensor], compute: Callable[[Tensor], Any]
    ) -> list[Any]:
        refuse_tiling(vae)
        listed = ", ".join(f"{list(clip.shape)} {clip.dtype}" for clip in clips)
        self._agree(engine, name, clips[0], f"a list of clips dealt out: {listed}")
        engine.begin()
        owners = deal([clip.numel() for clip in clips], self.ranks)
        own = {i: compute(clips[i]) for i, owner in enumerate(owners) if owner == engine.rank}
        if self.gather == "none":
            results = [own.get(i) for i in range(len(clips))]
        else:
            results = gather_results(engine, own, owners, self.gather, clips)
        engine.agree("done")
        return results

    def _in_lockstep(self, engine: Lockstep, vae: nn.Module, on_rank: Callable[[Any], Any]) -> list[Any]:
        refuse_swapped(vae)
        try:
            return engine.run(on_rank)
        except BaseException:
            self._forget()
            raise

    def decode_in(self, stream: Any, z: Any) -> Any:
        """`DecodeStream.decode` of the whole z."""
        refuse_compiled()
        with self._one_call(stream.vae):
            return self._decode_in(stream, z)

    def _decode_in(self, stream: Any, z: Any) -> Any:
        if stream.graph:
            raise ValueError("DecodeStream: graph=True is not known to a distributed model; use graph=False")
        if not isinstance(z, Tensor) or z.dim() != 5:
            return stream.decode_alone(z)  # its own error, on every rank

        def on_part(rank: int, own: Tensor) -> Any:
            if not isinstance(self.engine, Lockstep):
                return stream.decode_alone(own)
            if rank not in stream.of_ranks:
                stream.of_ranks[rank] = type(stream)(twin_of(stream.vae))
            return stream.of_ranks[rank].decode_alone(own)

        return self._run(stream.vae, "stream", z, lambda: stream.decode_alone(z), on_part)

    def _run(
        self, vae: Any, name: str, x: Tensor, whole: Callable[[], Any], on_part: Callable[[int, Tensor], Any]
    ) -> Any:
        engine = self.engine
        if not isinstance(engine, Lockstep):
            return self._on_rank(engine, vae, name, x, whole, on_part)
        refuse_tiling(vae)
        why = why_whole(vae, x)
        if why is not None:
            self._warn(why)
            return whole()
        results = self._in_lockstep(
            engine, vae, lambda rank: self._on_rank(rank, vae, name, x, whole, on_part)
        )
        return results if self.gather == "none" else results[0]

    def _on_rank(
        self,
        engine: Engine,
        vae: Any,
        name: str,
        x: Tensor,
        whole: Callable[[], Any],
        on_part: Callable[[int, Tensor], Any],
    ) -> Any:
        refuse_tiling(vae)
        why = why_whole(vae, x)
        how = None if why else self._batch(engine, vae, name, x, whole, on_part)
        cut = None if why or how else self.cuts.best(vae, name, x)
        if isinstance(cut, str):
            why = cut
        if why is not None:
            self._agree(engine, name, x, why)
            self._warn(why)
            result = whole()
        elif how is not None:
            result = how()
        else:
            assert isinstance(cut, Cut)
            self._agree(engine, name, x, f"along {cut.axis}")
            engine.begin()
            split = self._split(engine, cut)
            assert split.settings is not None
            own = split.exchange.own(x).clone()
            with settings.entering(split.settings), SplitMode(split):
                result = on_part(engine.rank, own)
            result = map_tensors(result, lambda part: self._gathered(part, split.exchange))
        engine.agree("done")
        return result

    def _batch(
        self,
        engine: Engine,
        vae: Any,
        name: str,
        x: Tensor,
        whole: Callable[[], Any],
        on_part: Callable[[int, Tensor], Any],
    ) -> Callable[[], Any] | None:
        """What runs a call of many samples, each rank its own and nothing exchanged; None: they are split by
        rows.

        A kernel may round otherwise for fewer samples. So a call of this kind is computed both ways when it
        is first seen; where the bits are not the same, its samples stay together.
        """
        samples = x.shape[0]
        in_frames = self.split == "auto" and self.ranks == 1 and self.latents > 1  # several latents at once
        if name == "stream" or self.split not in ("auto", "batch") or samples < self.ranks or in_frames:
            if self.split == "batch":
                given = "a DecodeStream, whose frames" if name == "stream" else f"{samples} samples, which"
                raise ValueError(
                    f"{name}: {given} cannot be dealt out to {self.ranks} ranks; use split='auto'"
                )
            return None
        self._agree(engine, name, x, "by samples")
        engine.begin()
        exchange = Exchange(engine, 0, samples)
        kind = engine.rank, name, tuple(x.shape), x.dtype, settings.current()

        def own() -> Any:
            return on_part(engine.rank, exchange.own(x).clone(memory_format=torch.preserve_format))

        if kind not in self.alike:
            part, result = own(), whole()
            pairs: list[bool] = []
            expected = iter(tensors_of(result))
            for each in tensors_of(part):
                pairs.append(same_bits(each, exchange.own(next(expected))))
            self.alike[kind] = all(engine.agree(all(pairs)))
        if self.alike[kind]:
            return lambda: map_tensors(own(), lambda part: self._gathered(part, exchange))
        if self.split == "batch":
            self._warn("samples that are decoded by themselves have other bits than together")
            return whole
        return None

    @contextlib.contextmanager
    def _ended_everywhere(self) -> Iterator[None]:
        """A failure of this rank is told to all that may wait for it; of threads the step tells it."""
        try:
            yield
        except BaseException as failure:
            if not isinstance(self.engine, Lockstep):
                self.engine.fail(failure)
                self._forget()
            raise

    def _forget(self) -> None:
        """After a failure ranks know different things of calls that were seen: all begin anew."""
        self.splits.clear()
        self.agreed.clear()
        self.alike.clear()

    def _agree(self, engine: Engine, name: str, x: Tensor, computed: str) -> None:
        """Compare what decides about a call, and some values of its input when it is the first of its kind:
        to read them takes waiting for the device."""
        said = {**agreement.of_call(name, x, x.device), "computed": computed}
        key = (engine.rank, *said.values())
        values = {} if key in self.agreed else {"values of the input": agreement.values_of(x)}
        agreement.compare(engine, {**said, **values})
        self.agreed.add(key)

    def _split(self, engine: Engine, cut: Cut) -> Split:
        """The plan of a rank, which is kept: what was compared once is known."""
        key = engine.rank, *cut[:3], tuple(cut.levels.items()), settings.current()
        if key not in self.splits:
            split = self.splits[key] = Split(
                Exchange(engine, cut.axis, cut.units, cut.grain, cut.levels), self.latents
            )
            split.settings = settings.split_by(split)
        self.splits[key].exchange.engine = engine
        return self.splits[key]

    def _gathered(self, part: Tensor, exchange: Exchange) -> Tensor | None:
        if self.gather == "all":
            return exchange.all_gather(part)
        return part if self.gather == "none" else exchange.gather_first(part)

    def _warn(self, why: str) -> None:
        if not self.warned:
            self.warned = True
            warnings.warn(
                f"turnout.distribute: {why}; every rank computes and returns the whole",
                TurnoutWarning,
                stacklevel=6,
            )


def tensors_of(result: Any) -> list[Tensor]:
    """The tensors that a model returns, in order."""
    found: list[Tensor] = []
    map_tensors(result, found.append)
    return found

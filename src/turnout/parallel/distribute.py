"""distribute: decode and encode on the ranks of a mesh, the same bits as on one."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from turnout.models import patch
from turnout.models.bare import is_bare
from turnout.models.report import Entry, Report
from turnout.models.snapshot import REPLAYS
from turnout.ops.group_norm_silu.blocks import grain
from turnout.parallel import agreement
from turnout.parallel.clips import check_clips, deal, gather_results, map_tensors
from turnout.parallel.exchange import AXES, Engine, Exchange, levels_of, parts_of
from turnout.parallel.fake import Fake
from turnout.parallel.lockstep import Lockstep
from turnout.parallel.mode import SplitMode
from turnout.parallel.split import Split
from turnout.parallel.ways import same_bits
from turnout.routing import settings
from turnout.routing.op import TurnoutWarning

SPLITS = ("auto", "height", "width", "batch")
GATHERS = ("all", "first", "none")
LATENTS = 4  # of Wan 2.1 at 480 x 832, four fill eight H200 as far as frames are small: see docs/guides
_AUTOENCODERS = "diffusers.models.autoencoders"


class Known(NamedTuple):
    """Modules of a VAE that mix all pixels of a frame. Every rank computes them whole, but for `attention`:
    of those whose last step that mixes pixels is attention, a rank attends from its own pixels only.

    rest: whether the encoder drops the last row of an odd number where it halves them ("down"), or keeps it
    ("up"); None where it takes multiples of the latents only, or it is not known."""

    attention: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    rest: Literal["down", "up"] | None = None


class Cut(NamedTuple):
    """Along which axis, in how many rows or columns of latents, and the sizes of a picture that is no
    multiple of them (see `Exchange`)."""

    axis: int
    units: int
    levels: dict[int, int]


KNOWN = {
    f"{_AUTOENCODERS}.autoencoder_kl_wan.AutoencoderKLWan": Known(("WanAttentionBlock",), rest="down"),
    f"{_AUTOENCODERS}.autoencoder_kl_qwenimage.AutoencoderKLQwenImage": Known(
        ("QwenImageAttentionBlock",), rest="down"
    ),
    f"{_AUTOENCODERS}.autoencoder_kl.AutoencoderKL": Known(("Attention",), rest="down"),
    f"{_AUTOENCODERS}.autoencoder_kl_flux2.AutoencoderKLFlux2": Known(("Attention",), rest="down"),
    f"{_AUTOENCODERS}.autoencoder_kl_hunyuan_video.AutoencoderKLHunyuanVideo": Known(
        whole=("HunyuanVideoMidBlock3D",), rest="up"
    ),
    f"{_AUTOENCODERS}.autoencoder_kl_cogvideox.AutoencoderKLCogVideoX": Known(rest="down"),
    f"{_AUTOENCODERS}.autoencoder_kl_ltx.AutoencoderKLLTXVideo": Known(),
    f"{_AUTOENCODERS}.autoencoder_kl_ltx2.AutoencoderKLLTX2Video": Known(),
}


def distribute(
    vae: Any,
    mesh: Any,
    *,
    split: Literal["auto", "height", "width", "batch"] = "auto",
    gather: Literal["all", "first", "none"] = "all",
    latents: int | Literal["auto"] = "auto",
    timeout: float = 600.0,
) -> Report:
    """Decode and encode on all ranks of a mesh, each with a part of the rows, columns or samples, bit for bit
    as on one rank.

    vae: `AutoencoderKLWan` (2.1, 2.2), `AutoencoderKLQwenImage`, `AutoencoderKL` (SD, SDXL, Flux),
    `AutoencoderKLFlux2`, `AutoencoderKLHunyuanVideo`, `AutoencoderKLCogVideoX`, `AutoencoderKLLTXVideo` or
    `AutoencoderKLLTX2Video`, stock or accelerated, on this rank's device; `accelerate` may also come later.
    Every rank makes this call with the same weights, then calls `decode`, `encode` or `DecodeStream.decode`
    with the same whole input.
    mesh: a 1-D `torch.distributed.DeviceMesh`, or `turnout.parallel.Lockstep(ranks)`: ranks as threads on one
    device, or `turnout.parallel.Fake(rank, ranks)`: one rank's compute alone.
    split: the axis. "auto" takes samples where there are as many as ranks, else the axis whose longest part
    is the smallest share. Parts may differ by one row of latents.
    gather: "all" ranks get the whole result, the "first" one (others get None), or "none": each has its part.
    latents: how many latents an accelerated decoder of Wan takes at a time at most, behind the first one of a
    clip; "auto": four. At each stage as many of them go on together as have no more elements than two frames
    of the last stage, which one process has there in any case.
    timeout: seconds to wait for another rank; then the call fails on all.

    A distributed `decode` or `encode` also takes a list of clips or images, of whatever sizes, and returns a
    list. With split "auto" or "batch", and at least as many clips as ranks, each clip is computed whole by
    one rank, and only results are sent; with fewer, each clip in turn is split. With gather="none" the clips
    of other ranks are None.

    Ranks compare versions, settings, measured tables, weights and shapes, and raise `RanksDiffer` where they
    are not the same. An exception on one rank is raised on all. Calls that want gradients, or run under
    autocast, are computed whole on every rank, with a warning. `restore` undoes it.

    Group norms are computed of parts where the whole call takes sums of blocks: on a CPU for large pictures,
    on a GPU inside `turnout.pin(group_norm_silu="block-sums", ...)`, which then holds for one rank and for
    many. Elsewhere their inputs are gathered.

    >>> import torch, turnout
    >>> from diffusers import AutoencoderKLWan
    >>> from turnout.parallel import Lockstep
    >>> latents = {"z_dim": 2, "latents_mean": [0.0] * 2, "latents_std": [1.0] * 2}
    >>> vae = AutoencoderKLWan(base_dim=4, num_res_blocks=1, **latents)
    >>> z = torch.randn(1, 2, 2, 2, 4)
    >>> with torch.no_grad():
    ...     alone = vae.decode(z).sample
    ...     report = turnout.distribute(vae, Lockstep(2), split="width")
    ...     torch.equal(vae.decode(z).sample, alone)
    True
    """
    if split not in SPLITS:
        raise ValueError(f"distribute: split {split!r}; one of: {', '.join(SPLITS)}")
    if gather not in GATHERS:
        raise ValueError(f"distribute: gather {gather!r}; one of: {', '.join(GATHERS)}")
    known = _known(vae)
    most_latents = _most_latents(vae, latents)
    _refuse_tiling(vae)
    _refuse_noise(vae)
    distribution = Distribution(vae, _engine(mesh, timeout), split, gather, most_latents)
    _take_fronts(vae)
    distribution.meet()
    report = Report()
    for path, module in vae.named_modules():
        name = type(module).__name__
        if name in known.attention:
            patch.put_front(module, _Attention, {})
            report.entries.append(
                Entry(path, name, "attention of own pixels, the rest whole on every rank", fused=True)
            )
        elif name in known.whole:
            patch.put_front(module, _Whole, {})
            report.entries.append(Entry(path, name, "whole on every rank", fused=True))
    patch.put_front(vae, _Distributed, {"_turnout_distribution": distribution})
    name = type(vae).__name__
    report.entries.append(Entry("", name, f"decode and encode on {distribution.ranks} ranks", fused=True))
    report.models[""] = f"{name} is split over {distribution.ranks} ranks by {split}, results go to: {gather}"
    return report


def _known(vae: Any) -> Known:
    for cls in type(vae).__mro__:
        key = f"{cls.__module__}.{cls.__qualname__}"
        if key in KNOWN:
            return KNOWN[key]
    names = ", ".join(sorted(key.rpartition(".")[2] for key in KNOWN))
    raise ValueError(f"distribute: {type(vae).__name__} is not known; one of: {names}")


def _most_latents(vae: Any, latents: Any) -> int:
    """How many latents go through a decoder at a time, at most."""
    by_latent = hasattr(vae, "_cached_conv_counts")
    if latents == "auto":
        return LATENTS if by_latent else 1
    if not isinstance(latents, int) or isinstance(latents, bool) or latents < 1:
        raise ValueError(f"distribute: latents {latents!r}; it needs 'auto' or a number of at least 1")
    if latents > 1 and not by_latent:
        raise ValueError(
            f"distribute: latents {latents} for {type(vae).__name__}, which decodes all latents at once; "
            "leave latents out"
        )
    return latents


def _refuse_tiling(vae: Any) -> None:
    if getattr(vae, "use_tiling", False):
        raise ValueError(
            f"distribute: tiling of {type(vae).__name__} is on, whose overlaps change the picture; "
            "call vae.disable_tiling()"
        )


def _refuse_noise(vae: nn.Module) -> None:
    for path, module in vae.named_modules():
        if getattr(module, "per_channel_scale1", None) is not None:
            raise ValueError(
                f"distribute: {path} adds noise, which ranks would draw for themselves; "
                "it needs a model with inject_noise=False"
            )


def _engine(mesh: Any, timeout: float) -> Lockstep | Engine:
    if isinstance(mesh, Lockstep | Fake):
        return mesh
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(mesh, DeviceMesh):
        from turnout.parallel.dist import Dist

        return Dist(mesh, timeout)
    raise TypeError(
        f"distribute: a mesh of type {type(mesh).__name__}; "
        "it needs a torch.distributed.DeviceMesh of one dimension"
    )


def _take_fronts(vae: nn.Module) -> None:
    for module in vae.modules():
        patch.take_front(module)


def _refuse_captured(vae: Any) -> None:
    if torch.compiler.is_compiling():
        raise RuntimeError("a distributed model cannot be compiled from outside; restore() it first")
    if REPLAYS in vars(vae):
        raise ValueError(
            "a distributed model is not captured in CUDA graphs; call accelerate(vae) without graph=True"
        )


class _Attention:
    """Stands before modules whose last step that mixes pixels is attention."""

    def __call__(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        run = super().__call__  # pyright: ignore[reportAttributeAccessIssue]
        split = settings.splitting()
        return run(x, *args, **kwargs) if split is None else split.attention(run, x, *args, **kwargs)


class _Whole:
    """Stands before modules that mix all pixels, unless their adapter minds that."""

    def __call__(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        run = super().__call__  # pyright: ignore[reportAttributeAccessIssue]
        split = settings.splitting()
        if split is None or _minds_parts(self, x):
            return run(x, *args, **kwargs)
        return split.everywhere(run, x, *args, **kwargs)


def _minds_parts(module: nn.Module, x: Tensor) -> bool:
    """Whether a module has an adapter that gathers what it needs, and that adapter is what runs."""
    patched = patch.patched(module)
    if patched is None or not patched.adapter.splits:
        return False
    inside = patched.adapter.inside
    return inside is None or is_bare(module, inside, x.dtype, x.device)


def _pixels_of_a_latent(vae: Any) -> int:
    """Rows and columns of pixels that one of the latents stands for."""
    ratio = getattr(vae, "spatial_compression_ratio", None)
    return 2 ** (len(vae.config.block_out_channels) - 1) if ratio is None else int(ratio)


class _Distributed:
    """Stands before the VAE."""

    def decode(self: Any, z: Any, *args: Any, **kwargs: Any) -> Any:
        run = super().decode  # pyright: ignore[reportAttributeAccessIssue]
        return self._turnout_distribution.call(self, "decode", z, run, args, kwargs)

    def encode(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        run = super().encode  # pyright: ignore[reportAttributeAccessIssue]
        return self._turnout_distribution.call(self, "encode", x, run, args, kwargs)


class Distribution:
    """How one VAE is split. The ranks of a `Lockstep` share it."""

    def __init__(self, vae: Any, engine: Lockstep | Engine, split: str, gather: str, latents: int):
        self.engine, self.ranks, self.split, self.gather = engine, engine.ranks, split, gather
        self.latents = latents
        self.model = agreement.of_model(vae)
        self.how = {"split": split, "gather": gather, "ranks": str(engine.ranks), "latents": str(latents)}
        self.splits: dict[tuple, Split] = {}  # of each rank, axis, size and settings
        self.agreed: set[tuple] = set()
        self.sums_blocks = any(isinstance(module, nn.GroupNorm) for module in vae.modules())
        self.alike: dict[
            tuple, bool
        ] = {}  # kinds of calls: whether samples by themselves have the bits of all together
        self.warned = False

    def meet(self) -> None:
        """Compare models before anything is changed."""
        if not isinstance(self.engine, Lockstep):
            with self._ended_everywhere(self.engine):
                agreement.compare(self.engine, {**self.model, **self.how})

    def call(self, vae: Any, name: str, x: Any, run: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """`vae.decode` or `vae.encode` of the whole x; `run` is what would run without a distribution."""
        if isinstance(x, list | tuple):
            return self._of_clips(vae, name, x, run, args, kwargs)
        if not isinstance(x, Tensor) or x.dim() not in (4, 5):
            return run(x, *args, **kwargs)  # the model's own error, on every rank

        def on_part(rank: int, own: Tensor) -> Any:
            twin = _twin(vae) if isinstance(self.engine, Lockstep) else vae
            return getattr(super(_Distributed, twin), name)(own, *args, **kwargs)

        return self._run(vae, name, x, lambda: run(x, *args, **kwargs), on_part)

    def _of_clips(
        self, vae: Any, name: str, clips: Sequence[Any], run: Callable[..., Any], args: tuple, kwargs: dict
    ) -> list[Any]:
        """The same of several clips: whole ones for each rank where there are as many as ranks."""
        check_clips(name, clips)
        engine = self.engine
        of_all_ranks = self.gather == "none" and isinstance(engine, Lockstep)
        is_whole = any(_why_whole(vae, clip) for clip in clips)  # gradients, autocast
        if is_whole or self.split in AXES or len(clips) < self.ranks:
            results = [self.call(vae, name, clip, run, args, kwargs) for clip in clips]
            if of_all_ranks and not is_whole:
                return [list(of_rank) for of_rank in zip(*results, strict=True)]
            return results

        def on_rank(engine: Engine) -> list[Any]:
            twin = _twin(vae) if isinstance(self.engine, Lockstep) else vae

            def compute(clip: Tensor) -> Any:
                return getattr(super(_Distributed, twin), name)(clip, *args, **kwargs)

            return self._dealt_out(engine, vae, name, clips, compute)

        _refuse_captured(vae)
        if not isinstance(engine, Lockstep):
            return on_rank(engine)
        results = self._in_lockstep(engine, on_rank)
        return results if of_all_ranks else results[0]

    def _dealt_out(
        self, engine: Engine, vae: Any, name: str, clips: Sequence[Tensor], compute: Callable[[Tensor], Any]
    ) -> list[Any]:
        with self._ended_everywhere(engine):
            _refuse_tiling(vae)
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

    def _in_lockstep(self, engine: Lockstep, on_rank: Callable[[Any], Any]) -> list[Any]:
        try:
            return engine.run(on_rank)
        except BaseException:
            self._forget()
            raise

    def decode_in(self, stream: Any, z: Any) -> Any:
        """`DecodeStream.decode` of the whole z."""
        if stream.graph:
            raise ValueError("DecodeStream: graph=True is not known to a distributed model; use graph=False")
        if not isinstance(z, Tensor) or z.dim() != 5:
            return stream.decode_alone(z)  # its own error, on every rank

        def on_part(rank: int, own: Tensor) -> Any:
            if not isinstance(self.engine, Lockstep):
                return stream.decode_alone(own)
            if rank not in stream.of_ranks:
                stream.of_ranks[rank] = type(stream)(_twin(stream.vae))
            return stream.of_ranks[rank].decode_alone(own)

        return self._run(stream.vae, "stream", z, lambda: stream.decode_alone(z), on_part)

    def _run(
        self, vae: Any, name: str, x: Tensor, whole: Callable[[], Any], on_part: Callable[[int, Tensor], Any]
    ) -> Any:
        _refuse_captured(vae)
        engine = self.engine
        if not isinstance(engine, Lockstep):
            return self._on_rank(engine, vae, name, x, whole, on_part)
        _refuse_tiling(vae)
        why = _why_whole(vae, x)
        if why is not None:
            self._warn(why)
            return whole()
        results = self._in_lockstep(engine, lambda rank: self._on_rank(rank, vae, name, x, whole, on_part))
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
        with self._ended_everywhere(engine):
            _refuse_tiling(vae)
            why = _why_whole(vae, x)
            how = None if why else self._batch(engine, vae, name, x, whole, on_part)
            cut = None if why or how else self._cut(vae, name, x)
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
            expected = iter(_tensors(result))
            for each in _tensors(part):
                pairs.append(same_bits(each, exchange.own(next(expected))))
            self.alike[kind] = all(engine.agree(all(pairs)))
        if self.alike[kind]:
            return lambda: map_tensors(own(), lambda part: self._gathered(part, exchange))
        if self.split == "batch":
            self._warn("samples that are decoded by themselves have other bits than together")
            return whole
        return None

    @contextlib.contextmanager
    def _ended_everywhere(self, engine: Engine) -> Iterator[None]:
        """A failure of this rank is told to all that may wait for it."""
        try:
            yield
        except BaseException as failure:
            engine.fail(failure)
            if not isinstance(self.engine, Lockstep):
                self._forget()
            raise

    def _forget(self) -> None:
        """After a failure ranks know different things of calls that were seen: all begin anew."""
        self.splits.clear()
        self.agreed.clear()
        self.alike.clear()

    def _cut(self, vae: Any, name: str, x: Tensor) -> Cut | str:
        """The axis along which to split, and its rows or columns of latents; or why all is computed whole."""
        pixels = _pixels_of_a_latent(vae) if name == "encode" else 1
        names = (self.split,) if self.split in AXES else AXES
        sizes = {AXES[each]: x.shape[AXES[each]] for each in names}
        up = _known(vae).rest == "up"
        units = {axis: -(-size // pixels) if up else size // pixels for axis, size in sizes.items()}
        units = {axis: n for axis, n in units.items() if n >= self.ranks}
        if not units:
            given = " and ".join(f"{each} {x.shape[AXES[each]]}" for each in names)
            raise ValueError(
                f"{name}: {given} for {self.ranks} ranks; each needs at least {pixels} rows or columns: "
                "use fewer ranks, another split, or restore() the model"
            )
        cuts = [Cut(axis, n, self._levels(vae, sizes[axis], pixels, n)) for axis, n in units.items()]
        cuts = [cut for cut in cuts if cut.levels or sizes[cut.axis] % pixels == 0]
        if not cuts:
            of = " and ".join(f"{each} {x.shape[AXES[each]]}" for each in names)
            return f"{of} of a picture is no multiple of {pixels}, and cannot be split as the latents are"
        return min(cuts, key=lambda cut: (self._longest(cut.units) / cut.units, bool(cut.levels), -cut.units))

    def _levels(self, vae: Any, size: int, pixels: int, units: int) -> dict[int, int]:
        """Those of a picture that is no multiple of the latents; none for a multiple, or where it cannot be
        split: an encoder that takes multiples only says so itself."""
        rest = _known(vae).rest
        in_patches = isinstance(getattr(vae.config, "patch_size", None), int)
        if size % pixels == 0 or rest is None or in_patches or pixels & (pixels - 1):
            return {}
        levels = levels_of(size, pixels, up=rest == "up")
        begin, _ = parts_of(units, self.ranks, self._grain(units))[-1]
        of_last_rank = [whole - begin * times for times, whole in levels.items()]
        return levels if len(set(of_last_rank)) == len(levels) and min(of_last_rank) > 0 else {}

    def _longest(self, units: int) -> int:
        """The rows of latents of the longest part."""
        first, end = parts_of(units, self.ranks, self._grain(units))[0]
        return end - first

    def _grain(self, units: int) -> int:
        """Where group norms sum blocks of several rows of latents, parts are made of whole ones, as far as
        they go round.
        """
        blocks = grain(units) if self.sums_blocks else 1
        return blocks if -(-units // blocks) >= self.ranks else 1

    def _agree(self, engine: Engine, name: str, x: Tensor, computed: str) -> None:
        said = {**agreement.of_call(name, x, x.device), "computed": computed}
        key = (engine.rank, *said.values())
        if key not in self.agreed:
            agreement.compare(engine, said)
            self.agreed.add(key)

    def _split(self, engine: Engine, cut: Cut) -> Split:
        """The plan of a rank, which is kept: what was compared once is known."""
        key = engine.rank, cut.axis, cut.units, tuple(cut.levels.items()), settings.current()
        if key not in self.splits:
            split = self.splits[key] = Split(
                Exchange(engine, cut.axis, cut.units, self._grain(cut.units), cut.levels), self.latents
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


def _why_whole(vae: nn.Module, x: Tensor) -> str | None:
    """Why a call is computed whole on every rank."""
    if torch.is_grad_enabled() and (
        x.requires_grad or any(weight.requires_grad for weight in vae.parameters())
    ):
        return "gradients are wanted (torch.no_grad() is not entered)"
    if torch.is_autocast_enabled(x.device.type):
        return "autocast is on"
    return None


def _twin(vae: Any) -> Any:
    """The same modules, with plain attributes of its own: stock models keep their caches there."""
    twin = object.__new__(type(vae))
    twin.__dict__ = dict(vars(vae))
    return twin


def _tensors(result: Any) -> list[Tensor]:
    """The tensors that a model returns, in order."""
    found: list[Tensor] = []
    map_tensors(result, found.append)
    return found

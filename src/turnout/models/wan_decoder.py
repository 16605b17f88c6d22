"""The decoder of Wan 2.1, Wan 2.2 and Qwen-Image, run part by part with few frames at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from turnout.models.bare import Inside, hooked, is_bare
from turnout.models.frames import StreamCache, are_large, convolve_ahead
from turnout.models.patch import Adapter, drops, likes_channels_last, needs_plain, needs_silu
from turnout.models.video import channels_last, may_write, pixels_of_frame
from turnout.models.wan import (
    CONVS,
    NORMS,
    AttentionBlock,
    Resample,
    ResidualBlock,
    ResidualUpBlock,
    convolve_with_cache,
    norm,
    padding_of,
)
from turnout.routing.fallback import autocasts
from turnout.routing.settings import splitting

PIECE = 2  # frames, as many as a convolution of depth 3 keeps
_BLOCKS = (
    "WanMidBlock", "WanUpBlock", "WanResidualUpBlock", "QwenImageMidBlock", "QwenImageUpBlock",
)  # fmt: skip


class Decoder(Adapter):
    summary = "channels-last from the first convolution to the last"

    channels_last = True
    inside = Inside(reads=(*CONVS, *NORMS, nn.SiLU), calls=("mid_block", "up_blocks"))

    @staticmethod
    def refuses(instance: Any) -> Iterable[str]:
        yield from needs_silu(instance.nonlinearity)
        yield from needs_plain(instance.conv_in, instance.conv_out)

    def forward(
        self: Any,
        x: Tensor,
        feat_cache: list | None = None,
        feat_idx: list[int] = [0],  # noqa: B006
        **first: bool,
    ) -> Tensor:
        x = convolve_with_cache(
            self.conv_in, channels_last(x) if likes_channels_last(x) else x, feat_cache, feat_idx
        )
        x = self.mid_block(x, feat_cache=feat_cache, feat_idx=feat_idx)
        return self._up(list(self._stages(first, x)), x, feat_cache, feat_idx)

    def _stages(self: Any, first: dict[str, bool], x: Tensor) -> Iterator[Stage]:
        """The stages between the middle block and the head. The parts of a block are stages of their own, as
        a call of the whole block would keep its input alive until it returns."""
        blocks = list(self.up_blocks)
        whole = len(blocks)  # those before this one see all frames of a latent in one call, as in stock
        while whole and _runs_adapters_only(blocks[whole - 1], x):
            whole -= 1
        for i, (block, behind) in enumerate(zip(blocks, [*blocks[1:], None], strict=True)):
            if not _in_parts(block, x):
                yield Stage(partial(block, **first), growth=partial(_growth, block), in_pieces=i >= whole)
                continue
            for resnet in block.resnets:
                ring = block if _fits_ring(block, x) else None
                yield Stage(resnet, ring, growth=partial(_growth, resnet), in_pieces=i >= whole)
            for resample in block.upsamplers or ():
                growth = partial(_growth_in_time, resample)
                yield Stage(resample.doubled_in_time, growth=growth, in_pieces=i >= whole)
                ring, growth = behind if _fits_ring(behind, x) else None, partial(_growth_in_space, resample)
                yield Stage(resample.doubled_in_space, ring, 4, growth, in_pieces=i >= whole)

    def _up(
        self: Any, stages: list[Stage], x: Tensor, feat_cache: list | None, feat_idx: list[int]
    ) -> Tensor:
        """The stages and the head. The large ones see few frames at a time: they are causal, so nothing
        changes but the memory they need, and a piece as long as a cache becomes the cache without being
        copied. The largest see one, and have a ring instead of caches."""
        split = splitting()
        several = split if split is not None and split.calls > 1 else None  # latents at once
        room = 0.0 if several is None else _room(self, x)
        plain = may_write(x) and x.shape[0] == 1 and x.stride(1) == 1 and not autocasts(x.device.type)
        rings = feat_cache if isinstance(feat_cache, StreamCache) and feat_cache.may_have_rings else None
        if rings is not None and not torch.compiler.is_compiling():
            rings.keep_to([stage.block for stage in stages])
        calls = 1 if several is None else several.calls  # of one process, for which x stands
        waiting, parts, alone = [(0, feat_idx[0], x, calls)], [], False
        while waiting:
            start, feat_idx[0], x, calls = waiting.pop()
            for i in range(start, len(stages)):
                run, block, grows, growth, in_pieces = stages[i]
                large = block is not None and in_pieces and are_large(pixels_of_frame(x) * grows, x.device)
                alone = large and rings is not None and rings.decide_one_by_one(plain)
                most = 1 if alone else PIECE
                # those that wait do so in memory of their own: a view would keep all of x
                if several is not None:
                    elements = pixels_of_frame(x) * x.shape[1] * growth()
                    (x, calls), *later = several.pieces(x, calls, most, elements, 0.0 if alone else room)
                    waiting += [(i, feat_idx[0], *piece) for piece in reversed(later)]
                    del later
                elif x.shape[2] > most and in_pieces and feat_cache is not None:
                    x, *later = x.split(most, 2)
                    waiting += [
                        (i, feat_idx[0], piece.clone() if may_write(piece) else piece, 1)
                        for piece in reversed(later)
                    ]
                    del later
                kept = rings.ring(block, x) if rings is not None and alone and grows == 1 else feat_cache
                with _standing_for(calls, several):
                    x = run(
                        x, feat_cache=kept, feat_idx=feat_idx
                    )  # by name, as stock: hooks of offloading copy lists that have none
            with _standing_for(calls, several):
                x = norm(self.norm_out, x)  # what it was made of is free before the convolution needs memory
                if rings is not None and alone:
                    slot = feat_idx[0]
                    y, rings[slot] = convolve_ahead(
                        x, self.conv_out, padding_of(self.conv_out), rings[slot], rings.packed_weights
                    )
                else:
                    y = convolve_with_cache(self.conv_out, x, feat_cache, feat_idx)
            parts.append(y)
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


class Stage(NamedTuple):
    """A part of a decoder.

    run: `run(x, feat_cache=, feat_idx=)`. block: the block whose frames may be kept in a ring; where the part
    changes the size of frames, that is the next block. grows: pixels of an output frame for each of an input
    frame. growth: returns the most elements of the output for each of the input. in_pieces: whether it may
    get few frames at a time: it and all stages behind it are adapters' code, without hooks that would run
    more often.
    """

    run: Callable[..., Tensor]
    block: Any = None
    grows: int = 1
    growth: Callable[[], float] = lambda: 1.0
    in_pieces: bool = False


def _growth(part: Any) -> float:
    """How many times more elements come out of a residual block, an upsampling or a block of both."""
    if hasattr(part, "resnets"):
        return prod(map(_growth, [*part.resnets, *_upsamplings(part)]))
    if hasattr(part, "conv1"):
        return max(1.0, _more_channels(part.conv1))
    return _growth_in_time(part) * _growth_in_space(part)


def _growth_in_time(resample: Any) -> float:
    return 2.0 if resample.mode == "upsample3d" else 1.0


def _growth_in_space(resample: Any) -> float:
    return max(1.0, 4 * _more_channels(resample.resample[1]))


def _more_channels(conv: Any) -> float:
    return conv.weight.shape[0] / conv.weight.shape[1]


def _upsamplings(block: Any) -> list[Any]:
    parts = getattr(block, "upsamplers", None) or [getattr(block, "upsampler", None)]
    return [part for part in parts if part is not None]


def _room(decoder: Any, x: Tensor) -> float:
    """Elements that the frames of several latents may have at any stage: those of the piece that the last
    stage sees of one latent. x: what comes in, before any upsampling."""
    doublings = sum(len(_upsamplings(block)) for block in decoder.up_blocks)
    return PIECE * pixels_of_frame(x) * 4**doublings * decoder.norm_out.gamma.numel()


def _standing_for(calls: int, several: Any) -> contextlib.AbstractContextManager[None]:
    """In a distributed decode of several latents, the block replaces this many calls of one process."""
    return contextlib.nullcontext() if several is None else several.of(calls).entered()


def may_take_several(decoder: Any, x: Tensor) -> bool:
    """Whether a decoder runs adapters only and has no hooks: other code might depend on how many latents it
    gets at a time."""
    blocks = [decoder.mid_block, *decoder.up_blocks]
    return _ours(decoder, Decoder, x) and all(_runs_adapters_only(block, x) for block in blocks)


def _runs_adapters_only(block: Any, x: Tensor) -> bool:
    """Whether all parts of a block run adapters' code, without hooks and dropout: how often it is called, and
    with how many frames, cannot be noticed."""
    if hooked(block) or type(block).__qualname__ not in _BLOCKS or _drops(block):
        return False
    parts: list[tuple[Any, type[Adapter]]] = [(resnet, ResidualBlock) for resnet in block.resnets]
    if hasattr(block, "avg_shortcut"):
        parts.append((block, ResidualUpBlock))
    parts += [(part, AttentionBlock) for part in getattr(block, "attentions", ()) if part is not None]
    parts += [(part, Resample) for part in _upsamplings(block)]
    return all(_ours(part, adapter, x) for part, adapter in parts)


def _in_parts(block: Any, x: Tensor) -> bool:
    """Whether the parts of a block may be called one by one: it adds no shortcut after them, has no hooks,
    and its upsampling may be split in two.
    """
    if hasattr(block, "avg_shortcut") or hooked(block):
        return False
    return all(_ours(resample, Resample, x) for resample in block.upsamplers or ())


def _ours(part: Any, adapter: type[Adapter], x: Tensor) -> bool:
    """Whether a part runs this adapter's code, and has no hooks."""
    if adapter not in type(part).__mro__ or hooked(part):
        return False
    return adapter.inside is None or is_bare(part, adapter.inside, x.dtype, x.device)


def _fits_ring(block: Any, x: Tensor) -> bool:
    """Whether all frames that a block keeps are of one size, and all its parts know how to keep them in a
    ring.
    """
    if (
        block is None
        or not _in_parts(block, x)
        or not all(_ours(resnet, ResidualBlock, x) for resnet in block.resnets)
    ):
        return False
    convolutions = [conv for resnet in block.resnets for conv in (resnet.conv1, resnet.conv2)]
    alike = all(
        tuple(conv.weight.shape[:3]) == (conv.in_channels, convolutions[0].in_channels, 3)
        for conv in convolutions
    )
    return alike and not _drops(block)


def _drops(block: Any) -> bool:
    return any(drops(resnet.dropout) for resnet in block.resnets)

"""The causal video VAE of Wan 2.1 and 2.2, and Qwen-Image's, which has the same parts under other names.

Every convolution keeps its last frames for the next chunk. The list that holds them is the stock model's own,
entry by entry, so its tiling and slicing keep working; only a stream of large frames keeps those in rings
(`frames.py`).
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from turnout import ops
from turnout.models.bare import Inside, hooked, is_bare
from turnout.models.frames import Clip, Conditions, Kept, Ring, are_large, convolve_ahead, latents_needed
from turnout.models.graphs import ENGINES, CapturedStep, layouts
from turnout.models.patch import Adapter, likes_channels_last, needs_silu
from turnout.models.sdpa import attend
from turnout.models.snapshot import ModelSnapshot
from turnout.models.video import as_video, causal_conv, channels_last, may_write, per_frame, pixels_of_frame
from turnout.ops.add_repeated import picks_of
from turnout.ops.add_repeated import reference as repeated_and_added
from turnout.routing.fallback import autocasts
from turnout.routing.settings import splitting

PIECE = 2  # frames, as many as a convolution of depth 3 keeps
_BLOCKS = (
    "WanMidBlock", "WanUpBlock", "WanResidualUpBlock", "QwenImageMidBlock", "QwenImageUpBlock",
)  # fmt: skip
_CONVS, _NORMS = ("WanCausalConv3d", "QwenImageCausalConv3d"), ("WanRMS_norm", "QwenImageRMS_norm")
START = "Rep"  # the stock model's mark: the first frame has passed, the next ones are doubled in time


def _norm(norm: Any, x: Tensor, *, silu: bool = True, out: Tensor | None = None) -> Tensor:
    bias = norm.bias if isinstance(norm.bias, Tensor) else None
    return ops.rms_norm_silu(
        x, norm.gamma, bias=bias, eps=1e-12, dim=1, silu=silu, style="normalize", out=out
    )


def _padding(conv: Any) -> tuple[int, int]:
    """Of rows and columns."""
    return conv._padding[2], conv._padding[0]


def _remembering(
    conv: Any, x: Tensor, feat_cache: list | None, feat_idx: list[int], residual: Tensor | None = None
) -> Tensor:
    """One convolution behind its own entry of the stock model's list."""
    slot = feat_idx[0]
    cache = None if feat_cache is None else feat_cache[slot]
    y, kept = causal_conv(x, conv.weight, conv.bias, cache, padding=_padding(conv), residual=residual)
    if feat_cache is not None:
        if not (isinstance(feat_cache, Kept) and feat_cache.ends):
            feat_cache[slot] = kept
        feat_idx[0] += 1
    return y


class CausalConv(Adapter):
    """cache, input and padding written once"""

    exact = True

    def forward(self: Any, x: Tensor, cache_x: Tensor | None = None) -> Tensor:
        if self.padding_mode != "zeros" or "_conv_forward" in vars(self):  # somebody wants other edges
            return super().forward(x, cache_x)  # pyright: ignore[reportAttributeAccessIssue]
        wide, _, high, _, before, _ = self._padding
        if not (wide or high or before) or not may_write(x, self.weight) or splitting() is not None:
            with_cache = super().forward  # pyright: ignore[reportAttributeAccessIssue]
            return (
                with_cache(x, cache_x)
                if wide or high or before
                else ops.conv3d(x, self.weight, self.bias, self.stride)
            )
        held = 0 if cache_x is None or not before else cache_x.shape[2]
        place = None if not held else (cache_x.shape, cache_x.stride())  # pyright: ignore[reportOptionalMemberAccess]
        shape, strides = _padded_layout(x.shape, x.stride(), place, self._padding)
        whole = torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device)
        start, height, width = before - held, x.shape[3], x.shape[4]
        whole[:, :, :start].zero_()
        body = whole[:, :, start:]
        for axis, edge, size in ((3, high, height), (4, wide, width)):
            body.narrow(axis, 0, edge).zero_()
            body.narrow(axis, edge + size, edge).zero_()
        inside = body[:, :, :, high : high + height, wide : wide + width]
        if held:
            inside[:, :, :held].copy_(cache_x)  # pyright: ignore[reportArgumentType]
        inside[:, :, held:].copy_(x)
        return ops.conv3d(whole, self.weight, self.bias, self.stride)


@lru_cache(1024)
def _padded_layout(shape: Any, strides: Any, cache: Any, padding: tuple[int, ...]) -> tuple[Any, Any]:
    """Shape and strides that concatenation and padding would give: a convolution of another layout is not the
    same bit for bit.
    """
    x = torch.empty_strided(shape, strides, device="meta")
    pads = list(padding)
    if cache is not None:
        x = torch.cat([torch.empty_strided(*cache, device="meta"), x], 2)
        pads[4] -= cache[0][2]
    whole = F.pad(x, pads)
    return whole.shape, whole.stride()


class ResidualBlock(Adapter):
    """norm with SiLU; cache, bias and residual in the convolution"""

    inside = Inside(reads=(*_CONVS, *_NORMS, nn.SiLU, nn.Dropout, nn.Identity))

    @staticmethod
    def refuses(instance: Any) -> Iterable[str]:
        return needs_silu(instance.nonlinearity)

    def forward(self: Any, x: Tensor, feat_cache: list | None = None, feat_idx: list[int] = [0]) -> Tensor:  # noqa: B006
        if self.training and self.dropout.p > 0:
            return super().forward(x, feat_cache, feat_idx)  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(feat_cache, Ring):
            return self._in_ring(x, feat_cache, feat_idx)
        shortcut = self.conv_shortcut
        residual = x if isinstance(shortcut, nn.Identity) else ops.conv3d(x, shortcut.weight, shortcut.bias)
        x = _remembering(self.conv1, _norm(self.norm1, x), feat_cache, feat_idx)
        x = _norm(self.norm2, x)  # what it was made of is free before the convolution needs memory
        return _remembering(self.conv2, x, feat_cache, feat_idx, residual)

    def _in_ring(self: Any, x: Tensor, ring: Ring, feat_idx: list[int]) -> Tensor:
        """One frame, where the ring keeps those before it."""
        feat_idx[0] += 2
        _norm(self.norm1, x, out=ring.place())
        y = ring.convolve(self.conv1, _padding(self.conv1))
        _norm(self.norm2, y, out=ring.place())
        del y  # is free before the convolution needs memory
        return ring.convolve(self.conv2, _padding(self.conv2), x)


class AttentionBlock(Adapter):
    """one head as wide as the block, no layout flips"""

    inside = Inside(reads=(*_NORMS, nn.Conv2d))

    def forward(self: Any, x: Tensor) -> Tensor:
        batch, _, _, height, width = x.shape
        frames = per_frame(x)
        normed = _norm(self.norm, frames, silu=False)
        tokens = normed.flatten(2).transpose(1, 2)  # [frames, H*W, C]
        qkv = F.linear(tokens, self.to_qkv.weight.flatten(1), self.to_qkv.bias)
        q, k, v = qkv[:, None].chunk(3, -1)
        found = attend(q, k, v)[:, 0]
        found = F.linear(found, self.proj.weight.flatten(1), self.proj.bias)
        return as_video(found.transpose(1, 2).unflatten(2, (height, width)), batch) + x


class Resample(Adapter):
    """upsampling folded into its convolution"""

    inside = Inside(reads=(*_CONVS, "WanUpsample", "QwenImageUpsample", nn.Conv2d, nn.ZeroPad2d, nn.Identity))

    def forward(self: Any, x: Tensor, feat_cache: list | None = None, feat_idx: list[int] = [0]) -> Tensor:  # noqa: B006
        if self.mode in ("upsample2d", "upsample3d"):
            return self.doubled_in_space(self.doubled_in_time(x, feat_cache, feat_idx))
        if self.mode in ("downsample2d", "downsample3d"):
            conv = self.resample[1]
            x = as_video(
                ops.conv2d(F.pad(per_frame(x), (0, 1, 0, 1)), conv.weight, conv.bias, conv.stride), x.shape[0]
            )
        if self.mode == "downsample3d" and feat_cache is not None:
            x = self._halved_in_time(x, feat_cache, feat_idx)
        return x

    def doubled_in_space(self: Any, x: Tensor, **unused: Any) -> Tensor:
        conv = self.resample[1]
        return as_video(
            ops.upsample_conv2d(per_frame(x), conv.weight, conv.bias, scale=2, padding=1), x.shape[0]
        )

    def doubled_in_time(self: Any, x: Tensor, feat_cache: list | None, feat_idx: list[int]) -> Tensor:
        if self.mode != "upsample3d" or feat_cache is None:
            return x
        slot = feat_idx[0]
        feat_idx[0] += 1
        if feat_cache[slot] is None:
            feat_cache[slot] = START
            return x
        cache = None if isinstance(feat_cache[slot], str) else feat_cache[slot]
        conv = self.time_conv
        y, feat_cache[slot] = causal_conv(x, conv.weight, conv.bias, cache, padding=(0, 0))
        split = splitting()
        return _pairs(y) if split is None or split.calls == 1 else split.each(_pairs, y)

    def _halved_in_time(self: Any, x: Tensor, feat_cache: list, feat_idx: list[int]) -> Tensor:
        slot = feat_idx[0]
        feat_idx[0] += 1
        before, feat_cache[slot] = feat_cache[slot], x[:, :, -1:].clone()
        if before is None:
            return x
        conv = self.time_conv
        return ops.conv3d(torch.cat([before[:, :, -1:], x], 2), conv.weight, conv.bias, conv.stride)


def _pairs(y: Tensor) -> Tensor:
    """`[B, 2 * C, T, H, W]` with two frames side by side in the channels to `[B, C, 2 * T, H, W]`.

    Of one frame it is a view, of more a copy in another layout."""
    pairs = y.unflatten(1, (2, -1))  # [B, 2, C, T, H, W]
    return pairs.permute(0, 3, 1, 4, 5, 2).flatten(1, 2).permute(0, 4, 1, 2, 3)


class ResidualUpBlock(Adapter):
    """the shortcut is added where it lands, never built"""

    inside = Inside(reads=("DupUp3D",), calls=("resnets", "upsampler"))

    def forward(
        self: Any,
        x: Tensor,
        feat_cache: list | None = None,
        feat_idx: list[int] = [0],  # noqa: B006
        first_chunk: bool = False,
    ) -> Tensor:
        y = x
        for resnet in self.resnets:
            y = resnet(y, feat_cache=feat_cache, feat_idx=feat_idx)
        if self.upsampler is not None:
            y = self.upsampler(y, feat_cache=feat_cache, feat_idx=feat_idx)
        return y if self.avg_shortcut is None else _add_repeated(y, x, self.avg_shortcut, first_chunk)


def _add_repeated(y: Tensor, x: Tensor, shortcut: Any, first_chunk: bool) -> Tensor:
    """y + shortcut(x), where the shortcut repeats x in time and space, and takes the repeats from
    neighbouring channels if there are more of those."""
    times = (shortcut.factor_t, shortcut.factor_s, shortcut.factor_s)
    if picks_of(x.shape[1], y.shape[1], times) is None or (first_chunk and x.shape[2] != 1):
        return y + shortcut(x, first_chunk=first_chunk)
    if splitting() is None:
        return ops.add_repeated(y, x, times=times)
    with torch._C.DisableTorchFunction():  # every pixel by itself: of a part it is the same
        return repeated_and_added(y, x, list(times))


class Decoder(Adapter):
    """channels-last from the first convolution to the last"""

    channels_last = True
    inside = Inside(reads=(*_CONVS, *_NORMS, nn.SiLU), calls=("mid_block", "up_blocks"))

    @staticmethod
    def refuses(instance: Any) -> Iterable[str]:
        return needs_silu(instance.nonlinearity)

    def forward(
        self: Any,
        x: Tensor,
        feat_cache: list | None = None,
        feat_idx: list[int] = [0],  # noqa: B006
        **first: bool,
    ) -> Tensor:
        x = _remembering(
            self.conv_in, channels_last(x) if likes_channels_last(x) else x, feat_cache, feat_idx
        )
        x = self.mid_block(x, feat_cache=feat_cache, feat_idx=feat_idx)
        return self._up(list(self._stages(first, x)), x, feat_cache, feat_idx)

    def _stages(self: Any, first: dict[str, bool], x: Tensor) -> Iterator[Stage]:
        """What stands between the middle block and the head. The parts of a block are called one by one: a
        call of the whole block would keep its input alive to the end."""
        blocks = list(self.up_blocks)
        for block, behind in zip(blocks, [*blocks[1:], None], strict=True):
            if not _in_parts(block, x):
                yield Stage(partial(block, **first), growth=partial(_growth, block))
                continue
            for resnet in block.resnets:
                yield Stage(resnet, block if _fits_ring(block, x) else None, growth=partial(_growth, resnet))
            for resample in block.upsamplers or ():
                yield Stage(resample.doubled_in_time, growth=partial(_growth_in_time, resample))
                behind_ring = behind if _fits_ring(behind, x) else None
                yield Stage(resample.doubled_in_space, behind_ring, 4, partial(_growth_in_space, resample))

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
        rings = feat_cache if isinstance(feat_cache, Kept) and feat_cache.may_have_rings else None
        if rings is not None and not torch.compiler.is_compiling():
            rings.keep_to([stage.block for stage in stages])
        calls = 1 if several is None else several.calls  # of one process, for which x stands
        waiting, parts, alone = [(0, feat_idx[0], x, calls)], [], False
        while waiting:
            start, feat_idx[0], x, calls = waiting.pop()
            for i in range(start, len(stages)):
                run, block, grows, growth = stages[i]
                large = block is not None and are_large(pixels_of_frame(x) * grows, x.device)
                alone = large and rings is not None and rings.settle(plain)
                most = 1 if alone else PIECE
                # those that wait do so in memory of their own: a view would keep all of x
                if several is not None:
                    elements = pixels_of_frame(x) * x.shape[1] * growth()
                    (x, calls), *later = several.pieces(x, calls, most, elements, 0.0 if alone else room)
                    waiting += [(i, feat_idx[0], *piece) for piece in reversed(later)]
                    del later
                elif x.shape[2] > most and feat_cache is not None:
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
                x = _norm(self.norm_out, x)  # what it was made of is free before the convolution needs memory
                if rings is not None and alone:
                    slot = feat_idx[0]
                    y, rings[slot] = convolve_ahead(
                        x, self.conv_out, _padding(self.conv_out), rings[slot], rings.arranged
                    )
                else:
                    y = _remembering(self.conv_out, x, feat_cache, feat_idx)
            parts.append(y)
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


class Stage(NamedTuple):
    """A part of a decoder, `run(x, feat_cache=, feat_idx=)`; the block for whose frames there may be a ring,
    the one behind where the part changes their size; how many times more pixels of a frame come out than go
    in; and, asked when it matters, how many times more elements, at most."""

    run: Callable[..., Tensor]
    block: Any = None
    grows: int = 1
    growth: Callable[[], float] = lambda: 1.0


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
    """In a distributed decode of several latents, what runs stands for so many calls of one process."""
    return contextlib.nullcontext() if several is None else several.of(calls).entered()


def _may_take_several(decoder: Any, x: Tensor) -> bool:
    """Whether all of a decoder is our own code and nobody looks on: other code might mind how many latents
    it sees."""
    blocks = [decoder.mid_block, *decoder.up_blocks]
    parts: list[tuple[Any, type[Adapter]]] = [(decoder, Decoder)]
    for block in blocks:
        if hooked(block) or type(block).__qualname__ not in _BLOCKS:
            return False
        if hasattr(block, "avg_shortcut"):
            parts.append((block, ResidualUpBlock))
        parts += [(resnet, ResidualBlock) for resnet in block.resnets]
        parts += [(part, AttentionBlock) for part in getattr(block, "attentions", ()) if part is not None]
        parts += [(part, Resample) for part in _upsamplings(block)]
    drops = any(resnet.training and resnet.dropout.p > 0 for block in blocks for resnet in block.resnets)
    return not drops and all(_ours(part, adapter, x) for part, adapter in parts)


def _in_parts(block: Any, x: Tensor) -> bool:
    """Whether the parts of a block may be called one by one: nothing is added behind them, nobody looks on,
    and upsampling may be split.
    """
    if hasattr(block, "avg_shortcut") or hooked(block):
        return False
    return all(_ours(resample, Resample, x) for resample in block.upsamplers or ())


def _ours(part: Any, adapter: type[Adapter], x: Tensor) -> bool:
    """Whether a part runs this adapter's code, and nobody looks on."""
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
    return alike and not block.training


class Encoder(Adapter):
    """channels-last from the first convolution to the last"""

    channels_last = True
    inside = Inside(reads=(*_CONVS, *_NORMS, nn.SiLU), calls=("mid_block", "down_blocks"))

    @staticmethod
    def refuses(instance: Any) -> Iterable[str]:
        return needs_silu(instance.nonlinearity)

    def forward(self: Any, x: Tensor, feat_cache: list | None = None, feat_idx: list[int] = [0]) -> Tensor:  # noqa: B006
        x = _remembering(
            self.conv_in, channels_last(x) if likes_channels_last(x) else x, feat_cache, feat_idx
        )
        for layer in self.down_blocks:
            x = layer(x) if hasattr(layer, "to_qkv") else layer(x, feat_cache=feat_cache, feat_idx=feat_idx)
        x = self.mid_block(x, feat_cache=feat_cache, feat_idx=feat_idx)
        return _remembering(self.conv_out, _norm(self.norm_out, x), feat_cache, feat_idx)


class Autoencoder(Adapter):
    """frames go straight to their place in the video"""

    exact = True

    def _decode(self: Any, z: Tensor, return_dict: bool = True) -> Any:
        tile = self.spatial_compression_ratio
        if self.use_tiling and (
            z.shape[-1] > self.tile_sample_min_width // tile
            or z.shape[-2] > self.tile_sample_min_height // tile
        ):
            return super()._decode(z, return_dict)  # pyright: ignore[reportAttributeAccessIssue]
        from diffusers.models.autoencoders.vae import DecoderOutput

        # a picture is a clip that ends with its first frame: nothing is kept for the next one
        ends = z.shape[2] == 1
        steps = Steps(self, Kept([None] * self._cached_conv_counts["decoder"], rings=not ends, ends=ends))
        video = steps.video(self.post_quant_conv(z))
        return DecoderOutput(sample=video) if return_dict else (video,)


class Steps:
    """Decodes the latents of one clip one after the other, and holds what each step needs of those before it.

    A step replaces the entries of `cache` and writes into its rings: a failure in the middle leaves them of
    no use. steady: the last step left the layout of every cache as it was; only watched if `watch_layouts`.
    """

    def __init__(
        self, vae: Any, cache: list, *, begun: bool = False, steady: bool = False, watch_layouts: bool = False
    ):  # fmt: skip
        self.vae, self.cache = vae, cache
        self.begun, self.steady, self.watch_layouts = begun, steady, watch_layouts

    def run(self, latent: Tensor) -> Tensor:
        """`[B, C, 1, h, w]` to the frames of this latent, `[B, 3, frames, H, W]`; of several in a distributed
        decode that takes them together."""
        layouts_before = layouts(self.cache) if self.watch_layouts else None
        frames = decode_latent(self.vae, latent, self.cache, first=not self.begun)
        self.begun = True
        if self.watch_layouts:
            self.steady = layouts(self.cache) == layouts_before
        return frames

    def video(self, latents: Tensor, run: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """`[B, C, T, h, w]` to the frames of all latents, clamped. run: decodes one; None: as above."""
        per_latent = 2 ** sum(self.vae.temperal_upsample)
        total = latents.shape[2] * per_latent - (0 if self.begun else per_latent - 1)
        chunks = self._chunks(latents, run or self.run)
        first = next(chunks)
        if not may_write(first):
            return torch.cat([first, *chunks], 2).clamp(-1.0, 1.0)
        shape = (*first.shape[:2], total, *first.shape[3:])
        video = torch.empty(shape, dtype=first.dtype, device=first.device)
        filled = 0
        for part in itertools.chain([first], chunks):
            torch.clamp(part, -1.0, 1.0, out=video[:, :, filled : filled + part.shape[2]])
            filled += part.shape[2]
            del part  # or it would wait for the next one
        return video

    def _chunks(self, latents: Tensor, run: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
        """The frames of one latent after the other; of several at once behind the first one where a
        distributed decode may take them together."""
        split, most = splitting(), 1
        if split is not None and latents.shape[0] == 1 and may_write(latents):
            most = split.latents if _may_take_several(self.vae.decoder, latents) else 1
        begin, total = 0, latents.shape[2]
        while begin < total:
            count = min(most, total - begin) if self.begun else 1
            if split is None or count == 1:
                # dense, in the layout of all: a kernel may round otherwise where it lies otherwise
                yield run(latents[:, :, begin : begin + 1].clone())
            else:
                several = split.of(count)
                with several.entered():
                    frames = run(several.gather(latents, begin))
                yield frames
                del frames
            begin += count


def decode_latent(vae: Any, latent: Tensor, cache: list, *, first: bool) -> Tensor:
    """One latent behind those that `cache` is of: `[B, C, 1, h, w]` to `[B, 3, frames, H, W]`."""
    chunk = {} if "Qwen" in type(vae).__name__ else {"first_chunk": first}
    frames = vae.decoder(latent, feat_cache=cache, feat_idx=[0], **chunk)
    patch = getattr(vae.config, "patch_size", None)
    return frames if patch is None else _unpatched(frames, patch)


Assumptions = tuple[ModelSnapshot, Conditions]  # what the steps of a clip take for granted


class DecodeStream:
    """Decodes a video while its latents arrive: the frames of all chunks are those of the whole clip, bit for
    bit from the decoder on (the convolution of one pixel before it sees all latents of a chunk at once, and
    may round otherwise for one than for many).

    vae: `AutoencoderKLWan` (2.1 or 2.2) or `AutoencoderKLQwenImage`, stock or accelerated. What the next
    chunk needs is kept here, not in the model, so one model serves several streams.

    graph: on a CUDA device, capture the step of one latent in a CUDA graph and replay it for every later one.
    The first three or four latents are decoded as they would be without it, until the caches of all
    convolutions are full. A replay costs the host next to
    nothing, which shows where the host is what a step waits for: 8.6 ms became 2.3 on an H200 (accelerated,
    base_dim 32, 240 x 416, bf16). It costs memory: for as long as the stream lives, the caches are held
    twice, each step copies them once, and what the step works in is reserved for it (426 MiB instead of 210
    there). Hooks run when a step is captured, not when replayed.

    **Failures.** A call of `decode` that raises leaves the stream as it was before that call, wherever it
    failed and however many of its latents had been decoded: make the same call again for the same frames, or
    `reset()` for another clip. That holds for arguments that are refused, hooks that raise, memory that runs
    out, KeyboardInterrupt and other signals. The caches that a failed call has spoiled are computed again by
    the next call from the last latents, which are kept for that (at most 68 for Wan, 0.6 % of the memory of a
    decode). So the next call takes longer by the time that these latents took, and runs hooks for them once
    more. The frames are the same bit for bit, if torch and turnout are set as they were before and the model
    computes the same twice, which it does not with dropout switched on.

    **What must not change within a clip.** Batch, channels, height, width, dtype and device of the latents,
    autocast, and whether gradients are wanted (`torch.no_grad` and `torch.inference_mode` are alike): a
    change is refused with a `ValueError`. So is, with a `RuntimeError`, a model that has changed since the
    clip began, because the caches come from the model as it was. Each call compares:

    - the classes and the children of all modules: `accelerate`, `restore`, and what replaces modules, as LoRA
      does;
    - their modes: `train()` and `eval()`;
    - parameters and their version counters: weights that were replaced or changed in place, by an optimizer
      or `load_state_dict`. What is done to `parameter.data`, or to inference-mode parameters, has no version
      and is not noticed: later latents are decoded with the new weights;
    - with `graph=True` also where the weights lie, and hooks: a graph does not follow the one nor run the
      other;
    - hooks on the up blocks of an accelerated decoder, which keep their frames in another way then. Other
      hooks may come and go without `graph`.

    A model that was moved by `.to()` between calls, as offloading does, goes on without `graph` where it is
    back on its device and in its dtype; else the latents do not fit to it, or not to the clip, and are
    refused.

    One call at a time: a call while another one runs, in another thread or from a hook, is refused with a
    `RuntimeError`. Copies of a stream go on by themselves: `copy` and `pickle` take the latents along, not
    the caches.

    >>> import torch
    >>> from diffusers import AutoencoderKLWan
    >>> from turnout.models import DecodeStream
    >>> latents = {"z_dim": 2, "latents_mean": [0.0] * 2, "latents_std": [1.0] * 2}
    >>> vae = AutoencoderKLWan(base_dim=4, num_res_blocks=1, **latents)
    >>> stream = DecodeStream(vae)
    >>> with torch.no_grad():
    ...     [stream.decode(torch.randn(1, 2, latents, 2, 2)).shape[2] for latents in (1, 1, 2)]
    [1, 4, 8]
    >>> stream.reset()
    >>> with torch.no_grad():
    ...     stream.decode(torch.randn(1, 2, 1, 4, 4)).shape
    torch.Size([1, 3, 1, 32, 32])
    """

    def __init__(self, vae: Any, *, graph: bool = False):
        if not hasattr(vae, "_cached_conv_counts") or not hasattr(vae, "temperal_upsample"):
            raise TypeError(
                f"{type(vae).__name__} does not decode in chunks; "
                "AutoencoderKLWan and AutoencoderKLQwenImage do"
            )
        if graph and vae.device.type not in ENGINES:
            raise ValueError(
                "graph=True captures a CUDA graph, it needs a model on a CUDA device; "
                f"this one is on {vae.device}"
            )
        self.vae, self.graph = vae, graph
        self.captured: CapturedStep | None = None
        self._clip = Clip()
        self._running = threading.Lock()
        self.of_ranks: dict[int, DecodeStream] = {}  # of a distributed model whose ranks are threads

    @property
    def cache(self) -> list | None:
        """What the next step needs; None before the first one and after a call that failed."""
        return self._clip.cache

    def reset(self) -> None:
        """Begin another clip, with the model as it is now; its latents may be of another size.

        A captured graph is kept, and replayed again once the caches are full, unless the model has changed or
        the latents are others than it was captured with.
        """
        self._refuse_if_running()
        self._drop_stale_graph()
        self._clip = Clip()
        self.of_ranks.clear()

    def decode(self, z: Tensor) -> Tensor:
        """`[B, C, T, h, w]` latents to `[B, 3, frames, H, W]`: one frame for the very first latent of a clip,
        2 or 4 for each of the others. A call that raises changes nothing, see above."""
        if torch.compiler.is_compiling():
            return self.decode_alone(z)
        distribution = getattr(type(self.vae), "_turnout_distribution", None)
        return self.decode_alone(z) if distribution is None else distribution.decode_in(self, z)

    def decode_alone(self, z: Tensor) -> Tensor:
        """`decode` of what is given, also where the model is distributed."""
        if torch.compiler.is_compiling() and not self.graph:
            return self._decode_traced(z)
        self._refuse_if_running()
        with self._running:
            before = self._clip
            replays = self.captured is not None and before.cache is self.captured.cache
            model = before.model if replays else self._model(before)
            conditions = self._conditions(z, before, model)
            latents = self.vae.post_quant_conv(z)
            # caches that can be computed again count as spoiled from here on; others are copied
            kept = None if conditions.gradients or before.latents is None else before.latents
            during = before if kept is None else before._replace(cache=None)
            self._clip = during
            video, after = self._decode(latents, before, kept, (model, conditions))
            if replays:
                self._model(before)  # while the card works: a graph takes the host less time than this
        # The last act, and behind `with`: from the assignment on, Python looks at no signal before the caller
        # has the frames. Whoever used the stream since the lock was given back has found the caches spoiled.
        if self._clip is not during:
            raise RuntimeError(f"DecodeStream: {ONE_AT_A_TIME}")
        self._clip = after
        return video

    def _decode(
        self, latents: Tensor, before: Clip, kept: tuple[Tensor, ...] | None, assumptions: Assumptions
    ) -> tuple[Tensor, Clip]:  # fmt: skip
        """The frames of latents, and the clip behind them. kept: the latents before them; None: keep none."""
        entries = self.vae._cached_conv_counts["decoder"]
        missing = kept if before.cache is None and kept else ()
        if before.cache is None:
            # a graph needs caches that stay where they are: no rings
            cache = [None] * entries if self.graph else Kept([None] * entries, rings=kept is not None)
            steps = Steps(self.vae, cache, watch_layouts=self.graph)
        else:
            cache = before.cache
            if kept is None:
                cache = cache.fork() if isinstance(cache, Kept) else list(cache)
            steps = Steps(self.vae, cache, begun=before.begun, steady=before.steady, watch_layouts=self.graph)
        last = None if kept is None else collections.deque(kept, latents_needed(entries))

        def run(latent: Tensor) -> Tensor:
            frames = self._replayed(steps, latent, assumptions) if self.graph else steps.run(latent)
            if last is not None:
                split = splitting()
                last.extend([latent] if split is None or split.calls == 1 else split.apart(latent))
            return frames

        try:
            if isinstance(cache, Kept):
                cache.arranged.clear()  # what is done to the data of weights is not noticed
            for latent in missing:
                steps.run(latent)
            video = steps.video(latents, run)
        except BaseException:
            if isinstance(cache, Kept):
                cache.release()
            elif self.captured is None or cache is not self.captured.cache:
                cache.clear()
            raise
        model, conditions = assumptions
        latest = None if last is None else tuple(last)
        return video, Clip(True, steps.steady, steps.cache, latest, conditions, model)

    def _replayed(self, steps: Steps, latent: Tensor, assumptions: Assumptions) -> Tensor:
        """A step by the graph, once the caches are full and lie in the graph's buffers."""
        captured = self.captured
        if captured is None or steps.cache is not captured.cache:
            if not steps.steady:
                return steps.run(latent)
            if captured is not None and captured.fits(steps.cache, assumptions):
                captured.load(steps.cache)
                steps.cache.clear()  # whoever else holds this list has no use for it
            else:
                self.captured = captured = None  # its memory is free before another one needs as much
                step = partial(decode_latent, self.vae, first=False)
                self.captured = captured = CapturedStep(step, latent, steps.cache, assumptions)
            steps.cache = captured.cache
        return captured(latent)

    def _decode_traced(self, z: Tensor) -> Tensor:
        """`decode` in a compiled program, which has its own guards, and changes nothing before it ends."""
        before = self._clip
        cache = Kept([None] * self.vae._cached_conv_counts["decoder"], rings=False)
        has_rings = isinstance(before.cache, Kept) and before.cache.rings
        if has_rings or (before.begun and before.cache is None):
            raise RuntimeError(
                "DecodeStream: this clip keeps frames in rings, or was interrupted, and cannot go on in a "
                "compiled program; decode outside of torch.compile, or call reset() to begin another clip"
            )
        if before.cache is not None:
            cache[:] = before.cache
        steps = Steps(self.vae, cache, begun=before.begun)
        video = steps.video(self.vae.post_quant_conv(z))
        self._clip = Clip(begun=True, cache=steps.cache, latents=None)
        return video

    def _model(self, clip: Clip) -> ModelSnapshot:
        """The model of the clip, which has not changed since."""
        if clip.model is None:
            self._drop_stale_graph()
            if self.captured is not None:
                return self.captured.assumptions[0]
            return ModelSnapshot(self.vae, ("post_quant_conv", "decoder"), for_graph=self.graph)
        change = clip.model.change()
        if change is not None:
            raise RuntimeError(
                f"DecodeStream: {change} since this clip began, and what is kept of its frames comes from "
                "the model as it was; call reset() to begin another clip with the model as it is now"
            )
        return clip.model

    def _conditions(self, z: Any, clip: Clip, model: ModelSnapshot) -> Conditions:
        """Those of latents that fit to the model and to the clip; others are refused."""
        _check_latents(z, self.vae)
        gradients = torch.is_grad_enabled() and (z.requires_grad or model.wants_gradients())
        if self.graph and torch.is_grad_enabled():
            given = "graph=True was asked for and gradients are enabled"
            raise RuntimeError(f"{given}; a CUDA graph has none, decode under torch.no_grad()")
        conditions = Conditions.of(z, gradients)
        if clip.conditions is not None and clip.conditions != conditions:
            both = zip(Conditions._fields, conditions, clip.conditions, strict=True)
            others = [(name, now, was) for name, now, was in both if now != was]
            given = ", ".join(f"{name} {now}" for name, now, _ in others)
            needed = ", ".join(f"{name} {was}" for name, _, was in others)
            raise ValueError(
                f"DecodeStream.decode: latents {list(z.shape)} with {given}; this clip began with {needed}, "
                "which needs to be the same for all of its latents: call reset() to begin another clip"
            )
        return conditions

    def _drop_stale_graph(self) -> None:
        """Free a graph that was captured before the model changed, and the weights that it reads."""
        if self.captured is not None and self.captured.assumptions[0].change() is not None:
            self.captured = None

    def _refuse_if_running(self) -> None:
        if self._running.locked():
            raise RuntimeError(f"DecodeStream: {ONE_AT_A_TIME}")

    def __getstate__(self) -> dict[str, Any]:
        """For copies: no graph, no lock, and of the clip what its caches can be computed from."""
        clip = self._clip._replace(model=None, steady=False)
        clip = clip._replace(cache=None) if clip.latents is not None else clip
        return {"vae": self.vae, "graph": self.graph, "captured": None, "_clip": clip, "of_ranks": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._running = threading.Lock()


ONE_AT_A_TIME = (
    "another call of this stream is running, in another thread or around the hook that made this one; the "
    "latents of a clip are decoded one after the other: wait for it, or use a DecodeStream for each clip"
)


def _check_latents(z: Any, vae: Any) -> None:
    """Refuse what the model cannot decode, before anything is touched."""
    channels = vae.config.z_dim
    needed = f"a tensor [B, {channels}, T, h, w] of latents"
    if not isinstance(z, Tensor):
        raise TypeError(f"DecodeStream.decode: z is of type {type(z).__name__}, it needs {needed}")
    if z.dim() != 5 or z.shape[1] != channels or 0 in z.shape:
        raise ValueError(
            f"DecodeStream.decode: latents {list(z.shape)}, it needs {needed}, none of the sizes 0"
            + ("; add the batch with z.unsqueeze(0)" if z.dim() == 4 else "")
        )
    if not z.is_floating_point() or z.layout is not torch.strided:
        given = f"latents of {z.dtype} in layout {z.layout}"
        raise ValueError(f"DecodeStream.decode: {given}, it needs dense floating-point latents")
    entry = vae.post_quant_conv
    weight = getattr(entry, "weight", None)
    hooked = entry._forward_pre_hooks or "forward" in vars(entry)  # may bring the latents to the weights
    if hooked or not isinstance(weight, Tensor) or weight.is_meta or weight.dtype.itemsize < 2:
        return
    if z.device != weight.device:
        said = f"latents on {z.device}, the model is on {weight.device}"
        raise ValueError(f"DecodeStream.decode: {said}; move one of them, z.to({str(weight.device)!r})")
    if z.dtype != weight.dtype and not autocasts(z.device.type):
        said = f"latents of {z.dtype}, the model is of {weight.dtype}"
        raise ValueError(f"DecodeStream.decode: {said}; convert them, z.to({weight.dtype})")


def _unpatched(x: Tensor, patch: int) -> Tensor:
    """`[B, C*p*p, T, H, W]` to `[B, C, T, H*p, W*p]`: the first p of the channels runs along the width."""
    x = x.unflatten(1, (-1, patch, patch))  # [B, C, p, p, T, H, W]
    return x.permute(0, 1, 4, 5, 3, 6, 2).flatten(5, 6).flatten(3, 4)

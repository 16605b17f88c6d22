"""Decode the latents of one clip one after the other, for the VAEs of Wan and Qwen-Image."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from turnout.models.bare import calls_are_watched
from turnout.models.frames import StreamCache
from turnout.models.graphs import layouts
from turnout.models.patch import Adapter
from turnout.models.video import may_write
from turnout.models.wan_decoder import may_take_several
from turnout.routing.device import is_planning
from turnout.routing.settings import splitting
from turnout.routing.torch_private import without_function_modes


class Autoencoder(Adapter):
    summary = "frames go straight to their place in the video"

    exact = True

    def _decode(self: Any, z: Tensor, return_dict: bool = True) -> Any:
        tile = self.spatial_compression_ratio
        tiled = self.use_tiling and (
            z.shape[-1] > self.tile_sample_min_width // tile
            or z.shape[-2] > self.tile_sample_min_height // tile
        )
        if tiled or calls_are_watched():
            return super()._decode(z, return_dict)  # pyright: ignore[reportAttributeAccessIssue]
        from diffusers.models.autoencoders.vae import DecoderOutput

        # a picture is a clip that ends with its first frame: nothing is kept for the next one
        ends = z.shape[2] == 1
        cache = StreamCache([None] * self._cached_conv_counts["decoder"], rings=not ends, ends=ends)
        planned = not torch.compiler.is_compiling() and is_planning()
        steps = Steps(self, cache, watch_layouts=planned, planned=planned)
        video = steps.video(self.post_quant_conv(z))
        return DecoderOutput(sample=video) if return_dict else (video,)


class Steps:
    """Decodes the latents of one clip one after the other, and holds what each step needs of those before it.

    A step replaces the entries of `cache` and writes into its rings: a failure in the middle leaves them of
    no use. steady: the last step left the layout of every cache as it was; only watched if `watch_layouts`.
    planned: a step that launches what the one before has launched is left out.
    """

    def __init__(
        self, vae: Any, cache: list, *, begun: bool = False, steady: bool = False,
        watch_layouts: bool = False, planned: bool = False,
    ):  # fmt: skip
        self.vae, self.cache = vae, cache
        self.begun, self.steady, self.watch_layouts, self.planned = begun, steady, watch_layouts, planned

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
        split, most, frames = splitting(), 1, None
        if split is not None and may_write(latents) and may_take_several(self.vae.decoder, latents):
            most = split.latents if latents.shape[0] == 1 else 1
            run = partial(_without_modes, run)
        begin, total = 0, latents.shape[2]
        while begin < total:
            count = min(most, total - begin) if self.begun else 1
            if self.steady and self.planned and frames is not None:
                yield torch.empty_like(frames)
            elif split is None or count == 1:
                # dense, in the layout of all: a kernel may round otherwise where it lies otherwise
                frames = run(latents[:, :, begin : begin + 1].clone())
                yield frames
                frames = frames if self.planned else None
            else:
                several = split.of(count)
                with several.entered():
                    frames = run(several.gather(latents, begin))
                yield frames
                frames = None
            begin += count


def _without_modes(run: Callable[[Tensor], Tensor], latent: Tensor) -> Tensor:
    """`run` in a distributed decoder that runs adapters only: they ask the plan themselves. The mode that
    watches torch's functions, for stock code, would take the host 40 % of its time (21 latents of Wan 2.1 on
    one of 8 ranks: 0.18 s instead of 0.10, one core of a shared Xeon, routes that compute nothing).
    """
    with without_function_modes():
        return run(latent)


def decode_latent(vae: Any, latent: Tensor, cache: list, *, first: bool) -> Tensor:
    """One latent behind those that `cache` is of: `[B, C, 1, h, w]` to `[B, 3, frames, H, W]`."""
    chunk = {"first_chunk": True} if first and "Qwen" not in type(vae).__name__ else {}
    frames = vae.decoder(latent, feat_cache=cache, feat_idx=[0], **chunk)
    patch = getattr(vae.config, "patch_size", None)
    return frames if patch is None else _unpatched(frames, patch)


def _unpatched(x: Tensor, patch: int) -> Tensor:
    """`[B, C*p*p, T, H, W]` to `[B, C, T, H*p, W*p]`: the first p of the channels runs along the width."""
    x = x.unflatten(1, (-1, patch, patch))  # [B, C, p, p, T, H, W]
    return x.permute(0, 1, 4, 5, 3, 6, 2).flatten(5, 6).flatten(3, 4)

"""The causal video VAE of Wan 2.1 and 2.2, and Qwen-Image's, which has the same parts under other names.

Every convolution keeps its last frames for the next chunk. The list that holds them is the stock model's own,
entry by entry, so its tiling and slicing keep working; only a stream of large frames keeps those in rings
(`frames.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from turnout import ops
from turnout.models.bare import Inside
from turnout.models.frames import FrameRing, StreamCache
from turnout.models.patch import Adapter, drops, likes_channels_last, needs_plain, needs_silu
from turnout.models.sdpa import attend
from turnout.models.video import as_video, causal_conv, channels_last, may_write, per_frame
from turnout.ops.add_repeated import picks_of
from turnout.ops.add_repeated import reference as repeated_and_added
from turnout.routing.settings import splitting
from turnout.routing.torch_private import without_function_modes

CONVS, NORMS = ("WanCausalConv3d", "QwenImageCausalConv3d"), ("WanRMS_norm", "QwenImageRMS_norm")
START = "Rep"  # the stock model's mark: the first frame has passed, the next ones are doubled in time


def norm(norm: Any, x: Tensor, *, silu: bool = True, out: Tensor | None = None) -> Tensor:
    bias = norm.bias if isinstance(norm.bias, Tensor) else None
    return ops.rms_norm_silu(
        x, norm.gamma, bias=bias, eps=1e-12, dim=1, silu=silu, style="normalize", out=out
    )


def padding_of(conv: Any) -> tuple[int, int]:
    """The padding of rows and columns."""
    return conv._padding[2], conv._padding[0]


def convolve_with_cache(
    conv: Any, x: Tensor, feat_cache: list | None, feat_idx: list[int], residual: Tensor | None = None
) -> Tensor:
    """A causal convolution, with its entry of the stock model's list as cache."""
    slot = feat_idx[0]
    cache = None if feat_cache is None else feat_cache[slot]
    y, kept = causal_conv(x, conv.weight, conv.bias, cache, padding=padding_of(conv), residual=residual)
    if feat_cache is not None:
        if not (isinstance(feat_cache, StreamCache) and feat_cache.ends):
            feat_cache[slot] = kept
        feat_idx[0] += 1
    return y


class CausalConv(Adapter):
    summary = "cache, input and padding written once"

    exact = True
    inside = Inside()

    def forward(self: Any, x: Tensor, cache_x: Tensor | None = None) -> Tensor:
        if self.padding_mode != "zeros" or "_conv_forward" in vars(self):  # somebody wants other edges
            return super().forward(x, cache_x)  # pyright: ignore[reportAttributeAccessIssue]
        wide, _, high, _, before, _ = self._padding
        if not (wide or high or before) or not may_write(x, self.weight) or splitting() is not None:
            with_cache = super().forward  # pyright: ignore[reportAttributeAccessIssue]
            return with_cache(x, cache_x) if wide or high or before else ops.conv3d(x, *self._arguments())
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
        return ops.conv3d(whole, *self._arguments())

    def _arguments(self: Any) -> tuple:
        return self.weight, self.bias, self.stride, 0, self.dilation, self.groups


@lru_cache(1024)
def _padded_layout(shape: Any, strides: Any, cache: Any, padding: tuple[int, ...]) -> tuple[Any, Any]:
    """The shape and strides that concatenation and padding would give: in another layout the convolution
    would differ in some bits.
    """
    x = torch.empty_strided(shape, strides, device="meta")
    pads = list(padding)
    if cache is not None:
        x = torch.cat([torch.empty_strided(*cache, device="meta"), x], 2)
        pads[4] -= cache[0][2]
    whole = F.pad(x, pads)
    return whole.shape, whole.stride()


class ResidualBlock(Adapter):
    summary = "norm with SiLU; cache, bias and residual in the convolution"

    inside = Inside(reads=(*CONVS, *NORMS, nn.SiLU, nn.Dropout, nn.Identity))

    @staticmethod
    def refuses(instance: Any) -> Iterable[str]:
        yield from needs_silu(instance.nonlinearity)
        shortcut = instance.conv_shortcut
        yield from needs_plain(
            instance.conv1, instance.conv2, *([] if isinstance(shortcut, nn.Identity) else [shortcut])
        )

    def forward(self: Any, x: Tensor, feat_cache: list | None = None, feat_idx: list[int] = [0]) -> Tensor:  # noqa: B006
        if drops(self.dropout):
            return super().forward(x, feat_cache, feat_idx)  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(feat_cache, FrameRing):
            return self._in_ring(x, feat_cache, feat_idx)
        shortcut = self.conv_shortcut
        residual = x if isinstance(shortcut, nn.Identity) else ops.conv3d(x, shortcut.weight, shortcut.bias)
        x = convolve_with_cache(self.conv1, norm(self.norm1, x), feat_cache, feat_idx)
        x = norm(self.norm2, x)  # what it was made of is free before the convolution needs memory
        return convolve_with_cache(self.conv2, x, feat_cache, feat_idx, residual)

    def _in_ring(self: Any, x: Tensor, ring: FrameRing, feat_idx: list[int]) -> Tensor:
        """The block for one frame; the ring keeps the frames before it."""
        feat_idx[0] += 2
        norm(self.norm1, x, out=ring.place())
        y = ring.convolve(self.conv1, padding_of(self.conv1))
        norm(self.norm2, y, out=ring.place())
        del y  # is free before the convolution needs memory
        return ring.convolve(self.conv2, padding_of(self.conv2), x)


class AttentionBlock(Adapter):
    summary = "one head as wide as the block, no layout flips"

    inside = Inside(reads=(*NORMS, nn.Conv2d))

    def forward(self: Any, x: Tensor) -> Tensor:
        batch, _, _, height, width = x.shape
        frames = per_frame(x)
        normed = norm(self.norm, frames, silu=False)
        tokens = normed.flatten(2).transpose(1, 2)  # [frames, H*W, C]
        qkv = F.linear(tokens, self.to_qkv.weight.flatten(1), self.to_qkv.bias)
        q, k, v = qkv[:, None].chunk(3, -1)
        attended = attend(q, k, v)[:, 0]
        attended = F.linear(attended, self.proj.weight.flatten(1), self.proj.bias)
        return as_video(attended.transpose(1, 2).unflatten(2, (height, width)), batch) + x


class Resample(Adapter):
    summary = "upsampling folded into its convolution"

    inside = Inside(reads=(*CONVS, "WanUpsample", "QwenImageUpsample", nn.Conv2d, nn.ZeroPad2d, nn.Identity))

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
    summary = "the shortcut is added where it lands, never built"

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
    with without_function_modes():  # every pixel by itself: of a part it is the same
        return repeated_and_added(y, x, list(times))


class Encoder(Adapter):
    summary = "channels-last from the first convolution to the last"

    channels_last = True
    inside = Inside(reads=(*CONVS, *NORMS, nn.SiLU), calls=("mid_block", "down_blocks"))

    @staticmethod
    def refuses(instance: Any) -> Iterable[str]:
        yield from needs_silu(instance.nonlinearity)
        yield from needs_plain(instance.conv_in, instance.conv_out)

    def forward(self: Any, x: Tensor, feat_cache: list | None = None, feat_idx: list[int] = [0]) -> Tensor:  # noqa: B006
        x = convolve_with_cache(
            self.conv_in, channels_last(x) if likes_channels_last(x) else x, feat_cache, feat_idx
        )
        for layer in self.down_blocks:
            x = layer(x) if hasattr(layer, "to_qkv") else layer(x, feat_cache=feat_cache, feat_idx=feat_idx)
        x = self.mid_block(x, feat_cache=feat_cache, feat_idx=feat_idx)
        return convolve_with_cache(self.conv_out, norm(self.norm_out, x), feat_cache, feat_idx)

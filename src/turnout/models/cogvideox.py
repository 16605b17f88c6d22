"""The video VAE of CogVideoX: norms whose scale and shift come from the latents, a cache for every
convolution.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from turnout import ops
from turnout.models.bare import Inside
from turnout.models.patch import Adapter, drops, needs_silu
from turnout.models.video import as_video, channels_last, per_frame, repeat_frames
from turnout.ops.group_norm_silu.spatial import repeats

_CONVS = ("CogVideoXCausalConv3d", "CogVideoXSafeConv3d")


def _convolved(
    module: Any, x: Tensor, cache: Tensor | None, residual: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The causal convolution of x, and the frames to keep."""
    conv = module.conv
    y = ops.causal_conv3d(
        x,
        conv.weight,
        conv.bias,
        cache=cache,
        stride=conv.stride,
        padding=(module.height_pad, module.width_pad),
        dilation=conv.dilation,
        groups=conv.groups,
        pad_mode="replicate",
        residual=residual,
        return_cache=module.time_kernel_size > 1,
    )
    return (y[0], y[1].clone()) if isinstance(y, tuple) else (y, None)


class CausalConv(Adapter):
    summary = "cache beside the input of the convolution"

    inside = Inside(reads=_CONVS)

    @staticmethod
    def refuses(instance: Any) -> Iterable[str]:
        if instance.pad_mode == "replicate":
            yield "edges repeated in space, this adapter needs zeros there"

    def forward(self: Any, inputs: Tensor, conv_cache: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return _convolved(self, channels_last(inputs), conv_cache if self.time_kernel_size > 1 else None)


class SpatialNorm(Adapter):
    summary = "scale and shift computed where the latents are, and repeated, not the other way round"

    inside = Inside(reads=(*_CONVS, nn.GroupNorm))

    def forward(self: Any, f: Tensor, zq: Tensor, conv_cache: dict | None = None) -> tuple[Tensor, dict]:
        return _scaled(self, f, zq, silu=False), {"conv_y": None, "conv_b": None}


def _scaled(norm: Any, f: Tensor, zq: Tensor, *, silu: bool) -> Tensor:
    """norm(f) * y(z) + b(z), y and b being linear: a 1x1x1 convolution of repeated pixels is the repeated
    convolution of each.
    """
    layer, apart = norm.norm_layer, f.shape[2] > 1 and f.shape[2] % 2 == 1  # the first frame stands alone
    if not all(
        repeats(size, small, int(apart and i == 0))
        for i, (size, small) in enumerate(zip(f.shape[2:], zq.shape[2:], strict=True))
    ):
        zq, apart = _resized(zq, f.shape[2:], apart), False
    scale, shift = (
        channels_last(F.conv3d(zq, conv.weight, conv.bias)) for conv in (norm.conv_y.conv, norm.conv_b.conv)
    )
    return ops.spatial_norm_silu(
        f,
        layer.num_groups,
        layer.weight,
        layer.bias,
        scale,
        shift,
        eps=layer.eps,
        silu=silu,
        first_apart=apart,
    )


def _resized(zq: Tensor, size: Any, apart: bool) -> Tensor:
    """The latents at the size of what they scale, as the stock norm makes them."""
    if not apart:
        return F.interpolate(zq, size=size)
    first, rest = (
        F.interpolate(zq[:, :, :1], size=(1, *size[1:])),
        F.interpolate(zq[:, :, 1:], size=(size[0] - 1, *size[1:])),
    )
    return torch.cat([first, rest], 2)


class ResnetBlock(Adapter):
    summary = "norm with SiLU; cache, bias and residual in the convolution"

    inside = Inside(
        reads=(*_CONVS, "CogVideoXSpatialNorm3D", nn.GroupNorm, nn.SiLU, nn.Dropout),
        calls=("temb_proj", "conv_shortcut"),
    )

    @staticmethod
    def refuses(instance: Any) -> Iterable[str]:
        yield from CausalConv.refuses(instance.conv1)
        yield from needs_silu(instance.nonlinearity)

    def forward(
        self: Any,
        inputs: Tensor,
        temb: Tensor | None = None,
        zq: Tensor | None = None,
        conv_cache: dict | None = None,
    ) -> tuple[Tensor, dict]:
        if drops(self.dropout):
            return super().forward(inputs, temb, zq, conv_cache)  # pyright: ignore[reportAttributeAccessIssue]
        old, new = conv_cache or {}, {}
        residual = inputs
        if self.in_channels != self.out_channels:
            residual = (
                self.conv_shortcut(inputs, old.get("conv_shortcut"))
                if self.use_conv_shortcut
                else self.conv_shortcut(inputs)
            )
            if self.use_conv_shortcut:
                residual, new["conv_shortcut"] = residual
        x, new["conv1"] = _convolved(self.conv1, _normed(self.norm1, inputs, zq), old.get("conv1"))
        if temb is not None:
            x = x + self.temb_proj(F.silu(temb))[:, :, None, None, None]
        y, new["conv2"] = _convolved(self.conv2, _normed(self.norm2, x, zq), old.get("conv2"), residual)
        return y, new


def _normed(norm: Any, x: Tensor, zq: Tensor | None) -> Tensor:
    if zq is not None:
        return _scaled(norm, x, zq, silu=True)
    return ops.group_norm_silu(x, norm.num_groups, norm.weight, norm.bias, eps=norm.eps)


class Upsample(Adapter):
    summary = "upsampling folded into its convolution, frames repeated behind it"

    inside = Inside(reads=(nn.Conv2d,))

    def forward(self: Any, inputs: Tensor) -> Tensor:
        y = as_video(
            ops.upsample_conv2d(per_frame(inputs), self.conv.weight, self.conv.bias, scale=2, padding=1),
            inputs.shape[0],
        )
        frames = inputs.shape[2]
        if not self.compress_time or frames == 1:
            return y
        return repeat_frames(y, (2, 1, 1), first_apart=frames % 2 == 1)

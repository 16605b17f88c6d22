"""The video VAE of HunyuanVideo: group norms over the whole clip, edges repeated in time and space, attention
that is causal by frames.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from turnout import ops
from turnout.models.bare import Inside
from turnout.models.patch import Adapter, drops, needs_silu
from turnout.models.sdpa import attend
from turnout.models.video import Border, bordered, repeat_frames
from turnout.routing.settings import splitting

_CONV = "HunyuanVideoCausalConv3d"


def _plain_conv(conv: nn.Conv3d, x: Tensor, residual: Tensor | None = None) -> Tensor:
    return ops.conv3d(
        x, conv.weight, conv.bias, conv.stride, conv.padding, conv.dilation, conv.groups, residual=residual
    )


def _convolved(
    module: Any, x: Tensor, norm: nn.GroupNorm | None = None, residual: Tensor | None = None
) -> Tensor:
    """The convolution of x, or of SiLU of its norm, with repeated edges around it."""
    padding = module.time_causal_padding
    if norm is None:
        wide, _, high, _, before, _ = padding
        whole = bordered(x, Border(before, 0, (high, wide)), lambda out: x if out is None else out.copy_(x))
    else:
        whole = ops.group_norm_silu_pad(
            x, norm.num_groups, norm.weight, norm.bias, padding=padding, eps=norm.eps
        )
    return _plain_conv(module.conv, whole, residual)


class CausalConv(Adapter):
    summary = "edges repeated in the buffer that is convolved"

    inside = Inside(reads=(nn.Conv3d,))

    @staticmethod
    def refuses(instance: Any) -> Iterable[str]:
        if instance.pad_mode != "replicate":
            yield f"padding mode {instance.pad_mode}, this adapter needs replicate"

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        return _convolved(self, hidden_states)


class ResnetBlock(Adapter):
    summary = "norm with SiLU into the buffer that is convolved, bias and residual in the convolution"

    inside = Inside(reads=(_CONV, nn.Conv3d, nn.GroupNorm, nn.SiLU, nn.Dropout), calls=("conv_shortcut",))

    @staticmethod
    def refuses(instance: Any) -> Iterable[str]:
        yield from CausalConv.refuses(instance.conv1)
        yield from needs_silu(instance.nonlinearity)

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        if drops(self.dropout):
            return super().forward(hidden_states)  # pyright: ignore[reportAttributeAccessIssue]
        residual = hidden_states if self.conv_shortcut is None else self.conv_shortcut(hidden_states)
        return _convolved(self.conv2, _convolved(self.conv1, hidden_states, self.norm1), self.norm2, residual)


class Upsample(Adapter):
    summary = "pixels repeated in the buffer that is convolved"

    inside = Inside(reads=(_CONV, nn.Conv3d))

    @staticmethod
    def refuses(instance: Any) -> Iterable[str]:
        yield from CausalConv.refuses(instance.conv)
        if any(factor != int(factor) for factor in instance.upsample_factor):
            yield f"upsample factor {tuple(instance.upsample_factor)}, this adapter needs whole numbers"

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        in_time, in_height, in_width = map(int, self.upsample_factor)
        wide, _, high, _, before, _ = self.conv.time_causal_padding
        border = Border(before, 0, (high, wide))

        def fill(out: Tensor | None) -> Tensor:
            return repeat_frames(hidden_states, (in_time, in_height, in_width), first_apart=True, out=out)

        frames, height, width = hidden_states.shape[2:]
        size = (1 + (frames - 1) * in_time, height * in_height, width * in_width)
        return _plain_conv(self.conv.conv, bordered(hidden_states, border, fill, size))


class MidBlock(Adapter):
    summary = "attention frame by frame over the frames before, without a mask"

    splits = True
    inside = Inside(
        reads=("Attention", nn.GroupNorm),
        calls=("resnets", *(f"attentions.*.{name}" for name in ("to_q", "to_k", "to_v", "to_out"))),
    )

    @staticmethod
    def refuses(instance: Any) -> Iterable[str]:
        for attn in instance.attentions:
            if attn is not None and (
                not attn.residual_connection or attn.rescale_output_factor != 1.0 or attn.norm_q is not None
            ):
                yield (
                    "attention without residual, or scaled, or with normed queries, "
                    "this adapter needs a plain one"
                )

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        if torch.is_grad_enabled() and self.gradient_checkpointing:
            return super().forward(hidden_states)  # pyright: ignore[reportAttributeAccessIssue]
        x = self.resnets[0](hidden_states)
        for attn, resnet in zip(self.attentions, self.resnets[1:], strict=True):
            if attn is not None:
                split = splitting()
                attended = functools.partial(_attended, attn)
                x = attended(x) if split is None else split.attention(attended, x)
            x = resnet(x)
        return x


def _attended(attn: Any, x: Tensor) -> Tensor:
    frames, height, width = x.shape[2:]
    norm = attn.group_norm
    normed = ops.group_norm_silu(x, norm.num_groups, norm.weight, norm.bias, eps=norm.eps, silu=False)
    tokens = normed.permute(0, 2, 3, 4, 1).flatten(1, 3)  # [B, T*H*W, C]
    q, k, v = (
        project(tokens).unflatten(2, (attn.heads, -1)).transpose(1, 2)
        for project in (attn.to_q, attn.to_k, attn.to_v)
    )
    size, attended_frames = height * width, []
    for t in range(frames):
        earlier = slice(0, (t + 1) * size)
        attended_frames.append(attend(q[:, :, t * size : (t + 1) * size], k[:, :, earlier], v[:, :, earlier]))
    y = attn.to_out[1](attn.to_out[0](torch.cat(attended_frames, 2).transpose(1, 2).flatten(2)))
    return y.unflatten(1, (frames, height, width)).permute(0, 4, 1, 2, 3) + x


class Coder(Adapter):
    summary = "channels-last from the first convolution to the last"

    channels_last = True
    inside = Inside(
        reads=(_CONV, nn.Conv3d, nn.GroupNorm, nn.SiLU), calls=("mid_block", "up_blocks", "down_blocks")
    )

    @staticmethod
    def refuses(instance: Any) -> Iterable[str]:
        yield from CausalConv.refuses(instance.conv_out)
        yield from needs_silu(instance.conv_act)


class Decoder(Coder):
    summary = "channels-last from the first convolution to the last"

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        if torch.is_grad_enabled() and self.gradient_checkpointing:
            return super().forward(hidden_states)  # pyright: ignore[reportAttributeAccessIssue]
        x = self.mid_block(self.conv_in(hidden_states))
        for block in self.up_blocks:
            x = block(x)
        return _convolved(self.conv_out, x, self.conv_norm_out)


class Encoder(Coder):
    summary = "channels-last from the first convolution to the last"

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        if torch.is_grad_enabled() and self.gradient_checkpointing:
            return super().forward(hidden_states)  # pyright: ignore[reportAttributeAccessIssue]
        x = self.conv_in(hidden_states)
        for block in self.down_blocks:
            x = block(x)
        x = self.mid_block(x)
        return _convolved(self.conv_out, x, self.conv_norm_out)

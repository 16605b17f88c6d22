"""The image VAE of Stable Diffusion, SDXL, Flux and Flux 2, and the blocks it shares with their U-Nets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from turnout import ops
from turnout.models.bare import Inside, is_bare
from turnout.models.layers import parameters_of
from turnout.models.patch import Adapter, drops, needs_plain, needs_silu
from turnout.models.routed import RoutedProcessor
from turnout.models.sdpa import attend
from turnout.models.worth import is_torch, learn
from turnout.ops.conv2d import CONV2D
from turnout.ops.convolution.layout import with_residual
from turnout.ops.group_norm_silu import GROUP_NORM_SILU

is_compiling = torch.compiler.is_compiling


def norm_silu(norm: nn.GroupNorm, x: Tensor, *, silu: bool = True) -> Tensor:
    """The norm of a bare layer, and its activation: torch's own functions where no route is worth asking
    for."""
    weight, bias = parameters_of(norm)
    args = (x, norm.num_groups, weight, bias)
    if not is_compiling():
        stock = is_torch(norm, GROUP_NORM_SILU, x)
        if stock is None:  # torch's norm makes what is contiguous of any layout, the op keeps the layout
            plain = x.is_contiguous() and weight is not None and weight.dtype is x.dtype
            stock = plain and learn(norm, ops.group_norm_silu, *args, eps=norm.eps, silu=silu)
        if stock:
            y = F.group_norm(*args, norm.eps)
            return F.silu(y) if silu else y
    return ops.group_norm_silu(*args, eps=norm.eps, silu=silu)


def _conv(conv: nn.Conv2d, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """A bare convolution and the addition of a residual: torch's own functions where no route is worth asking
    for."""
    args: Any = (x, *parameters_of(conv), conv.stride, conv.padding, conv.dilation, conv.groups)
    if not is_compiling():
        stock = is_torch(conv, CONV2D, x)
        if stock is None:
            stock = learn(conv, ops.conv2d, *args, residual=residual)
        if stock:
            y = F.conv2d(*args)
            return with_residual(y, residual)
    return ops.conv2d(*args, residual=residual)


class ResnetBlock(Adapter):
    summary = "norm with SiLU, bias and residual in the convolution"

    inside = Inside(reads=(nn.GroupNorm, nn.Conv2d, nn.SiLU, nn.Dropout), calls=("time_emb_proj",))

    @staticmethod
    def refuses(instance: Any) -> Iterable[str]:
        yield from needs_silu(instance.nonlinearity)
        if instance.upsample is not None or instance.downsample is not None:
            yield "it resamples, this adapter needs a block that does not"
        if instance.time_embedding_norm == "scale_shift":
            yield "a time embedding that scales and shifts, this adapter needs one that is added"
        if instance.output_scale_factor != 1.0:
            yield f"output scale {instance.output_scale_factor}, this adapter needs 1"

    def forward(
        self: Any, input_tensor: Tensor, temb: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        if drops(self.dropout):
            return super().forward(input_tensor, temb, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        x = _conv(self.conv1, norm_silu(self.norm1, input_tensor))
        if self.time_emb_proj is not None:
            temb = self.time_emb_proj(temb if self.skip_time_act else F.silu(temb))  # pyright: ignore[reportArgumentType]
        if temb is not None and self.time_embedding_norm == "default":
            x = x + temb[:, :, None, None]
        residual = input_tensor if self.conv_shortcut is None else _conv(self.conv_shortcut, input_tensor)
        return _conv(self.conv2, norm_silu(self.norm2, x), residual)


class Upsample(Adapter):
    summary = "upsampling folded into its convolution"

    inside = Inside(reads=(nn.Conv2d,))

    @staticmethod
    def refuses(instance: Any) -> Iterable[str]:
        if not (instance.use_conv and instance.interpolate) or instance.use_conv_transpose:
            yield "no convolution behind the upsampling, this adapter needs one"
        elif _upsampled(instance).kernel_size != (3, 3) or _upsampled(instance).padding != (1, 1):
            yield f"kernel {_upsampled(instance).kernel_size}, this adapter needs 3 x 3 with padding 1"
        else:
            yield from needs_plain(_upsampled(instance))

    def forward(
        self: Any, hidden_states: Tensor, output_size: Any = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        if self.norm is not None or output_size is not None:
            return super().forward(hidden_states, output_size, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        conv = _upsampled(self)
        return ops.upsample_conv2d(hidden_states, conv.weight, conv.bias, scale=2, padding=1)


def _upsampled(upsample: Any) -> Any:
    return upsample.conv if upsample.name == "conv" else upsample.Conv2d_0


class Coder(Adapter):
    summary = "channels-last from the first convolution to the last"

    channels_last = True
    inside = Inside(reads=(nn.Conv2d, nn.GroupNorm, nn.SiLU), calls=("mid_block", "up_blocks", "down_blocks"))

    @staticmethod
    def refuses(instance: Any) -> Iterable[str]:
        if not isinstance(instance.conv_norm_out, nn.GroupNorm):
            yield f"last norm {type(instance.conv_norm_out).__name__}, this adapter needs GroupNorm"
        yield from needs_silu(instance.conv_act)


class Decoder(Coder):
    summary = "channels-last from the first convolution to the last"

    def forward(self: Any, sample: Tensor, latent_embeds: Tensor | None = None) -> Tensor:
        if torch.is_grad_enabled() and self.gradient_checkpointing:
            return super().forward(sample, latent_embeds)  # pyright: ignore[reportAttributeAccessIssue]
        x = _conv(self.conv_in, sample.to(memory_format=torch.channels_last))
        x = self.mid_block(x, latent_embeds)
        for block in self.up_blocks:
            x = block(x, latent_embeds)
        return _conv(self.conv_out, norm_silu(self.conv_norm_out, x)).contiguous()


class Encoder(Coder):
    summary = "channels-last from the first convolution to the last"

    def forward(self: Any, sample: Tensor) -> Tensor:
        if torch.is_grad_enabled() and self.gradient_checkpointing:
            return super().forward(sample)  # pyright: ignore[reportAttributeAccessIssue]
        x = _conv(self.conv_in, sample.to(memory_format=torch.channels_last))
        for block in self.down_blocks:
            x = block(x)
        x = self.mid_block(x)
        return _conv(self.conv_out, norm_silu(self.conv_norm_out, x)).contiguous()


class AttentionProcessor(RoutedProcessor):
    summary = "attention of the middle block without layout flips"

    # Not `inside`: only images need the norm, and a U-Net calls this 140 times with tokens.
    reads = Inside(reads=(nn.GroupNorm,), calls=("to_q", "to_k", "to_v", "to_out"))

    def __call__(
        self: Any,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        x = hidden_states
        if (
            x.dim() != 4
            or encoder_hidden_states is not None
            or attention_mask is not None
            or attn.group_norm is None
            or attn.spatial_norm is not None
            or attn.norm_q is not None
            or attn.norm_k is not None
            or attn.rescale_output_factor != 1.0
            or not is_bare(attn, self.reads, x.dtype, x.device)
        ):
            return self._routed_stock(attn, x, encoder_hidden_states, attention_mask, temb, *args, **kwargs)
        tokens = norm_silu(attn.group_norm, x, silu=False).flatten(2).transpose(1, 2)  # [B, H*W, C]
        heads = (attn.heads, -1)
        q, k, v = (
            project(tokens).unflatten(2, heads).transpose(1, 2)
            for project in (attn.to_q, attn.to_k, attn.to_v)
        )
        attended = attn.to_out[1](attn.to_out[0](attend(q, k, v).transpose(1, 2).flatten(2)))
        attended = attended.transpose(1, 2).unflatten(2, x.shape[2:])
        return attended + x if attn.residual_connection else attended

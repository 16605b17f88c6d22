"""The video VAEs of LTX and LTX-2: frames are repeated at both ends of a clip, or at its start where a coder
is causal.
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
from turnout.models.video import Border, bordered, channels_last

_CONVS, _NORMS = ("LTXVideoCausalConv3d", "LTX2VideoCausalConv3d"), ("RMSNorm", "PerChannelRMSNorm")
_PADDING_MODES = ("zeros", "replicate", "reflect")


def _norm(
    norm: Any, x: Tensor, out: Tensor | None, *, scale: Tensor | None = None, shift: Tensor | None = None
) -> Tensor:
    """SiLU of the norm, whose weight and bias may come from a time step."""
    weight, bias = (
        (getattr(norm, "weight", None), getattr(norm, "bias", None))
        if scale is None
        else (1 + scale.flatten(), shift)
    )
    bias = None if bias is None else bias.flatten()
    return ops.rms_norm_silu(x, weight, bias=bias, eps=norm.eps, dim=1, out=out)


def _convolved(
    module: Any, x: Tensor, causal: bool | None, *, norm: Any = None, residual: Tensor | None = None
) -> Tensor:
    """One of these models' convolutions, of x or of norm(x)."""
    conv, depth = module.conv, module.kernel_size[0]
    causal = getattr(module, "is_causal", True) if causal is None else causal
    before, after = (depth - 1, 0) if causal else ((depth - 1) // 2, (depth - 1) // 2)
    if not causal or conv.padding_mode != "zeros" or conv.stride != (1, 1, 1):
        edges, padding = (
            ((0, 0), conv.padding) if conv.padding_mode == "zeros" else (conv.padding[1:], (0, 0, 0))
        )
        fill = (
            (lambda out: x if out is None else out.copy_(x)) if norm is None else functools.partial(norm, x)
        )
        whole = bordered(x, Border(before, after, edges, conv.padding_mode), fill)
        return ops.conv3d(
            whole, conv.weight, conv.bias, conv.stride, padding, conv.dilation, conv.groups, residual=residual
        )
    x = channels_last(x) if norm is None else norm(x, None)
    return ops.causal_conv3d(  # pyright: ignore[reportReturnType]
        x,
        conv.weight,
        conv.bias,
        padding=conv.padding[1:],
        dilation=conv.dilation,
        groups=conv.groups,
        pad_mode="replicate",
        residual=residual,
    )


class CausalConv(Adapter):
    summary = "frames repeated in the buffer that is convolved"

    inside = Inside(reads=(nn.Conv3d,), padding_modes=_PADDING_MODES)

    def forward(self: Any, hidden_states: Tensor, causal: bool | None = None) -> Tensor:
        return _convolved(self, hidden_states, causal)


class ResnetBlock(Adapter):
    summary = "norm with SiLU into the buffer that is convolved, bias and residual in the convolution"

    inside = Inside(
        reads=(*_CONVS, *_NORMS, nn.Conv3d, nn.SiLU, nn.Dropout), calls=("norm3", "conv_shortcut"),
        padding_modes=_PADDING_MODES,
    )  # fmt: skip

    @staticmethod
    def refuses(instance: Any) -> Iterable[str]:
        yield from needs_silu(instance.nonlinearity)
        if instance.per_channel_scale1 is not None:
            yield "noise is added between its convolutions, this adapter needs none"

    def forward(
        self: Any,
        inputs: Tensor,
        temb: Tensor | None = None,
        generator: Any = None,
        causal: bool | None = None,
    ) -> Tensor:
        if drops(self.dropout) or (
            temb is not None and self.scale_shift_table is not None and inputs.shape[0] > 1
        ):
            stock = {} if causal is None else {"causal": causal}
            return super().forward(inputs, temb, generator, **stock)  # pyright: ignore[reportAttributeAccessIssue]
        scales = [{}, {}]
        if self.scale_shift_table is not None:
            assert temb is not None
            table = temb.unflatten(1, (4, -1))[0, ..., 0, 0, 0] + self.scale_shift_table  # [4, C]
            shift_1, scale_1, shift_2, scale_2 = table.unbind()
            scales = [{"scale": scale_1, "shift": shift_1}, {"scale": scale_2, "shift": shift_2}]
        residual = inputs
        if self.norm3 is not None:
            residual = self.norm3(residual.movedim(1, -1)).movedim(-1, 1)
        if self.conv_shortcut is not None:
            residual = self.conv_shortcut(residual)
        x = _convolved(self.conv1, inputs, causal, norm=functools.partial(_norm, self.norm1, **scales[0]))
        return _convolved(
            self.conv2, x, causal, norm=functools.partial(_norm, self.norm2, **scales[1]), residual=residual
        )


class Upsampler(Adapter):
    summary = "channels spread over time and space without leaving channels-last"

    def forward(self: Any, hidden_states: Tensor, causal: bool | None = None) -> Tensor:
        y = self._spread(
            self.conv(hidden_states) if causal is None else self.conv(hidden_states, causal=causal)
        )
        if self.residual:
            residual = self._spread(hidden_states)
            y = y + residual.repeat(1, y.shape[1] // residual.shape[1], 1, 1, 1)
        return y

    def _spread(self: Any, x: Tensor) -> Tensor:
        """`[B, (C, t, h, w), T, H, W]` as `[B, C, T*t, H*h, W*w]`, without the first t - 1 frames."""
        x = x.unflatten(1, (-1, *self.stride))  # [B, C, t, h, w, T, H, W]
        x = (
            x.permute(0, 5, 2, 6, 3, 7, 4, 1).flatten(5, 6).flatten(3, 4).flatten(1, 2)
        )  # [B, T*t, H*h, W*w, C]
        return x.permute(0, 4, 1, 2, 3)[:, :, self.stride[0] - 1 :]


class Decoder(Adapter):
    summary = "channels-last from the first convolution to the last"

    channels_last = True
    inside = Inside(
        reads=(*_CONVS, *_NORMS, nn.Conv3d, nn.SiLU), calls=("mid_block", "up_blocks", "time_embedder"),
        padding_modes=_PADDING_MODES,
    )  # fmt: skip

    @staticmethod
    def refuses(instance: Any) -> Iterable[str]:
        yield from needs_silu(instance.conv_act)

    def forward(
        self: Any, hidden_states: Tensor, temb: Tensor | None = None, **causal: bool | None
    ) -> Tensor:
        x = hidden_states
        if (torch.is_grad_enabled() and self.gradient_checkpointing) or (
            self.time_embedder is not None and x.shape[0] > 1
        ):
            return super().forward(x, temb, **causal)  # pyright: ignore[reportAttributeAccessIssue]
        if causal:
            causal = {"causal": causal["causal"] or self.is_causal}
        x = self.conv_in(x, **causal)
        if self.timestep_scale_multiplier is not None:
            temb = temb * self.timestep_scale_multiplier  # pyright: ignore[reportOptionalOperand]
        x = self.mid_block(x, temb, **causal)
        for block in self.up_blocks:
            x = block(x, temb, **causal)
        scales = {}
        if self.time_embedder is not None:
            embedded = self.time_embedder(
                timestep=temb.flatten(),  # pyright: ignore[reportOptionalMemberAccess]
                resolution=None,
                aspect_ratio=None,
                batch_size=1,
                hidden_dtype=x.dtype,
            )
            shift, scale = (embedded.view(2, -1) + self.scale_shift_table).unbind()
            scales = {"scale": scale, "shift": shift}
        x = _convolved(
            self.conv_out, x, causal.get("causal"), norm=functools.partial(_norm, self.norm_out, **scales)
        )
        x = x.unflatten(
            1, (-1, self.patch_size_t, self.patch_size, self.patch_size)
        )  # [B, C, t, w, h, T, H, W]
        return x.permute(0, 1, 5, 2, 6, 4, 7, 3).flatten(6, 7).flatten(4, 5).flatten(2, 3)

"""Blocks of diffusion transformers. The operations between two matrix products run in one pass, GELU runs in
the epilogue of the product before it, and products are written to their place in a joined tensor instead of
being joined later. Attention is in dit.py."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from turnout import ops
from turnout.models.bare import Inside, bare_layer, hooked
from turnout.models.patch import Adapter
from turnout.models.video import may_write
from turnout.routing import settings
from turnout.routing.fallback import autocasts
from turnout.routing.torch_private import addmm_gelu, storage_id

_HALF = (torch.float16, torch.bfloat16)


def direct(x: Tensor, *layers: Any) -> bool:
    """Whether torch's functions may replace linear layers: no gradient, no tracing, no autocast, and layers
    that only multiply x by their weight: no hooks, no LoRA, no quantised weights."""
    return (
        may_write(x, *(layer.weight for layer in layers))
        and not autocasts(x.device.type)
        and all(bare_layer(layer, nn.Linear, x) and layer.bias is not None for layer in layers)
    )


def linear_gelu(layer: Any, x: Tensor) -> Tensor:
    """`gelu(layer(x))` in its tanh form. On a GPU cuBLAS computes it in the product's epilogue, for dense
    results; its tanh has the precision of half types. On other devices torch's function computes the GELU
    without tanh."""
    if (
        x.device.type == "cuda"
        and x.dtype in _HALF
        and direct(x, layer)
        and settings.current().numerics != "exact"
    ):
        rows = addmm_gelu(layer.bias, x.flatten(0, -2), layer.weight.t(), use_gelu=True)
        return rows.unflatten(0, x.shape[:-1])
    return F.gelu(layer(x), approximate="tanh")


def joined(first: Tensor, second: Tensor) -> Tensor:
    """`cat([first, second], 1)` of `[B, S, C]`; of two parts of one tensor, that tensor."""
    batch, words, channels = first.shape
    strides, tokens = first.stride(), words + second.shape[1]
    if (
        may_write(first, second)
        and strides == second.stride()
        and strides[0] == tokens * strides[1]
        and first.storage_offset() + words * strides[1] == second.storage_offset()
        and storage_id(first) == storage_id(second)
    ):
        return first.as_strided((batch, tokens, channels), strides)
    return torch.cat([first, second], 1)


def can_join(first: Any, x: Tensor, second: Any, y: Tensor) -> bool:
    """Whether two products may be written to their places in one tensor."""
    return x.shape[0] == 1 and direct(x, first) and direct(y, second)


def joined_products(first: Any, x: Tensor, second: Any, y: Tensor) -> Tensor:
    """`cat([first(x), second(y)], 1)` of `[B, S, C]`, each product written to its place in the result."""
    out = x.new_empty(1, x.shape[1] + y.shape[1], first.weight.shape[0])
    for layer, parameter, into in ((first, x, out[0, : x.shape[1]]), (second, y, out[0, x.shape[1] :])):
        torch.addmm(layer.bias, parameter[0], layer.weight.t(), out=into)
    return out


def _finite(x: Tensor) -> Tensor:
    return x.clip(-65504, 65504) if x.dtype == torch.float16 else x


def _needs_bare_norm(*norms: Any) -> Iterable[str]:
    for norm in norms:
        if not isinstance(norm, nn.LayerNorm) or norm.weight is not None:
            yield f"norm {type(norm).__name__}, this adapter needs a layer norm without weights"


class AdaLayerNormZero(Adapter):
    summary = "layer norm, scale and shift in one pass"

    inside = Inside(reads=(nn.LayerNorm,), calls=("emb", "linear", "silu"))

    @staticmethod
    def refuses(instance: Any) -> Iterable[str]:
        yield from _needs_bare_norm(instance.norm)

    def forward(
        self: Any,
        x: Tensor,
        timestep: Tensor | None = None,
        class_labels: Tensor | None = None,
        hidden_dtype: torch.dtype | None = None,
        emb: Tensor | None = None,
    ) -> Any:
        if self.emb is not None:
            emb = self.emb(timestep, class_labels, hidden_dtype=hidden_dtype)
        shift, scale, *rest = self.linear(self.silu(emb)).chunk(6, dim=1)
        return _modulated(self.norm, x, scale, shift), rest[0], rest[1], rest[2], rest[3]


class AdaLayerNormZeroSingle(Adapter):
    summary = "layer norm, scale and shift in one pass"

    inside = Inside(reads=(nn.LayerNorm,), calls=("linear", "silu"))

    @staticmethod
    def refuses(instance: Any) -> Iterable[str]:
        yield from _needs_bare_norm(instance.norm)

    def forward(self: Any, x: Tensor, emb: Tensor) -> Any:
        shift, scale, gate = self.linear(self.silu(emb)).chunk(3, dim=1)
        return _modulated(self.norm, x, scale, shift), gate


class AdaLayerNormContinuous(Adapter):
    summary = "layer norm, scale and shift in one pass"

    inside = Inside(reads=(nn.LayerNorm,), calls=("linear", "silu"))

    @staticmethod
    def refuses(instance: Any) -> Iterable[str]:
        yield from _needs_bare_norm(instance.norm)

    def forward(self: Any, x: Tensor, conditioning_embedding: Tensor) -> Tensor:
        scale, shift = self.linear(self.silu(conditioning_embedding).to(x.dtype)).chunk(2, dim=1)
        return _modulated(self.norm, x, scale, shift)


def _modulated(norm: Any, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    if x.dim() != 3 or scale.dtype != x.dtype:  # torch would give more dimensions, or a wider result
        return norm(x) * (1 + scale[:, None]) + shift[:, None]
    return ops.layer_norm_modulate(x, scale, shift, eps=norm.eps)  # pyright: ignore[reportReturnType]


class Gelu(Adapter):
    summary = "GELU in the product's epilogue"

    @staticmethod
    def refuses(instance: Any) -> Iterable[str]:
        if instance.approximate != "tanh":
            yield f"approximate {instance.approximate!r}, this adapter needs 'tanh'"

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        if self.approximate != "tanh":  # it may have been set since
            return super().forward(hidden_states)  # pyright: ignore[reportAttributeAccessIssue]
        return linear_gelu(self.proj, hidden_states)


def _fed_forward(
    feed_forward: Any,
    norm: Any,
    x: Tensor,
    attended: Tensor,
    gate: Tensor,
    shift: Tensor,
    scale: Tensor,
    last_gate: Tensor,
) -> Tensor:
    """The second half of a block: add the gated output of attention to x, then the gated output of the
    feed-forward layers on the norm of that sum.
    """
    normed, x = ops.layer_norm_modulate(attended, scale, shift, eps=norm.eps, residual=x, gate=gate)
    return ops.gated_add(x, last_gate, feed_forward(normed))


class FluxPosEmbed(Adapter):
    summary = "rotary tables of all axes at once"

    inside = Inside()

    def forward(self: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
        if ids.device.type not in ("cpu", "cuda"):  # not every device has float64
            return super().forward(ids)  # pyright: ignore[reportAttributeAccessIssue]
        sizes = self.axes_dim[: ids.shape[-1]]
        steps = torch.cat(
            [torch.arange(0, size, 2, dtype=torch.float64, device=ids.device) / size for size in sizes]
        )
        places = torch.cat(
            [place.expand(-1, size // 2) for place, size in zip(ids.float().split(1, 1), sizes, strict=True)],
            1,
        )
        turns = places * (1.0 / self.theta**steps)  # [S, D/2]
        cos, sin = (
            table.float().unsqueeze(-1).expand(-1, -1, 2).flatten(1) for table in (turns.cos(), turns.sin())
        )
        return cos, sin


class FluxBlock(Adapter):
    summary = "residual, gate, norm, scale and shift in one pass"

    inside = Inside(reads=(nn.LayerNorm,), calls=("norm1", "norm1_context", "attn", "ff", "ff_context"))

    @staticmethod
    def refuses(instance: Any) -> Iterable[str]:
        yield from _needs_bare_norm(instance.norm2, instance.norm2_context)

    def forward(
        self: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        image_rotary_emb: Any = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
    ) -> tuple[Tensor, Tensor]:
        if joint_attention_kwargs or temb.dtype != hidden_states.dtype:
            return super().forward(  # pyright: ignore[reportAttributeAccessIssue]
                hidden_states, encoder_hidden_states, temb, image_rotary_emb, joint_attention_kwargs
            )
        image, *image_modulation = self.norm1(hidden_states, emb=temb)
        text, *text_modulation = self.norm1_context(encoder_hidden_states, emb=temb)
        image, text = self.attn(
            hidden_states=image, encoder_hidden_states=text, image_rotary_emb=image_rotary_emb
        )
        image = _fed_forward(self.ff, self.norm2, hidden_states, image, *image_modulation)
        text = _fed_forward(
            self.ff_context, self.norm2_context, encoder_hidden_states, text, *text_modulation
        )
        return _finite(text), image


class FluxSingleBlock(Adapter):
    summary = "residual and gate in one pass, GELU in the product's epilogue"

    inside = Inside(reads=(nn.GELU,), calls=("norm", "attn", "proj_mlp", "proj_out"))

    @staticmethod
    def refuses(instance: Any) -> Iterable[str]:
        activation = instance.act_mlp
        if not isinstance(activation, nn.GELU) or activation.approximate != "tanh":
            yield f"activation {activation}, this adapter needs GELU in its tanh form"

    def forward(
        self: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        image_rotary_emb: Any = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
    ) -> tuple[Tensor, Tensor]:
        if joint_attention_kwargs or temb.dtype != hidden_states.dtype:
            return super().forward(  # pyright: ignore[reportAttributeAccessIssue]
                hidden_states, encoder_hidden_states, temb, image_rotary_emb, joint_attention_kwargs
            )
        words, x = encoder_hidden_states.shape[1], joined(encoder_hidden_states, hidden_states)
        normed, gate = self.norm(x, emb=temb)
        # A plain product waits until attention has returned its memory. Another layer may draw random
        # numbers, as the dropout of a LoRA does, and is called in its turn.
        waits = bare_layer(self.proj_mlp, nn.Linear, normed) and not hooked(self.attn)
        opened = None if waits else linear_gelu(self.proj_mlp, normed)
        attended = self.attn(hidden_states=normed, image_rotary_emb=image_rotary_emb)
        opened = linear_gelu(self.proj_mlp, normed) if opened is None else opened
        opened = torch.cat([attended, opened], -1)  # what it was made of is free before the product
        del attended
        x = _finite(ops.gated_add(x, gate, self.proj_out(opened)))
        return x[:, :words], x[:, words:]


class QwenImageBlock(Adapter):
    summary = "residual, gate, norm, scale and shift in one pass"

    inside = Inside(reads=(nn.LayerNorm,), calls=("img_mod", "txt_mod", "attn", "img_mlp", "txt_mlp"))

    @staticmethod
    def refuses(instance: Any) -> Iterable[str]:
        yield from _needs_bare_norm(
            instance.img_norm1, instance.img_norm2, instance.txt_norm1, instance.txt_norm2
        )

    def forward(
        self: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Tensor | None,
        temb: Tensor,
        image_rotary_emb: Any = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
        modulate_index: Any = None,
    ) -> tuple[Tensor, Tensor]:
        if self.zero_cond_t or modulate_index is not None or temb.dtype != hidden_states.dtype:
            return super().forward(  # pyright: ignore[reportAttributeAccessIssue]
                hidden_states,
                encoder_hidden_states,
                encoder_hidden_states_mask,
                temb,
                image_rotary_emb,
                joint_attention_kwargs,
                modulate_index,
            )
        shift, scale, gate, last_shift, last_scale, last_gate = self.img_mod(temb).chunk(6, -1)
        text_shift, text_scale, text_gate, last_text_shift, last_text_scale, last_text_gate = self.txt_mod(
            temb
        ).chunk(6, -1)
        image, text = self.attn(
            hidden_states=_modulated(self.img_norm1, hidden_states, scale, shift),
            encoder_hidden_states=_modulated(self.txt_norm1, encoder_hidden_states, text_scale, text_shift),
            encoder_hidden_states_mask=encoder_hidden_states_mask,
            image_rotary_emb=image_rotary_emb,
            **(joint_attention_kwargs or {}),
        )
        image = _fed_forward(
            self.img_mlp, self.img_norm2, hidden_states, image, gate, last_shift, last_scale, last_gate
        )
        text = _fed_forward(
            self.txt_mlp,
            self.txt_norm2,
            encoder_hidden_states,
            text,
            text_gate,
            last_text_shift,
            last_text_scale,
            last_text_gate,
        )
        return _finite(text), _finite(image)


class WanBlock(Adapter):
    summary = "residual, gate, norm, scale and shift in one pass"

    inside = Inside(
        reads=("FP32LayerNorm", nn.LayerNorm, nn.Identity), calls=("attn1", "attn2", "ffn"), any_dtype=True
    )

    @staticmethod
    def refuses(instance: Any) -> Iterable[str]:
        yield from _needs_bare_norm(instance.norm1, instance.norm3)
        if not isinstance(instance.norm2, (nn.LayerNorm, nn.Identity)):
            yield f"norm {type(instance.norm2).__name__}, this adapter needs a layer norm or none"

    def forward(
        self: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor, rotary_emb: Any
    ) -> Tensor:
        # [B, 6, C], or one for each token: [B, S, 6, C]
        shift, scale, gate, last_shift, last_scale, last_gate = (
            self.scale_shift_table + temb.float()
        ).unbind(-2)
        x = hidden_states
        attended = self.attn1(
            ops.layer_norm_modulate(x, scale, shift, eps=self.norm1.eps), None, None, rotary_emb
        )
        if isinstance(self.norm2, nn.LayerNorm):
            weight, bias = (None if p is None else p.float() for p in (self.norm2.weight, self.norm2.bias))
            normed, x = ops.layer_norm_modulate(
                attended, weight=weight, bias=bias, eps=self.norm2.eps, residual=x, gate=gate
            )
        else:
            normed = x = ops.gated_add(x, gate, attended)
        attended = self.attn2(normed, encoder_hidden_states, None, None)
        normed, x = ops.layer_norm_modulate(attended, last_scale, last_shift, eps=self.norm3.eps, residual=x)
        return ops.gated_add(x, last_gate, self.ffn(normed))


class WanTransformer(Adapter):
    summary = "patches as one product, last norm with scale and shift in one pass"

    inside = Inside(
        reads=("FP32LayerNorm", nn.LayerNorm, nn.Conv3d),
        calls=("rope", "condition_embedder", "blocks", "proj_out"),
    )

    @staticmethod
    def refuses(instance: Any) -> Iterable[str]:
        yield from _needs_bare_norm(instance.norm_out)

    def forward(
        self: Any,
        hidden_states: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_image: Tensor | None = None,
        return_dict: bool = True,
        attention_kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # the scale of LoRA layers is the business of the stock method's decorator
        if attention_kwargs is not None or (torch.is_grad_enabled() and self.gradient_checkpointing):
            return super().forward(  # pyright: ignore[reportAttributeAccessIssue]
                hidden_states,
                timestep,
                encoder_hidden_states,
                encoder_hidden_states_image,
                return_dict,
                attention_kwargs=attention_kwargs,
            )
        patch = self.config.patch_size
        batch = hidden_states.shape[0]
        places = [size // length for size, length in zip(hidden_states.shape[2:], patch, strict=True)]
        rotary_emb = self.rope(hidden_states)
        x = _tokens_of_patches(self.patch_embedding, hidden_states, places)
        tokens = timestep.shape[1] if timestep.ndim == 2 else None
        temb, modulation, text, image = self.condition_embedder(
            timestep.flatten() if timestep.ndim == 2 else timestep,
            encoder_hidden_states,
            encoder_hidden_states_image,
            timestep_seq_len=tokens,
        )
        modulation = modulation.unflatten(1 if tokens is None else 2, (6, -1))
        text = text if image is None else torch.concat([image, text], 1)
        for block in self.blocks:
            x = block(x, text, modulation, rotary_emb)
        wide = torch.promote_types(temb.dtype, torch.float32)
        both = self.scale_shift_table.to(temb.device) + temb.to(wide).unsqueeze(-2)  # [B, 2, C], [B, S, 2, C]
        shift, scale = both.to(x.device).unbind(-2)
        x = self.proj_out(ops.layer_norm_modulate(x, scale, shift, eps=self.norm_out.eps))
        x = x.reshape(batch, *places, *patch, -1).permute(0, 7, 1, 4, 2, 5, 3, 6)  # [B, C, T, p, H, p, W, p]
        video = x.flatten(6, 7).flatten(4, 5).flatten(2, 3)
        if not return_dict:
            return (video,)
        from diffusers.models.modeling_outputs import Transformer2DModelOutput

        return Transformer2DModelOutput(sample=video)


def _tokens_of_patches(conv: Any, x: Tensor, places: list[int]) -> Tensor:
    """`[B, C, T, H, W]` to `[B, S, C']`, by a convolution whose stride is its kernel size. It is computed as
    a matrix product, whose result has the layout that the blocks read; that of a convolution would have to be
    copied."""
    patch = list(conv.weight.shape[2:])
    plain = (
        list(conv.stride) == patch
        and conv.groups == 1
        and (tuple(conv.padding), tuple(conv.dilation)) == ((0, 0, 0), (1, 1, 1))
        and all(
            size == count * length for size, count, length in zip(x.shape[2:], places, patch, strict=True)
        )
    )
    if not plain:
        return conv(x).flatten(2).transpose(1, 2).contiguous()
    for axis in (4, 3, 2):
        x = x.unflatten(axis, (places[axis - 2], patch[axis - 2]))
    patches = x.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4).flatten(1, 3)  # [B, T, H, W, C, p, p, p]
    return F.linear(patches, conv.weight.flatten(1), conv.bias)

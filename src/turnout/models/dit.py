"""Attention of diffusion transformers: Flux, Wan and Qwen-Image. Norm, rotation and joining of q and k are
one pass.

These are attention processors, diffusers' own extension point. A backend that the user chose keeps the
attention itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from turnout import ops
from turnout.models.bare import Inside
from turnout.models.blocks import can_join, joined_products
from turnout.models.diffusers_private import attention_of_backend
from turnout.models.routed import RoutedProcessor
from turnout.models.sdpa import attend


def _norm(*norms: Any, x: Tensor) -> dict[str, Any] | None:
    """The arguments of `norm_rope` for these norms, one a stream; None where it cannot compute them."""
    if not all(type(norm).__name__ == "RMSNorm" and getattr(norm, "bias", None) is None for norm in norms):
        return None
    if len({(norm.eps, type(norm), norm.weight is None) for norm in norms}) != 1:
        return None
    eps = norms[0].eps if norms[0].eps is not None else torch.finfo(x.dtype).eps
    # diffusers' RMSNorm, which is not torch's, rounds before it multiplies
    return {"norm": True, "eps": eps, "round_before_weight": not isinstance(norms[0], nn.RMSNorm)}


def _weights(*norms: Any) -> Any:
    weights = tuple(norm.weight for norm in norms)
    return None if weights[0] is None else weights[0] if len(weights) == 1 else weights


def _attend(processor: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """q, k, v `[B, S, H, D]`; gives `[B, S, H*D]`."""
    attend_by_backend = attention_of_backend(processor)
    if attend_by_backend is not None:
        return attend_by_backend(q, k, v, mask).flatten(2).to(q.dtype)
    if mask is not None and mask.shape == k.shape[:2]:  # over keys, as diffusers' native backend reads it
        mask = mask[:, None, None]
    return attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask).transpose(1, 2).flatten(2)


def _projected(attn: Any, names: tuple[str, ...], fused: str, x: Tensor, head_dim: int) -> list[Tensor]:
    """q, k and v of one stream, `[B, S, H, D]`."""
    if getattr(attn, "fused_projections", False) and hasattr(attn, fused):
        parts = getattr(attn, fused)(x).chunk(3, -1)
    else:
        parts = [getattr(attn, name)(x) for name in names]
    return [part.unflatten(-1, (-1, head_dim)) for part in parts]


def _projected_jointly(
    attn: Any, text: Tensor, image: Tensor, head_dim: int
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
    """q and k of text and image, which `norm_rope` joins, and v of both, joined."""
    if getattr(attn, "fused_projections", False) or not can_join(attn.add_v_proj, text, attn.to_v, image):
        # in the order of the stock code: a layer may draw random numbers, as the dropout of a LoRA does
        pixels, words = _projected(attn, *_IMAGE, image, head_dim), _projected(attn, *_TEXT, text, head_dim)
        values = torch.cat([words[2], pixels[2]], 1)
    else:
        pixels, words = (
            _projected(attn, _IMAGE[0][:2], "", image, head_dim),
            _projected(attn, _TEXT[0][:2], "", text, head_dim),
        )
        values = joined_products(attn.add_v_proj, text, attn.to_v, image).unflatten(-1, (-1, head_dim))
    return (words[0], pixels[0]), (words[1], pixels[1]), values


_IMAGE = ("to_q", "to_k", "to_v"), "to_qkv"
_TEXT = ("add_q_proj", "add_k_proj", "add_v_proj"), "to_added_qkv"


# Everything inside an attention is called, but for the norms of q and k, and products that `joined_products`
# asks about itself.
_NORMS_ONLY = Inside(reads=(nn.RMSNorm, "RMSNorm"), calls=("to_*", "add_*"), any_dtype=True)


class FluxProcessor(RoutedProcessor):
    summary = "norm, rotation and joining of q and k in one pass"

    inside = _NORMS_ONLY

    def __call__(
        self: Any,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        joint = encoder_hidden_states is not None
        q_norms = (attn.norm_added_q, attn.norm_q) if joint else (attn.norm_q,)
        k_norms = (attn.norm_added_k, attn.norm_k) if joint else (attn.norm_k,)
        norm_options = _norm(*q_norms, *k_norms, x=hidden_states)
        if norm_options is None or image_rotary_emb is None:
            return self._routed_stock(
                attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb
            )
        if encoder_hidden_states is None:
            q, k, v = _projected(attn, *_IMAGE, hidden_states, attn.head_dim)
        else:
            q, k, v = _projected_jointly(attn, encoder_hidden_states, hidden_states, attn.head_dim)
        cos, sin = image_rotary_emb
        q, k = ops.norm_rope_qk(
            q,
            k,
            cos,
            sin,
            q_weight=_weights(*q_norms),
            k_weight=_weights(*k_norms),
            pairing="interleaved",
            out_layout="bshd",
            **norm_options,
        )
        attended = _attend(self, q, k, v, attention_mask)
        if not joint:
            return attended
        words = encoder_hidden_states.shape[1]  # pyright: ignore[reportOptionalMemberAccess]
        return attn.to_out[1](attn.to_out[0](attended[:, words:])), attn.to_add_out(attended[:, :words])


class QwenImageProcessor(RoutedProcessor):
    summary = "norm, rotation and joining of q and k in one pass"

    inside = _NORMS_ONLY

    def __call__(
        self: Any,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        encoder_hidden_states_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        norms = (attn.norm_added_q, attn.norm_q, attn.norm_added_k, attn.norm_k)
        norm_options = _norm(*norms, x=hidden_states)
        if (
            norm_options is None
            or image_rotary_emb is None
            or encoder_hidden_states is None
            or attention_mask is not None
        ):
            return self._routed_stock(
                attn,
                hidden_states,
                encoder_hidden_states,
                encoder_hidden_states_mask,
                attention_mask,
                image_rotary_emb,
            )
        words, head_dim = encoder_hidden_states.shape[1], attn.inner_dim // attn.heads
        q, k, v = _projected_jointly(attn, encoder_hidden_states, hidden_states, head_dim)
        turns = torch.cat([image_rotary_emb[1], image_rotary_emb[0]])  # complex, [text and image, D/2]
        q, k = ops.norm_rope_qk(
            q, k, turns, None, q_weight=_weights(*norms[:2]), k_weight=_weights(*norms[2:]),
            pairing="interleaved", out_layout="bshd", **norm_options,
        )  # fmt: skip
        mask = None
        if encoder_hidden_states_mask is not None:
            image = encoder_hidden_states_mask.new_ones(hidden_states.shape[:2], dtype=torch.bool)
            mask = torch.cat([encoder_hidden_states_mask.bool(), image], 1)[:, None, None]
        attended = _attend(self, q, k, v, mask)
        image = attn.to_out[0](attended[:, words:])
        return attn.to_out[1](image) if len(attn.to_out) > 1 else image, attn.to_add_out(attended[:, :words])


class WanProcessor(RoutedProcessor):
    summary = "norm over all heads and rotation of q and k in one pass"

    inside = _NORMS_ONLY

    def __call__(
        self: Any,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: Any = None,
    ) -> Tensor:
        norm_options = _norm(attn.norm_q, attn.norm_k, x=hidden_states)
        if norm_options is None or attn.add_k_proj is not None:
            return self._routed_stock(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)
        norm_options |= {"across_heads": True, "out_layout": "bshd"}
        q, k, v = self._qkv(attn, hidden_states, encoder_hidden_states)
        if rotary_emb is not None:
            cos, sin = rotary_emb
            q, k = ops.norm_rope_qk(
                q,
                k,
                cos,
                sin,
                q_weight=attn.norm_q.weight,
                k_weight=attn.norm_k.weight,
                pairing="interleaved",
                **norm_options,
            )
        else:
            q = ops.norm_rope(q, weight=attn.norm_q.weight, **norm_options)
            k = ops.norm_rope(k, weight=attn.norm_k.weight, **norm_options)
        return attn.to_out[1](attn.to_out[0](_attend(self, q, k, v, attention_mask)))

    def _qkv(self: Any, attn: Any, x: Tensor, context: Tensor | None) -> list[Tensor]:
        head_dim = attn.inner_dim // attn.heads
        if context is None:
            return _projected(attn, *_IMAGE, x, head_dim)
        if getattr(attn, "fused_projections", False) and attn.is_cross_attention:
            parts = [attn.to_q(x), *attn.to_kv(context).chunk(2, -1)]
        else:
            parts = [attn.to_q(x), attn.to_k(context), attn.to_v(context)]
        return [part.unflatten(-1, (-1, head_dim)) for part in parts]

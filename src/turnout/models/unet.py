"""Transformer blocks of U-Nets: the functions of their layers, called without their modules.

diffusers' `BasicTransformerBlock` calls 20 modules, and each of its two attentions looks up the signature of
its processor. For a U-Net that takes more host time than the kernels take on a GPU. The functions and their
order are those of the stock block, so the results are the same bit for bit.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from turnout.models import stock
from turnout.models.bare import Inside, remembered
from turnout.models.image import AttentionProcessor
from turnout.models.patch import Adapter, drops
from turnout.models.sdpa import attend

is_compiling = torch.compiler.is_compiling

_INSIDE = Inside(
    reads=(nn.LayerNorm, nn.Linear, nn.Dropout, "Attention", "FeedForward", "GEGLU"),
    calls=("attn1.processor", "attn2.processor"),  # those of IP-Adapters are modules
)
PROCESSOR = "diffusers.models.attention_processor.AttnProcessor2_0"


class _Layer(NamedTuple):
    """A norm or a product, and its parameters."""

    module: Any
    weight: Tensor | None
    bias: Tensor | None


class _Attention(NamedTuple):
    """An attention and its products; none, where it computes more than they do."""

    module: Any
    products: tuple[_Layer, _Layer, _Layer, _Layer] | None  # of q, k, v and the result


class _Layers(NamedTuple):
    """The layers of a block whose weights are read without calling them."""

    norms: tuple[_Layer | None, ...]
    attentions: tuple[_Attention | None, ...]
    feed_forward: tuple[_Layer, _Layer]
    dropouts: tuple[Any, ...]


class TransformerBlock(Adapter):
    summary = "its layers called without their modules"

    exact = True
    inside = _INSIDE

    @staticmethod
    def refuses(instance: Any) -> Iterable[str]:
        if instance.norm_type != "layer_norm":
            yield f"norm type {instance.norm_type!r}, this adapter needs 'layer_norm'"
        if instance.pos_embed is not None:
            yield "positions are embedded inside, this adapter needs a block that does not"

    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        timestep: Any = None,
        cross_attention_kwargs: dict[str, Any] | None = None,
        class_labels: Any = None,
        added_cond_kwargs: Any = None,
    ) -> Tensor:
        x = hidden_states
        layers = None
        if (
            not cross_attention_kwargs
            and self._chunk_size is None
            and not is_compiling()
            and x.dim() == 3
            and x.device.type in _DEVICES
        ):
            layers = remembered(self, _INSIDE, _layers)
        if layers is None or (any(map(_training, layers.dropouts)) and any(map(drops, layers.dropouts))):
            return super().forward(  # pyright: ignore[reportAttributeAccessIssue]
                hidden_states,
                attention_mask,
                encoder_hidden_states,
                encoder_attention_mask,
                timestep,
                cross_attention_kwargs,
                class_labels,
                added_cond_kwargs,
            )
        (norm1, norm2, norm3), (attn1, attn2) = layers.norms, layers.attentions
        context = encoder_hidden_states if self.only_cross_attention else None
        x = _attended(attn1, _normed(norm1, x), context, attention_mask) + x
        if attn2 is not None:
            x = _attended(attn2, _normed(norm2, x), encoder_hidden_states, encoder_attention_mask) + x
        return _fed_forward(layers.feed_forward, _normed(norm3, x)) + x


_DEVICES = ("cpu", "cuda")  # on others GEGLU is another function


_training = operator.attrgetter("training")


def _normed(norm: Any, x: Tensor) -> Tensor:
    module, weight, bias = norm
    return F.layer_norm(x, module.normalized_shape, weight, bias, module.eps)


def _attended(attention: Any, x: Tensor, context: Tensor | None, mask: Tensor | None) -> Tensor:
    """The output of attention, to be added to x `[B, S, C]`; computed by the user's processor where it is
    another one."""
    attn, products = attention
    if (
        products is None
        or mask is not None
        or not (context is None or isinstance(context, Tensor))
        or attn.residual_connection
        or attn.rescale_output_factor != 1.0
        or not _is_plain(type(attn.processor))
    ):
        return attn(x, encoder_hidden_states=context, attention_mask=mask)
    (_, q_weight, q_bias), (_, k_weight, k_bias), (_, v_weight, v_bias), (_, weight, bias) = products
    source = x if context is None else context
    q = F.linear(x, q_weight, q_bias)
    k = F.linear(source, k_weight, k_bias)
    v = F.linear(source, v_weight, v_bias)
    batch, _, channels = source.shape[0], *k.shape[1:]
    heads = attn.heads
    shape = (batch, -1, heads, channels // heads)
    q, k, v = q.view(shape).transpose(1, 2), k.view(shape).transpose(1, 2), v.view(shape).transpose(1, 2)
    attended = attend(q, k, v).transpose(1, 2).reshape(batch, -1, shape[2] * shape[3])
    return F.linear(attended if attended.dtype is q.dtype else attended.to(q.dtype), weight, bias)


def _fed_forward(layers: Any, x: Tensor) -> Tensor:
    (_, weight, bias), (_, out_weight, out_bias) = layers
    inner, gate = F.linear(x, weight, bias).chunk(2, dim=-1)
    opened = F.gelu(gate)
    # In place, the widest tensor of the U-Net is not there a third time; a gradient would need both factors.
    inner = inner * opened if torch.is_grad_enabled() else opened.mul_(inner)
    return F.linear(inner, out_weight, out_bias)


def _is_plain(processor: type) -> bool:
    """Whether a class of processors computes what the code above does: the stock class, patched or not."""
    patch: Any = vars(processor).get("_turnout_patch")
    return _is_stock(processor) if patch is None else patch.adapter is AttentionProcessor


@functools.lru_cache(64)
def _is_stock(processor: type) -> bool:
    key = f"{processor.__module__}.{processor.__qualname__}"
    return key == PROCESSOR and not list(stock.unlike_stock(processor, PROCESSOR, AttentionProcessor))


def _layers(block: Any) -> _Layers | None:
    """The layers of a block; None where some were replaced."""
    attentions = (block.attn1, block.attn2)
    norms = (block.norm1, block.norm2, block.norm3)
    net = list(block.ff.net)
    kinds = [type(module).__name__ for module in net]
    if kinds not in (["GEGLU", "Dropout", "Linear"], ["GEGLU", "Dropout", "Linear", "Dropout"]):
        return None
    if not _are(nn.LayerNorm, norms[0], norms[2]) or (
        block.attn2 is not None and not _are(nn.LayerNorm, norms[1])
    ):
        return None
    dropouts = [*net[1::2], *(attn.to_out[1] for attn in attentions if attn is not None)]
    if not _are(nn.Dropout, *dropouts):
        return None
    return _Layers(
        tuple(None if norm is None else _layer(norm) for norm in norms),
        tuple(None if attn is None else _Attention(attn, _products(attn)) for attn in attentions),
        (_layer(net[0].proj), _layer(net[2])),
        tuple(dropouts),
    )


def _products(attn: Any) -> tuple[_Layer, _Layer, _Layer, _Layer] | None:
    """The matrix products of an attention; None where it computes more than those."""
    more = (attn.spatial_norm, attn.group_norm, attn.norm_q, attn.norm_k, attn.norm_cross)
    products = (attn.to_q, attn.to_k, attn.to_v, attn.to_out[0])
    if any(each is not None for each in more) or len(attn.to_out) != 2 or not _are(nn.Linear, *products):
        return None
    q, k, v, out = map(_layer, products)
    return q, k, v, out


def _are(cls: type, *modules: object) -> bool:
    return all(isinstance(module, cls) for module in modules)


def _layer(module: Any) -> _Layer:
    return _Layer(module, module.weight, module.bias)

"""Single layers of any model: convolutions, group norms, attention. What a model gets that is not known by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import turnout
from turnout.models.patch import Adapter


class Conv2d(Adapter):
    """turnout.conv2d"""

    exact = True

    @staticmethod
    def refuses(instance: Any) -> Iterable[str]:
        yield from _padding(instance)

    def _conv_forward(self: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return turnout.conv2d(input, weight, bias, self.stride, self.padding, self.dilation, self.groups)


class Conv3d(Adapter):
    """turnout.conv3d"""

    exact = True

    @staticmethod
    def refuses(instance: Any) -> Iterable[str]:
        yield from _padding(instance)

    def _conv_forward(self: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return turnout.conv3d(input, weight, bias, self.stride, self.padding, self.dilation, self.groups)


class GroupNorm(Adapter):
    """turnout.group_norm_silu"""

    @staticmethod
    def refuses(instance: Any) -> Iterable[str]:
        if not instance.affine:
            yield "no weight, this adapter needs one"

    def forward(self: Any, input: Tensor) -> Tensor:
        if self.weight.dtype is not input.dtype:  # torch takes some of these, and says why it does not take others
            return super().forward(input)  # pyright: ignore[reportAttributeAccessIssue]
        return turnout.group_norm_silu(input, self.num_groups, self.weight, self.bias, eps=self.eps, silu=False)


class Attention(Adapter):
    """turnout.attention in place of scaled_dot_product_attention"""

    @staticmethod
    def refuses(instance: Any) -> Iterable[str]:
        if isinstance(instance, nn.MultiheadAttention):
            yield "its attention is called inside torch, where it cannot be replaced for one instance"

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with routed_attention():
            return super().forward(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]


class AttentionProcessor(Adapter):
    """turnout.attention in place of scaled_dot_product_attention"""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        with routed_attention():
            return super().__call__(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]


def adapter_of(instance: object) -> type[Adapter] | None:
    """The adapter for an instance's kind of layer."""
    if isinstance(instance, nn.Conv2d):
        return Conv2d
    if isinstance(instance, nn.Conv3d):
        return Conv3d
    if isinstance(instance, nn.GroupNorm):
        return GroupNorm
    if not isinstance(instance, nn.Module):
        return AttentionProcessor
    return Attention if _attends_by_itself(instance) else None


def _attends_by_itself(module: nn.Module) -> bool:
    """By its name, and because neither a processor nor a module inside does it."""
    inside = any("Attention" in type(inner).__name__ for inner in module.modules() if inner is not module)
    return "Attention" in type(module).__name__ and not inside and not hasattr(module, "processor")


def _padding(conv: Any) -> Iterable[str]:
    if conv.padding_mode != "zeros":
        yield f"padding mode {conv.padding_mode}, this adapter needs zeros"


class _RoutedAttention(TorchFunctionMode):
    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return _sdpa(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def routed_attention() -> Any:
    """Inside, `scaled_dot_product_attention` is `turnout.attention`, in this thread. While a graph is traced nothing changes."""
    return contextlib.nullcontext() if torch.compiler.is_compiling() else _RoutedAttention()


def _sdpa(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """`turnout.attention` under torch's signature; what it has no words for stays torch's."""
    if dropout_p > 0.0 or query.dim() != 4 or (attn_mask is not None and is_causal):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    return turnout.attention(query, key, value, mask=attn_mask, causal=is_causal, scale=scale)

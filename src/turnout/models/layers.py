"""Single layers of any model: convolutions, group norms, attention. What a model gets that is not known by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from turnout import ops
from turnout.models.patch import Adapter
from turnout.models.routed import Routed, RoutedProcessor, needs_a_way


class Conv2d(Adapter):
    """turnout.conv2d"""

    exact = True

    @staticmethod
    def refuses(instance: Any) -> Iterable[str]:
        yield from _padding(instance)

    def _conv_forward(self: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return ops.conv2d(input, weight, bias, self.stride, self.padding, self.dilation, self.groups)


class Conv3d(Adapter):
    """turnout.conv3d"""

    exact = True

    @staticmethod
    def refuses(instance: Any) -> Iterable[str]:
        yield from _padding(instance)

    def _conv_forward(self: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return ops.conv3d(input, weight, bias, self.stride, self.padding, self.dilation, self.groups)


class GroupNorm(Adapter):
    """turnout.group_norm_silu"""

    @staticmethod
    def refuses(instance: Any) -> Iterable[str]:
        if not instance.affine:
            yield "no weight, this adapter needs one"

    def forward(self: Any, input: Tensor) -> Tensor:
        if self.weight.dtype is not input.dtype:  # torch takes some of these, and says why it does not take others
            return super().forward(input)  # pyright: ignore[reportAttributeAccessIssue]
        return ops.group_norm_silu(input, self.num_groups, self.weight, self.bias, eps=self.eps, silu=False)


class Attention(Routed):
    """turnout.attention in place of scaled_dot_product_attention"""

    @staticmethod
    def refuses(instance: Any) -> Iterable[str]:
        if isinstance(instance, nn.MultiheadAttention):
            yield "its attention is called inside torch, where it cannot be replaced for one instance"
        else:
            yield from needs_a_way(instance, "forward")

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._routed_stock(*args, **kwargs)


class AttentionProcessor(RoutedProcessor):
    """turnout.attention in place of scaled_dot_product_attention"""

    @staticmethod
    def refuses(instance: Any) -> Iterable[str]:
        yield from needs_a_way(instance, "__call__")

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._routed_stock(*args, **kwargs)


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

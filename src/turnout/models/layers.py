"""Single layers of any model: convolutions, group norms, attention.

Models without adapters of their own get these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from turnout import ops
from turnout.models.bare import is_as_written
from turnout.models.patch import Adapter
from turnout.models.routed import Routed, RoutedProcessor, needs_a_way
from turnout.models.worth import is_torch, learn
from turnout.ops.conv2d import CONV2D
from turnout.ops.conv3d import CONV3D
from turnout.ops.group_norm_silu import GROUP_NORM_SILU

is_compiling = torch.compiler.is_dynamo_compiling


def _as_written(layer: type, name: str = "forward") -> Any:
    """A method of torch's layer; None where it is another one already."""
    return getattr(layer, name) if is_as_written(layer, name) else None


_is_a: Callable[[Any, type], bool] = isinstance  # without telling a type checker what `self` then is
_METHOD = "_conv_forward"
# Asked at every call: somebody may put other methods into torch's classes.
_CONV2D, _CONV2D_FORWARD = _as_written(nn.Conv2d, "_conv_forward"), _as_written(nn.Conv2d)
_CONV3D, _CONV3D_FORWARD = _as_written(nn.Conv3d, "_conv_forward"), _as_written(nn.Conv3d)
_GROUP_NORM_FORWARD = _as_written(nn.GroupNorm)
_TORCHS_CONV2D, _TORCHS_CONV3D, _TORCHS_GROUP_NORM = F.conv2d, F.conv3d, F.group_norm


class Conv2dMethod(Adapter):
    summary = "turnout.conv2d"

    exact = True
    sees_for_itself = True

    @staticmethod
    def refuses(instance: Any) -> Iterable[str]:
        yield from _own_code(instance, nn.Conv2d, "_conv_forward")
        yield from _padding(instance)

    def _conv_forward(self: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if (
            self.padding_mode != "zeros"  # it may have been set since
            or getattr(nn.Conv2d, _METHOD) is not _CONV2D
            or F.conv2d is not _TORCHS_CONV2D
            or not _is_a(self, Conv2dMethod)
        ):
            return getattr(nn.Conv2d, _METHOD)(self, input, weight, bias)
        args = (input, weight, bias, self.stride, self.padding, self.dilation, self.groups)
        if is_compiling():
            return ops.conv2d(*args)
        stock = is_torch(self, CONV2D, input)
        if stock is None:
            stock = learn(self, ops.conv2d, *args)
        return F.conv2d(*args) if stock else ops.conv2d(*args)


class Conv3dMethod(Adapter):
    summary = "turnout.conv3d"

    exact = True
    sees_for_itself = True

    @staticmethod
    def refuses(instance: Any) -> Iterable[str]:
        yield from _own_code(instance, nn.Conv3d, "_conv_forward")
        yield from _padding(instance)

    def _conv_forward(self: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if (
            self.padding_mode != "zeros"  # it may have been set since
            or getattr(nn.Conv3d, _METHOD) is not _CONV3D
            or F.conv3d is not _TORCHS_CONV3D
            or not _is_a(self, Conv3dMethod)
        ):
            return getattr(nn.Conv3d, _METHOD)(self, input, weight, bias)
        args = (input, weight, bias, self.stride, self.padding, self.dilation, self.groups)
        if is_compiling():
            return ops.conv3d(*args)
        stock = is_torch(self, CONV3D, input)
        if stock is None:
            stock = learn(self, ops.conv3d, *args)
        return F.conv3d(*args) if stock else ops.conv3d(*args)


def parameters_of(layer: Any) -> tuple[Any, Any]:
    """The weight and the bias of a bare layer: read from the module's dict where they lie there."""
    return _weight_and_bias(layer) or (layer.weight, layer.bias)


def _weight_and_bias(layer: Any) -> tuple[Any, Any] | None:
    """The parameters of a layer, if they are plain parameters of it; None where they were replaced, as by
    parametrisations. They are read from the module's dict: an attribute look-up takes 0.37 us each. What that
    saves pays for the checks (`worth`) before torch's function, so that a routed layer takes no longer than
    torch's own.
    """
    held = layer.__dict__
    if "_conv_forward" in held or "weight" in held or "bias" in held:
        return None
    try:
        return held["_parameters"]["weight"], held["_parameters"]["bias"]
    except KeyError:
        return None


class Conv2d(Conv2dMethod):
    summary = "turnout.conv2d"

    def forward(self: Any, input: Tensor) -> Tensor:
        if nn.Conv2d.forward is not _CONV2D_FORWARD or not _is_a(self, Conv2d):
            return nn.Conv2d.forward(self, input)
        if not is_compiling() and is_torch(self, CONV2D, input):
            own = _weight_and_bias(self)
            if own is not None and self.padding_mode == "zeros" and getattr(nn.Conv2d, _METHOD) is _CONV2D:
                weight, bias = own
                return F.conv2d(input, weight, bias, self.stride, self.padding, self.dilation, self.groups)
        return super().forward(input)  # pyright: ignore[reportAttributeAccessIssue]


class Conv3d(Conv3dMethod):
    summary = "turnout.conv3d"

    def forward(self: Any, input: Tensor) -> Tensor:
        if nn.Conv3d.forward is not _CONV3D_FORWARD or not _is_a(self, Conv3d):
            return nn.Conv3d.forward(self, input)
        if not is_compiling() and is_torch(self, CONV3D, input):
            own = _weight_and_bias(self)
            if own is not None and self.padding_mode == "zeros" and getattr(nn.Conv3d, _METHOD) is _CONV3D:
                weight, bias = own
                return F.conv3d(input, weight, bias, self.stride, self.padding, self.dilation, self.groups)
        return super().forward(input)  # pyright: ignore[reportAttributeAccessIssue]


class GroupNorm(Adapter):
    summary = "turnout.group_norm_silu"

    sees_for_itself = True

    @staticmethod
    def refuses(instance: Any) -> Iterable[str]:
        yield from _own_code(instance, nn.GroupNorm, "forward")
        if not instance.affine:
            yield "no weight, this adapter needs one"

    def forward(self: Any, input: Tensor) -> Tensor:
        if (
            nn.GroupNorm.forward is not _GROUP_NORM_FORWARD
            or F.group_norm is not _TORCHS_GROUP_NORM
            or not _is_a(self, GroupNorm)
        ):
            return nn.GroupNorm.forward(self, input)
        stock = False if is_compiling() else is_torch(self, GROUP_NORM_SILU, input)
        if stock:
            own = _weight_and_bias(self)
            if own is not None:
                weight, bias = own
                return F.group_norm(input, self.num_groups, weight, bias, self.eps)
        weight, bias = self.weight, self.bias
        if weight.dtype is not input.dtype:  # torch takes some of these, and says why it does not take others
            return super().forward(input)  # pyright: ignore[reportAttributeAccessIssue]
        args = (input, self.num_groups, weight, bias)
        if stock is None:
            stock = learn(self, ops.group_norm_silu, *args, eps=self.eps, silu=False)
        if stock:
            return F.group_norm(*args, self.eps)
        return ops.group_norm_silu(*args, eps=self.eps, silu=False)


class Attention(Routed):
    summary = "turnout.attention in place of scaled_dot_product_attention"

    @staticmethod
    def refuses(instance: Any) -> Iterable[str]:
        if isinstance(instance, nn.MultiheadAttention):
            yield "its attention is called inside torch, where it cannot be replaced for one instance"
        else:
            yield from needs_a_way(instance, "forward")

    forward = Routed._routed_stock


class AttentionProcessor(RoutedProcessor):
    summary = "turnout.attention in place of scaled_dot_product_attention"

    @staticmethod
    def refuses(instance: Any) -> Iterable[str]:
        yield from needs_a_way(instance, "__call__")

    __call__ = RoutedProcessor._routed_stock


def adapter_of(instance: object) -> type[Adapter] | None:
    """The adapter for an instance's kind of layer."""
    if isinstance(instance, nn.Conv2d):
        return Conv2d if _has_the_forward_of(nn.Conv2d, instance) else Conv2dMethod
    if isinstance(instance, nn.Conv3d):
        return Conv3d if _has_the_forward_of(nn.Conv3d, instance) else Conv3dMethod
    if isinstance(instance, nn.GroupNorm):
        return GroupNorm
    if not isinstance(instance, nn.Module):
        return AttentionProcessor
    return Attention if _attends_by_itself(instance) else None


def _has_the_forward_of(layer: type[nn.Module], instance: nn.Module) -> bool:
    return type(instance).forward is layer.forward and "forward" not in vars(instance)


def _attends_by_itself(module: nn.Module) -> bool:
    """Whether a module computes attention in its own forward: it is named so, and has neither a processor nor
    such a module inside."""
    inside = any("Attention" in type(inner).__name__ for inner in module.modules() if inner is not module)
    return "Attention" in type(module).__name__ and not inside and not hasattr(module, "processor")


def _own_code(instance: Any, layer: type, name: str) -> Iterable[str]:
    """Why a class derived from torch's layer cannot be routed: it has a forward of its own."""
    for own in (name, "__getattr__"):
        if getattr(type(instance), own) is not getattr(layer, own):
            yield f"a {own} of its own, this adapter needs that of {layer.__qualname__}"


def _padding(conv: Any) -> Iterable[str]:
    if conv.padding_mode != "zeros":
        yield f"padding mode {conv.padding_mode}, this adapter needs zeros"

"""layer_norm_modulate and gated_add: the steps between the products of a diffusion transformer's block, in
one pass each.
"""

from __future__ import annotations

from typing import NamedTuple, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from turnout.ops.layouts import contiguous_strides, with_strides
from turnout.routing.device import Device
from turnout.routing.op import Op
from turnout.routing.public import public
from turnout.routing.route import Work

Strides = tuple[int, ...]  # by batch, token and channel; of modulations 0 where they are the same for all


class LayerNormModulate(NamedTuple):
    """Everything that may change the answer or the speed of one call, of either op."""

    shape: tuple[int, int, int]
    strides: Strides
    residual_strides: Strides | None
    gate_strides: Strides | None
    scale_strides: Strides | None
    shift_strides: Strides | None
    dtype: torch.dtype
    gate_dtype: torch.dtype | None
    scale_dtype: torch.dtype | None
    shift_dtype: torch.dtype | None
    weight_dtype: torch.dtype | None
    bias_dtype: torch.dtype | None
    norm: bool

    @staticmethod
    def of(
        x: Tensor,
        residual: Tensor | None,
        gate: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        scale: Tensor | None,
        shift: Tensor | None,
        eps: float,
        norm: bool = True,
    ) -> LayerNormModulate:
        check(x, residual, gate, weight, bias, scale, shift)
        batch, tokens, channels = x.shape
        return LayerNormModulate(
            (batch, tokens, channels),
            x.stride(),
            None if residual is None else residual.stride(),
            _steps(gate),
            _steps(scale),
            _steps(shift),
            x.dtype,
            _dtype(gate),
            _dtype(scale),
            _dtype(shift),
            _dtype(weight),
            _dtype(bias),
            norm,
        )

    @property
    def channels(self) -> int:
        return self.shape[2]

    @property
    def elements(self) -> int:
        return self.shape[0] * self.shape[1] * self.shape[2]

    @property
    def widest(self) -> int:
        """The bytes of an element of the widest tensor."""
        dtypes = (
            self.dtype,
            self.gate_dtype,
            self.scale_dtype,
            self.shift_dtype,
            self.weight_dtype,
            self.bias_dtype,
        )
        return max(dtype.itemsize for dtype in dtypes if dtype is not None)


class GatedAdd(LayerNormModulate):
    """The same, without a norm."""

    @staticmethod
    def of(x: Tensor, residual: Tensor, gate: Tensor | None) -> LayerNormModulate:  # pyright: ignore[reportIncompatibleMethodOverride]
        return LayerNormModulate.of(x, residual, gate, None, None, None, None, 0.0, False)


def _dtype(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


def _steps(modulation: Tensor | None) -> Strides | None:
    """Strides of a modulation `[B or 1, S or 1, C]`; 0 where it is the same for all."""
    if modulation is None:
        return None
    batch, token, channel = (
        0 if size == 1 else stride for size, stride in zip(modulation.shape, modulation.stride(), strict=True)
    )
    return batch, token, channel


def check(
    x: Tensor,
    residual: Tensor | None,
    gate: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
) -> None:
    """Raise where shapes, dtypes or devices do not fit together. Looks at no values."""
    if x.dim() != 3 or not x.is_floating_point():
        raise ValueError(
            f"x is {x.dtype} {list(x.shape)}, it needs to be floating-point [batch, tokens, channels]"
        )
    if residual is not None and (
        residual.shape != x.shape or residual.dtype != x.dtype or residual.device != x.device
    ):
        raise ValueError(
            f"residual is {residual.dtype} {list(residual.shape)} on {residual.device}, "
            f"it needs to be as x is: {x.dtype} {list(x.shape)} on {x.device}"
        )
    if gate is not None and residual is None:
        raise ValueError("a gate without a residual; pass the residual that gate * x is added to")
    batch, tokens, channels = x.shape
    for name, tensor in (("gate", gate), ("scale", scale), ("shift", shift)):
        if tensor is None:
            continue
        fits = (
            tensor.dim() == 3
            and tensor.shape[0] in (1, batch)
            and tensor.shape[1] in (1, tokens)
            and tensor.shape[2] == channels
        )
        if not fits or not tensor.is_floating_point() or tensor.device != x.device:
            raise ValueError(
                f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}, "
                f"it needs to be [{batch}, {channels}], [{batch}, 1, {channels}] or "
                f"[{batch}, {tokens}, {channels}] on {x.device}"
            )
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and (
            tuple(tensor.shape) != (channels,) or not tensor.is_floating_point() or tensor.device != x.device
        ):
            raise ValueError(
                f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}, "
                f"it needs to be [{channels}] on {x.device}"
            )


def gated(x: Tensor, residual: Tensor, gate: Tensor | None) -> Tensor:
    """residual + gate * x with the roundings of PyTorch: in the widest of the dtypes, then in x's."""
    return (residual + (x if gate is None else gate * x)).to(x.dtype)


def modulated(
    h: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    eps: float,
) -> Tensor:
    """The chain of PyTorch: each step is rounded to the widest of the dtypes, the last to h's. Half types
    throughout are Flux and Qwen-Image, modulations in float32 are Wan."""
    wide = h.dtype
    for tensor in (weight, bias, scale, shift):
        wide = wide if tensor is None else torch.promote_types(wide, tensor.dtype)
    weight, bias = (None if tensor is None else tensor.to(wide) for tensor in (weight, bias))
    y = F.layer_norm(h.to(wide), (h.shape[-1],), weight, bias, eps)
    y = y if scale is None else y * (1 + scale)
    y = y if shift is None else y + shift
    return y.to(h.dtype)


def dense(y: Tensor) -> Tensor:
    """y without gaps, in this order; `contiguous` leaves the strides of dimensions of size 1 as they are."""
    return with_strides(y, contiguous_strides(y.shape))


def reference(
    x: Tensor,
    residual: Tensor | None,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """The norm and its input h, both `[B, S, C]`; h is empty where it is x itself."""
    check(x, residual, gate, weight, bias, scale, shift)
    h = x if residual is None else gated(x, residual, gate)
    y = modulated(h, weight, bias, scale, shift, eps)
    return dense(y), x.new_empty(0) if residual is None else dense(h)


def reference_add(x: Tensor, residual: Tensor, gate: Tensor | None) -> Tensor:
    check(x, residual, gate)
    return dense(gated(x, residual, gate))


def work(problem: LayerNormModulate) -> Work:
    """Every stream moved once, and modulations where each token has its own; a norm is about eight operations
    an element, a gate two.
    """
    added, size = problem.residual_strides is not None, problem.elements * problem.dtype.itemsize
    own = [
        dtype.itemsize
        for strides, dtype in _modulations(problem)
        if strides is not None and strides[1] and dtype is not None
    ]
    written = size * (problem.norm + added)
    return Work(
        size * (1 + added) + written + problem.elements * sum(own),
        (8 * problem.norm + 2 * added) * problem.elements,
        written,
    )


def _modulations(problem: LayerNormModulate) -> list[tuple[Strides | None, torch.dtype | None]]:
    return list(zip(problem[3:6], problem[7:10], strict=True))


def family(problem: LayerNormModulate) -> tuple[tuple, int]:
    """Problems that differ in their tokens only, and the number of those."""
    each_token = tuple(strides is not None and strides[1] != 0 for strides, _ in _modulations(problem))
    same = (problem.channels, problem.residual_strides is not None, each_token, *problem[6:])
    return same, problem.shape[0] * problem.shape[1]


def reference_cost(problem: LayerNormModulate, device: Device) -> float | None:
    """Norm, scale, shift, gate and sum are calls of their own, each as long as moving five elements of the
    widest type: measured on an H200 (1 x 4608 x 3072 and 1 x 32760 x 5120). On a CPU a guess, there is no
    other route."""
    steps = 3 * problem.norm + 2 * (problem.residual_strides is not None)
    fitted = device.fitted("layer_norm_modulate.reference")
    if device.type == "cuda":
        moved = device.seconds(5 * steps * problem.widest * problem.elements)
        return None if moved is None else max(fitted.host * steps, moved)
    if device.type == "cpu":
        return steps * (fitted.start + fitted.element * problem.elements)
    return None


LAYER_NORM_MODULATE = Op(
    "layer_norm_modulate",
    reference,
    problem_type=LayerNormModulate,
    cost=reference_cost,
    work=work,
    cases="turnout.ops.layer_norm_modulate.cases",
    family=family,
)

GATED_ADD = Op(
    "gated_add",
    reference_add,
    problem_type=GatedAdd,
    cost=reference_cost,
    work=work,
    cases="turnout.ops.layer_norm_modulate.cases_add",
    family=family,
)


def _by_token(modulation: Tensor | None) -> Tensor | None:
    """Give a modulation `[B, C]` the shape `[B, 1, C]`; others stay as they are."""
    return modulation.unsqueeze(1) if isinstance(modulation, Tensor) and modulation.dim() == 2 else modulation


@overload
def layer_norm_modulate(
    x: Tensor,
    scale: Tensor | None = ...,
    shift: Tensor | None = ...,
    *,
    weight: Tensor | None = ...,
    bias: Tensor | None = ...,
    eps: float = ...,
    gate: Tensor | None = ...,
    residual: None = ...,
) -> Tensor: ...
@overload
def layer_norm_modulate(
    x: Tensor,
    scale: Tensor | None = ...,
    shift: Tensor | None = ...,
    *,
    weight: Tensor | None = ...,
    bias: Tensor | None = ...,
    eps: float = ...,
    gate: Tensor | None = ...,
    residual: Tensor,
) -> tuple[Tensor, Tensor]: ...
@public(LAYER_NORM_MODULATE)
def layer_norm_modulate(
    x: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Layer norm over the last dimension, scaled and shifted, in one pass: `layer_norm(x) * (1 + scale) +
    shift`.

    With `residual`, the norm is that of `h = residual + gate * x`, and the pair of it and h is returned:
    the end of one half of a diffusion transformer's block and the beginning of the next.

    x, residual: `[B, S, C]`, any strides. scale, shift, gate: `[B, C]`, `[B, 1, C]` or `[B, S, C]`, each may
    be None. weight, bias: `[C]` or None, the layer norm's own. Returns dense tensors of x's dtype. Sums are
    float32 at least, and h is rounded to x's dtype before it is normed, as a model does that keeps it.

    >>> import torch, turnout
    >>> x = torch.tensor([[[1.0, 3.0]]])  # one token of two channels
    >>> turnout.layer_norm_modulate(x, torch.ones(1, 2), torch.zeros(1, 2), eps=0.0)
    tensor([[[-2.,  2.]]])
    >>> gate = torch.full((1, 2), 2.0)
    >>> normed, h = turnout.layer_norm_modulate(x, residual=torch.ones(1, 1, 2), gate=gate, eps=0.0)
    >>> h, normed
    (tensor([[[3., 7.]]]), tensor([[[-1.,  1.]]]))
    """
    y, h = LAYER_NORM_MODULATE(
        x, residual, _by_token(gate), weight, bias, _by_token(scale), _by_token(shift), eps
    )
    return y if residual is None else (y, h)


@public(GATED_ADD)
def gated_add(residual: Tensor, gate: Tensor | None, x: Tensor) -> Tensor:
    """`residual + gate * x` in one pass, where the gate may be the same for all tokens: the end of a
    diffusion transformer's block.

    residual, x: `[B, S, C]`, any strides. gate: `[B, C]`, `[B, 1, C]`, `[B, S, C]` or None, of any dtype.
    Returns a dense tensor of x's dtype, computed in float32 at least.

    >>> import torch, turnout
    >>> turnout.gated_add(torch.ones(1, 1, 2), torch.tensor([[2.0, 0.5]]), torch.full((1, 1, 2), 4.0))
    tensor([[[9., 3.]]])
    """
    return GATED_ADD(x, residual, _by_token(gate))

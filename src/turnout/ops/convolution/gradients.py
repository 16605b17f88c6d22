"""Gradients: torch's own backward of a convolution, asked only for what is wanted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def convolution_backward(
    grad: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    wants_input: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of input, weight and bias."""
    wanted = [wants_input, weight.requires_grad, bias is not None and bias.requires_grad]
    sizes, no_more = None if bias is None else [bias.shape[0]], [0] * len(stride)
    if not any(wanted):
        return None, None, None
    return torch.ops.aten.convolution_backward(
        grad, input, weight, sizes, stride, padding, dilation, False, no_more, groups, wanted
    )


def residual_gradient(grad: Tensor, residual: Tensor | None) -> Tensor | None:
    return None if residual is None else grad.sum_to_size(residual.shape).to(residual.dtype)


def convolution_vjp(inputs: tuple, grads: tuple) -> tuple:
    """A gradient for each input of conv2d or conv3d."""
    input, weight, bias, stride, padding, dilation, groups, residual = inputs
    (grad,) = grads
    gradients = convolution_backward(
        grad, input, weight, bias, stride, padding, dilation, groups, input.requires_grad
    )
    return *gradients, None, None, None, None, residual_gradient(grad, residual)

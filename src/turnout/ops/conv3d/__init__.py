"""conv3d: exactly `torch.nn.functional.conv3d`."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from turnout.ops.convolution import problem as shared
from turnout.ops.convolution.costs import family, reference_cost, work
from turnout.ops.convolution.gradients import convolution_vjp
from turnout.ops.convolution.layout import with_residual
from turnout.routing.op import Op
from turnout.routing.public import public


def reference(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    residual: Tensor | None,
) -> Tensor:
    return with_residual(F.conv3d(input, weight, bias, stride, padding, dilation, groups), residual)


def arguments(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: shared.Padding = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    residual: Tensor | None = None,
) -> tuple:
    """The reference's arguments of a public call."""
    return shared.arguments(F.conv3d, 3, input, weight, bias, stride, padding, dilation, groups, residual)


CONV3D = Op(
    "conv3d",
    reference,
    problem_type=shared.Conv3d,
    cost=reference_cost,
    work=work,
    cases="turnout.ops.conv3d.cases",
    arguments=arguments,
    family=family,
    autocast="cast",
    vjp=convolution_vjp,
    ambient=shared.torch_settings,
)


@public(CONV3D)
def conv3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: shared.Padding = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    residual: Tensor | None = None,
) -> Tensor:
    """3-D convolution, exactly `torch.nn.functional.conv3d`: layouts, paddings in words, unbatched inputs,
    TF32 flags.

    input: `[N, Cin, D, H, W]` or without N, weight: `[Cout, Cin / groups, KD, KH, KW]`, bias: `[Cout]`.
    `residual`, shaped like the result, is added to it: torch rounds before it adds, a route may round once.

    >>> import torch, turnout
    >>> turnout.conv3d(torch.ones(1, 2, 4, 3, 3), torch.ones(1, 2, 3, 3, 3), padding="valid")
    tensor([[[[[54.]],
    <BLANKLINE>
              [[54.]]]]])
    """
    y = CONV3D(*arguments(input, weight, bias, stride, padding, dilation, groups, residual))
    return y.squeeze(0) if input.dim() == 4 else y

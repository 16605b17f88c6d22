"""conv2d: exactly `torch.nn.functional.conv2d`."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from turnout.ops.convolution.declaration import convolution_op
from turnout.ops.convolution.problem import Conv2d, Padding, arguments
from turnout.routing.public import public

CONV2D = convolution_op("conv2d", F.conv2d, Conv2d)


@public(CONV2D, of_cases=True)
def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: Padding = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    residual: Tensor | None = None,
) -> Tensor:
    """2-D convolution, exactly `torch.nn.functional.conv2d`: layouts, paddings in words, unbatched inputs,
    TF32 flags.

    input: `[N, Cin, H, W]` or without N, weight: `[Cout, Cin / groups, KH, KW]`, bias: `[Cout]`.
    `residual`, shaped like the result, is added to it: torch rounds before it adds, a route may round once.

    >>> import torch, turnout
    >>> turnout.conv2d(torch.ones(1, 1, 3, 3), torch.ones(1, 1, 3, 3), padding=1)
    tensor([[[[4., 6., 4.],
              [6., 9., 6.],
              [4., 6., 4.]]]])
    """
    call = (input, weight, bias, stride, padding, dilation, groups, residual)
    y = CONV2D(*arguments(F.conv2d, 2, *call))
    return y.squeeze(0) if input.dim() == 3 else y

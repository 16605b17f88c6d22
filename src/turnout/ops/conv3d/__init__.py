"""conv3d: exactly `torch.nn.functional.conv3d`."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from turnout.ops.convolution.declaration import convolution_op
from turnout.ops.convolution.problem import Conv3d, Padding, arguments
from turnout.routing.public import public

CONV3D = convolution_op("conv3d", F.conv3d, Conv3d)


@public(CONV3D, of_cases=True)
def conv3d(
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
    call = (input, weight, bias, stride, padding, dilation, groups, residual)
    y = CONV3D(*arguments(F.conv3d, 3, *call))
    return y.squeeze(0) if input.dim() == 4 else y

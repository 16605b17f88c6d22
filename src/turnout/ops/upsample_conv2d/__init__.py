"""upsample_conv2d: nearest upsampling, then a convolution, as every image and video decoder has it."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from turnout.ops.convolution import costs
from turnout.ops.convolution.gradients import convolution_backward
from turnout.ops.convolution.layout import FIRST, LAST, dense_strides, in_format, plain_format
from turnout.ops.convolution.problem import Conv2d, spread, torch_settings
from turnout.routing.device import Device
from turnout.routing.mistakes import UNCLEAR, raise_clearer
from turnout.routing.op import Op
from turnout.routing.public import public
from turnout.routing.route import Work

LARGEST = 2**20  # scale: no picture has more pixels in a row


class UpsampleConv2d(NamedTuple):
    """Everything that may change the answer or the speed of one call: a convolution on the small image, and
    the scale.
    """

    small: Conv2d
    scale: int

    @staticmethod
    def of(
        input: Tensor, weight: Tensor, bias: Tensor | None, scale: int, padding: Sequence[int]
    ) -> UpsampleConv2d:
        return UpsampleConv2d(Conv2d.of(input, weight, bias, [1, 1], padding, [1, 1], 1, None), scale)  # pyright: ignore[reportArgumentType]

    @property
    def large(self) -> Conv2d:
        """The convolution on the upsampled image."""
        shape = self.small.input
        large = (*shape[:2], *(n * self.scale for n in shape[2:]))
        last = len(shape) == 4 and self.small.channels_last
        return self.small._replace(
            input=large, input_strides=dense_strides(large, LAST[4] if last else FIRST)
        )

    @property
    def products(self) -> int:
        """Products of one image's pixels with added-up weights, for one filter."""
        s = self.scale
        rows, columns = (
            sum(
                -(-(size - phase) // s) * len({(phase + k - p) // s for k in range(kernel)})
                for phase in range(s)
            )
            for size, kernel, p in zip(
                self.large.output[2:], self.small.weight[2:], self.small.padding, strict=True
            )
        )
        return rows * columns * self.small.weight[1]

    def invalid(self) -> str | None:
        """Why no route can take this call: it is empty, or wrong, and torch raises the error."""
        return self.large.invalid()


def reference(input: Tensor, weight: Tensor, bias: Tensor | None, scale: int, padding: list[int]) -> Tensor:
    return in_format(F.conv2d(upsampled(input, scale), weight, bias, 1, padding), plain_format(input, weight))


def upsampled(input: Tensor, scale: int) -> Tensor:
    return F.interpolate(input, scale_factor=float(scale), mode="nearest")


def vjp(inputs: tuple, grads: tuple) -> tuple:
    """The gradient of each input: that of the convolution, added up over the pixels of each block."""
    input, weight, bias, scale, padding = inputs
    large = upsampled(input, scale)
    dlarge, dweight, dbias = convolution_backward(
        grads[0], large, weight, bias, [1, 1], padding, [1, 1], 1, input.requires_grad
    )
    if dlarge is None:
        return None, dweight, dbias, None, None
    factor = float(scale)
    small = torch.ops.aten.upsample_nearest2d_backward(
        dlarge, list(large.shape[2:]), list(input.shape), factor, factor
    )
    return small, dweight, dbias, None, None


def work(problem: UpsampleConv2d) -> Work:
    """The small image read once, the output written once; a multiplication and an addition for each weight
    and pixel it falls on.
    """
    large_work = costs.work(problem.large)
    saved = (prod(problem.large.input) - prod(problem.small.input)) * problem.small.dtype.itemsize
    return large_work._replace(
        bytes=large_work.bytes - saved, flops=2 * prod(problem.large.output[:2]) * problem.products
    )


def family(problem: UpsampleConv2d) -> tuple:
    """What problems share that differ only in the size of the image, and its number of pixels."""
    without_sizes, pixels = costs.family(problem.small)
    return (without_sizes, problem.scale), 0 if problem.invalid() else pixels


def reference_cost(problem: UpsampleConv2d, device: Device) -> float | None:
    """The seconds of writing the large image and of the convolution on it."""
    seconds = costs.reference_cost(problem.large, device)
    return (
        None if seconds is None else seconds + costs.copying(prod(problem.large.input), problem.small, device)
    )


UPSAMPLE_CONV2D = Op(
    "upsample_conv2d",
    reference,
    problem_type=UpsampleConv2d,
    cost=reference_cost,
    work=work,
    cases="turnout.ops.upsample_conv2d.cases",
    family=family,
    autocast="cast",
    vjp=vjp,
    ambient=torch_settings,
)


@public(UPSAMPLE_CONV2D, of_cases=True)
def upsample_conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scale: int = 2,
    padding: int | Sequence[int] = 1,
) -> Tensor:
    """Nearest upsampling by a whole number, then a 2-D convolution of stride 1.

    input: `[N, Cin, H, W]` or without N, weight: `[Cout, Cin, KH, KW]`, bias: `[Cout]`. Returns
    `[N, Cout, scale * H + 2 * padding - KH + 1, scale * W + 2 * padding - KW + 1]`.

    >>> import torch, turnout
    >>> turnout.upsample_conv2d(torch.tensor([[[[1.0, 2.0]]]]), torch.ones(1, 1, 3, 3))
    tensor([[[[ 4.,  8., 10.,  8.],
              [ 4.,  8., 10.,  8.]]]])
    """
    if not isinstance(scale, int) or not 1 <= scale <= LARGEST:
        raise ValueError(f"scale {scale!r}, it must be a whole number from 1 to {LARGEST}")
    try:
        paddings, image = spread(padding, 2), input if input.dim() != 3 else input.unsqueeze(0)
    except UNCLEAR as failure:
        raise_clearer("upsample_conv2d", upsample_conv2d, locals().items(), failure)
        raise
    y = UPSAMPLE_CONV2D(image, weight, bias, scale, paddings)
    return y if image is input else y.squeeze(0)

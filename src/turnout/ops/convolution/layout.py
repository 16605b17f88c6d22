"""Memory formats: the one torch gives an output, and how a route's own output gets it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from turnout.ops.convolution.problem import channels_last
from turnout.routing.device import is_planning
from turnout.routing.machine import has_package
from turnout.routing.prepared import kept, worked_out_once
from turnout.routing.torch_private import convolution_backend, convolution_format, functorch_level

LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
FIRST = torch.contiguous_format


def torch_format(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> torch.memory_format:
    """The format of torch's own output.

    It depends on which of its kernels torch would take, so torch is asked, in the way in which its fake
    tensors ask: graphs and eager calls agree. It takes 10 us to answer, so it is not asked the same twice. Of
    a device that is assumed torch knows nothing.
    """
    if is_planning():
        return plain_format(input, weight)
    key = (
        torch_format,
        input.device,
        input.dtype,
        input.shape,
        input.stride(),
        weight.shape,
        weight.stride(),
        bias is None,
        *stride,
        *padding,
        *dilation,
        groups,
        torch.backends.cudnn.enabled,
    )

    def ask() -> torch.memory_format:
        backend = convolution_backend(
            input,
            weight,
            bias=bias,
            stride=stride,
            padding=padding,
            dilation=dilation,
            transposed=False,
            output_padding=[0] * len(stride),
            groups=groups,
            bias_sizes=None,
        )
        return convolution_format(input, weight, backend)

    return kept(key, ask)


def plain_format(input: Tensor, weight: Tensor) -> torch.memory_format:
    """The format cuDNN and oneDNN return: channels last where the input or the weight is."""
    last = any(channels_last(tuple(x.shape), x.stride()) for x in (input, weight))
    return LAST[input.dim()] if last else FIRST


def in_format(x: Tensor, format: torch.memory_format) -> Tensor:
    """Give x exactly the strides of a fresh tensor of that format; copy only if needed."""
    strides = dense_strides(x.shape, format)
    if x.stride() == strides:
        return x
    if x.is_contiguous(memory_format=format):  # dimensions of size one may have any stride
        return x.as_strided(x.shape, strides)
    return x.new_empty_strided(x.shape, strides).copy_(x)


def with_residual(y: Tensor, residual: Tensor | None) -> Tensor:
    """Add a residual to y: in place, but not in a transform, where y may lack the residual's batch."""
    if residual is None:
        return y
    return y.add_(residual.to(y.dtype)) if functorch_level() is None else y + residual.to(y.dtype)


def moved(x: Tensor, format: torch.memory_format) -> Tensor:
    """Do as `in_format`, without gradients.

    A GPU transposes blocks in shared memory: torch's strided copy reaches a sixteenth of its bandwidth
    (2.2 ms for 128 x 1024 x 1024 bf16 on an H200).
    """
    strides = known_strides(x.shape, format)
    if x.stride() == strides:
        return x
    if x.device.type != "cuda" or x.is_contiguous(memory_format=format) or not has_package("triton"):
        return in_format(x, format)
    from turnout.ops.convolution.gpu.packing import transpose

    out = torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)
    return out if transpose(x, out) else out.copy_(x)


def output_in(y: Tensor, format: torch.memory_format) -> Tensor:
    """Give a route's output exactly the strides of a fresh tensor of that format.

    Where only the strides of axes of size one differ, they change in place: `moved` would return a view.
    """
    strides = known_strides(y.shape, format)
    if y.stride() == strides:
        return y
    return y.as_strided_(y.shape, strides) if y.is_contiguous(memory_format=format) else moved(y, format)


def dense_strides(shape: Sequence[int], format: torch.memory_format) -> tuple[int, ...]:
    """The strides of a fresh tensor.

    >>> dense_strides((2, 3, 4, 5), torch.channels_last)
    (60, 1, 15, 3)
    """
    order = range(len(shape) - 1, -1, -1) if format == FIRST else (1, *range(len(shape) - 1, 1, -1), 0)
    strides, step = [0] * len(shape), 1
    for dim in order:
        strides[dim], step = step, step * max(shape[dim], 1)
    return tuple(strides)


def channels_side_by_side(x: Tensor) -> Tensor:
    """A tensor with channels last, as it is or copied."""
    return x.contiguous(memory_format=LAST[x.dim()])


# For routes, which are called again and again: sizes in a traced graph may be symbols, which cannot be looked
# up.
known_last = worked_out_once(channels_last)
known_strides = worked_out_once(dense_strides)


def known_format(input: Tensor, weight: Tensor) -> torch.memory_format:
    """`plain_format` at a tenth of its host time."""
    return (
        LAST[input.dim()]
        if known_last(input.shape, input.stride()) or known_last(weight.shape, weight.stride())
        else FIRST
    )

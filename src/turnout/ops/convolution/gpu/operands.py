"""One convolution as a launch takes it: its tensors and its numbers.

All kernels see three spatial axes, so a 2-D convolution has depth 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from turnout.ops.convolution.gpu.task import Triple
from turnout.ops.layouts import batch_steps

Layout = tuple[tuple[int, ...], ...]  # shape and strides of a tensor; empty if there is none


class Extent(NamedTuple):
    """One number for each spatial axis: depth, height, width."""

    d: int
    h: int
    w: int


class Strides(NamedTuple):
    """Elements from one image, channel, frame, row or column of a tensor to the next."""

    n: int
    c: int
    d: int
    h: int
    w: int


class WeightStrides(NamedTuple):
    """Elements from one filter, channel, frame, row or column of a weight to the next."""

    f: int
    c: int
    d: int
    h: int
    w: int


class CacheStrides(NamedTuple):
    """As `Strides`, for the cache, whose channels are as far apart as those of the input."""

    n: int
    d: int
    h: int
    w: int


class Operands(NamedTuple):
    """The tensors of one launch, which writes `out`."""

    x: Tensor  # [N, C, D, H, W], or without D
    weight: Tensor  # [F, C, KD, KH, KW], or without KD
    bias: Tensor | None  # [F]
    out: Tensor  # [N, F, OD, OH, OW], or without OD
    residual: Tensor | None = None  # like out; added before the one rounding at the end
    cache: Tensor | None = None  # [N, C, T, H, W]: the frames right before the first one of x

    def as_clips(self) -> Operands:
        """The same with three spatial axes."""
        x, weight, bias, out, residual, cache = self
        return Operands(
            clip(x),
            clip(weight),
            bias,
            clip(out),
            None if residual is None else clip(residual),
            None if cache is None else clip(cache),
        )


class Geometry(NamedTuple):
    """The numbers of one launch, one for each spatial axis.

    padding: the zeros before the first frame, row and column; the padding behind the last follows from the
    size of the output, so the two ends may differ. pad_mode: what stands before the frames of the cache,
    "zeros", or "replicate" for copies of the very first frame. precision: how float32 is multiplied, "tf32"
    or "ieee"; sums are float32 in any case, and other dtypes ignore it. streams: other calls of the layer
    have a cache, so all of them take the kernel that reads one.
    """

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    pad_mode: str = "zeros"
    precision: str = "tf32"
    streams: bool = False

    def as_clip(self, precision: str) -> Geometry:
        """The same for three spatial axes, with this precision."""
        stride, padding, dilation = triple(self.stride, 1), triple(self.padding, 0), triple(self.dilation, 1)
        return Geometry(stride, padding, dilation, self.pad_mode, precision, self.streams)


def triple(numbers: Sequence[int], front: int) -> Triple:
    """Three numbers: a 2-D convolution has one frame."""
    return tuple(numbers) if len(numbers) == 3 else (front, *numbers)  # pyright: ignore[reportReturnType]


def clip(x: Tensor) -> Tensor:
    """A tensor with three spatial axes: a view."""
    return x.unsqueeze(2) if x.dim() == 4 else x


def clip_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:2], 1, *shape[2:]) if len(shape) == 4 else tuple(shape)


def clip_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """The strides that `clip` gives a tensor of this shape.

    >>> clip_strides((2, 3, 4, 5), (60, 1, 15, 3))
    (60, 1, 60, 15, 3)
    """
    return (*strides[:2], strides[2] * shape[2], *strides[2:]) if len(shape) == 4 else strides


def layout_of(x: Tensor | None) -> Layout:
    return () if x is None else (x.shape, x.stride())


def clip_layout(layout: Layout) -> Layout:
    """A layout with three spatial axes."""
    return (clip_shape(layout[0]), clip_strides(*layout)) if layout else ()


class KernelNumbers(NamedTuple):
    """Sizes, paddings and strides in the order of the Triton kernels' parameters."""

    out_size: Extent
    channels: int
    in_size: Extent
    filters: int
    frames: int  # of the cache
    padding: Extent  # before the first element
    x: Strides
    weight: WeightStrides
    residual: Strides  # zeros where there is none
    cache: CacheStrides  # zeros where there is none
    out: Strides


def kernel_numbers(operands: Operands, padding: Sequence[int]) -> KernelNumbers:
    """The numbers of a launch on tensors with three spatial axes."""
    x, weight, _, out, residual, cache = operands
    return KernelNumbers(
        Extent(*out.shape[2:]),
        x.shape[1],
        Extent(*x.shape[2:]),
        out.shape[1],
        0 if cache is None else cache.shape[2],
        Extent(*padding),
        Strides(*batch_steps(x)),
        WeightStrides(*weight.stride()),
        Strides(0, 0, 0, 0, 0) if residual is None else Strides(*batch_steps(residual)),
        CacheStrides(0, 0, 0, 0)
        if cache is None
        else CacheStrides(batch_steps(cache)[0], *cache.stride()[2:]),
        Strides(*batch_steps(out)),
    )

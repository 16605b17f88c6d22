"""The problem of one convolution, and how the arguments of a public call become it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from math import prod
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from turnout.routing.device import Device
from turnout.routing.mistakes import UNCLEAR, is_index, raise_clearer
from turnout.routing.torch_private import cudnn_enabled, get_precision

ON_TORCHS_OWN_LOOP = 20480  # N * C * D * H of a single float32 image up to which torch keeps it from oneDNN


def float32_settings(on_cpu: bool = False) -> tuple[str, str]:
    """What torch's flags say of float32 now: of convolutions and of matrix products, on a GPU or on a CPU.

    One of "tf32", "bf16", "ieee", or "none", which means IEEE too. Old flags, such as
    `torch.backends.cudnn.allow_tf32`, and new ones, such as `torch.backends.cudnn.conv.fp32_precision`, end
    here, in whatever order they were set; the getters of old flags raise once the new ones disagree.
    """
    backend = "mkldnn" if on_cpu else "cuda"
    return get_precision(backend, "conv"), get_precision(backend, "matmul")


def torch_settings(input: Tensor) -> tuple:
    """All settings of torch that change how this input is convolved, or the layout of what comes out."""
    if input.is_cpu:
        return get_precision("mkldnn", "conv"), get_precision("mkldnn", "matmul")
    return get_precision("cuda", "conv"), get_precision("cuda", "matmul"), cudnn_enabled()


class Float32(NamedTuple):
    """How float32 is multiplied: "ieee", "tf32" or "bf16". Empty for other dtypes, which no flag changes."""

    conv: str
    matmul: str

    @staticmethod
    def of(input: Tensor) -> Float32:
        if input.dtype is not torch.float32:
            return Float32("", "")
        settings = float32_settings(Device.of(input.device).type == "cpu")
        return Float32(*("ieee" if precision == "none" else precision for precision in settings))


class Beside(NamedTuple):
    """A tensor that is read beside the input: a cache, a residual."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(x: Tensor | None) -> Beside | None:
        return None if x is None else Beside(tuple(x.shape), x.stride(), x.dtype)


class Convolution(NamedTuple):
    """Everything that may change the answer or the speed of one convolution."""

    input: tuple[int, ...]
    weight: tuple[int, ...]
    input_strides: tuple[int, ...]
    weight_strides: tuple[int, ...]
    dtype: torch.dtype
    weight_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    residual: Beside | None
    float32: Float32

    @classmethod
    def of(
        cls,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        groups: int,
        residual: Tensor | None,
    ) -> Convolution:
        return cls(
            tuple(input.shape),
            tuple(weight.shape),
            input.stride(),
            weight.stride(),
            input.dtype,
            weight.dtype,
            None if bias is None else bias.dtype,
            tuple(stride),
            tuple(padding),
            tuple(dilation),
            groups,
            Beside.of(residual),
            Float32.of(input),
        )

    @property
    def spatial(self) -> int:
        """The number of dimensions that are convolved, 2 or 3."""
        return len(self.weight) - 2

    @property
    def dimensions(self) -> int:
        """The number of dimensions that the op convolves."""
        return self.spatial

    @property
    def output(self) -> tuple[int, ...]:
        """The output's shape."""
        sizes = zip(self.input[2:], self.weight[2:], self.stride, self.padding, self.dilation, strict=True)
        return (
            self.input[0],
            self.weight[0],
            *((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sizes),
        )

    @property
    def flops(self) -> int:
        """Multiplications and additions, those with padding included."""
        return 2 * prod(self.output) * prod(self.weight[1:])

    @property
    def channels_last(self) -> bool:
        return channels_last(self.input, self.input_strides)

    @property
    def weight_channels_last(self) -> bool:
        return channels_last(self.weight, self.weight_strides)

    @property
    def output_channels_last(self) -> bool:
        """Whether cuDNN and oneDNN write channels last: if the input or the weight is."""
        return self.channels_last or self.weight_channels_last

    def invalid(self) -> str | None:
        """Why no route can take this call: it is empty or unbatched, or wrong, and torch raises the error."""
        spatial = self.dimensions
        if len(self.weight) != spatial + 2 or len(self.input) != spatial + 2:
            return (
                f"an input of {len(self.input)} and a weight of {len(self.weight)} dimensions, "
                f"this route needs {spatial + 2} of both"
            )
        if any(len(numbers) != spatial for numbers in (self.stride, self.padding, self.dilation)):
            return (
                f"stride {self.stride}, padding {self.padding}, dilation {self.dilation}, "
                f"this route needs {spatial} numbers each"
            )
        if min(self.stride) < 1 or min(self.dilation) < 1 or min(self.padding) < 0 or self.groups < 1:
            return (
                "a stride, padding, dilation or groups below its least, this route needs a valid convolution"
            )
        if self.weight[1] * self.groups != self.input[1] or self.weight[0] % self.groups:
            return (
                f"{self.input[1]} channels and weight {list(self.weight)} in {self.groups} groups, "
                "this route needs them to fit"
            )
        if not prod(self.input) or not prod(self.weight) or min(self.output) < 1:
            return (
                f"input {list(self.input)} and weight {list(self.weight)}, "
                "this route needs an output of at least one element"
            )
        if self.residual is not None and (self.residual.shape, self.residual.dtype) != (
            self.output,
            self.dtype,
        ):
            return (
                f"a residual {list(self.residual.shape)}, "
                f"this route needs it like the output, {list(self.output)}"
            )
        return None


class Conv2d(Convolution):
    """One 2-D convolution."""

    __slots__ = ()
    dimensions: ClassVar[int] = 2  # pyright: ignore[reportIncompatibleMethodOverride, reportIncompatibleVariableOverride]


class Conv3d(Convolution):
    """One 3-D convolution."""

    __slots__ = ()
    dimensions: ClassVar[int] = 3  # pyright: ignore[reportIncompatibleMethodOverride, reportIncompatibleVariableOverride]


def channels_last(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether torch takes these strides for channels-last memory. Sliced counts, ambiguous (one channel, one
    pixel) does not.

    >>> channels_last((1, 8, 4, 4), (128, 1, 32, 8)), channels_last((1, 8, 4, 4), (128, 16, 4, 1))
    (True, False)
    """
    if len(shape) not in (4, 5) or strides[1] == 0:
        return False
    least = 0
    for d in (1, *range(len(shape) - 1, 1, -1), 0):
        if shape[d] == 0 or strides[d] < least or (d == 0 and least == strides[1]):
            return False
        least = strides[d] * max(shape[d], 1)
    return True


# From a public call to the arguments of a reference


def spread(value: int | Sequence[int], count: int) -> list[int]:
    """One number for each dimension, as torch spreads them.

    >>> spread(2, 3), spread((1, 2), 2), spread([4], 2)
    ([2, 2, 2], [1, 2], [4, 4])
    """
    if isinstance(value, int):
        return [value] * count
    if not isinstance(value, (list, tuple)) and is_index(value):  # NumPy's integers
        return [operator.index(value)] * count  # pyright: ignore[reportArgumentType]
    return list(value) * count if len(value) == 1 else list(value)


Padding = int | Sequence[int] | str


def arguments(
    convolve: Callable[..., Tensor],
    dimensions: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: Padding = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    residual: Tensor | None = None,
) -> tuple:
    """The reference's arguments of a public call: numbers for every dimension, a batch, no words.

    `convolve` is torch's own function.
    """
    try:
        if isinstance(padding, str):
            if padding not in ("valid", "same") or (
                padding == "same" and any(s != 1 for s in spread(stride, dimensions))
            ):
                convolve(input, weight, bias, stride, padding, dilation, groups)  # raises, in torch's words
            input, padding = without_words(input, weight, padding, spread(dilation, dimensions))
        if input.dim() == dimensions + 1:
            input, residual = input.unsqueeze(0), None if residual is None else residual.unsqueeze(0)
        numbers = [spread(value, dimensions) for value in (stride, padding, dilation)]
    except UNCLEAR as failure:
        raise_clearer(convolve.__name__, arguments, locals().items(), failure)
        raise
    return input, weight, bias, *numbers, groups, residual


def without_words(
    input: Tensor, weight: Tensor, padding: str, dilation: Sequence[int]
) -> tuple[Tensor, list[int]]:
    """Input and padding that mean "valid" or "same".

    Where "same" needs one more at the end, that is padded here, as torch does.
    """
    totals = [
        0 if padding == "valid" else d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)
    ]
    if any(total % 2 for total in totals):
        input = F.pad(input, [side for total in reversed(totals) for side in (0, total % 2)])
    return input, [total // 2 for total in totals]

"""One convolution as the GPU kernels see it, and what each of them cannot do."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

import torch

from turnout.launch import descriptors as tma
from turnout.ops import needs
from turnout.ops.integers import ceil_div, power_of_two

Triple = tuple[int, int, int]
MOST_HELD = 9  # blocks of the weight that `narrow_out` keeps at hand
MOST_TAPS = 5  # along one axis, written out in `narrow_out_hopper`
MOST_NARROW = 64  # filters times columns of the kernel, each rounded up to a power of two


class Task(NamedTuple):
    """One convolution as the GPU kernels see it.

    Shapes are logical, [N, C, D, H, W] and [F, C, KD, KH, KW]; a 2-D convolution has depth 1. `padding`
    counts the zeros before the first frame, row and column; the padding behind the last follows from the size
    of `out`. `precision` is how float32 is multiplied, "tf32" or "ieee"; other dtypes ignore it. `cache`
    counts frames.
    """

    x: tuple[int, ...]
    weight: tuple[int, ...]
    out: tuple[int, ...]
    x_strides: tuple[int, ...]
    out_strides: tuple[int, ...]
    dtype: torch.dtype
    stride: Triple = (1, 1, 1)
    padding: Triple = (0, 0, 0)
    dilation: Triple = (1, 1, 1)
    precision: str = "tf32"
    cache: int = 0
    cache_strides: tuple[int, ...] | None = None
    residual_strides: tuple[int, ...] | None = None
    pad_mode: str = "zeros"

    @property
    def frames_before(self) -> bool:
        """Whether frames that are not zero stand before the first: only kernels that read frame by frame can
        use them.
        """
        return self.cache > 0 or self.replicates

    @property
    def replicates(self) -> bool:
        """Whether the very first frame stands in for those before it."""
        return self.pad_mode == "replicate" and self.padding[0] > self.cache

    @property
    def seen(self) -> float:
        """The share of the kernel's depth that sees frames, not zeros before the first or behind the last."""
        frames, depth, outputs = self.x[2], self.weight[2], self.out[2]
        first = -self.padding[0] if self.pad_mode == "replicate" else -self.cache
        at = (
            o * self.stride[0] + k * self.dilation[0] - self.padding[0]
            for o in range(outputs)
            for k in range(depth)
        )
        return sum(first <= frame < frames for frame in at) / max(outputs * depth, 1)


def implicit_gemm_refuses(task: Task) -> Iterator[str]:
    """Reasons why `implicit_gemm` cannot take a task. Strides and layouts are never among them."""
    yield from needs.needs_dtype(task.dtype, torch.float32, torch.float16, torch.bfloat16)
    if not prod(task.out) or not prod(task.x) or not prod(task.weight):
        yield "an empty tensor, this route needs at least one element"
    if task.x[1] != task.weight[1]:
        yield f"{task.x[1] // max(task.weight[1], 1)} groups, this route needs 1"
    if task.cache_strides is not None and task.x[1] > 1 and task.cache_strides[1] != task.x_strides[1]:
        yield (
            f"channels {task.cache_strides[1]} apart in the cache, {task.x_strides[1]} in the input, "
            "this route needs the same"
        )


def implicit_gemm_hopper_refuses(task: Task) -> Iterator[str]:
    """Reasons why `implicit_gemm_hopper` cannot take a task on a Hopper card."""
    yield from hopper_refuses(task)
    yield from needs_steps("filters", task.weight[0], task)
    yield from needs_tma("output", task.out, task.out_strides, task)
    if task.residual_strides is not None:
        yield from needs_tma("residual", task.out, task.residual_strides, task)


def narrow_out_refuses(task: Task) -> Iterator[str]:
    """Reasons why `narrow_out` cannot take a task."""
    yield from implicit_gemm_refuses(task)
    yield from few_filters_refuse(task)
    _, channels, *kernel = task.weight
    if kernel[0] * kernel[1] * ceil_div(channels, 128) > MOST_HELD:
        yield (
            f"{channels} channels and a kernel of {kernel}, "
            f"this route needs at most {MOST_HELD} blocks of 128 channels, tap by tap"
        )


def narrow_out_hopper_refuses(task: Task) -> Iterator[str]:
    """Reasons why `narrow_out_hopper` cannot take a task on a Hopper card."""
    yield from hopper_refuses(task)
    yield from few_filters_refuse(task)
    if max(task.weight[2:4]) > MOST_TAPS:
        yield f"a kernel of {task.weight[2:]}, this route needs at most {MOST_TAPS} frames and rows"


def few_filters_refuse(task: Task) -> Iterator[str]:
    if task.dtype is torch.float32 and task.precision == "ieee":
        yield "float32 in ieee precision, this route needs TF32 allowed"
    if task.stride != (1, 1, 1) or task.dilation != (1, 1, 1):
        yield f"stride {task.stride}, dilation {task.dilation}, this route needs 1"
    filters, wide = task.weight[0], task.weight[4]
    columns = power_of_two(filters) * power_of_two(wide)
    if columns > MOST_NARROW:
        yield (
            f"{filters} filters and {wide} columns of the kernel, {columns} as powers of two, "
            f"this route needs at most {MOST_NARROW}"
        )


def hopper_refuses(task: Task) -> Iterator[str]:
    yield from implicit_gemm_refuses(task)
    if task.dtype is torch.float32 and task.precision != "tf32":
        yield f"float32 in {task.precision} precision, this route needs TF32 allowed"
    if task.stride != (1, 1, 1):
        yield f"stride {task.stride}, this route needs 1"
    yield from needs_steps("channels", task.x[1], task)
    yield from needs_tma("input", task.x, task.x_strides, task)
    if task.cache_strides is not None:
        yield from needs_tma("cache", (*task.x[:2], task.cache, *task.x[3:]), task.cache_strides, task)


def needs_steps(name: str, count: int, task: Task) -> Iterator[str]:
    if count * task.dtype.itemsize % tma.ALIGNMENT:
        yield f"{count} {name}, this route needs a multiple of {tma.ALIGNMENT // task.dtype.itemsize}"


def needs_tma(name: str, shape: tuple[int, ...], strides: tuple[int, ...], task: Task) -> Iterator[str]:
    last = (0, 2, 3, 4, 1)
    if not tma.fits([shape[a] for a in last], [strides[a] for a in last], task.dtype.itemsize):
        yield (
            f"{name} strides {strides}, "
            f"this route needs channels side by side and the others multiples of {tma.ALIGNMENT} bytes"
        )

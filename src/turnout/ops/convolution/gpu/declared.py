"""Our four GPU kernels as routes declare them: what each refuses and costs, in terms of a `Task`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import NamedTuple

import torch

from turnout.ops import needs
from turnout.ops.convolution import costs
from turnout.ops.convolution.gpu import implicit_gemm, narrow_out, tiles
from turnout.ops.convolution.gpu.launching import extra_channels, precision_of
from turnout.ops.convolution.gpu.lowering import Hopper, Lowering
from turnout.ops.convolution.gpu.operands import clip_shape, clip_strides, triple
from turnout.ops.convolution.gpu.task import (
    Task,
    implicit_gemm_hopper_refuses,
    implicit_gemm_refuses,
    narrow_out_hopper_refuses,
    narrow_out_refuses,
)
from turnout.ops.convolution.layout import LAST, dense_strides
from turnout.ops.convolution.problem import Convolution, channels_last
from turnout.routing.device import Device
from turnout.routing.route import ANYWHERE, UNKNOWN, Config, Grain

_HERE = "turnout.ops.convolution.gpu"
TRANSPOSE = f"{_HERE}.kernels:transpose"
FITTED = "convolution.kernels"  # the section of a device's constants


class Kernel(NamedTuple):
    """One of our kernels as routes declare it.

    `arithmetic` estimates the seconds of its products, without reading and writing. `kernels` names those
    whose source decides the time, also the ones that copy or round before and after; not the fallback for
    unaligned tensors. `grain` of the implicit GEMMs: each output is one sum over taps and channels, in an
    order and in blocks that follow from the configuration, wherever the output lies; taps on padding add
    zeros or are left out. `narrow_out` adds columns of the kernel in an order that the compiler chooses.
    """

    refuses: Callable[[Task], Iterator[str]]
    configs: Callable[[Task, Device], list[Config]]
    arithmetic: Callable[[Task, Device], float | None]
    lowering: Lowering
    kernels: tuple[str, ...]
    grain: Grain = UNKNOWN

    @property
    def defaults(self) -> Config:
        """The configuration of a route where none is given."""
        return self.lowering.tile()._asdict()

    def widened(self, task: Task) -> Task:
        """The task as it is launched.

        A copy adds channels of zeros where TMA, which moves 16 bytes at a time, could not read the tensor.
        """
        extra = extra_channels(self.lowering, task.x[1], task.dtype) if task.x[1] == task.weight[1] else 0
        if not extra:
            return task
        (batch, channels, *size), (filters, _, *taps) = task.x, task.weight
        x = (batch, channels + extra, *size)
        cache = dense_strides((*x[:2], task.cache, *size[1:]), LAST[5]) if task.cache_strides else None
        return task._replace(
            x=x,
            weight=(filters, channels + extra, *taps),
            x_strides=dense_strides(x, LAST[5]),
            cache_strides=cache,
        )

    def refuses_on(self, task: Task, device: Device) -> Iterator[str]:
        hopper = isinstance(self.lowering, Hopper)
        yield from needs.needs_hopper(device) if hopper else needs.needs_triton(device)
        yield from self.refuses(task)

    def seconds(self, task: Task, device: Device) -> float | None:
        """One launch: the longer of its arithmetic and of what it reads and writes."""
        arithmetic = self.arithmetic(task, device)
        bytes = (prod(task.x) + prod(task.weight) + prod(task.out)) * task.dtype.itemsize
        if arithmetic is None:
            return None
        return max(arithmetic, costs.gpu_moving(bytes, device, device.fitted(FITTED).moving))

    def cost(self, task: Task, around: float, device: Device) -> float | None:
        """The seconds of a call: `around` is what moving tensors from and to other layouts takes."""
        launched, fitted = self.widened(task), device.fitted(FITTED)
        seconds = self.seconds(launched, device)
        if seconds is None or launched is task:
            return None if seconds is None else max(fitted.host, seconds + around)
        copied = costs.gpu_moving(
            (prod(task.x) + 2 * prod(launched.x)) * task.dtype.itemsize, device, fitted.widening
        )
        return max(fitted.host + fitted.widening_host, seconds + around + copied)


def portable_arithmetic(task: Task, device: Device) -> float | None:
    """Estimate the seconds of the products in plain Triton, with filters padded to a power of two.

    Gathered pixels let it reach a quarter of the peak. Few channels lower that share, and channels that do
    not make whole vectors of 16 bytes leave hardly any of it.
    """
    peak, fitted = peak_of(task, device), device.fitted(FITTED)
    if peak is None:
        return None
    channels, filters = task.weight[1], max(32, 1 << (task.weight[0] - 1).bit_length())
    if channels * task.dtype.itemsize % 16:
        share = fitted.gathered_odd_channels
    elif channels < 32:
        share = fitted.gathered_few_channels
    else:
        share = fitted.gathered_float32 if task.dtype is torch.float32 else fitted.gathered
    return 2 * prod(task.out) * prod(task.weight[1:]) * (filters / task.weight[0]) / (share * peak)


def peak_of(task: Task, device: Device) -> float | None:
    """The operations a second that a device's tensor cores do in the task's arithmetic."""
    in_tf32 = task.dtype is torch.float32 and task.precision == "tf32"
    kind = "tf32" if in_tf32 else str(task.dtype).removeprefix("torch.")
    peak = device.flops.get(kind)
    return None if peak is None else peak.value


def hopper_arithmetic(task: Task, device: Device) -> float | None:
    """Estimate the seconds of the products by the bound of the best tile: 0.9 to 1.1 times an H200's time."""
    fastest = tiles.best(task, device.shared, device.units, 1)
    return fastest[0].cycles(task, device.units) / device.fitted(FITTED).hopper_clock if fastest else None


def narrow_reading(kernel: str) -> Callable[[Task, Device], float]:
    """Estimate the seconds of a kernel for few filters, whose time is that of reading the input.

    It reaches a share of the bandwidth with one depth of the kernel, and less with each further one.
    """

    def seconds(task: Task, device: Device) -> float:
        fitted = device.fitted(FITTED)
        alone, more = getattr(fitted, kernel), getattr(fitted, f"{kernel}_more_depth")
        return costs.gpu_moving(
            prod(task.x) * task.dtype.itemsize, device, alone / (1 + more * (task.weight[2] - 1))
        )

    return seconds


IMPLICIT_GEMM = Kernel(
    implicit_gemm_refuses,
    implicit_gemm.portable_configs,
    portable_arithmetic,
    implicit_gemm.PORTABLE,
    (f"{_HERE}.kernels:implicit_gemm", TRANSPOSE),
    ANYWHERE,
)
IMPLICIT_GEMM_HOPPER = Kernel(
    implicit_gemm_hopper_refuses,
    implicit_gemm.hopper_configs,
    hopper_arithmetic,
    implicit_gemm.HOPPER,
    (f"{_HERE}.gluon_kernels:implicit_gemm", f"{_HERE}.gluon_kernels:round_to_tf32", TRANSPOSE),
    ANYWHERE,
)
NARROW_OUT = Kernel(
    narrow_out_refuses,
    narrow_out.portable_configs,
    narrow_reading("narrow"),
    narrow_out.PORTABLE,
    (f"{_HERE}.kernels:narrow_out", TRANSPOSE),
)
NARROW_OUT_HOPPER = Kernel(
    narrow_out_hopper_refuses,
    narrow_out.hopper_configs,
    narrow_reading("narrow_hopper"),
    narrow_out.HOPPER,
    (
        f"{_HERE}.gluon_narrow_kernels:narrow_out",
        f"{_HERE}.gluon_narrow_kernels:narrow_out_rolled",
        f"{_HERE}.gluon_kernels:round_to_tf32",
        TRANSPOSE,
    ),
)
# By the names of their routes
GEMMS = {"implicit-gemm": IMPLICIT_GEMM, "implicit-gemm-hopper": IMPLICIT_GEMM_HOPPER}
KERNELS = {**GEMMS, "narrow-out": NARROW_OUT, "narrow-out-hopper": NARROW_OUT_HOPPER}


def task_of(problem: Convolution) -> Task:
    """A valid convolution as the kernels see it."""
    out, residual = clip_shape(problem.output), problem.residual
    return Task(
        clip_shape(problem.input),
        clip_shape(problem.weight),
        out,
        kernel_strides(problem.input, problem.input_strides),
        dense_strides(out, LAST[5]),
        problem.dtype,
        triple(problem.stride, 1),
        triple(problem.padding, 0),
        triple(problem.dilation, 1),
        precision_of(problem.float32, problem.input[1], problem.weight[0]),
        residual_strides=None if residual is None else kernel_strides(residual.shape, residual.strides),
    )


def kernel_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """The strides that the kernels see: the tensor's own if channels are last, else those of a copy."""
    if not channels_last(shape, strides):
        return dense_strides(clip_shape(shape), LAST[5])
    return clip_strides(shape, strides)

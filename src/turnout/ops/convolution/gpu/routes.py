"""Routes by our own GPU kernels, for all four ops: what they need, what they cost, and how a call reaches
them.

The kernels work channels last. What is not so is copied before, and the output is copied behind where torch's
has channels first. Few channels of half precision, such as the three of a picture, are copied with zeros
behind them where TMA could not read them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from turnout.launch import Launch, LaunchPlan, prepare_from_plan, start
from turnout.launch import descriptors as tma
from turnout.ops import needs
from turnout.ops.convolution import costs
from turnout.ops.convolution.gpu import launches, tiles
from turnout.ops.convolution.gpu.launches import (
    GEMM,
    GEMM_HOPPER,
    NARROW,
    NARROW_HOPPER,
    Lowering,
    direct_launch,
)
from turnout.ops.convolution.gpu.task import (
    Task,
    Triple,
    implicit_gemm_hopper_refuses,
    implicit_gemm_refuses,
    narrow_out_hopper_refuses,
    narrow_out_refuses,
)
from turnout.ops.convolution.layout import LAST, dense_strides, known_last, moved, output_in, torch_format
from turnout.ops.convolution.methods import output_frames
from turnout.ops.convolution.problem import Convolution, Float32, channels_last
from turnout.routing.device import Device
from turnout.routing.op import ANYWHERE, UNKNOWN, Config, Grain
from turnout.routing.prepared import Prepare, worked_out_once

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
    def hopper(self) -> bool:
        return self.lowering.launch is not None

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
        yield from needs.needs_hopper(device) if self.hopper else needs.needs_triton(device)
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


def peak_of(task: Task, device: Device) -> float | None:
    in_tf32 = task.dtype is torch.float32 and task.precision == "tf32"
    kind = "tf32" if in_tf32 else str(task.dtype).removeprefix("torch.")
    peak = device.flops.get(kind)
    return None if peak is None else peak.value


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
    lambda task, device: launches.implicit_gemm_configs(task),
    portable_arithmetic,
    GEMM,
    (f"{_HERE}.kernels:implicit_gemm", TRANSPOSE),
    ANYWHERE,
)
IMPLICIT_GEMM_HOPPER = Kernel(
    implicit_gemm_hopper_refuses,
    launches.implicit_gemm_hopper_configs,
    hopper_arithmetic,
    GEMM_HOPPER,
    (f"{_HERE}.gluon_kernels:implicit_gemm", f"{_HERE}.gluon_kernels:round_to_tf32", TRANSPOSE),
    ANYWHERE,
)
NARROW_OUT = Kernel(
    narrow_out_refuses,
    lambda task, device: launches.narrow_out_configs(device),
    narrow_reading("narrow"),
    NARROW,
    (f"{_HERE}.kernels:narrow_out", TRANSPOSE),
)
NARROW_OUT_HOPPER = Kernel(
    narrow_out_hopper_refuses,
    launches.narrow_out_hopper_configs,
    narrow_reading("narrow_hopper"),
    NARROW_HOPPER,
    (
        f"{_HERE}.gluon_narrow_kernels:narrow_out",
        f"{_HERE}.gluon_narrow_kernels:narrow_out_rolled",
        f"{_HERE}.gluon_kernels:round_to_tf32",
        TRANSPOSE,
    ),
)


# From a problem to a task


def triple(numbers: Sequence[int], front: int) -> Triple:
    """Three numbers: a 2-D convolution has one frame."""
    return tuple(numbers) if len(numbers) == 3 else (front, *numbers)  # pyright: ignore[reportReturnType]


def as_clip(x: Tensor) -> Tensor:
    return x.unsqueeze(2) if x.dim() == 4 else x


def clip_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:2], 1, *shape[2:]) if len(shape) == 4 else shape


def clip_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """The strides that the kernels see: the tensor's own if channels are last, else those of a copy."""
    if not channels_last(shape, strides):
        return dense_strides(clip_shape(shape), LAST[5])
    return (*strides[:2], strides[2] * shape[2], *strides[2:]) if len(shape) == 4 else strides


def precision_of(float32: Float32, channels: int, filters: int) -> str:
    """How float32 is multiplied: "tf32" where torch allows it and cuDNN would use it, else "ieee".

    cuDNN uses TF32 only for channels and filters in fours.
    """
    return "tf32" if float32.conv == "tf32" and channels % 4 == 0 and filters % 4 == 0 else "ieee"


def task_of(problem: Convolution) -> Task:
    """A valid convolution as the kernels see it."""
    out, residual = clip_shape(problem.output), problem.residual
    return Task(
        clip_shape(problem.input),
        clip_shape(problem.weight),
        out,
        clip_strides(problem.input, problem.input_strides),
        dense_strides(out, LAST[5]),
        problem.dtype,
        triple(problem.stride, 1),
        triple(problem.padding, 0),
        triple(problem.dilation, 1),
        precision_of(problem.float32, problem.input[1], problem.weight[0]),
        residual_strides=None if residual is None else clip_strides(residual.shape, residual.strides),
    )


def prepare_by(plan: Callable[..., LaunchPlan | None], kernel: Kernel) -> Prepare:
    """Prepare a route by this kernel: `plan(kernel.lowering, ...)` gives its launches."""
    return functools.partial(prepare_from_plan, plan=functools.partial(plan, kernel.lowering))


def declaration(kernel: Kernel) -> dict[str, Any]:
    """The keywords that declare a route of conv2d or conv3d by this kernel."""

    def refuses(problem: Convolution, device: Device) -> Iterator[str]:
        why = problem.invalid()
        if why is not None:
            yield why
        elif problem.dtype != problem.weight_dtype or problem.bias_dtype not in (None, problem.dtype):
            yield (
                f"a weight of {problem.weight_dtype} and a bias of {problem.bias_dtype}, "
                "this route needs the input's dtype"
            )
        else:
            yield from kernel.refuses_on(kernel.widened(task_of(problem)), device)

    def cost(problem: Convolution, device: Device) -> float | None:
        return kernel.cost(task_of(problem), costs.around(problem._replace(residual=None), device), device)

    def configs(problem: Convolution, device: Device) -> list[Config]:
        return kernel.configs(kernel.widened(task_of(problem)), device)

    prepare = prepare_by(plan_convolution, kernel)
    return {
        "refuses": refuses,
        "cost": cost,
        "configs": configs,
        "prepare": prepare,
        "numerics": "close",
        "version": 1,
        "kernels": kernel.kernels,
        "grain": kernel.grain,
    }


# From tensors to a launch


def extra_channels(lowering: Lowering, channels: int, dtype: torch.dtype) -> int:
    """How many channels of zeros a launch adds to those of the input.

    TF32 needs none: only channels in fours are multiplied in TF32.
    """
    if lowering is not GEMM_HOPPER or dtype not in (torch.float16, torch.bfloat16):
        return 0
    return -channels % (tma.ALIGNMENT // dtype.itemsize)


def one_launch(
    lowering: Lowering,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    residual: Tensor | None,
    config: Config,
    cache: Tensor | None = None,
    pad_mode: str = "zeros",
) -> Launch | None:
    """The launch that fills `out` (see `launch_into`) from tensors as they are.

    None where one of the tensors has to be copied to another layout first.
    """
    if lowering.portable is None:
        return direct_launch(
            lowering, input, weight, bias, out, padding, dilation, residual, cache, pad_mode, config
        )
    channels_last = all(
        t is None or known_last(t.shape, t.stride()) for t in (input, weight, residual, cache)
    )
    if not channels_last or (bias is not None and not bias.is_contiguous()):
        return None
    x, taps, beside, before = (None if t is None else as_clip(t) for t in (input, weight, residual, cache))
    return lowering.portable(
        x,
        taps,
        bias,
        as_clip(out),
        stride=triple(stride, 1),
        padding=triple(padding, 0),
        dilation=triple(dilation, 1),
        residual=beside,
        cache=before,
        pad_mode=pad_mode,
        precision=precision_in(input, weight),
        **config,
    )


def launch_into(
    lowering: Lowering,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    residual: Tensor | None,
    config: Config,
    cache: Tensor | None = None,
    pad_mode: str = "zeros",
) -> None:
    """Convolve `input` into `out`, `[N, Cout, D', H', W']` or without D', channels last.

    Tensors that the kernel cannot read are copied first.
    """
    extra = extra_channels(lowering, input.shape[1], input.dtype)
    if extra:
        behind = (0, 0) * (input.dim() - 2) + (0, extra)
        input, weight, cache = (None if t is None else pad(t, behind) for t in (input, weight, cache))  # pyright: ignore
        input, weight, cache = (None if t is None else with_channels_last(t) for t in (input, weight, cache))  # pyright: ignore
    launch = one_launch(
        lowering, input, weight, bias, out, stride, padding, dilation, residual, config, cache, pad_mode
    )
    if launch is not None:
        start(launch)
        return
    precision = precision_in(input, weight)
    x, taps, beside, before = (
        None if t is None else as_clip(with_channels_last(t)) for t in (input, weight, residual, cache)
    )
    lowering.general(
        x,
        taps,
        None if bias is None else bias.contiguous(),
        as_clip(out),
        stride=triple(stride, 1),
        padding=triple(padding, 0),
        dilation=triple(dilation, 1),
        residual=beside,
        cache=before,
        pad_mode=pad_mode,
        precision=precision,
        **config,
    )


def precision_in(input: Tensor, weight: Tensor) -> str:
    """How a call multiplies float32: "tf32" or "ieee". Half types ignore it."""
    if input.dtype is not torch.float32:
        return "tf32"
    return precision_of(Float32.of(input), input.shape[1], weight.shape[0])


def with_channels_last(x: Tensor) -> Tensor:
    """A tensor with channels side by side, as it is or copied."""
    return x if known_last(x.shape, x.stride()) else moved(x, LAST[x.dim()])


@worked_out_once
def known_output(input: Sequence[int], weight: Sequence[int], *numbers: tuple[int, ...]) -> tuple[int, ...]:
    """The output shape of a convolution; `numbers` are its stride, padding and dilation."""
    sizes = itertools.starmap(output_frames, zip(input[2:], weight[2:], *numbers, strict=True))
    return (input[0], weight[0], *sizes)


def convolved(
    lowering: Lowering,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    residual: Tensor | None,
    **config: Any,
) -> Tensor:
    """A 2-D or 3-D convolution by one launch."""
    shape = known_output(input.shape, weight.shape, tuple(stride), tuple(padding), tuple(dilation))
    out = torch.empty(shape, dtype=input.dtype, device=input.device, memory_format=LAST[input.dim()])
    launch_into(lowering, input, weight, bias, out, stride, padding, dilation, residual, config)
    return output_in(out, torch_format(input, weight, bias, stride, padding, dilation, groups))


def plan_convolution(
    lowering: Lowering,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    residual: Tensor | None,
    **config: Any,
) -> LaunchPlan | None:
    """The plan of `convolved` where all of it is one launch on tensors as they are; else None."""
    if torch_format(input, weight, bias, stride, padding, dilation, groups) != LAST[input.dim()]:
        return None
    shape = known_output(input.shape, weight.shape, tuple(stride), tuple(padding), tuple(dilation))
    out = torch.empty(shape, dtype=input.dtype, device=input.device, memory_format=LAST[input.dim()])
    launch = one_launch(lowering, input, weight, bias, out, stride, padding, dilation, residual, config)
    return None if launch is None else LaunchPlan((launch,), out)


def with_implicit_gemm(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    residual: Tensor | None,
    *,
    pixels: int = 64,
    filters: int = 32,
    channels: int = 32,
    warps: int = 4,
) -> Tensor:
    call = (input, weight, bias, stride, padding, dilation, groups, residual)
    return convolved(GEMM, *call, pixels=pixels, filters=filters, channels=channels, warps=warps)


def with_implicit_gemm_hopper(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    residual: Tensor | None,
    *,
    share: str = "depth",
    slots: int = 1,
    rows: int = 8,
    columns: int = 16,
    channels: int = 32,
    filters: int = 64,
    stages: int = 3,
    from_registers: bool = False,
) -> Tensor:
    call = (input, weight, bias, stride, padding, dilation, groups, residual)
    return convolved(
        GEMM_HOPPER,
        *call,
        share=share,
        slots=slots,
        rows=rows,
        columns=columns,
        channels=channels,
        filters=filters,
        stages=stages,
        from_registers=from_registers,
    )


def with_narrow_out(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    residual: Tensor | None,
    *,
    rows: int = 16,
    columns: int = 128,
    warps: int = 4,
) -> Tensor:
    call = (input, weight, bias, stride, padding, dilation, groups, residual)
    return convolved(NARROW, *call, rows=rows, columns=columns, warps=warps)


def with_narrow_out_hopper(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    residual: Tensor | None,
    *,
    share: str = "depth",
    slots: int = 1,
    channels: int = 32,
    stages: int = 3,
) -> Tensor:
    call = (input, weight, bias, stride, padding, dilation, groups, residual)
    return convolved(NARROW_HOPPER, *call, share=share, slots=slots, channels=channels, stages=stages)

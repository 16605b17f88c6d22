"""The routes of causal_conv1d: one kernel a layout, on a GPU and on a CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from turnout.launch import Launch, LaunchPlan, Workspace, prepare_from_plan, runs_plan
from turnout.ops import needs
from turnout.ops.causal_conv1d import CAUSAL_CONV1D, CausalConv1d, channel_last, launches, work
from turnout.ops.causal_conv1d.launches import empty_dense
from turnout.ops.integers import ceil_div, power_of_two
from turnout.ops.layouts import array, flat
from turnout.routing.configured import configured
from turnout.routing.device import Device
from turnout.routing.route import Config

WIDEST = 32  # taps: the Triton kernels write out each one, so more of them compile slowly
LONGEST = 2**31 - 2**16  # positions are counted in 32 bits inside a row; offsets have 64


# Guards


def refuses_anywhere(problem: CausalConv1d) -> Iterator[str]:
    if problem.elements == 0:
        yield "nothing to convolve, this route needs at least one element"
    yield from needs.needs_dtype(problem.dtype, *needs.HALF_AND_SINGLE)
    yield from needs.needs_half_or_single(weight=problem.weight_dtype, bias=problem.bias_dtype)


def refuses_on_gpu(problem: CausalConv1d, device: Device) -> Iterator[str]:
    yield from needs.needs_triton(device)
    yield from refuses_anywhere(problem)
    if problem.width > WIDEST:
        yield f"width {problem.width}, this route needs at most {WIDEST}"
    if problem.length > LONGEST:
        yield f"length {problem.length}, this route needs at most {LONGEST}"


def needs_layout(problem: CausalConv1d, layout: str) -> Iterator[str]:
    if problem.layout != layout:
        yield f"a {problem.layout} x with strides {list(problem.strides)}, this route needs it {layout}"


def refuses_channel_first(problem: CausalConv1d, device: Device) -> Iterator[str]:
    yield from refuses_on_gpu(problem, device)
    yield from needs_layout(problem, "channel-first")


def refuses_channel_last(problem: CausalConv1d, device: Device) -> Iterator[str]:
    yield from refuses_on_gpu(problem, device)
    yield from needs_layout(problem, "channel-last")


def refuses_cpu_rows(problem: CausalConv1d, device: Device) -> Iterator[str]:
    yield from needs.needs_numba(device)
    yield from refuses_anywhere(problem)


def refuses_cpu_cols(problem: CausalConv1d, device: Device) -> Iterator[str]:
    yield from needs.needs_numba(device)
    yield from refuses_anywhere(problem)
    yield from needs_layout(problem, "channel-last")


# Costs, in seconds: bytes at a share of the bandwidth. GPU shares are what the probes of this kernel reached
# on an H200, CPU times were measured on two cores (see NOTES.md).


def launches_of(problem: CausalConv1d) -> int:
    """The main kernel, one that numbers packed sequences, one for states."""
    return (
        1
        + (problem.sequences > 0)
        + ((problem.initial_states or problem.return_final_states) and problem.width > 1)
    )


def gpu_cost(layout: str) -> Callable[[CausalConv1d, Device], float | None]:
    def seconds(problem: CausalConv1d, device: Device) -> float | None:
        moving = device.seconds(work(problem).bytes)
        if moving is None or device.type != "cuda":
            return None
        fitted = device.fitted("causal_conv1d.kernels")
        return max(fitted.host * launches_of(problem), fitted.start + moving / getattr(fitted, layout))

    return seconds


def cpu_cost(problem: CausalConv1d, device: Device) -> float | None:
    if device.type != "cpu":
        return None
    fitted = device.fitted("causal_conv1d.kernels")
    per_element = fitted.element_tap * problem.width + (
        fitted.element_silu if problem.activation else fitted.element
    )
    per_element += fitted.element_packed if problem.seq_idx else 0
    return fitted.start + problem.elements * per_element / device.cores


def cpu_rows_cost(problem: CausalConv1d, device: Device) -> float | None:
    """One element at a time where positions are not side by side."""
    seconds = cpu_cost(problem, device)
    if seconds is None or problem.layout == "channel-first":
        return seconds
    fitted = device.fitted("causal_conv1d.kernels")
    return seconds * (fitted.rows_strided if problem.layout == "strided" else fitted.rows_channel_last)


# Configurations, best guess first


def vector_if_aligned(problem: CausalConv1d, along: int) -> int:
    """The vector that the kernel will have if the tensors start at a multiple of 16 bytes."""
    sizes = (problem.batch, problem.dim, problem.length)
    numbers = [
        sizes[along],
        *(stride for axis, stride in enumerate(problem.strides) if axis != along and sizes[axis] > 1),
    ]
    vector = launches.VECTOR_BYTES // problem.dtype.itemsize
    while vector > 1 and any(n % vector for n in numbers):
        vector //= 2
    return vector


def rows_tiles(problem: CausalConv1d, vector: int, most: int) -> list[Config]:
    """Long rows take a program several times; short rows share one."""
    # At least two vectors: Triton 3.7 cannot analyse a tile one element wide.
    across = min(most, power_of_two(max(2, ceil_div(problem.length, vector))))
    if across > 256:
        return [{"channels": 1, "vectors": 256, "warps": 4}, {"channels": 1, "vectors": across, "warps": 8}]
    if across == 256:
        return [{"channels": 1, "vectors": 256, "warps": 4}, {"channels": 1, "vectors": 256, "warps": 2}]
    tall = power_of_two(problem.dim)
    return [
        {"channels": max(1, min(tall, lanes // across)), "vectors": across, "warps": 4}
        for lanes in (256, 512)
    ]


def channel_first_configs(problem: CausalConv1d, device: Device) -> list[Config]:
    return rows_tiles(problem, vector_if_aligned(problem, 2), 512)


def strided_configs(problem: CausalConv1d, device: Device) -> list[Config]:
    return rows_tiles(problem, 1, 512)


def cols_shape(problem: CausalConv1d) -> tuple[int, int]:
    """Channels and groups of rows of one program: 1024 lanes, a vector of 8 for each of 128 threads."""
    channels = min(256, power_of_two(problem.dim))
    return channels, min(32, 1024 // channels)


def channel_last_configs(problem: CausalConv1d, device: Device) -> list[Config]:
    channels, groups = cols_shape(problem)
    return [
        {"groups": groups, "rows": rows, "steps": 1, "channels": channels, "warps": 4} for rows in (16, 12, 8)
    ]


# Routes on a GPU


def with_states(
    main: Callable[..., Launch],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
    initial_states: Tensor | None,
    return_final_states: bool,
    **config: int,
) -> LaunchPlan:
    """The main kernel, `launches.rows` or `launches.cols`, then what happens at the ends of sequences."""
    y, silu = empty_dense(x, channel_last(x)), activation == "silu"
    bias = None if bias is None else bias.contiguous()
    seg, fill = launches.segments(seq_idx, cu_seqlens, x.shape[2])
    every = [*fill, main(x, weight, bias, seg, y, silu, **config)]
    final = x.new_empty(0)
    if return_final_states:
        sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        final = x.new_empty(sequences, x.shape[1], weight.shape[1] - 1)
    if (initial_states is not None or return_final_states) and weight.shape[1] > 1:
        own = None if cu_seqlens is not None else seg
        left = final if return_final_states else None
        every.append(launches.edges(x, weight, bias, own, cu_seqlens, initial_states, y, left, silu))
    return LaunchPlan(tuple(every), (y, final), (Workspace(seg),) if seg is not None and fill else ())


# The rows kernel takes any strides too, one element at a time.
ALONG_ROWS = [f"turnout.ops.causal_conv1d.kernels:{name}" for name in ("rows", "edges", "segments")]
DOWN_COLUMNS = [f"turnout.ops.causal_conv1d.kernels:{name}" for name in ("cols", "edges", "segments")]
PLANNED: Any = {"prepare": prepare_from_plan, "numerics": "close", "version": 1}
along_rows = runs_plan(
    configured(functools.partial(with_states, launches.rows), {"channels": 1, "vectors": 256, "warps": 4})
)
down_columns = runs_plan(
    configured(
        functools.partial(with_states, launches.cols),
        {"groups": 4, "rows": 8, "steps": 1, "channels": 256, "warps": 4},
    )
)

CAUSAL_CONV1D.route(
    "channel-first",
    refuses=refuses_channel_first,
    cost=gpu_cost("channel_first"),
    configs=channel_first_configs,
    kernels=ALONG_ROWS,
    **PLANNED,
)(along_rows)
CAUSAL_CONV1D.route(
    "strided",
    refuses=refuses_on_gpu,
    cost=gpu_cost("strided"),
    configs=strided_configs,
    kernels=ALONG_ROWS,
    **PLANNED,
)(along_rows)
CAUSAL_CONV1D.route(
    "channel-last",
    refuses=refuses_channel_last,
    cost=gpu_cost("channel_last"),
    configs=channel_last_configs,
    kernels=DOWN_COLUMNS,
    **PLANNED,
)(down_columns)


# Routes on a CPU


def on_cpu(
    columns: bool,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
    initial_states: Tensor | None,
    return_final_states: bool,
) -> tuple[Tensor, Tensor]:
    """Sequences are rows of their own here, packed or not: where each starts in x and in y, and how long it
    is.
    """
    import numpy as np

    from turnout.ops.threads import import_uninterrupted, in_shares

    import_uninterrupted("turnout.ops.causal_conv1d.cpu_kernels")
    from turnout.ops.causal_conv1d import cpu_kernels

    (batch, dim, length), width = x.shape, weight.shape[1]
    x, y = x.detach(), empty_dense(x, channel_last(x))
    if cu_seqlens is None:
        batches, starts, sizes = np.arange(batch), np.zeros(batch, np.int64), np.full(batch, length)
    else:
        ends = np.maximum.accumulate(array(cu_seqlens).astype(np.int64).clip(0, length))
        ends[0], ends[-1] = 0, length  # unchecked ends, as in a traced graph, must still fill all of y
        batches, starts, sizes = np.zeros(ends.size - 1, np.int64), ends[:-1], ends[1:] - ends[:-1]
    x_at, y_at = (batches * t.stride(0) + starts * t.stride(2) for t in (x, y))
    source, into = flat(x), flat(y)
    taps = weight.detach().to(torch.float32)
    shift = np.zeros(dim, np.float32) if bias is None else array(bias.to(torch.float32).contiguous())
    marks = np.empty(0, np.int64) if seq_idx is None else array(seq_idx.to(torch.int64).contiguous().view(-1))
    states = source[:0] if initial_states is None else flat(initial_states.detach().contiguous())
    has = (activation == "silu", seq_idx is not None, initial_states is not None)
    if columns:
        blocks = cpu_kernels.blocks_of(sizes)
        taps = array(taps.t().contiguous())
        block = (x.stride(2), taps, shift, marks, states, into, y_at, sizes, blocks, length, *has)
        in_shares(functools.partial(cpu_kernels.cols, source, x_at, *block), blocks.shape[0])
    else:
        taps = array(taps.contiguous())
        row = (
            x.stride(1),
            x.stride(2),
            taps,
            shift,
            marks,
            states,
            into,
            y_at,
            y.stride(1),
            y.stride(2),
            sizes,
            length,
            *has,
        )
        in_shares(functools.partial(cpu_kernels.rows, source, x_at, *row), sizes.size * dim)
    final = x.new_empty(0)
    if return_final_states:
        final = x.new_empty(sizes.size, dim, width - 1)
        if width > 1:
            tail = (x.stride(1), x.stride(2), marks, states, flat(final), sizes, dim, width - 1, length)
            cpu_kernels.finals(source, x_at, *tail, *has[1:])
    return y, final


ON_CPU: Any = {
    "numerics": "close",
    "version": 1,
    "kernels": [f"turnout.ops.causal_conv1d.cpu_kernels:{name}" for name in ("rows", "cols", "finals")],
}
CAUSAL_CONV1D.route("cpu-rows", refuses=refuses_cpu_rows, cost=cpu_rows_cost, **ON_CPU)(
    functools.partial(on_cpu, False)
)
CAUSAL_CONV1D.route("cpu-cols", refuses=refuses_cpu_cols, cost=cpu_cost, **ON_CPU)(
    functools.partial(on_cpu, True)
)

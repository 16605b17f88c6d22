"""The routes of causal_conv1d_backward: one kernel a layout, which leaves sums for dweight and dbias, and one
that adds these up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from turnout.launch import start
from turnout.ops.causal_conv1d import channel_last
from turnout.ops.causal_conv1d import routes as forward
from turnout.ops.causal_conv1d.launches import empty_dense, segments, strides, vector_of
from turnout.ops.causal_conv1d_backward import CAUSAL_CONV1D_BACKWARD, CausalConv1dBackward, work
from turnout.ops.integers import ceil_div
from turnout.routing.configured import configured
from turnout.routing.device import Device
from turnout.routing.route import Config

# Guards


def refuses_channel_first(problem: CausalConv1dBackward, device: Device) -> Iterator[str]:
    yield from forward.refuses_channel_first(problem.call, device)


def refuses_channel_last(problem: CausalConv1dBackward, device: Device) -> Iterator[str]:
    yield from forward.refuses_channel_last(problem.call, device)


def refuses_strided(problem: CausalConv1dBackward, device: Device) -> Iterator[str]:
    yield from forward.refuses_on_gpu(problem.call, device)


# Costs


def gpu_cost(layout: str) -> Any:
    def seconds(problem: CausalConv1dBackward, device: Device) -> float | None:
        moving = device.seconds(work(problem).bytes)
        if moving is None or device.type != "cuda":
            return None
        fitted = device.fitted("causal_conv1d_backward.kernels")
        return max(
            fitted.host * (1 + forward.launches_of(problem.call)),
            fitted.start + moving / getattr(fitted, layout),
        )

    return seconds


# Configurations, best guess first


def rows_configs(problem: CausalConv1dBackward, device: Device) -> list[Config]:
    return forward.rows_tiles(problem.call, forward.vector_if_aligned(problem.call, 2), 256)


def strided_configs(problem: CausalConv1dBackward, device: Device) -> list[Config]:
    return forward.rows_tiles(problem.call, 1, 256)


def cols_configs(problem: CausalConv1dBackward, device: Device) -> list[Config]:
    """A group walks width - 1 rows further than it owns, so it walks long where there are rows enough to fill
    the card.
    """
    channels, groups = forward.cols_shape(problem.call)
    channels = min(128, channels)
    rows = ceil_div(problem.call.length, groups)
    walks = [steps for steps in (16, 8, 4) if 4 * steps <= max(rows, 16)]
    return [
        {"groups": groups, "rows": 4, "steps": steps, "channels": channels, "warps": 4} for steps in walks
    ]


# Running


class Call(NamedTuple):
    """The arguments, and what every launch of one backward shares."""

    grad: Tensor
    grad_final: Tensor | None
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    silu: bool
    seq_idx: Tensor | None
    cu_seqlens: Tensor | None
    initial: Tensor | None
    seg: Tensor | None
    dx: Tensor

    @staticmethod
    def of(
        grad: Tensor,
        grad_final: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str | None,
        seq_idx: Tensor | None,
        cu_seqlens: Tensor | None,
        initial_states: Tensor | None,
        return_final_states: bool,
    ) -> Call:
        last, ends = channel_last(x), weight.shape[1] > 1
        if last and grad.stride(1) != 1:
            grad = grad.transpose(1, 2).contiguous().transpose(1, 2)
        seg, fill = segments(seq_idx, cu_seqlens, x.shape[2])
        for launch in fill:
            start(launch)
        return Call(
            grad,
            grad_final if return_final_states and ends else None,
            x,
            weight,
            None if bias is None else bias.contiguous(),
            activation == "silu",
            None if seq_idx is None else seg,
            cu_seqlens,
            initial_states if ends else None,
            seg,
            empty_dense(x, last),
        )

    @property
    def sequences(self) -> int:
        return self.x.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def heads(self) -> int:
        """Which first outputs see initial states: none, those of batch rows or those of packed sequences."""
        return 0 if self.initial is None else 1 if self.cu_seqlens is None else 2

    def parts(self, tiles: int) -> Tensor:
        """Room for the sums of every program and, after them, of every sequence whose head is left to
        `edges_back`.
        """
        count = self.x.shape[0] * tiles + (self.sequences if self.heads else 0)
        return torch.empty(
            count, self.weight.shape[1] + 1, self.x.shape[1], dtype=torch.float32, device=self.x.device
        )

    @property
    def flags(self) -> dict[str, Any]:
        return {
            "BIAS": self.bias is not None,
            "SILU": self.silu,
            "SEG": self.seg is not None,
            "HEADS": self.heads,
        }


def finish(
    call: Call, part: Tensor, main: int, initial_states: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """After the main kernel, which left `main` sums: the ends of sequences, then the sums of sums."""
    from turnout.launch import launch
    from turnout.ops.causal_conv1d_backward.kernels import edges_back, fold

    x, weight, bias = call.x, call.weight, call.bias
    (_, dim, length), width = x.shape, weight.shape[1]
    dinitial = (
        x.new_empty(0)
        if initial_states is None
        else torch.empty(initial_states.shape, dtype=x.dtype, device=x.device)
    )
    if call.initial is not None or call.grad_final is not None:
        left = dinitial if call.initial is not None else None
        tensors = (
            x,
            weight,
            bias,
            call.seq_idx,
            call.cu_seqlens,
            call.initial,
            call.grad,
            call.grad_final,
            call.dx,
            left,
            part[main:],
        )
        numbers = (
            dim,
            length,
            *x.stride(),
            *weight.stride(),
            *strides(call.initial),
            *call.grad.stride(),
            *strides(call.grad_final),
            *call.dx.stride(),
            *strides(left),
        )
        constants = {
            "W": width,
            "BD": 128,
            "BIAS": bias is not None,
            "SILU": call.silu,
            "SEG": call.seq_idx is not None,
            "PACKED": call.cu_seqlens is not None,
            "INIT": call.initial is not None,
            "FINAL": call.grad_final is not None,
        }
        launch(edges_back, call.sequences * ceil_div(dim, 128), tensors, numbers, constants, warps=4)
    dweight = torch.empty(dim, width, dtype=weight.dtype, device=x.device)
    dbias = x.new_empty(0) if bias is None else torch.empty(dim, dtype=bias.dtype, device=x.device)
    constants = {"W": width, "BN": 16, "BM": 64, "BIAS": bias is not None}
    tensors = (part, dweight, None if bias is None else dbias)
    launch(fold, ceil_div((width + 1) * dim, 64), tensors, (part.shape[0], dim), constants, warps=4)
    return call.dx, dweight, dbias, dinitial


ENDS = [f"turnout.ops.causal_conv1d_backward.kernels:{name}" for name in ("edges_back", "fold")]
ENDS += ["turnout.ops.causal_conv1d.kernels:segments"]
ALONG_ROWS = ["turnout.ops.causal_conv1d_backward.kernels:rows_back", *ENDS]
DOWN_COLUMNS = ["turnout.ops.causal_conv1d_backward.kernels:cols_back", *ENDS]


class MainKernel(NamedTuple):
    """The launch that leaves sums for `tiles` tiles of every batch row."""

    kernel: Any
    tiles: int
    programs: int
    numbers: tuple[int, ...]
    constants: dict[str, Any]


def rows_kernel(call: Call, channels: int, vectors: int) -> MainKernel:
    from turnout.ops.causal_conv1d_backward.kernels import rows_back

    (batch, dim, length), weight = call.x.shape, call.weight
    vector = vector_of(2, call.seg, call.x, call.grad, call.dx)
    tiles = ceil_div(length, vectors * vector)
    pairs = (*call.x.stride(), *weight.stride(), *call.grad.stride(), *call.dx.stride())
    constants = {"W": weight.shape[1], "V": vector, "BR": channels, "BV": vectors, **call.flags}
    programs = batch * tiles * ceil_div(dim, channels)
    return MainKernel(rows_back, tiles, programs, (dim, length, *pairs), constants)


def cols_kernel(call: Call, groups: int, rows: int, steps: int, channels: int) -> MainKernel:
    from turnout.ops.causal_conv1d_backward.kernels import cols_back

    x, (batch, dim, length), width = call.x, call.x.shape, call.weight.shape[1]
    steps = max(steps, ceil_div(width, rows))  # a walk must own at least one row
    tiles = ceil_div(length, groups * (rows * steps - (width - 1)))
    pairs = (n for t in (call.grad, call.dx) for n in (t.stride(0), t.stride(2)))
    numbers = (dim, length, x.stride(0), x.stride(2), *call.weight.stride(), *pairs)
    constants = {
        "W": width,
        "V": vector_of(1, None, x, call.grad, call.dx),
        "G": groups,
        "T": rows,
        "STEPS": steps,
        "BD": channels,
        **call.flags,
    }
    return MainKernel(cols_back, tiles, batch * tiles * ceil_div(dim, channels), numbers, constants)


def backward(
    main: Callable[..., MainKernel],
    grad: Tensor,
    grad_final: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
    initial_states: Tensor | None,
    return_final_states: bool,
    *,
    warps: int,
    **config: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The main kernel, `rows_kernel` or `cols_kernel`, then the rest."""
    from turnout.launch import launch

    packing = (seq_idx, cu_seqlens, initial_states)
    call = Call.of(grad, grad_final, x, weight, bias, activation, *packing, return_final_states)
    kernel, tiles, programs, numbers, constants = main(call, **config)
    part = call.parts(tiles)
    tensors = (x, weight, call.bias, call.seg, call.grad, call.dx, part)
    launch(kernel, programs, tensors, numbers, constants, warps=warps)
    return finish(call, part, x.shape[0] * tiles, initial_states)


CLOSE: Any = {"numerics": "close", "version": 1}
along_rows = configured(functools.partial(backward, rows_kernel), {"channels": 1, "vectors": 256, "warps": 4})
down_columns = configured(
    functools.partial(backward, cols_kernel),
    {"groups": 4, "rows": 4, "steps": 16, "channels": 128, "warps": 4},
)

CAUSAL_CONV1D_BACKWARD.route(
    "channel-first",
    refuses=refuses_channel_first,
    cost=gpu_cost("channel_first"),
    configs=rows_configs,
    kernels=ALONG_ROWS,
    **CLOSE,
)(along_rows)
CAUSAL_CONV1D_BACKWARD.route(
    "strided",
    refuses=refuses_strided,
    cost=gpu_cost("strided"),
    configs=strided_configs,
    kernels=ALONG_ROWS,
    **CLOSE,
)(along_rows)
CAUSAL_CONV1D_BACKWARD.route(
    "channel-last",
    refuses=refuses_channel_last,
    cost=gpu_cost("channel_last"),
    configs=cols_configs,
    kernels=DOWN_COLUMNS,
    **CLOSE,
)(down_columns)

"""The routes of matmul: products that are one long sum per batch element.

Anything else is torch's own matrix product.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from turnout.launch import LaunchPlan, runs_plan
from turnout.ops import needs
from turnout.ops.dot import DOT
from turnout.ops.dot.contraction import (
    CPU_CHUNKS,
    SINGLE_LAUNCH,
    TWO_STAGE,
    Contraction,
    plan_sums,
    refuses_all_but_sums,
    sum_on_cpu,
)
from turnout.ops.matmul import MATMUL, Matmul
from turnout.routing.device import Device

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
_DTYPES += (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


def needs_one_dot(problem: Matmul, device: Device) -> Iterator[str]:
    yield from refuses_all_but_sums(problem)
    sums = problem.contraction()
    if isinstance(sums, Contraction) and sums.batch > 1:
        yield f"{sums.batch} sums, this route needs one"
    # With gaps torch's dot adds one product after the other. Its matmul may add in blocks: 0.36 to 1 times
    # that error.
    gaps = isinstance(sums, Contraction) and sums.length > 1 and (sums.a_stride, sums.b_stride) != (1, 1)
    if isinstance(sums, Contraction) and gaps and problem.a_dtype is torch.float32:
        yield f"float32 with strides {sums.a_stride} and {sums.b_stride}, this route needs both to be 1"
    if device.type != "cpu":
        yield f"device {device.name}, this route needs a CPU"
    yield from needs.needs_dtype(problem.a_dtype, *_DTYPES)


def as_dot_cost(problem: Matmul, device: Device) -> float | None:
    seconds = DOT.cost(problem, device)
    return None if seconds is None else seconds + device.fitted("matmul.as-dot").host


@MATMUL.route("as-dot", refuses=needs_one_dot, cost=as_dot_cost, numerics="close", version=1)
def as_dot(a: Tensor, b: Tensor) -> Tensor:
    sums = MATMUL.problem(a, b).contraction()
    y = torch.dot(
        a.as_strided((sums.length,), (sums.a_stride,)), b.as_strided((sums.length,), (sums.b_stride,))
    )
    return y.resize_(sums.output)  # no view, as `reshape` would give


@MATMUL.route("single-launch", **SINGLE_LAUNCH)
@runs_plan
def single_launch(a: Tensor, b: Tensor, *, block: int = 8192, warps: int = 16) -> LaunchPlan:
    return plan_sums(MATMUL.problem(a, b), a, b, block, warps)


@MATMUL.route("two-stage", **TWO_STAGE)
@runs_plan
def two_stage(a: Tensor, b: Tensor, *, block: int = 2048, warps: int = 4, waves: int = 8) -> LaunchPlan:
    return plan_sums(MATMUL.problem(a, b), a, b, block, warps, waves)


@MATMUL.route("cpu-chunks", **CPU_CHUNKS)
def cpu_chunks(a: Tensor, b: Tensor) -> Tensor:
    return sum_on_cpu(a, b, MATMUL.problem(a, b))

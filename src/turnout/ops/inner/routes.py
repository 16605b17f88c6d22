"""The routes of inner: all of them are for one sum."""

from __future__ import annotations

from torch import Tensor

from turnout.launch import LaunchPlan, runs_plan
from turnout.ops.dot.contraction import CPU_CHUNKS, SINGLE_LAUNCH, TWO_STAGE, plan_sums, sum_on_cpu
from turnout.ops.inner import INNER


@INNER.route("single-launch", **SINGLE_LAUNCH)
@runs_plan
def single_launch(a: Tensor, b: Tensor, *, block: int = 8192, warps: int = 16) -> LaunchPlan:
    return plan_sums(INNER.problem(a, b), a, b, block, warps)


@INNER.route("two-stage", **TWO_STAGE)
@runs_plan
def two_stage(a: Tensor, b: Tensor, *, block: int = 2048, warps: int = 4, waves: int = 8) -> LaunchPlan:
    return plan_sums(INNER.problem(a, b), a, b, block, warps, waves)


@INNER.route("cpu-chunks", **CPU_CHUNKS)
def cpu_chunks(a: Tensor, b: Tensor) -> Tensor:
    return sum_on_cpu(a, b, INNER.problem(a, b))

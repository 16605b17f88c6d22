"""The routes of dot."""

from __future__ import annotations

from torch import Tensor

from turnout.launch import LaunchPlan, runs_plan
from turnout.ops.dot import DOT
from turnout.ops.dot.contraction import CPU_CHUNKS, SINGLE_LAUNCH, TWO_STAGE, plan_sums, sum_on_cpu


@DOT.route("single-launch", **SINGLE_LAUNCH)
@runs_plan
def single_launch(a: Tensor, b: Tensor, *, block: int = 8192, warps: int = 16) -> LaunchPlan:
    return plan_sums(DOT.problem(a, b), a, b, block, warps)


@DOT.route("two-stage", **TWO_STAGE)
@runs_plan
def two_stage(a: Tensor, b: Tensor, *, block: int = 2048, warps: int = 4, waves: int = 8) -> LaunchPlan:
    return plan_sums(DOT.problem(a, b), a, b, block, warps, waves)


@DOT.route("cpu-chunks", **CPU_CHUNKS)
def cpu_chunks(a: Tensor, b: Tensor) -> Tensor:
    return sum_on_cpu(a, b, DOT.problem(a, b))

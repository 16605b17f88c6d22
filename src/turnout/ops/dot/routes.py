"""The tracks of dot."""

from __future__ import annotations

from torch import Tensor

from turnout.ops.dot import DOT
from turnout.ops.dot.contraction import CPU_CHUNKS, SINGLE_LAUNCH, TWO_STAGE, sum_on_cpu, sum_on_gpu


@DOT.route("single-launch", **SINGLE_LAUNCH)
def single_launch(a: Tensor, b: Tensor, *, block: int = 8192, warps: int = 16) -> Tensor:
    return sum_on_gpu(a, b, DOT.problem(a, b), block=block, warps=warps)


@DOT.route("two-stage", **TWO_STAGE)
def two_stage(a: Tensor, b: Tensor, *, block: int = 2048, warps: int = 4, waves: int = 8) -> Tensor:
    return sum_on_gpu(a, b, DOT.problem(a, b), block=block, warps=warps, waves=waves)


@DOT.route("cpu-chunks", **CPU_CHUNKS)
def cpu_chunks(a: Tensor, b: Tensor) -> Tensor:
    return sum_on_cpu(a, b, DOT.problem(a, b))

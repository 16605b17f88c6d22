"""The tracks of dot."""

from __future__ import annotations

import functools

from torch import Tensor

from turnout.ops.dot import DOT
from turnout.ops.dot.contraction import CPU_CHUNKS, SINGLE_LAUNCH, TWO_STAGE, bound, sum_on_cpu, sums_on_gpu


@DOT.route("single-launch", **SINGLE_LAUNCH, bound=functools.partial(bound, DOT))
def single_launch(a: Tensor, b: Tensor, *, block: int = 8192, warps: int = 16) -> Tensor:
    return sums_on_gpu(DOT.problem(a, b), a.device, block, warps)(a, b)


@DOT.route("two-stage", **TWO_STAGE, bound=functools.partial(bound, DOT))
def two_stage(a: Tensor, b: Tensor, *, block: int = 2048, warps: int = 4, waves: int = 8) -> Tensor:
    return sums_on_gpu(DOT.problem(a, b), a.device, block, warps, waves)(a, b)


@DOT.route("cpu-chunks", **CPU_CHUNKS)
def cpu_chunks(a: Tensor, b: Tensor) -> Tensor:
    return sum_on_cpu(a, b, DOT.problem(a, b))

"""What dot, inner and matmul share when each output is one long sum: the shape of that sum, its guards, its costs, its launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from turnout.ops import needs
from turnout.routing.device import Device
from turnout.routing.op import Work

GPU_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.complex64)
CPU_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Contraction(NamedTuple):
    """`batch` sums of `length` products each. Strides count elements: along the sum, and from one sum to the next."""

    length: int
    batch: int
    a_stride: int
    b_stride: int
    a_batch_stride: int
    b_batch_stride: int
    output: tuple[int, ...]


def family(problem: Any) -> tuple[Any, int]:
    """Problems that differ in the length of the sum only, and that length."""
    sums = problem.contraction()
    if isinstance(sums, str):
        return (problem, 0)
    dense = all(stride in (0, sums.length) for stride in (sums.a_batch_stride, sums.b_batch_stride))
    batch_strides = () if dense else (sums.a_batch_stride, sums.b_batch_stride)
    return ((sums.output, sums.a_stride, sums.b_stride, batch_strides, problem.a_dtype, problem.b_dtype), sums.length)


# Guards


def refuses_all_but_sums(problem: Any) -> Iterator[str]:
    sums = problem.contraction()
    if isinstance(sums, str):
        yield sums
    elif sums.length == 0 or sums.batch == 0:
        yield "nothing to sum, this route needs at least one product"
    if problem.a_dtype != problem.b_dtype:
        yield f"dtypes {problem.a_dtype} and {problem.b_dtype}, this route needs one dtype".replace("torch.", "")


def refuses_on_gpu(problem: Any, device: Device) -> Iterator[str]:
    yield from refuses_all_but_sums(problem)
    yield from needs.needs_triton(device)
    yield from needs.needs_dtype(problem.a_dtype, *GPU_DTYPES)


def refuses_on_cpu(problem: Any, device: Device) -> Iterator[str]:
    yield from refuses_all_but_sums(problem)
    yield from needs.needs_numba(device)
    yield from needs.needs_dtype(problem.a_dtype, *CPU_DTYPES)
    sums = problem.contraction()
    if isinstance(sums, Contraction):
        if sums.batch > 1:
            yield f"{sums.batch} sums, this route needs one"
        if sums.length > 1 and (sums.a_stride != 1 or sums.b_stride != 1):
            yield f"strides {sums.a_stride} and {sums.b_stride}, this route needs 1"


# Costs, in seconds. Host times and shares of the bandwidth: measured with `turnout bench`, H200 with torch 2.11, and a 2-core CPU.


def work(problem: Any) -> Work:
    """Both operands read once; one multiplication and one addition a product, four of each for complex numbers."""
    elements = prod(problem.a) + prod(problem.b)
    return Work(elements * problem.a_dtype.itemsize, elements * (4 if problem.a_dtype.is_complex else 1))


class Rate(NamedTuple):
    """A time is the longer of `host` and of `start` plus the reading at a share of the bandwidth, by dtype."""

    host: float
    start: float
    share: Mapping[torch.dtype, float] = {}
    otherwise: float = 0.8


def cost(**rates: Rate) -> Callable[[Any, Device], float | None]:
    """A cost from one rate for each type of device."""

    def seconds(problem: Any, device: Device) -> float | None:
        reading, rate = device.seconds(work(problem).bytes), rates.get(device.type)
        if reading is None or rate is None:
            return None
        return max(rate.host, rate.start + reading / rate.share.get(problem.a_dtype, rate.otherwise))

    return seconds


def single_launch_cost(problem: Any, device: Device) -> float | None:
    """One multiprocessor reads 75 GB/s at the most, so a few long sums leave most of the card idle."""
    reading = device.seconds(work(problem).bytes)
    if reading is None:
        return None
    alone = work(problem).bytes / (75e9 * min(problem.contraction().batch, device.units))
    return max(11e-6, 3.5e-6 + max(alone, reading / 0.87))


# The three routes that dot, inner and matmul have in common. Configurations come best guess first; `tune` tries them all.


def single_launch_configs(problem: Any, device: Device) -> list[dict[str, int]]:
    if problem.a_dtype.is_complex:
        return [{"block": 2048, "warps": 8}, {"block": 1024, "warps": 4}]
    return [{"block": 8192, "warps": 16}, {"block": 1024, "warps": 4}]


def two_stage_configs(problem: Any, device: Device) -> list[dict[str, int]]:
    if problem.a_dtype.is_complex:
        return [{"block": 1024, "warps": 4, "waves": 4}, {"block": 512, "warps": 4, "waves": 8}]
    return [{"block": 2048, "warps": 4, "waves": 8}, {"block": 8192, "warps": 16, "waves": 8}, {"block": 4096, "warps": 8, "waves": 16}]


SINGLE_LAUNCH: Any = {
    "refuses": refuses_on_gpu, "cost": single_launch_cost, "configs": single_launch_configs, "numerics": "close", "version": 1,
}  # fmt: skip
TWO_STAGE: Any = {
    "refuses": refuses_on_gpu, "cost": cost(cuda=Rate(host=20e-6, start=5e-6, otherwise=0.87)),
    "configs": two_stage_configs, "numerics": "close", "version": 1,
}  # fmt: skip
CPU_CHUNKS: Any = {
    "refuses": refuses_on_cpu, "numerics": "close", "version": 1,
    "cost": cost(cpu=Rate(host=40e-6, start=40e-6, share={torch.bfloat16: 0.5, torch.float16: 0.35}, otherwise=0.6)),
}  # fmt: skip


# Running


def sum_in_one_launch(a: Tensor, b: Tensor, sums: Contraction, *, block: int, warps: int) -> Tensor:
    """Each sum is the work of one program."""
    out = torch.empty(sums.output, dtype=a.dtype, device=a.device)
    _sum_chunkwise(a, b, out, out, sums, 1, block, warps, overlap=False)
    return out


def sum_in_two_stages(a: Tensor, b: Tensor, sums: Contraction, *, block: int, warps: int, waves: int) -> Tensor:
    """Each sum is the work of as many programs as fill the card `waves` times; a second kernel adds up what they found. From Hopper on
    the second takes its place on the card before the first has ended (`overlap`)."""
    from turnout.ops.dot.kernels import sum_chunks
    from turnout.ops.launching import launch

    device = Device.of(a.device)
    overlap = (device.capability or (0, 0)) >= (9, 0) and torch.version.hip is None
    chunks = max(1, min(device.units * waves // sums.batch, sums.length // block))
    out = torch.empty(sums.output, dtype=a.dtype, device=a.device)
    real = torch.view_as_real(out) if out.is_complex() else out
    partial = torch.empty(sums.batch * chunks * (2 if out.is_complex() else 1), dtype=torch.float32, device=a.device)
    _sum_chunkwise(a, b, partial, out, sums, chunks, block, warps, overlap)
    constants = {"BLOCK": 1 << (chunks - 1).bit_length(), "COMPLEX": out.is_complex(), "OVERLAP": overlap}
    options = {"launch_pdl": True} if overlap else {}
    launch(sum_chunks, sums.batch, (partial, real), (chunks,), constants, warps=4, **options)
    return out


def _sum_chunkwise(a, b, into, out, sums, chunks, block, warps, overlap) -> None:
    from turnout.ops.dot.kernels import dot_chunks
    from turnout.ops.launching import launch

    strides = (sums.a_stride, sums.b_stride, sums.a_batch_stride, sums.b_batch_stride)
    if out.is_complex():
        a, b, strides = torch.view_as_real(a), torch.view_as_real(b), tuple(2 * stride for stride in strides)
        into = torch.view_as_real(into) if into.is_complex() else into
    constants = {"BLOCK": block, "COMPLEX": out.is_complex(), "OVERLAP": overlap}
    launch(dot_chunks, sums.batch * chunks, (a, b, into), (sums.length, chunks, *strides), constants, warps=warps)


def sum_on_cpu(a: Tensor, b: Tensor, sums: Contraction) -> Tensor:
    """Fixed chunks over torch's threads, added up in float64."""
    import numpy as np

    from turnout.ops.dot.cpu_kernels import CHUNK, sum_bfloat16, sum_float16, sum_float32
    from turnout.ops.threads import split

    kernel = {torch.float32: sum_float32, torch.bfloat16: sum_bfloat16, torch.float16: sum_float16}[a.dtype]
    x, y = (t.detach().as_strided((sums.length,), (1,)) for t in (a, b))
    if a.dtype is not torch.float32:
        x, y = x.view(torch.uint16), y.view(torch.uint16)
    xs, ys = x.numpy(), y.numpy()
    totals = np.empty(-(-sums.length // CHUNK))
    split(lambda first, last: kernel(xs, ys, first, last, totals), totals.size)
    return torch.tensor(totals.sum(), dtype=torch.float64).to(a.dtype).reshape(sums.output)

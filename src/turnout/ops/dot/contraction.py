"""What dot, inner and matmul share when each output is one long sum: the shape of that sum, its guards, its
costs, its launches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from turnout.launch import Launch, LaunchPlan, Workspace, prepare_from_plan
from turnout.ops import needs
from turnout.ops.layouts import array, contiguous_strides
from turnout.routing import torch_private
from turnout.routing.device import Device, is_planning
from turnout.routing.prepared import worked_out_once
from turnout.routing.route import Work

GPU_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.complex64)
CPU_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
COUNTERS = 4096  # of sums that are taken in parts, 4 bytes each
_MOST_ROOM = 16384  # for the parts, 8 bytes each: more than any card we know takes
_kept_room: dict[tuple[int, int], Tensor] = {}  # by device and stream


class Pair(NamedTuple):
    """Everything that may change the answer or the speed of a product of two tensors."""

    a: tuple[int, ...]
    b: tuple[int, ...]
    a_strides: tuple[int, ...]
    b_strides: tuple[int, ...]
    a_dtype: torch.dtype
    b_dtype: torch.dtype

    @classmethod
    def of(cls, a: Tensor, b: Tensor) -> Pair:
        return cls(a.shape, b.shape, a.stride(), b.stride(), a.dtype, b.dtype)


class Contraction(NamedTuple):
    """`batch` sums of `length` products each.

    Strides count elements: along the sum, and from one sum to the next.
    """

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
    return (
        (sums.output, sums.a_stride, sums.b_stride, batch_strides, problem.a_dtype, problem.b_dtype),
        sums.length,
    )


# Guards


def refuses_all_but_sums(problem: Any) -> Iterator[str]:
    sums = problem.contraction()
    if isinstance(sums, str):
        yield sums
    elif sums.length == 0 or sums.batch == 0:
        yield "nothing to sum, this route needs at least one product"
    if problem.a_dtype != problem.b_dtype:
        yield f"dtypes {problem.a_dtype} and {problem.b_dtype}, this route needs one dtype".replace(
            "torch.", ""
        )


def refuses_on_gpu(problem: Any, device: Device) -> Iterator[str]:
    yield from refuses_all_but_sums(problem)
    yield from needs.needs_triton(device)
    yield from needs.needs_dtype(problem.a_dtype, *GPU_DTYPES)


def refuses_on_cpu(problem: Any, device: Device) -> Iterator[str]:
    yield from refuses_all_but_sums(problem)
    yield from needs.needs_numba(device)
    yield from needs.needs_dtype(problem.a_dtype, *CPU_DTYPES)
    sums = problem.contraction()
    if isinstance(sums, Contraction) and sums.length > 1 and (sums.a_stride, sums.b_stride) != (1, 1):
        yield f"strides {sums.a_stride} and {sums.b_stride}, this route needs 1"


# Costs, in seconds.


def work(problem: Any) -> Work:
    """Both operands read once; one multiplication and one addition a product, four of each for complex
    numbers.
    """
    elements = prod(problem.a) + prod(problem.b)
    return Work(elements * problem.a_dtype.itemsize, elements * (4 if problem.a_dtype.is_complex else 1))


def cost(section: str, *types: str) -> Callable[[Any, Device], float | None]:
    """A cost on devices of these types from fitted constants: the longer of `host` and of `start` plus the
    reading at a share of the bandwidth, by dtype."""

    def seconds(problem: Any, device: Device) -> float | None:
        reading = device.seconds(work(problem).bytes)
        if reading is None or device.type not in types:
            return None
        fitted, dtype = device.fitted(section), str(problem.a_dtype).removeprefix("torch.")
        return max(fitted.host, fitted.start + reading / fitted.get(f"share_{dtype}", fitted.share))

    return seconds


def single_launch_cost(problem: Any, device: Device) -> float | None:
    """One multiprocessor reads 30 to 55 GB/s, so a few long sums leave most of the card idle."""
    reading = device.seconds(work(problem).bytes)
    if reading is None or device.type != "cuda":
        return None
    fitted = device.fitted("dot.single-launch")
    rate = fitted.get(f"alone_of_{problem.a_dtype.itemsize}_bytes", fitted.alone)
    alone = work(problem).bytes / (rate * min(problem.contraction().batch, device.units))
    return max(fitted.host, fitted.start + max(alone, reading / fitted.share))


# The three routes that dot, inner and matmul have in common. Configurations come best guess first; `tune`
# tries them all.


def single_launch_configs(problem: Any, device: Device) -> list[dict[str, int]]:
    whole = max(128, 1 << (problem.contraction().length - 1).bit_length())
    large = min(whole, 2048 if problem.a_dtype.is_complex else 8192)
    blocks = [large, 1024] if large > 1024 else [large]
    return [
        {"block": block, "warps": max(1, block // (256 if problem.a_dtype.is_complex else 512))}
        for block in blocks
    ]


def two_stage_configs(problem: Any, device: Device) -> list[dict[str, int]]:
    if problem.a_dtype.is_complex:
        return [{"block": 1024, "warps": 4, "waves": 4}, {"block": 512, "warps": 4, "waves": 8}]
    return [
        {"block": 2048, "warps": 4, "waves": 8},
        {"block": 8192, "warps": 16, "waves": 8},
        {"block": 4096, "warps": 8, "waves": 16},
    ]


SINGLE_LAUNCH: Any = {
    "refuses": refuses_on_gpu,
    "cost": single_launch_cost,
    "configs": single_launch_configs,
    "prepare": prepare_from_plan,
    "numerics": "close",
    "version": 1,
    "kernels": ("turnout.ops.dot.kernels:dot_chunks",),
}
TWO_STAGE: Any = {
    "refuses": refuses_on_gpu,
    "cost": cost("dot.two-stage", "cuda"),
    "configs": two_stage_configs,
    "prepare": prepare_from_plan,
    "numerics": "close",
    "version": 1,
    "kernels": ("turnout.ops.dot.kernels:dot_chunks",),
}
CPU_CHUNKS: Any = {
    "refuses": refuses_on_cpu,
    "numerics": "close",
    "version": 1,
    "cost": cost("dot.cpu-chunks", "cpu"),
    "kernels": ["turnout.ops.dot.cpu_kernels:sum_chunks"],
}


# Running. Everything but the tensors' addresses follows from the problem and the configuration, so it is
# planned once.


def plan_sums(problem: Any, a: Tensor, b: Tensor, block: int, warps: int, waves: int = 0) -> LaunchPlan:
    """The launch that takes the sums of two tensors of this problem.

    Each sum is the work of one program, or with waves of as many as fill the card so many times; the last one
    to end then adds up what all have found.
    """
    from turnout.ops.dot.kernels import dot_chunks

    device = a.device
    sums = _sums_launch(problem, Device.of(device).units * waves, block)
    out = torch.empty_strided(sums.shape, sums.strides, dtype=a.dtype, device=device)
    make_room = functools.partial(counters_and_room, device, sums.room)
    room = Workspace(make_room(), make_room) if sums.constants["CHUNKS"] > 1 else None
    tensors = (a, b, out, out if room is None else room.tensor)
    real = tuple([torch.view_as_real(x) if x.is_complex() else x for x in tensors])
    launch = Launch(dot_chunks, sums.programs, real, sums.numbers, sums.constants, warps)
    return LaunchPlan((launch,), out, () if room is None else (room,))


class _SumsLaunch(NamedTuple):
    """All of the launch that follows from the problem; shape and strides are the output's."""

    programs: int
    numbers: tuple[int, ...]
    constants: dict[str, Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    room: int  # float64 numbers for what the programs have found


@worked_out_once
def _sums_launch(problem: Any, most: int, block: int) -> _SumsLaunch:
    """`most`: programs for all sums together."""
    sums, dtype = problem.contraction(), problem.a_dtype
    parts = 2 if dtype.is_complex else 1
    chunks = max(1, min(most // sums.batch, sums.length // block))
    chunks = chunks if sums.batch <= COUNTERS else 1
    numbers = (sums.length, chunks, *[stride * parts for stride in sums[2:6]], COUNTERS)
    constants = {"BLOCK": block, "CHUNKS": 1 << (chunks - 1).bit_length(), "COMPLEX": dtype.is_complex}
    strides = contiguous_strides(sums.output)
    return _SumsLaunch(
        sums.batch * chunks, numbers, constants, sums.output, strides, sums.batch * chunks * parts
    )


def counters_and_room(device: torch.device, size: int) -> Tensor:
    """Counters at zero, where kernels leave them, and room for so many float64. One for each stream, whose
    kernels run one after the other; a graph that is being captured may be replayed on any, and has its
    own."""
    is_current = device.type == "cuda" and not is_planning() and torch_private.cuda_device() == device.index
    if not is_current or size > _MOST_ROOM or torch_private.is_capturing():
        return torch.zeros(COUNTERS // 2 + size, dtype=torch.float64, device=device)
    stream = torch_private.cuda_stream(device.index)
    room = _kept_room.get((device.index, stream))
    if room is None:
        with ThreadPoolExecutor(1) as other:
            room = _kept_room[device.index, stream] = other.submit(_new_room, device).result()
    return room


def _new_room(device: torch.device) -> Tensor:
    """For another thread than the one that needs it: while torch.compile prepares a graph, all that its
    thread allocates is the graph's.
    """
    room = torch.zeros(COUNTERS // 2 + _MOST_ROOM, dtype=torch.float64, device=device)
    torch.cuda.current_stream(device).synchronize()
    return room


def sum_on_cpu(a: Tensor, b: Tensor, problem: Any) -> Tensor:
    """Fixed chunks over torch's threads, added up in float64."""
    import numpy as np

    from turnout.ops.threads import import_uninterrupted, in_shares

    import_uninterrupted("turnout.ops.dot.cpu_kernels")
    from turnout.ops.dot.cpu_kernels import CHUNK, sum_chunks

    sums = problem.contraction()
    steps = sums.a_batch_stride, sums.b_batch_stride
    spans = [(sums.batch - 1) * step + sums.length for step in steps]
    x, y = [array(t.as_strided((span,), (1,))) for t, span in zip((a, b), spans, strict=True)]
    zero = np.float64(0) if a.dtype is torch.float32 else np.float32(0)
    totals = np.empty((sums.batch, -(-sums.length // CHUNK)))
    in_shares(functools.partial(sum_chunks, x, y, *steps, sums.length, zero, totals.reshape(-1)), totals.size)
    out = torch.from_numpy(totals.sum(1)).to(a.dtype)  # a copy: the totals are float64, and a is not
    return out.resize_(sums.output)  # no view, as `reshape` would give

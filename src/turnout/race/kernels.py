"""Profile one call of a model: its kernels by kind, and the routes that launched them."""

from __future__ import annotations

import bisect
import collections
import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from turnout.routing.op import Op, watched

# A kernel is of the first kind that has one of its words in the kernel's name. The names are those of cuDNN,
# cuBLAS, torch and turnout.
KINDS = {
    "layout": ("nchwtonhwc", "nhwctonchw", "nchw2nhwc", "nhwc2nchw", "contiguous", "to_copy"),
    "attention": ("flash", "fmha", "attention", "sdpa", "attend"),
    "norm": ("norm", "moments", "rms_", "welford"),
    "conv": (
        "fprop",
        "conv",
        "implicit_gemm",
        "narrow_out",
        "xmma_new",
        "upsample_gemm",
        "cutlass__5x_cudnn",
        "cudnn_generated",
    ),
    "gemm": ("gemm", "nvjet", "cublas", "linear", "addmm", "::mm", "bmm", "matmul", "cutlass"),
    "copy": ("copy", "memcpy", "catarray", "::cat", "clone", "pad", "im2col", "col2im"),
    "fill": ("fill", "memset", "zero", "::empty"),
    "scan": ("scan", "selective"),
    "resample": ("upsample", "interpolate", "nearest"),
    "reduce": ("reduce", "::sum", "::mean", "softmax"),
    "elementwise": (
        "elementwise",
        "::mul",
        "::add",
        "::silu",
        "::sigmoid",
        "::div",
        "::sub",
        "::pow",
        "::rsqrt",
        "::clamp",
        "::exp",
    ),
}

LAUNCH = re.compile("(cuda|cu|hip)[A-Z]")  # driver calls: cudaLaunchKernel, cuLaunchKernelEx, hipLaunchKernel


def kind_of(name: str) -> str:
    """The kind of a kernel, by its name: the first of `KINDS` with a word in it, or "other"."""
    name = name.lower()
    return next((kind for kind, words in KINDS.items() if any(word in name for word in words)), "other")


class Kernel(NamedTuple):
    """One kernel (on a CPU: one op of torch): name, start and length in milliseconds."""

    name: str
    start: float
    length: float


@dataclass
class Share:
    """The calls of one op that took one route: how many, their time and share, and why that route."""

    op: str
    route: str
    calls: int
    ms: float
    share: float
    why: str


@dataclass
class Trace:
    """The kernels of one call of a model, in the order they ran, and the routes of its ops."""

    kernels: list[Kernel]
    routes: list[Share] = field(default_factory=list)

    @property
    def busy(self) -> float:
        return sum(kernel.length for kernel in self.kernels)

    def by_kind(self) -> dict[str, float]:
        total: dict[str, float] = collections.defaultdict(float)
        for kernel in self.kernels:
            total[kind_of(kernel.name)] += kernel.length
        return {kind: round(ms, 3) for kind, ms in sorted(total.items(), key=lambda item: -item[1])}

    def longest(self, count: int = 10) -> list[tuple[str, int, float]]:
        """The kernels that took longest in total: name, number of launches, milliseconds."""
        total: dict[str, float] = collections.defaultdict(float)
        launches: collections.Counter[str] = collections.Counter()
        for kernel in self.kernels:
            total[kernel.name] += kernel.length
            launches[kernel.name] += 1
        slowest = sorted(total.items(), key=lambda item: -item[1])[:count]
        return [(name, launches[name], ms) for name, ms in slowest]


def traced(run: Callable[[], Any], device: torch.device, *, routes: bool) -> Trace:
    """Run once under torch's profiler; with `routes`, record also which route each routed op took."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU] * (routes or not on_gpu) + [ProfilerActivity.CUDA] * on_gpu
    profiler = profile(activities=activities)
    with _named_calls() as why:
        with without_profiler_lines():
            profiler.start()
        try:
            run()
            if on_gpu:
                torch.cuda.synchronize(device)
        finally:
            with without_profiler_lines():
                profiler.stop()
    events = list(profiler.events() or [])
    device_type = "CUDA" if on_gpu else "CPU"
    # On a GPU the time of a range repeats that of its kernels; on a CPU its own time is that of kernels which
    # torch does not know.
    repeats = set(why) if on_gpu else set()
    kernels = [
        Kernel(
            event.name,
            event.time_range.start / 1e3,
            (event.device_time if on_gpu else event.self_cpu_time_total) / 1e3,
        )
        for event in events
        if event.device_type.name == device_type
        and event.name not in repeats
        and not event.name.startswith(("ProfilerStep", "cuda", "cudnn::"))
    ]
    kernels = [kernel for kernel in kernels if kernel.length > 0]
    trace = Trace(sorted(kernels, key=lambda kernel: kernel.start))
    calls = [event for event in events if event.name in why and event.device_type.name == "CPU"]
    call_ms = launched_in(calls, events) if on_gpu else [event.cpu_time_total / 1e3 for event in calls]
    by_route: dict[str, list[float]] = collections.defaultdict(list)
    for event, ms in zip(calls, call_ms, strict=True):
        by_route[event.name].append(ms)
    for name, times in sorted(by_route.items(), key=lambda item: -sum(item[1])):
        op, _, route = name.removeprefix("turnout::").partition("/")
        trace.routes.append(
            Share(op, route, len(times), round(sum(times), 3), round(sum(times) / trace.busy, 4), why[name])
        )
    return trace


# A line of Kineto's own log: level, time, process and thread, place in its source. Errors are shown.
LOG_LINE = re.compile(
    rb"^(?!ERROR|FATAL)[A-Z]+:\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \d+:\d+ \S+:\d+\].*\n?", re.MULTILINE
)


@contextlib.contextmanager
def without_profiler_lines() -> Iterator[None]:
    """Inside this block, keep the profiler's log lines (start, stop) out of the process's output and error.

    Everything written there goes to a file first; at the end, the other lines are written to where they
    belong.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.ExitStack() as files:
        redirected = []  # (descriptor, a duplicate of it, the file in its place)
        for descriptor in (1, 2):
            try:
                duplicate = os.dup(descriptor)
            except OSError:  # it is closed: nothing can be written there
                continue
            file = files.enter_context(tempfile.TemporaryFile())
            redirected.append((descriptor, duplicate, file))
            os.dup2(file.fileno(), descriptor)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for descriptor, duplicate, file in redirected:
                os.dup2(duplicate, descriptor)
                os.close(duplicate)
                file.seek(0)
                _write_all(descriptor, LOG_LINE.sub(b"", file.read()))


def _write_all(descriptor: int, text: bytes) -> None:
    while text:
        text = text[os.write(descriptor, text) :]


def launched_in(calls: list[Any], events: list[Any]) -> list[float]:
    """Sum the milliseconds of the kernels that each host range launched; of nested ranges the inner counts.

    The profiler itself assigns only kernels that torch launches. Triton's have nothing but the number of
    their launch, which the event of the driver's call has too.
    """
    order = sorted(range(len(calls)), key=lambda i: calls[i].time_range.start)
    starts = [calls[i].time_range.start for i in order]
    launches = {
        event.id: event.time_range.start
        for event in events
        if event.device_type.name == "CPU" and LAUNCH.match(event.name)
    }
    names = {event.name for event in calls}
    milliseconds = [0.0] * len(calls)
    for kernel in events:
        is_kernel = kernel.device_type.name == "CUDA" and kernel.name not in names
        launched_at = launches.get(kernel.id) if is_kernel else None
        if launched_at is None:
            continue
        for i in reversed(order[: bisect.bisect_right(starts, launched_at)]):
            if launched_at <= calls[i].time_range.end:
                milliseconds[i] += kernel.device_time / 1e3
                break
    return milliseconds


@contextlib.contextmanager
def _named_calls() -> Iterator[dict[str, str]]:
    """Inside this block every routed call is a profiler range "turnout::<op>/<route>".

    Yields the reason for each route, by the range's name.
    """
    why: dict[str, str] = {}

    def named(op: Op, args: tuple) -> contextlib.AbstractContextManager[Any]:
        verdict = op.verdict(op.key(args))
        name = f"turnout::{op.name}/{verdict.chosen}"
        why.setdefault(name, f"{verdict.authority}: {verdict.why}")
        return torch.profiler.record_function(name)

    with watched(named, every_call=True):
        yield why

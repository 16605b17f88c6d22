"""Race one model, stock and accelerated in turns: time, first call, peak memory, difference of the outputs.

The lanes are the stock model, the model after `turnout.accelerate`, and, if asked for, after
`accelerate(graph=True)` and with torch.compile of the module that the call runs. A VAE's `decode` runs its
decoder, never the VAE's `forward`, and `generate` runs the `forward` of the model itself. So the lane of
torch.compile replaces the `forward` of that module with a compiled one.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import statistics
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from turnout.bench.sweep import commit
from turnout.measure.machine import machine, now
from turnout.measure.timer import time_call
from turnout.models.accelerate import Report, accelerate, restore
from turnout.race.kernels import Share, Trace, traced
from turnout.race.models import RACERS
from turnout.race.racer import Racer
from turnout.routing import versions

SHORT_MS = 200.0  # a shorter call is slowed down by the lane's change, so another call is made before it
FEWEST_FOR_QUARTILES = 4  # rounds; with fewer, the spread is from the fastest to the slowest
CHUNK = 2**24  # elements that are compared at once
STOCK, ACCELERATED, GRAPH, COMPILED = "stock", "accelerated", "graph", "torch.compile"
UNTIL_REPLAYED = 2  # calls of a model with graph=True before the first that is replayed


@dataclass
class Lane:
    """The figures of one contestant.

    ms, spread: milliseconds of a call. first_ms: of the first call, which compiles. host_ms: until the host
    has launched everything; a card that has finished by then waits for its host. peak_mib: memory beside the
    weights. psnr: decibels against the stock model in float32. psnr_stock, max_error: decibels and largest
    difference against the stock lane.
    """

    ms: float = math.nan
    spread: float = math.nan
    first_ms: float = math.nan
    host_ms: float | None = None
    peak_mib: float | None = None
    psnr: float = math.nan
    psnr_stock: float = math.nan
    max_error: float = math.nan
    trace: Trace | None = None
    output: Tensor | None = None
    samples: list[float] = field(default_factory=list)
    host_samples: list[float] = field(default_factory=list)
    failed: str | None = None  # why there are no figures

    def figures(self) -> dict[str, Any]:
        """The figures for JSON: rounded, None where there is none. An exact match has no decibels."""
        if self.failed is not None:
            return {"failed": self.failed}
        names = ("ms", "spread", "first_ms", "host_ms", "peak_mib", "psnr", "psnr_stock")
        numbers = {name: _rounded(getattr(self, name)) for name in names}
        error = None if math.isnan(self.max_error) else float(f"{self.max_error:.3g}")
        return {**numbers, "max_error": error, "samples": [round(sample, 3) for sample in self.samples]}

    def summarize(self, on_gpu: bool) -> None:
        """Compute the figures from the samples."""
        self.ms, self.spread = statistics.median(self.samples), spread(self.samples)
        self.host_ms = statistics.median(self.host_samples) if on_gpu else None


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 3)


def in_ms(value: float) -> str:
    """Write milliseconds with at least three digits.

    >>> in_ms(1836.2), in_ms(582.44), in_ms(18.123)
    ('1,836', '582.4', '18.12')
    """
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def spread(samples: list[float]) -> float:
    """How far apart samples lie: the interquartile range; of fewer than four, from smallest to largest.

    >>> spread([10.0, 12.0, 11.0]), spread([1.0, 2.0, 3.0, 4.0, 100.0])
    (2.0, 2.0)
    """
    if len(samples) < FEWEST_FOR_QUARTILES:
        return max(samples) - min(samples)
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return high - low


@dataclass
class Race:
    """The results of one race."""

    model: str
    size: str
    what: str
    dtype: str
    device: str
    lanes: dict[str, Lane]
    report: Report
    versions: dict[str, str]
    machine: dict[str, Any]
    date: str
    commit: str | None
    compiled: str = ""  # the submodule that torch.compile compiled; "" is the model itself
    weights: str = "random"
    no_truth: str = ""  # why the outputs were not compared with float32

    @property
    def speedup(self) -> float:
        return self.lanes[STOCK].ms / self.lanes[ACCELERATED].ms

    @property
    def bounds(self) -> tuple[float, float]:
        """The smallest and the largest speed-up of a round, in which stock and accelerated ran in a row."""
        pairs = zip(self.lanes[STOCK].samples, self.lanes[ACCELERATED].samples, strict=False)
        ratios = [stock / fast for stock, fast in pairs]
        return min(ratios), max(ratios)

    @property
    def verdict(self) -> str:
        """`faster`, `slower`, `within noise`, or `wrong`, which has no speed.

        Within noise means that the medians differ by no more than the spread of one of the two.
        """
        stock, fast = self.lanes[STOCK], self.lanes[ACCELERATED]
        if fast.failed is not None:
            return "wrong"
        if abs(stock.ms - fast.ms) <= max(stock.spread, fast.spread):
            return "within noise"
        return "faster" if fast.ms < stock.ms else "slower"

    def headline(self) -> str:
        """The result in a line, with its uncertainty."""
        stock, fast = self.lanes[STOCK], self.lanes[ACCELERATED]
        if fast.failed is not None:
            return f"no speed: {fast.failed}"
        low, high = self.bounds
        rounds = f"{len(fast.samples)} rounds of {low:.2f}x to {high:.2f}x"
        times = f"{in_ms(stock.ms)} -> {in_ms(fast.ms)} ms, {rounds}"
        spreads = (
            f"; stock's rounds differ by {in_ms(stock.spread)} ms, accelerated's by {in_ms(fast.spread)}"
        )
        noise = spreads if self.verdict == "within noise" else ""
        return f"{self.speedup:.2f}x stock, {self.verdict} ({times}{noise})"

    def row(self) -> dict[str, Any]:
        """The race as a JSON object: figures only."""
        is_right = self.lanes[ACCELERATED].failed is None
        kinds = {name: self.kinds_ms(name) for name, lane in self.lanes.items() if lane.trace is not None}
        return {
            "model": self.model,
            "size": self.size,
            "what": self.what,
            "dtype": self.dtype,
            "device": self.device,
            "speedup": round(self.speedup, 3) if is_right else None,
            "speedup_range": [round(bound, 3) for bound in self.bounds] if is_right else None,
            "verdict": self.verdict,
            "lanes": {name: lane.figures() for name, lane in self.lanes.items()},
            "compiled": (self.compiled or "model") if COMPILED in self.lanes else None,
            "routes": [asdict(share) for share in self.routes()],
            "kinds_ms": kinds,
            "patched": len(self.report.patched),
            "weights": self.weights,
            "versions": self.versions,
            "machine": self.machine,
            "date": self.date,
            "commit": self.commit,
        }

    def kinds_ms(self, lane: str) -> dict[str, float]:
        """Milliseconds of a lane's median call by kind of kernel."""
        trace = self.lanes[lane].trace
        times = {} if trace is None else trace.by_kind()
        return {kind: round(self._scale(lane) * ms, 3) for kind, ms in times.items()}

    def routes(self) -> list[Share]:
        """The routes of the accelerated model, with their milliseconds in its median call."""
        trace = self.lanes[ACCELERATED].trace
        shares = [] if trace is None else trace.routes
        return [replace(share, ms=round(self._scale(ACCELERATED) * share.ms, 3)) for share in shares]

    def _scale(self, lane: str) -> float:
        """What the profiler's times of a lane are multiplied with: see `profile_scale`."""
        trace = self.lanes[lane].trace
        on_gpu = self.machine["card"] is not None
        return 1.0 if trace is None else profile_scale(trace.busy, self.lanes[lane].ms, on_gpu=on_gpu)


def profile_scale(busy_ms: float, median_ms: float, *, on_gpu: bool) -> float:
    """What times under the profiler must be multiplied with to fit into the median of undisturbed calls.

    The profiler slows the host down. On a CPU its times are scaled to the median. A card's kernels keep
    theirs, unless they exceed the median: the rest of the median is time in which the card waited.
    """
    if busy_ms <= 0:
        return 1.0
    return min(1.0, median_ms / busy_ms) if on_gpu else median_ms / busy_ms


def race(
    name: str,
    size: str,
    dtype: torch.dtype,
    device: torch.device,
    *,
    weights: Path | None = None,
    numerics: str | None = None,
    rounds: int = 10,
    seconds: float = 20.0,
    compiled: bool = False,
    graph: bool = False,
    profiled: Collection[str] = (STOCK, ACCELERATED, COMPILED),
    backend: str | Callable[..., Any] = "inductor",
    on_progress: Callable[[str], object] = lambda step: None,
) -> Race:
    """Run the lanes of one model in turns.

    After the first call of each lane there are at least two rounds, and at most `rounds` or as many as begin
    within `seconds`. Every other round runs the lanes in the opposite order, so that none always comes last.

    graph: adds the accelerated model with CUDA graphs; its samples are replays, and where nothing is
    replayed, its lane says why. compiled: adds torch.compile with `backend`; where that cannot compile the
    model, its lane says why. profiled: the lanes of which one more call runs under the profiler.
    """
    if rounds < 2:
        raise ValueError(f"{rounds} rounds, a race needs 2 at least: one time says nothing about its spread")
    racer = RACERS[name]
    on_progress("building")
    names = [STOCK, ACCELERATED] + [GRAPH] * graph + [COMPILED] * compiled
    lanes = {lane: Lane() for lane in names}
    with torch.no_grad():
        model, call = racer.make(size, dtype, device, weights)
        on_progress("float32")
        truth, no_truth = None, "this race is in float32"
        if dtype is not torch.float32:
            truth, no_truth = _in_float32(model, call)
        contestant = _Contestant(model, call, racer, numerics, backend)
        report = accelerate(model, numerics=numerics)
        restore(model)
        for lane in lanes:
            on_progress(f"first call of {lane}")
            _first_calls(lane, lanes, contestant, truth, device, span=2.0 if racer.pictures else None)
        running = [lane for lane in lanes if lanes[lane].failed is None]
        end = time.perf_counter() + seconds
        for i in range(1, rounds):
            for lane in running if i % 2 == 0 else reversed(running):
                on_progress(f"round {i + 1} of at most {rounds}, {lane}")
                with contestant.prepared(lane) as run:
                    is_short = lanes[lane].samples[0] < SHORT_MS
                    for _ in range(UNTIL_REPLAYED if lane == GRAPH else int(is_short)):
                        run()
                    _timed(run, lanes[lane], device)
            if time.perf_counter() > end:
                break
        for lane in [lane for lane in running if lane in profiled]:
            on_progress(f"profile of {lane}")
            with contestant.prepared(lane) as run:
                lanes[lane].trace = traced(run, device, routes=lane == ACCELERATED)
        restore(model)
    for lane in running:
        lanes[lane].summarize(device.type == "cuda")
        lanes[lane].output = lanes[lane].output if racer.pictures else None
    host = machine(device)
    return Race(
        name,
        size,
        racer.describe(size, own_weights=weights is not None),
        str(dtype).removeprefix("torch."),
        host["card"] or "cpu",
        lanes,
        report,
        _versions(device),
        host,
        now(),
        commit(),
        racer.compiled,
        "random" if weights is None else "given",
        no_truth,
    )


class _Contestant:
    """The model, changed into each lane in turn, so that its weights are in memory only once."""

    report: Report  # of the last lane that was accelerated

    def __init__(
        self,
        model: Any,
        call: Callable[[Any], Tensor],
        racer: Racer,
        numerics: str | None,
        backend: str | Callable[..., Any],
    ) -> None:
        self.model, self.call, self.numerics, self.backend = model, call, numerics, backend
        self.module = model.get_submodule(racer.compiled)

    @functools.cached_property
    def compiled_forward(self) -> Callable[..., Any]:
        return torch.compile(self.module.forward, backend=self.backend)

    @contextlib.contextmanager
    def prepared(self, lane: str) -> Iterator[Callable[[], Tensor]]:
        """Change the model into a lane, and yield the function that calls it."""
        if lane in (ACCELERATED, GRAPH):
            self.report = accelerate(self.model, numerics=self.numerics, graph=lane == GRAPH)
        else:
            restore(self.model)
        if lane == COMPILED:
            self.module.forward = self.compiled_forward
        try:
            yield lambda: self.call(self.model)
        finally:
            if lane == COMPILED:
                del self.module.forward


def _first_calls(
    lane: str,
    lanes: dict[str, Lane],
    contestant: _Contestant,
    truth: Tensor | None,
    device: torch.device,
    span: float | None,
) -> None:
    """Make the first call of a lane, which compiles, and the second, its first sample; compare the output."""
    results = lanes[lane]
    with contestant.prepared(lane) as run:
        try:
            results.first_ms = time_call(run, device).ms
            bytes_before = _reset_peak(device)
            if lane == GRAPH:
                run()  # this call is captured
            output = _timed(run, results, device)
        except Exception as failure:  # of any kind: the other lanes go on
            if lane in (STOCK, ACCELERATED):
                raise
            last = traceback.extract_tb(failure.__traceback__)[-1]
            message = f"{type(failure).__name__} in {last.name}, {Path(last.filename).name}:{last.lineno}: "
            results.failed = " ".join((message + str(failure)).split())[:300]
            return
        if lane == GRAPH and not any(replays.replayed for replays in contestant.report.graphs.values()):
            results.failed = f"nothing was replayed; {_why_eager(contestant.report)}"
            return
        if bytes_before is not None:
            results.peak_mib = (torch.cuda.max_memory_allocated(device) - bytes_before) / 2**20
    if truth is not None:
        results.psnr, _ = compare(output, truth, span)
    if lane != STOCK:
        stock = lanes[STOCK].output
        assert stock is not None
        results.psnr_stock, results.max_error = compare(output, stock, span)
        if math.isnan(results.max_error) and bool(stock.isfinite().all()):
            results.failed = "its output has NaN or infinity where stock's has none"
    results.output = output.cpu()


def _why_eager(report: Report) -> str:
    """How many calls had no graph, and why; none, where graphs are made of other methods of the model."""
    lines = [line for replays in report.graphs.values() for line in replays.lines()]
    reasons = [line for line in lines if "not captured" in line]
    return reasons[-1] if reasons else "graphs are made of decode and forward alone"


def _in_float32(model: Any, call: Callable[[Any], Tensor]) -> tuple[Tensor | None, str]:
    """Run the stock model in float32 under the current settings (TF32 convolutions, unless disabled).

    Returns its output and "", or None and the reason.
    """
    try:
        return call(copy.deepcopy(model).float()).float().cpu(), ""
    except RuntimeError as failure:  # a kernel for half precision only, or not enough memory
        lines = str(failure).strip().splitlines()
        message = lines[0] if lines else type(failure).__name__
        return None, f"the stock model does not run in float32 here ({message})"


def compare(output: Tensor, other: Tensor, span: float | None = None) -> tuple[float, float]:
    """The PSNR of an output against another in decibels, and the largest difference.

    span: the range of the values, by default that of `other`. Both results are NaN if an element of either is
    not finite.

    >>> compare(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 0.9]), 1.0)  # doctest: +ELLIPSIS
    (23.01..., 0.1...)
    """
    if output.shape != other.shape:
        shapes = f"{list(output.shape)} and {list(other.shape)}"
        raise ValueError(f"outputs of shapes {shapes} cannot be compared; the lanes must return equal shapes")
    span = span if span is not None else float(other.max().double() - other.min().double())
    total, largest = 0.0, 0.0
    for one, two in zip(output.flatten().split(CHUNK), other.flatten().split(CHUNK), strict=True):
        difference = one.double() - two.to(one.device).double()
        total += float(difference.square().sum())
        largest = max(largest, float(difference.abs().max()))
    if not math.isfinite(total):
        return math.nan, math.nan
    return (10 * math.log10(span**2 / (total / output.numel())) if total and span else math.inf), largest


def _reset_peak(device: torch.device) -> int | None:
    """Begin to count peak memory, and return the bytes in use now; None on a CPU, which does not count."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _timed(run: Callable[[], Tensor], lane: Lane, device: torch.device) -> Tensor:
    """Run a lane once, and add the time to its samples."""
    timing = time_call(run, device)
    lane.host_samples.append(timing.host_ms)
    lane.samples.append(timing.ms)
    return timing.output


def _versions(device: torch.device) -> dict[str, str]:
    models = {name: versions.installed(name) for name in ("diffusers", "transformers")}
    present = {name: version for name, version in models.items() if version is not None}
    return versions.for_device(device.type) | present

"""Stock and accelerated in turns in one run: time, peak memory, and how far each is from the same model in float32."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from turnout.bench.sweep import commit
from turnout.models.accelerate import Report, accelerate, restore
from turnout.race.kernels import Trace, traced
from turnout.race.models import RACERS, Settings
from turnout.routing import versions

BRIEF = 200.0  # milliseconds; a briefer call notices that the model has just changed its shape, so one goes before it
STOCK, ACCELERATED, COMPILED = "stock", "accelerated", "torch.compile"


@dataclass
class Lane:
    """One contestant: milliseconds (median and interquartile range), of which the host took so many to ask for everything (a card that has
    nothing left to do when the last is asked for waits for its host), extra memory in MiB at the peak, decibels against float32."""

    ms: float = math.nan
    iqr: float = math.nan
    host_ms: float | None = None
    peak_mib: float | None = None
    psnr: float = math.nan
    trace: Trace | None = None
    output: Tensor | None = None
    samples: list[float] = field(default_factory=list)
    host_samples: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, float | None]:
        numbers = {"ms": self.ms, "iqr": self.iqr, "host_ms": self.host_ms, "peak_mib": self.peak_mib, "psnr": self.psnr}
        return {name: None if value is None or not math.isfinite(value) else round(value, 3) for name, value in numbers.items()}


@dataclass
class Race:
    """All that was seen of one race."""

    model: str
    what: str
    dtype: str
    device: str
    lanes: dict[str, Lane]
    report: Report
    versions: dict[str, str]

    @property
    def speedup(self) -> float:
        return self.lanes[STOCK].ms / self.lanes[ACCELERATED].ms

    def row(self) -> dict[str, Any]:
        """One line of JSON: figures only."""
        lanes = {name: lane.figures() for name, lane in self.lanes.items()}
        accelerated = self.lanes[ACCELERATED].trace
        routes = [] if accelerated is None else [asdict(share) for share in accelerated.routes]
        kinds = {name: lane.trace.by_kind() for name, lane in self.lanes.items() if lane.trace is not None}
        return {
            "model": self.model, "what": self.what, "dtype": self.dtype, "device": self.device, "speedup": round(self.speedup, 3),
            "lanes": lanes, "routes": routes, "kinds_ms": kinds, "patched": len(self.report.patched), "versions": self.versions,
            "commit": commit(),
        }  # fmt: skip


def race(
    name: str, size: str, dtype: torch.dtype, device: torch.device, *, weights: Any = None, numerics: str | None = None,
    rounds: int = 10, seconds: float = 20.0, compiled: bool = False, say: Callable[[str], object] = lambda step: None,
) -> Race:  # fmt: skip
    """Run one model in turns: once to warm up, then two rounds at least, at most `rounds`, or until `seconds` have passed."""
    if rounds < 2:
        raise ValueError(f"{rounds} rounds, a race needs 2 at least: one time says nothing of how far times lie apart")
    racer = RACERS[name]
    say("building")
    with torch.no_grad():
        model, call = racer.make(Settings(racer.sizes[size], dtype, device, weights))
        lanes = {STOCK: Lane(), ACCELERATED: Lane()} | ({COMPILED: Lane()} if compiled else {})
        runs = {STOCK: lambda: call(model), ACCELERATED: lambda: call(model)}
        if compiled:
            graph = torch.compile(model)
            runs[COMPILED] = lambda: call(graph)
        say("float32")
        truth = _in_float32(model, call) if dtype is not torch.float32 else None
        report = accelerate(model, numerics=numerics)
        for lane, run in _turns(lanes, runs, model, numerics):
            say(f"first {lane}")
            run()
            before = _reset_peak(device)
            output = _timed(run, lanes[lane], device)
            lanes[lane].peak_mib = None if before is None else (torch.cuda.max_memory_allocated(device) - before) / 2**20
            if truth is not None:
                lanes[lane].psnr = psnr(output, truth, 2.0 if racer.pictures else None)
            lanes[lane].output = output.cpu() if racer.pictures else None
            del output
        end = time.perf_counter() + seconds
        for i in range(1, rounds):
            for lane, run in _turns(lanes, runs, model, numerics):
                say(f"round {i + 1}, {lane}")
                if lanes[lane].samples[0] < BRIEF:
                    run()
                _timed(run, lanes[lane], device)
            if time.perf_counter() > end:
                break
        for lane, run in _turns(lanes, runs, model, numerics):
            say(f"profile of {lane}")
            lanes[lane].trace = traced(run, device, routes=lane == ACCELERATED)
        restore(model)
    for lane in lanes.values():
        lane.ms = statistics.median(lane.samples)
        quarters = statistics.quantiles(lane.samples, n=4)
        lane.iqr = quarters[2] - quarters[0]
        lane.host_ms = statistics.median(lane.host_samples) if device.type == "cuda" else None
    return Race(name, racer.describe(size), str(dtype).removeprefix("torch."), _device_name(device), lanes, report, _versions(device))


def _turns(lanes: Any, runs: dict[str, Callable[[], Tensor]], model: Any, numerics: str | None) -> Iterator[tuple[str, Callable]]:
    """Each lane with the model in its shape."""
    for lane in lanes:
        accelerate(model, numerics=numerics) if lane == ACCELERATED else restore(model)
        yield lane, runs[lane]


def _in_float32(model: Any, call: Callable[[Any], Tensor]) -> Tensor:
    """What the stock model says in float32, with the settings that are in force (TF32 convolutions, unless somebody said no)."""
    return call(copy.deepcopy(model).float()).float().cpu()


def psnr(output: Tensor, truth: Tensor, span: float | None = None) -> float:
    """Decibels of the values' span over the error."""
    span = span if span is not None else float(truth.max() - truth.min())
    error = float((output.cpu().double() - truth.double()).square().mean())
    return math.inf if error == 0 else 10 * math.log10(span**2 / error)


def _reset_peak(device: torch.device) -> int | None:
    """Bytes in use now, from where the peak is counted; None on a CPU, where nobody counts."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _timed(run: Callable[[], Tensor], lane: Lane, device: torch.device) -> Tensor:
    """One more sample of a lane."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    before = time.perf_counter()
    output = run()
    lane.host_samples.append(1e3 * (time.perf_counter() - before))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    lane.samples.append(1e3 * (time.perf_counter() - before))
    return output


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _versions(device: torch.device) -> dict[str, str]:
    models = {name: versions.installed(name) for name in ("diffusers", "transformers")}
    return versions.for_device(device.type) | {name: version for name, version in models.items() if version is not None}

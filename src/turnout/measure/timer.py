"""The one timer of `tune`, `bench` and `race`.

A GPU call has two costs: what the card does and what the host does to ask for it. In a program that calls one
op after the other the longer of the two is felt, so that is the time of a variant; both parts are kept. The
card's part is timed with events behind work that keeps it busy, so no launch latency leaks in; the host's
part with a clock around calls that nothing waits for, as if the host's speed had been the same in all rounds.
Variants take turns in one loop, in another order each time (a card that has just been hot runs slower: the
same kernel took 8 % longer behind a heavier one), the clocks are warm, the data is cold: buffers rotate, and
on a GPU other memory is read before each call. Read, not written: writing would leave dirty lines, and a call
would pay for storing them (10 us on an H200, seen as 3.5 of 4.2 TB/s). On a CPU nothing else is read, since
that would empty the caches of the interpreter too; a call before each sample warms the code.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

_HOST_CALLS = 50
_SHORT = 200.0  # us: the host sets the time of such a call, and asking it often costs little
_WARM = 40  # passes over half a gigabyte, 5 ms on an H200
_BUSY = (
    4  # of them before a sample at least: half a millisecond, longer than a host takes to queue most calls
)


class Timing(NamedTuple):
    """Microseconds per call: the median of max(device, host), its interquartile range, the medians of the
    card's and the host's part.
    """

    us: float
    iqr: float
    device_us: float
    host_us: float


class CallTime(NamedTuple):
    """Milliseconds of one call: until it returned, and until its device had done it; and what it gave."""

    host_ms: float
    ms: float
    output: Any


def time_call(run: Callable[[], Any], device: torch.device) -> CallTime:
    """Time one long call, such as that of a whole model; nothing else runs on the device.

    >>> time_call(lambda: 1 + 1, torch.device("cpu")).output
    2
    """
    _synchronize(device)
    before = time.perf_counter()
    output = run()
    host = time.perf_counter() - before
    _synchronize(device)
    return CallTime(1e3 * host, 1e3 * (time.perf_counter() - before), output)


def host_us(run: Callable[..., Any], args: tuple, calls: int, device: torch.device) -> float:
    """Microseconds the host takes for each of so many calls in a row, which wait for nothing."""
    _synchronize(device)
    before = time.perf_counter()
    for _ in range(calls):
        run(*args)
    return 1e6 * (time.perf_counter() - before) / calls


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_variants(
    variants: Mapping[str, Callable[..., Any]],
    inputs: Sequence[tuple],
    device: torch.device,
    *,
    cache: int = 0,
    rounds: int = 30,
    seconds: float = 2.0,
) -> dict[str, Timing]:
    """Time each variant on the given sets of inputs, taking turns.

    `cache` is the size of the last-level cache in bytes, to be outgrown. Stops after `rounds` samples of each
    variant or `seconds`, whichever comes first, but takes three samples at least.
    """
    for args in (
        inputs if device.type == "cuda" else inputs[:1]
    ):  # compile, allocate, load; a graph is captured for each set
        for run in variants.values():
            run(*args)
    if device.type == "cuda":
        return _time_cuda(variants, inputs, device, cache, rounds, seconds)
    return _time_cpu(variants, inputs, rounds, seconds)


def _shuffled(variants: Mapping[str, Callable[..., Any]], seed: int) -> list[tuple[str, Callable[..., Any]]]:
    return random.Random(seed).sample(list(variants.items()), len(variants))


def _time_cpu(variants, inputs, rounds, seconds) -> dict[str, Timing]:
    samples: dict[str, list[float]] = {name: [] for name in variants}
    end = time.perf_counter() + seconds
    for i in range(rounds):
        for name, run in _shuffled(variants, i):
            run(*inputs[(i + 1) % len(inputs)])
            before = time.perf_counter()
            run(*inputs[i % len(inputs)])
            samples[name].append(1e6 * (time.perf_counter() - before))
        if i >= 2 and time.perf_counter() > end:
            break
    return {name: _summary(times, [0.0]) for name, times in samples.items()}


def _time_cuda(variants, inputs, device, cache, rounds, seconds) -> dict[str, Timing]:
    with torch.cuda.device(device):
        # Read before every sample: it empties the cache, and it keeps the card busy for as long as the host
        # needs to queue the call.
        flush = torch.zeros(max(512 * 2**20, 4 * cache) // 4, device=device)
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(_WARM):  # to steady clocks
            flush.sum()
        stop.record()
        torch.cuda.synchronize()
        pass_us = 1e3 * start.elapsed_time(stop) / _WARM
        samples: dict[str, list[float]] = {name: [] for name in variants}
        host: dict[str, list[float]] = {name: [] for name in variants}
        end = time.perf_counter() + seconds
        for i in range(rounds):
            for name, run in _shuffled(variants, i):
                args = inputs[i % len(inputs)]
                start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                for _ in range(_passes(host[name], pass_us)):
                    flush.sum()
                start.record()
                run(*args)
                stop.record()
                torch.cuda.synchronize()
                samples[name].append(1e3 * start.elapsed_time(stop))
                if i % 3 == 0 or samples[name][-1] < _SHORT:
                    host[name].append(host_us_of_a_call(run, args, samples[name][-1], device))
            if i >= 2 and time.perf_counter() > end:
                break
    hosts = _steadied({name: times for name, times in host.items() if len(times) == len(samples[name])})
    return {name: _summary(samples[name], hosts.get(name, host[name])) for name in variants}


def _steadied(host_us: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Host times of all rounds as if the host had always had its usual speed. It changes by half and back
    within seconds, for all variants of a round alike, and where that happens in the middle, the median of
    each is at one speed or the other by chance. The times of one variant alone say nothing of the host's
    speed and stay as they are."""
    if len(host_us) < 2:
        return {name: list(times) for name, times in host_us.items()}
    rounds = [statistics.geometric_mean(times) for times in zip(*host_us.values(), strict=True)]
    usual = statistics.median(rounds)
    return {
        name: [us * usual / speed for us, speed in zip(times, rounds, strict=True)]
        for name, times in host_us.items()
    }


def _passes(host_us: Sequence[float], pass_us: float) -> int:
    """Enough work to keep the card busy for as long as the host takes to queue a call, and half as long
    again.
    """
    return max(_BUSY, int(1.5 * min(host_us, default=0.0) / max(pass_us, 1.0)) + 1)


def host_us_of_a_call(run: Callable[..., Any], args: tuple, device_us: float, device: torch.device) -> float:
    """Microseconds the host spends on a call: the median of calls in a row, as the first ones find cold
    caches.

    device_us: about how long the device takes. Few of a call that keeps it for long: the host does not set
    its time, and all of them are waited for.
    """
    spent = []
    for _ in range(max(3, min(_HOST_CALLS, int(10e3 / max(device_us, 1.0))))):
        before = time.perf_counter()
        run(*args)
        spent.append(time.perf_counter() - before)
    _synchronize(device)
    return 1e6 * statistics.median(spent)


def _summary(device_us: Sequence[float], host_us: Sequence[float]) -> Timing:
    # Not the least: hosts have rare quick moments, and the same call, timed as two variants, took 12.7 us in
    # one, 15.9 in the other.
    host = statistics.median(host_us)
    hosts = (
        host_us if len(host_us) == len(device_us) else [host] * len(device_us)
    )  # long calls: the host is asked now and then
    felt = [max(pair) for pair in zip(device_us, hosts, strict=True)]
    spread = statistics.quantiles(felt, n=4)
    return Timing(statistics.median(felt), spread[2] - spread[0], statistics.median(device_us), host)

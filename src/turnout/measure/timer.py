"""Time functions, for `tune`, `bench` and `race` alike.

A call on a GPU takes time twice: the card's, and the host's to ask for it. A program that calls one op after
another waits for the longer of the two, so that is the time of a variant; both parts are kept.

- The card's time is measured with events, behind work that keeps the card busy, so that it has no launch
  latency in it.
- The host's time is measured with a clock around calls that wait for nothing, and corrected for rounds in
  which the whole host was faster or slower.
- Variants take turns in one loop, in another order each time: a card that has just been hot runs slower (the
  same kernel took 8 % longer behind a heavier one).
- The clocks are warm and the data is cold: sets of inputs rotate, and on a GPU other memory is read before
  each call. It is not written, which would leave dirty cache lines that the call has to store (10 us on an
  H200, seen as 3.5 of 4.2 TB/s). On a CPU nothing else is read, as that would empty the interpreter's caches
  too; a call before each sample warms the code.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

_HOST_CALLS = 50
_SHORT_US = 200.0  # the host often sets the time of shorter calls, and measuring it costs little then
_WARM_PASSES = 40  # over half a gigabyte, 5 ms on an H200
_BUSY_PASSES = 4  # before each sample at least: half a millisecond, longer than most calls take to queue


class Timing(NamedTuple):
    """Microseconds per call: the median of max(device, host), its interquartile range, the median of each."""

    us: float
    iqr: float
    device_us: float
    host_us: float


class CallTime(NamedTuple):
    """Milliseconds of one call: until it returned, and until its device had finished; and its output."""

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
    """Microseconds of host time for each of `calls` calls in a row, which do not wait for the device."""
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
    """Time each variant on the sets of inputs, in turns.

    `cache` is the size of the last-level cache in bytes. Stops after `rounds` samples of each variant or
    `seconds`, whichever comes first, but not before three samples.
    """
    # First calls compile, allocate and load. A peer that replays graphs captures one for each set of inputs.
    for args in inputs if device.type == "cuda" else inputs[:1]:
        for run in variants.values():
            run(*args)
    if device.type == "cuda":
        return _time_cuda(variants, inputs, device, cache, rounds, seconds)
    return _time_cpu(variants, inputs, rounds, seconds)


def _shuffled(variants: Mapping[str, Callable[..., Any]], seed: int) -> list[tuple[str, Callable[..., Any]]]:
    return random.Random(seed).sample(list(variants.items()), len(variants))


def _time_cpu(
    variants: Mapping[str, Callable[..., Any]], inputs: Sequence[tuple], rounds: int, seconds: float
) -> dict[str, Timing]:
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


def _time_cuda(
    variants: Mapping[str, Callable[..., Any]],
    inputs: Sequence[tuple],
    device: torch.device,
    cache: int,
    rounds: int,
    seconds: float,
) -> dict[str, Timing]:
    with torch.cuda.device(device):
        # Read before every sample: it empties the cache, and it keeps the card busy for as long as the host
        # needs to queue the call.
        flush = torch.zeros(max(512 * 2**20, 4 * cache) // 4, device=device)
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(_WARM_PASSES):  # until the clocks are steady
            flush.sum()
        stop.record()
        torch.cuda.synchronize()
        pass_us = 1e3 * start.elapsed_time(stop) / _WARM_PASSES
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
                if i % 3 == 0 or samples[name][-1] < _SHORT_US:
                    host[name].append(host_us_of_a_call(run, args, samples[name][-1], device))
            if i >= 2 and time.perf_counter() > end:
                break
    every_round = {name: times for name, times in host.items() if len(times) == len(samples[name])}
    corrected = _at_usual_speed(every_round)
    return {name: _summary(samples[name], corrected.get(name, host[name])) for name in variants}


def _at_usual_speed(host_us: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Correct host times for rounds in which the host was faster or slower than usual.

    A host's speed changes by half and back within seconds, for all variants of a round alike. Uncorrected,
    chance would decide which speed the median of a variant has. The times of a single variant do not tell the
    host's speed, and stay as they are.
    """
    if len(host_us) < 2:
        return {name: list(times) for name, times in host_us.items()}
    rounds = [statistics.geometric_mean(times) for times in zip(*host_us.values(), strict=True)]
    usual = statistics.median(rounds)
    return {
        name: [us * usual / speed for us, speed in zip(times, rounds, strict=True)]
        for name, times in host_us.items()
    }


def _passes(host_us: Sequence[float], pass_us: float) -> int:
    """How many passes keep the card busy for 1.5 times as long as the host takes to queue a call."""
    return max(_BUSY_PASSES, int(1.5 * min(host_us, default=0.0) / max(pass_us, 1.0)) + 1)


def host_us_of_a_call(run: Callable[..., Any], args: tuple, device_us: float, device: torch.device) -> float:
    """Microseconds that the host spends on a call: the median of calls in a row, of which the first are slow.

    device_us: about how long the device takes. Only a few calls are made if it takes long: the host does not
    set their time, and all of them have to be waited for.
    """
    spent = []
    for _ in range(max(3, min(_HOST_CALLS, int(10e3 / max(device_us, 1.0))))):
        before = time.perf_counter()
        run(*args)
        spent.append(time.perf_counter() - before)
    _synchronize(device)
    return 1e6 * statistics.median(spent)


def _summary(device_us: Sequence[float], host_us: Sequence[float]) -> Timing:
    # The median, not the minimum: hosts have rare fast moments, and the same call, timed as two variants, had
    # minima of 12.7 and 15.9 us.
    host = statistics.median(host_us)
    # The host's time of a long call is measured only in every third round.
    hosts = host_us if len(host_us) == len(device_us) else [host] * len(device_us)
    longer = [max(pair) for pair in zip(device_us, hosts, strict=True)]
    quartiles = statistics.quantiles(longer, n=4)
    return Timing(statistics.median(longer), quartiles[2] - quartiles[0], statistics.median(device_us), host)

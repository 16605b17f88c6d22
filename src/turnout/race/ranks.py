"""`turnout race MODEL --ranks N`: a VAE's decode on several ranks, on one device.

`lockstep` runs all ranks in turns and compares the bits with a mesh of one rank, and with the model before it
was distributed. `fake` times the compute of every rank by itself, and adds what messages take by a table of
latencies: a prediction, of which the compute is measured.
"""

from __future__ import annotations

import bisect
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from turnout.bench.sweep import commit, versions
from turnout.measure.machine import machine, now
from turnout.models.accelerate import accelerate, restore
from turnout.parallel import Fake, Lockstep, distribute
from turnout.race.ahead import numbers_of, sized
from turnout.race.models import check_size, racer_named
from turnout.race.racer import Settings
from turnout.routing.names import model_dtype_named

ENGINES = ("fake", "lockstep")

# Bytes to seconds: NCCL's batched send and receive inside a CUDA graph, H100 with NVLink
# (meta-pytorch/torchcomms #2159)
LINKS = {8e3: 7.4e-6, 256e3: 9.3e-6, 1e6: 15e-6, 4e6: 30e-6, 32e6: 141e-6}


def read_links(path: Path | None) -> dict[float, float]:
    """Read a table of latencies: a JSON object, bytes to microseconds: `{"8000": 7.4, "1000000": 15}`."""
    if path is None:
        return LINKS
    try:
        return {
            float(size): float(us) * 1e-6
            for size, us in sorted(json.loads(path.read_text()).items(), key=lambda x: float(x[0]))
        }
    except (OSError, ValueError, AttributeError, TypeError) as failure:
        raise ValueError(
            f"--links {path}: {failure}; it needs a JSON object of bytes to microseconds"
        ) from failure


def seconds_of(size: float, links: dict[float, float]) -> float:
    """How long a message takes: between two sizes of the table in proportion, beyond them by the nearest.

    >>> [round(1e6 * seconds_of(size, {1e6: 15e-6, 4e6: 30e-6}), 1) for size in (2.5e6, 8e6)]
    [22.5, 60.0]
    """
    sizes = sorted(links)
    at = bisect.bisect_left(sizes, size)
    if at == 0:
        return links[sizes[0]]
    if at == len(sizes):
        return links[sizes[-1]] * size / sizes[-1]
    below, above = sizes[at - 1], sizes[at]
    return links[below] + (links[above] - links[below]) * (size - below) / (above - below)


def race_ranks(
    name: str,
    size: str,
    dtype: str | None,
    device: torch.device,
    ranks: int,
    engine: str,
    links: dict[float, float],
    rounds: int,
) -> dict[str, Any]:
    """A row of `ranks.jsonl`: whether bits are those of one rank, and whether one rank has those of the model
    that is not distributed (lockstep); or the time of one process, of each rank's compute and of its messages
    in seconds, and the predicted speed-up (fake)."""
    if engine not in ENGINES:
        raise ValueError(f"--engine {engine!r}; one of: {', '.join(ENGINES)}")
    racer, size = racer_named(name), sized(name, size, device)
    dtype_name = dtype or racer.default_dtype(device)
    config, numbers = numbers_of(name, racer, size)
    settings = Settings(numbers, model_dtype_named(dtype_name), device)
    with torch.no_grad():
        model = racer.build(config, settings)
        check_size(name, racer, model, numbers)
        call = racer.call(model, settings)
        accelerate(model)
        row: dict[str, Any] = {
            "model": name,
            "size": size,
            "title": f"{racer.title}, {' x '.join(map(str, numbers))} {racer.axes}".strip(),
            "dtype": dtype_name,
            "ranks": ranks,
            "engine": engine,
            "machine": machine(device),
            "date": now(),
            "torch": torch.__version__,
            "versions": versions(device.type),
            "commit": commit(),
        }
        if engine == "lockstep":
            plain = call(model)
            distribute(model, Lockstep(1))
            alone = call(model)
            distribute(model, Lockstep(ranks))
            same = all(torch.equal(call(model), alone) for _ in range(2))
            return row | {"same_bits": same, "same_bits_as_plain": torch.equal(alone, plain)}
        row["one_rank_seconds"], row["one_rank_peak_mib"] = _timed(lambda: call(model), device, rounds)
        each = []
        for rank in range(ranks):
            fake = Fake(rank, ranks)
            distribute(model, fake, gather="none")
            call(model)  # compiles, and learns what calls there are
            fake.messages.clear()
            call(model)
            sent = list(fake.messages)
            seconds, peak = _timed(lambda: call(model), device, rounds)
            exchanged = sum(seconds_of(message, links) for message in sent)
            each.append(
                {
                    "seconds": seconds,
                    "messages": len(sent),
                    "bytes": sum(sent),
                    "message_seconds": exchanged,
                    "peak_mib": peak,
                }
            )
            restore(model)
            accelerate(model)
    predicted = max(rank["seconds"] + rank["message_seconds"] for rank in each)
    return row | {
        "of_ranks": each,
        "predicted_seconds": predicted,
        "predicted_speedup": row["one_rank_seconds"] / predicted,
    }


def in_words(row: dict[str, Any]) -> str:
    """What a row says, in lines."""
    head = f"{row['title']}, {row['dtype']}, {row['ranks']} ranks"
    if row["engine"] == "lockstep":
        same = "the same bits as one rank" if row["same_bits"] else "OTHER BITS than one rank"
        plain = "the same as" if row["same_bits_as_plain"] else "which sums its norms otherwise than"
        return f"{head}: {same}, {plain} the model that is not distributed"
    lines = [f"{head}: one takes {row['one_rank_seconds']:.3f} s"]
    for rank, share in enumerate(row["of_ranks"]):
        sent = f"{share['messages']} messages of {share['bytes'] / 1e6:.1f} MB"
        wait = f"{1e3 * share['message_seconds']:.1f} ms by the table"
        lines.append(f"  rank {rank}  {share['seconds']:.3f} s of its own, {sent}, {wait}")
    lines.append(f"  predicted  {row['predicted_seconds']:.3f} s, {row['predicted_speedup']:.2f}x")
    return "\n".join(lines)


def _timed(run: Callable[[], Any], device: torch.device, rounds: int) -> tuple[float, float | None]:
    """The median of so many calls in seconds, and the most memory they took in MiB (None on a CPU)."""
    on_gpu, times = device.type == "cuda", []
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(max(2, rounds)):
        if on_gpu:
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        run()
        if on_gpu:
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times), torch.cuda.max_memory_allocated(device) / 2**20 if on_gpu else None

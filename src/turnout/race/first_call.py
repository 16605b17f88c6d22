"""`turnout race MODEL --first-call`: how long a user waits for the first output, and what is compiled for it.

Each figure needs a process that has run nothing yet, so this starts three: one with an empty cache of
kernels, which then calls the model in another size too; one that sees no GPU and compiles ahead (`turnout
warm`); one that finds what the second has compiled. Two folders of caches belong to a row, and go with it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from turnout.bench.sweep import commit, versions
from turnout.measure.machine import cores, machine, now
from turnout.measure.timer import time_call
from turnout.models.accelerate import accelerate
from turnout.race.ahead import numbers_of, sized
from turnout.race.models import check_size, racer_named
from turnout.race.racer import Racer, Settings
from turnout.routing.device import Device
from turnout.routing.names import model_dtype_named

FILE = "first-call.jsonl"
KEY = ("model", "size", "dtype")  # of rows that replace each other
SIDE = 32  # pixels of which every model takes a multiple
_BINARIES = ("*.cubin", "*.hsaco")  # what Triton keeps of each compiled kernel


class Called(NamedTuple):
    """One call: seconds, and how many kernels were compiled for it."""

    seconds: float
    compilations: int


def other_size(racer: Racer, numbers: tuple[int, ...]) -> tuple[int, ...] | None:
    """Another resolution, three quarters of each side or, where that is the same, twice; None for a model
    without pictures.

    >>> from turnout.race.models import RACERS
    >>> other_size(RACERS["wan-vae"], (480, 832, 81)), other_size(RACERS["flux-vae"], (32, 32))
    ((352, 608, 81), (64, 64))
    """
    axes = racer.axes.strip("()").split(" x ")
    if "height" not in axes:
        return None

    def scaled(times: float) -> tuple[int, ...]:
        return tuple(
            max(SIDE, int(times * n) // SIDE * SIDE) if axis in ("height", "width") else n
            for axis, n in zip(axes, numbers, strict=True)
        )

    smaller = scaled(0.75)
    return smaller if smaller != numbers else scaled(2)


def measure(
    name: str,
    size: str,
    dtype: str | None,
    device: torch.device,
    on_progress: Callable[[str], object] = lambda step: None,
) -> dict[str, Any]:
    """A row of `first-call.jsonl`. Raises RuntimeError where one of the processes fails, with what it said
    last.

    The figures of `turnout warm` are None on a CPU, for which nothing is compiled ahead.
    """
    racer, size = racer_named(name), sized(name, size, device)
    dtype = dtype or racer.default_dtype(device)
    _, numbers = numbers_of(name, racer, size)
    other = other_size(racer, numbers)
    calls = [numbers, *([] if other is None else [other])]
    on_progress("first calls, nothing compiled")
    with tempfile.TemporaryDirectory() as folder:
        cold = _calls_in_a_process(name, size, calls, dtype, device, Path(folder))
    figures: dict[str, Any] = {
        "cold_s": cold[0].seconds,
        "second_s": cold[1].seconds,
        "compilations": cold[0].compilations + cold[1].compilations,
        "other_size": other,
        "other_size_s": None if other is None else cold[2].seconds,
        "other_size_second_s": None if other is None else cold[3].seconds,
        "other_size_compilations": None if other is None else cold[2].compilations + cold[3].compilations,
    }
    figures |= dict.fromkeys(("warm_s", "warmed_s", "warmed_compilations"))
    if device.type == "cuda":
        on_progress("compiling ahead, without a GPU")
        with tempfile.TemporaryDirectory() as folder:
            figures["warm_s"] = _warm(name, size, dtype, device, Path(folder))
            on_progress("first call after that")
            warmed, *_ = _calls_in_a_process(name, size, [numbers], dtype, device, Path(folder))
        figures |= {"warmed_s": warmed.seconds, "warmed_compilations": warmed.compilations}
    return {
        "model": name,
        "size": size,
        "what": f"{racer.title}, {' x '.join(map(str, numbers))} {racer.axes}".strip(),
        "dtype": dtype,
        "device": Device.of(device).name,
        "cores": cores(),
        **{key: round(value, 3) if isinstance(value, float) else value for key, value in figures.items()},
        "versions": versions(device.type),
        "machine": machine(device),
        "date": now(),
        "commit": commit(),
    }


def in_words(row: dict[str, Any]) -> str:
    """What a row says, in lines."""
    lines = [
        f"{row['what']}, {row['dtype']}: first call {row['cold_s']:.2f} s, "
        f"{row['compilations']} kernels compiled, on {row['cores']} cores; second {row['second_s']:.2f} s"
    ]
    if row["other_size"] is not None:
        lines.append(
            f"  {' x '.join(map(str, row['other_size']))}: {row['other_size_s']:.2f} s, "
            f"{row['other_size_compilations']} compiled; second {row['other_size_second_s']:.2f} s"
        )
    if row["warmed_s"] is not None:
        lines.append(
            f"  after turnout warm ({row['warm_s']:.1f} s): {row['warmed_s']:.2f} s, "
            f"{row['warmed_compilations']} compiled"
        )
    return "\n".join(lines)


def _calls_in_a_process(
    name: str, size: str, calls: list[tuple[int, ...]], dtype: str, device: torch.device, folder: Path
) -> list[Called]:
    """Two calls of each size in a new process, whose caches are in a folder."""
    request = json.dumps([name, size, calls, dtype, str(device)])
    lines = _run(["-m", "turnout.race.first_call", request], folder).splitlines()
    return [Called(*json.loads(line)) for line in lines if line.startswith("[")]


def _warm(name: str, size: str, dtype: str, device: torch.device, folder: Path) -> float:
    """Compile ahead for this kind of card, as on a machine without one; the seconds that took."""
    words = ["-m", "turnout", "warm", name, "--size", size, "--dtype", dtype]
    words += ["--device", Device.of(device).slug, "--json"]
    return json.loads(_run(words, folder, CUDA_VISIBLE_DEVICES="").splitlines()[-1])["seconds"]


def _run(words: list[str], folder: Path, **environment: str) -> str:
    """What a new process of this Python prints; its caches of kernels and of measurements are in a folder."""
    caches = {"TRITON_CACHE_DIR": str(folder / "triton"), "TURNOUT_CACHE_DIR": str(folder / "turnout")}
    done = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, **caches, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        output = (done.stderr.strip() or done.stdout.strip() or f"status {done.returncode}").splitlines()
        raise RuntimeError(f"the process that makes the first call has failed: {output[-1]}")
    return done.stdout


def first_calls(
    name: str, size: str, calls: list[tuple[int, ...]], dtype: torch.dtype, device: torch.device, cache: Path
) -> Iterator[Called]:
    """The first two calls of an accelerated model in each size, in this process."""
    racer = racer_named(name)
    config, numbers = numbers_of(name, racer, size)
    with torch.no_grad():
        model = racer.build(config, Settings(numbers, dtype, device))
        accelerate(model)
        for size_of_call in calls:
            check_size(name, racer, model, size_of_call)
            call = racer.call(model, Settings(size_of_call, dtype, device))
            for _ in range(2):
                before = _compiled(cache)
                seconds = time_call(lambda call=call: call(model), device).ms / 1e3
                yield Called(seconds, _compiled(cache) - before)


def _compiled(cache: Path) -> int:
    """How many kernels a cache of Triton's holds."""
    return sum(1 for pattern in _BINARIES for _ in cache.rglob(pattern))


def main() -> None:
    """Make the calls that the first argument names, and print a line of JSON for each."""
    name, size, calls, dtype, device = json.loads(sys.argv[1])
    cache = Path(os.environ["TRITON_CACHE_DIR"])
    sizes = [tuple(each) for each in calls]
    for called in first_calls(name, size, sizes, model_dtype_named(dtype), torch.device(device), cache):
        print(json.dumps(called), flush=True)


if __name__ == "__main__":
    main()

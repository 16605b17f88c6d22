"""Measure this machine's card: python -m benchmarks.card [--step S] [--budget S] [--out DIR] ...

GPU tests, host times, races, first calls and ranks, what decides most first, each step a process of its own
with a limit in time. Rows go to DIR/<device>/ as soon as they are there. A step that this code has been
through is left out, so a run that was cut off goes on when it is started again: `card.jsonl` says what became
of each. At the end, and with --summary without measuring, every target of `targets.json` is said to be
reached, not reached or not measured.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import targets

ROOT = Path(__file__).parents[1]
# What the steps import, by the name of the module. `make card-packages` collects what it may lack.
PACKAGES = {
    "accelerate": "accelerate", "diffusers": "diffusers", "peft": "peft", "platformdirs": "platformdirs",
    "pytest": "pytest", "pytest_timeout": "pytest-timeout", "rich": "rich", "torch": "torch",
    "transformers": "transformers", "triton": "triton", "typer": "typer", "xdist": "pytest-xdist",
}  # fmt: skip
LOG = "card.jsonl"
_RACES_LISTED = ("-m", "turnout", "race", "--list")
DONE, FAILED, OUT_OF_TIME = "done", "failed", "out of time"
ALIKE = 3  # steps in a row that fail with the same words: so would the others
STARTED = 15.0  # seconds: a step with less left would hardly be there before it ends
# Races that targets are of, in the order of what they decide; then all others.
RACES = (
    ("flux", "bfloat16"), ("sdxl-unet", "float16"), ("wan-vae", "bfloat16"), ("mamba-decode", "bfloat16"),
    ("flux-vae", "bfloat16"), ("wan", "bfloat16"), ("hunyuan-vae", "bfloat16"), ("ltx-vae", "bfloat16"),
    ("wan22-vae", "bfloat16"), ("mamba2-decode", "bfloat16"), ("cogvideox-vae", "bfloat16"),
    ("wan-vae-encode", "bfloat16"), ("flux-vae-encode", "bfloat16"), ("hunyuan-vae-encode", "bfloat16"),
    ("ltx-vae-encode", "bfloat16"), ("qwen-image-vae", "bfloat16"), ("sd-vae", "bfloat16"),
    ("sdxl-vae", "float16"), ("sdxl-vae", "float32"), ("flux2-vae", "bfloat16"),
)  # fmt: skip
RANKS = {
    "lockstep": (
        ("wan-vae", "wan22-vae", "flux-vae", "ltx-vae", "hunyuan-vae"),
        (2, 4, 8),
    ),
    "fake": (("wan-vae", "wan22-vae", "flux-vae"), (8, 1, 2, 4)),
}


class Step(NamedTuple):
    """A command of this Python, by its words."""

    name: str
    words: tuple[str, ...]


class Settings(NamedTuple):
    """Where rows go, on what, and how long a step and all of them may take, in seconds."""

    out: Path
    device: str
    step: float
    budget: float
    processes: int = 15
    size: str = "full"

    @property
    def folder(self) -> Path:
        from turnout.routing.device import Device

        return self.out / Device.of(self.device).slug


def steps(settings: Settings) -> Iterator[Step]:
    """All steps, those first that decide most."""
    out = ("--out", str(settings.out), "--missing")
    on = ("--device", settings.device)
    size = ("--size", settings.size)
    yield Step("doctor", ("-m", "turnout", "doctor"))
    yield _tests(settings)
    for name, dtype in RACES:
        yield _race(f"race {name} {dtype}", (name, *size, "--dtype", dtype, *on, "--graph", *out))
    for name in ("wan-vae", "flux-vae", "sdxl-unet", "flux"):
        words = ("-m", "turnout", "race", name, *size, *on, "--first-call", *out)
        yield Step(f"first call {name}", words)
    yield Step("host times", ("-m", "turnout", "bench", "router", *on, *out))
    for engine, (names, counts) in RANKS.items():
        for name in names:
            for ranks in counts:
                words = ("-m", "turnout", "race", name, *_size_of_ranks(name, engine, settings.size), *on)
                words += ("--ranks", str(ranks), "--engine", engine, "--rounds", "3", *out)
                yield Step(f"{ranks} ranks {engine} {name}", words)
    others = [(name, dtype) for name, dtype in _races() if (name, dtype) not in RACES]
    for name, dtype in others:
        yield _race(f"race {name} {dtype}", (name, *size, "--dtype", dtype, *on, "--graph", *out))
    for name, dtype in (*RACES, *others):
        words = (name, *size, "--dtype", dtype, *on, "--graph", "--compile", *out)
        yield _race(f"race {name} {dtype}, torch.compile", words)


def _tests(settings: Settings) -> Step:
    words = ("-m", "pytest", "-q", "-m", "gpu", "-n", str(settings.processes), "--dist", "worksteal")
    words += ("-p", "benchmarks.recorded_tests", "--recorded", str(settings.folder / "gpu-tests.jsonl"))
    # Only files with such tests: others may need packages that a card's Python has no use for.
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text("utf-8")]
    return Step("GPU tests", (*words, *sorted(str(path.relative_to(ROOT)) for path in files)))


def _race(name: str, words: tuple[str, ...]) -> Step:
    return Step(name, ("-m", "turnout", "race", *words, "--rounds", "4", "--seconds", "4"))


def _races() -> Iterator[tuple[str, str]]:
    from turnout.race.models import RACERS

    return ((name, dtype) for name, racer in RACERS.items() for dtype in racer.dtypes)


def _size_of_ranks(name: str, engine: str, size: str) -> tuple[str, ...]:
    """A picture of 1024 x 1024 is too small to be split over eight cards."""
    larger = size == "full" and (name, engine) == ("flux-vae", "fake")
    return ("--size", "4096x4096" if larger else size)


def missing_packages() -> list[str]:
    """Why the steps cannot run here: a line for each package that pip would have to install."""
    reasons = []
    for module, name in PACKAGES.items():
        try:
            importlib.import_module(module)
        except ImportError as failure:
            reasons.append(f"{name}: {failure}")
    if not reasons:
        from turnout.race.models import RACERS

        one_of_each = {racer.package: (race, racer) for race, racer in RACERS.items()}
        for race, racer in one_of_each.values():
            try:
                racer.load_class()
            except ValueError as failure:
                reasons.append(f"{race}: {failure}")
    return reasons


def broken_commands(log: Path) -> list[str]:
    """What the command line says where it does not run at all: a line for each command that failed."""
    log.parent.mkdir(exist_ok=True)
    tried = (Step("version", ("-m", "turnout", "--version")), Step("races", _RACES_LISTED))
    tries = [(step, *run(step, 120.0, log)) for step in tried]
    return [f"python {' '.join(step.words)}: {state}: {line}" for step, state, line in tries if state != DONE]


def pending(all_steps: Sequence[Step], known: Sequence[dict[str, Any]], again: bool) -> list[Step]:
    """The steps that are left, those first that were not tried; with `again` also those that failed."""
    states = {row["step"]: row["state"] for row in known}
    new = [step for step in all_steps if step.name not in states]
    cut = [step for step in all_steps if states.get(step.name) == OUT_OF_TIME]
    failed = [step for step in all_steps if again and states.get(step.name) == FAILED]
    return [*new, *cut, *failed]


def run(step: Step, seconds: float, log: Path) -> tuple[str, str]:
    """Run a step for at most so long: its state, and the last line of its output."""
    paths = os.pathsep.join(filter(None, (str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}
    environment.setdefault("OMP_NUM_THREADS", "1" if step.name == "GPU tests" else str(os.cpu_count() or 1))
    with log.open("ab") as output:
        begin = output.tell()
        process = subprocess.Popen(
            [sys.executable, *step.words],
            env=environment,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(seconds)
            state = FAILED if status else DONE
        except subprocess.TimeoutExpired:
            state = OUT_OF_TIME
        finally:  # also where this process is interrupted: nothing it began goes on
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text = log.read_bytes()[begin:].decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return state, lines[-1] if lines else ""


def measure(settings: Settings, again: bool = False) -> int:
    """Run the steps that are left, as far as the budget goes. Returns how many are left or have failed."""
    from turnout.bench.sweep import commit, keep_row, rows_of_this_code, versions

    end = time.monotonic() + settings.budget
    path = settings.folder / LOG
    settings.folder.mkdir(parents=True, exist_ok=True)
    log = ROOT / "build" / "card.log"
    log.parent.mkdir(exist_ok=True)
    all_steps = list(steps(settings))
    device = _device(settings.device)
    left = pending(all_steps, rows_of_this_code(path, device), again)
    print(f"{len(all_steps) - len(left)} of {len(all_steps)} steps are done; what they say is in {log}")
    last_words: list[str | None] = []  # of steps that failed; None: of one that did not
    for i, step in enumerate(left):
        left_of_all = end - time.monotonic()
        if i and left_of_all < min(STARTED, settings.step):
            break
        seconds = min(settings.step, left_of_all)
        begun = time.monotonic()
        print(f"{step.name} ...", end=" ", flush=True)
        state, last_line = run(step, seconds, log)
        took = round(time.monotonic() - begun, 1)
        print(f"{state}, {took} s{'' if state == DONE else f': {last_line[:200]}'}", flush=True)
        row = {
            "step": step.name,
            "state": state,
            "seconds": took,
            "said": last_line[:500],
            "versions": versions(device.type),
            "commit": commit(),
        }
        keep_row(row, path, "step")
        last_words.append(last_line if state == FAILED else None)
        if last_words[-ALIKE:] == [last_line] * ALIKE:
            print(
                f"error: {ALIKE} steps in a row failed with the same words, the others are left: {last_line}"
            )
            break
    rows = rows_of_this_code(path, device)
    done = sum(row["state"] == DONE for row in rows)
    print(f"{done} of {len(all_steps)} steps are done; run it again for the others")
    return len(all_steps) - done


def show(folder: Path, code: str | None = None) -> list[targets.Result]:
    """Print what became of every target, by the rows that were measured with this state of the code (default:
    as it is).
    """
    from turnout.bench.sweep import commit

    code = code or commit()

    def rows(path: Path) -> list[dict[str, Any]]:
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [row for row in map(json.loads, lines) if row.get("commit") == code]

    results = targets.summary(folder, rows)
    for state in (targets.MISSED, targets.UNKNOWN, targets.REACHED):
        for result in results:
            if result.state == state:
                print(result)
    counts = ", ".join(
        f"{sum(result.state == state for result in results)} {state}"
        for state in (targets.REACHED, targets.MISSED, targets.UNKNOWN)
    )
    print(f"targets: {counts}; code {code}")
    return results


def _device(name: str) -> Any:
    import torch

    return torch.device(name)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--step", type=float, default=540, help="seconds that one step may take")
    parser.add_argument("--budget", type=float, default=86400, help="seconds in all")
    parser.add_argument("--processes", type=int, default=15, help="that test at a time on the card")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--size", default="full", help="of races: tiny and small are for trying this out")
    parser.add_argument("--again", action="store_true", help="try steps that failed once more")
    parser.add_argument("--list", action="store_true", help="print the steps, and end")
    parser.add_argument("--summary", action="store_true", help="print which targets are reached, and end")
    parser.add_argument("--card", help="with --summary: by name, h200 say, where it is not here")
    parser.add_argument("--commit", help="with --summary: of rows of that code")
    arguments = parser.parse_args(words)
    settings = Settings(
        arguments.out.resolve(),
        arguments.device,
        arguments.step,
        arguments.budget,
        arguments.processes,
        arguments.size,
    )
    if arguments.list:
        for step in steps(settings):
            print(f"{step.name:40} python {' '.join(step.words)}")
        return 0
    if arguments.summary:
        from turnout.routing.device import Device

        folder = (
            settings.folder if arguments.card is None else settings.out / Device.named(arguments.card).slug
        )
        show(folder, arguments.commit)
        return 0
    if missing := missing_packages():
        for reason in missing:
            print(f"missing: {reason}")
        print("error: pip install what is missing, or run make card-packages where there is a network")
        return 2
    import torch

    from turnout.bench.sweep import commit

    if _device(arguments.device).type == "cuda" and not torch.cuda.is_available():
        print("error: this machine has no CUDA GPU; --device cpu --size tiny tries the steps without one")
        return 2
    if commit() is None:
        print("error: nobody knows which code this is; set TURNOUT_COMMIT to the name of its commit")
        return 2
    if broken := broken_commands(ROOT / "build" / "card.log"):
        for reason in broken:
            print(f"error: {reason}")
        return 2
    left = measure(settings, arguments.again)
    show(settings.folder)
    return int(left > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

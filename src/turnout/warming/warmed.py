"""Compile launches, and say what became of each."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from turnout.launch.ahead import Spec
from turnout.routing import versions
from turnout.routing.device import Device, with_software_here
from turnout.routing.names import model_dtype_named
from turnout.warming.compiling import Compiler, can_compile
from turnout.warming.worker import Answer as Kernel

Progress = Callable[[int, int, str], object]


@dataclass(frozen=True)
class Warmed:
    """What became of the kernels of a call. seconds: planning, looking and compiling.

    Printed, it is one line, and one more for each kernel that is missing or does not compile.
    """

    device: str
    kernels: tuple[Kernel, ...]
    jobs: int
    seconds: float

    def named(self, state: str) -> list[Kernel]:
        """The kernels of one state: "cached", "missing", "compiled" or "failed"."""
        return [kernel for kernel in self.kernels if kernel.state == state]

    @property
    def ready(self) -> bool:
        """Whether the call would compile nothing."""
        return not self.named("missing") and not self.named("failed")

    def __str__(self) -> str:
        counts = {state: len(self.named(state)) for state in ("compiled", "cached", "missing", "failed")}
        shown = (
            ", ".join(f"{count} {state}" for state, count in counts.items() if count)
            or "it launches none of ours"
        )
        lines = [
            f"{len(self.kernels)} kernels for {self.device}: {shown}; "
            f"{self.seconds:.1f} s, {self.jobs} at a time"
        ]
        missing = Counter(kernel.name for kernel in self.named("missing"))
        lines += [f"  missing  {count} x {name}" for name, count in missing.items()]
        lines += [f"  failed   {kernel.name}: {kernel.error}" for kernel in self.named("failed")]
        return "\n".join(lines)


def compile_specs(
    compiler: Compiler,
    specs: list[Spec],
    card: Device,
    *,
    jobs: int,
    fewest: int | None = 1,
    progress: Progress | None,
    begun: float,
) -> Warmed:
    """Look up launches, and compile those that are missing if they are `fewest` at least; None: only look."""
    kernels: list[Kernel] = []
    done, missing = 0, 0
    for answer in compiler.answers(specs, card, jobs=jobs, fewest=fewest) if specs else ():
        if isinstance(answer, int):
            missing = answer
        else:
            kernels.append(answer)
        if progress is not None and fewest is not None and missing >= fewest:
            done += not isinstance(answer, int) and missing > 0
            progress(done, missing, "" if isinstance(answer, int) else answer.name)
    return Warmed(card.name, tuple(kernels), jobs, time.perf_counter() - begun)


def check_jobs(jobs: int) -> int:
    """A number of processes. Raises ValueError for none."""
    if not isinstance(jobs, int) or isinstance(jobs, bool):
        raise TypeError(f"jobs is {jobs!r}, it needs to be a whole number of processes")
    if jobs < 1:
        raise ValueError(f"jobs is {jobs}, one process at least has to compile")
    return jobs


def check_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """The dtype to cast to, which may be given by name. Raises for one that no weight is cast to."""
    if dtype is None:
        return None
    if not isinstance(dtype, str | torch.dtype):
        raise TypeError(f"dtype is {dtype!r}, it needs to be a dtype such as torch.bfloat16")
    return model_dtype_named(str(dtype).removeprefix("torch."))


def card_named(name: str | torch.device | Device | None) -> Device:
    """The card to compile for, with the Triton that is installed. Raises ValueError where there is none."""
    if versions.triton() is None:
        raise ValueError(
            "Triton is not installed, and nothing can be compiled without it; pip install triton"
        )
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise ValueError("TRITON_INTERPRET is set: kernels are interpreted, nothing is compiled; unset it")
    if not can_compile():
        raise ValueError("this Python is part of another program and cannot start a process that compiles")
    card = name if isinstance(name, Device) else _card(name)
    if card.backend not in ("cuda", "hip") or card.capability is None:
        raise ValueError(
            f"device {card.name} has no kernels to compile, only NVIDIA's and AMD's cards have; "
            "name one, such as h200"
        )
    return with_software_here(card)


def _card(name: str | torch.device | None) -> Device:
    """A known card by its name, or one that is here by torch's name for it."""
    if not isinstance(name, str | torch.device | None):
        raise TypeError(f"device is {name!r}, it needs to be the name of a card, such as 'h200'")
    if isinstance(name, str) and not re.fullmatch(r"cuda(:\d+)?", name):
        return Device.named(name)
    here = torch.device(name or "cuda")
    if here.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("no GPU is here; name the card to compile for, such as h200")
    return Device.of(here)

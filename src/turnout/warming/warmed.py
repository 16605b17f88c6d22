"""`turnout.warm`: compile all that a call will launch, and say what became of it."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from turnout.launch.ahead import Spec
from turnout.routing import versions
from turnout.routing.device import Device, with_software_here
from turnout.warming.compiling import Compiler, can_compile, most_jobs
from turnout.warming.planning import specs_of_call
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


def warm(
    call: Callable[..., Any],
    *args: Any,
    device: str | Device | None = None,
    dtype: torch.dtype | None = None,
    jobs: int | None = None,
    check: bool = False,
    progress: Progress | None = None,
    **kwargs: Any,
) -> Warmed:
    """Compile every kernel that `call(*args, **kwargs)` launches on a card, all together, into Triton's
    cache.

    Nothing runs, and no GPU is needed: the call is planned on tensors without memory, and its kernels are
    compiled in processes of their own. The first call on such a card, with the same software and the same
    cache folder (`TRITON_CACHE_DIR`), then compiles nothing.

    call: a model, a method of one (`vae.decode`), or a function that uses some. A model that is not
    accelerated is taken as it would be accelerated; the model itself is not changed. args: tensors of the
    sizes and dtypes to come, on any device, "meta" included. device: the card by name ("h200"); default: the
    one that is here. dtype: what models and floating-point arguments are cast to first. jobs: processes at a
    time; default: one for each core.
    check: only say what is missing. progress: called with how many are done, how many there are, and a name.

    What depends on values cannot be found ahead: a call that looks at a tensor on the card (`.item()`, a mask
    of lengths) raises `NeedsValuesError`, a RuntimeError.

    >>> import torch, turnout
    >>> norm = torch.nn.GroupNorm(8, 64)
    >>> found = turnout.warm(norm, torch.empty(1, 64, 64, 64), device="h200", check=True)
    >>> found.device
    'NVIDIA H200'
    """
    begun = time.perf_counter()
    card, jobs = card_named(device), check_jobs(most_jobs() if jobs is None else jobs)

    def prepare(model: nn.Module) -> None:
        if dtype is not None:
            nn.Module.to(model, dtype)

    with Compiler() as compiler:
        cast = [
            x.to(dtype) if dtype is not None and isinstance(x, Tensor) and x.is_floating_point() else x
            for x in args
        ]
        specs = specs_of_call(call, tuple(cast), kwargs, card, prepare)
        return compile_specs(compiler, specs, card, jobs=jobs, check=check, progress=progress, begun=begun)


def compile_specs(
    compiler: Compiler,
    specs: list[Spec],
    card: Device,
    *,
    jobs: int,
    check: bool,
    progress: Progress | None,
    begun: float,
) -> Warmed:
    """Look up launches, and compile those that are missing."""
    kernels: list[Kernel] = []
    done, missing = 0, 0
    for answer in compiler.answers(specs, card, check=check, jobs=jobs) if specs else ():
        if isinstance(answer, int):
            missing = answer
        else:
            kernels.append(answer)
        if progress is not None and not check:
            done += not isinstance(answer, int) and missing > 0
            progress(done, missing, "" if isinstance(answer, int) else answer.name)
    return Warmed(card.name, tuple(kernels), jobs, time.perf_counter() - begun)


def check_jobs(jobs: int) -> int:
    """A number of processes. Raises ValueError for none."""
    if jobs < 1:
        raise ValueError(f"jobs is {jobs}, one process at least has to compile")
    return jobs


def card_named(name: str | Device | None) -> Device:
    """The card to compile for, with the Triton that is installed. Raises ValueError where there is none."""
    if versions.triton() is None:
        raise ValueError(
            "Triton is not installed, and nothing can be compiled without it; pip install triton"
        )
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise ValueError("TRITON_INTERPRET is set: kernels are interpreted, nothing is compiled; unset it")
    if not can_compile():
        raise ValueError("this Python is part of another program and cannot start a process that compiles")
    if name is None:
        if not torch.cuda.is_available():
            raise ValueError("no GPU is here; name the card to compile for, device h200 say")
        name = Device.of("cuda")
    card = name if isinstance(name, Device) else Device.named(name)
    if card.backend not in ("cuda", "hip") or card.capability is None:
        raise ValueError(
            f"device {card.name} has no kernels to compile, only NVIDIA's and AMD's cards have; "
            "name one, h200 say"
        )
    return with_software_here(card)

"""Which versions of Triton the kernels compile with, and which kernels did not compile on this machine.

Tests compile every kernel with the Tritons in `COMPILED`, and run all routes on a card with the pairs in
`verified()`. With any other Triton one small kernel is compiled before a Gluon route is first taken: whether
that worked is kept on disk, and where it did not the route refuses. A kernel that does not compile although
the small one did is remembered in the same way (`routing.failures`), so nobody is warned of it twice.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import NamedTuple

from turnout.launch.direct import launcher_kind
from turnout.launch.launcher import compile_options
from turnout.routing import failures, versions
from turnout.routing.code_hash import code_hash
from turnout.routing.device import Device


class Verified(NamedTuple):
    """All GPU tests were run with these versions on this card at one commit, and so many of them passed."""

    torch: str
    triton: str
    card: str
    tests: int
    passed: int
    commit: str  # the state that was run; what has changed since has not been run on a card

    def __str__(self) -> str:
        return f"{self.passed} of {self.tests} GPU tests passed on {self.card} at commit {self.commit}"


COMPILED: tuple[versions.Version, ...] = ((3, 6), (3, 7), (3, 8), (3, 9))
PROBE = "turnout.launch.probe_kernels:probe"


@functools.cache
def verified() -> tuple[Verified, ...]:
    """The runs in which all GPU tests passed: verified.json, which `python -m benchmarks.docs_pages` writes
    from the results.
    """
    runs = json.loads(Path(__file__).with_name("verified.json").read_text(encoding="utf-8"))
    return tuple(Verified(**run) for run in runs)


def fast_launch() -> str | None:
    """Why kernels cannot be launched by address here, or None where they are."""
    if versions.triton() is None:
        return "Triton is not installed"
    if launcher_kind() is None:
        return (
            f"the launcher of Triton {versions.triton()} is not one that turnout knows; "
            "launches take 10 to 20 us more"
        )
    return None


def gluon_problem(device: Device) -> str | None:
    """Why Gluon kernels for Hopper do not compile with the Triton of this device, or None where they do."""
    if device.triton is None or device.triton in COMPILED:
        return None
    probe = code_hash(PROBE)
    return failures.compile_problem(probe, device) if failures.is_known(probe, device) else _probe(device)


def _probe(device: Device) -> str | None:
    """Compile the small kernel, and keep what came of it."""
    from turnout.launch.probe_kernels import probe_launch

    try:
        launch = probe_launch()
        named = {**launch.constants, **compile_options(launch.warps, launch.options)}
        launch.kernel.warmup(*launch.tensors, *launch.numbers, **named, grid=(launch.programs,))
        problem = None
    except Exception as failure:  # whatever a new Triton has changed
        problem = f"Triton {versions.triton()} does not compile Gluon kernels ({failures.in_words(failure)})"
    failures.remember(code_hash(PROBE), device, problem)
    return problem

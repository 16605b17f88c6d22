"""Failures of a route at launch: what counts as one, and which kernels do not compile on this machine.

Only three things make a call fall through to the next route: no memory, no shared memory, a kernel that does not
compile. Everything else that a route raises is a mistake, and is raised. That a kernel does not compile is kept on
disk for the Triton and the card it was seen with, so nobody waits for it, or is warned of it, twice.
"""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Literal

import torch

from turnout.routing import store, versions
from turnout.routing.device import Device
from turnout.routing.row import Unreadable

Kind = Literal["memory", "shared memory", "compilation"]

_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED")
_NOT_COMPILED = ("CompilationError", "CompileTimeAssertionFailure", "UnsupportedLanguageConstruct", "PTXASError")


def kind_of(failure: BaseException) -> Kind | None:
    """Which kind of launch failure this is; None for a mistake.

    >>> kind_of(torch.OutOfMemoryError("CUDA out of memory.")), kind_of(MemoryError()), kind_of(RuntimeError("shape"))
    ('memory', 'memory', None)
    """
    name, text = type(failure).__name__, str(failure)
    if isinstance(failure, (MemoryError, torch.OutOfMemoryError)):
        return "memory"
    if name == "OutOfResources":  # Triton: shared memory, tensor memory, threads
        return "shared memory"
    if name in _NOT_COMPILED or (isinstance(failure, RuntimeError) and "PassManager::run failed" in text):
        return "compilation"
    if isinstance(failure, RuntimeError) and any(sign in text for sign in _NO_MEMORY):
        return "memory"
    return None


def in_words(failure: BaseException) -> str:
    """A failure in one line: its type and the first line of its message."""
    return f"{type(failure).__name__}: {(str(failure).strip() or 'no message').splitlines()[0]}"


def compile_problem(kernels: str, device: Device) -> str | None:
    """Why the kernels with this hash do not compile for a device of this machine, if that was seen before."""
    return _known(device).get(kernels) if device.triton is not None else None


def is_known(kernels: str, device: Device) -> bool:
    """Whether the kernels with this hash were tried on this machine, whatever came of it."""
    return kernels in _known(device)


def remember(kernels: str, device: Device, problem: str | None) -> None:
    """Keep that the kernels with this hash do not compile for a device here, or (None) that they do."""
    _known(device)[kernels] = problem
    store.write_json(_file(device), _known(device))


def forget_problems() -> None:
    """Read from disk anew what compiles."""
    _known.cache_clear()


@functools.cache
def _known(device: Device) -> dict[str, str | None]:
    try:
        content = store.read_json(_file(device))
    except (Unreadable, FileNotFoundError):
        return {}
    entries = content.items() if isinstance(content, dict) else ()
    return {name: problem for name, problem in entries if problem is None or isinstance(problem, str)}


def _file(device: Device) -> Path:
    software = [versions.triton(), device.name, device.capability]
    name = hashlib.sha256(json.dumps(software).encode()).hexdigest()[:16]
    return store.cache_folder() / f"v{store.SCHEMA}" / "compiled" / f"{device.slug}-{name}.json"

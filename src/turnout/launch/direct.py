"""Triton's launcher in C, called with addresses: a tenth of the host time of `kernel[grid](...)`.

What it takes has changed once. Triton 3.6 compiles a launcher for each signature, which takes the kernel's
arguments one by one; from 3.7 on there is one launcher for all, which is told the signature and takes the
arguments as a tuple. Both skip constants, and take an int for a pointer, about which there is nothing to ask
the driver. From 3.7 on the launcher does not count its arguments, so they are counted here, once for each
compiled kernel. From 3.8 on a kernel that nobody holds unloads its code, so `DirectLauncher` holds it.
"""
# pyright: reportMissingModuleSource=false, reportAttributeAccessIssue=false

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

ONE_BY_ONE = "iiiKKppOOOOOO"  # Triton 3.6: what comes before the kernel's arguments
AS_TUPLE = "iiiKKpp(iii)OOOOOOy*O"  # Triton 3.7 to 3.9

Launcher = Callable[[int, int, Sequence[Any]], None]


class DirectLauncher(NamedTuple):
    """`run(programs, stream, arguments)` launches `kernel`; None if Triton's launcher is not one we know."""

    kernel: Any
    run: Launcher | None


@functools.cache
def launcher_kind() -> str | None:
    """How Triton's launcher in C takes its arguments: `ONE_BY_ONE`, `AS_TUPLE`, or None for any other one."""
    if torch.version.hip is not None:
        return None
    try:
        from triton.backends.nvidia import driver
    except ImportError:
        return None
    if getattr(driver, "_BASE_ARGS_FORMAT", None) == ONE_BY_ONE:
        return ONE_BY_ONE
    source = Path(driver.__file__).with_name("driver.c")  # from 3.7 on only the C source says it
    try:
        return AS_TUPLE if f'"{AS_TUPLE}"' in source.read_text(encoding="utf-8") else None
    except OSError:
        return None


def direct_launcher(kernel: Any, argument_count: int) -> DirectLauncher:
    """The direct launcher of a compiled kernel that takes so many arguments, descriptors spread out.

    `run` is None where the kernel needs memory of its own, or the launcher is not known: launch in the
    ordinary way.
    """
    kind, owner = launcher_kind(), kernel.run
    if (
        kind is None
        or owner.global_scratch_size
        or owner.profile_scratch_size
        or getattr(owner, "gsan_enabled", False)
    ):
        return DirectLauncher(kernel, None)
    fixed = (kernel.function, owner.launch_cooperative_grid, owner.launch_pdl)
    if kind == ONE_BY_ONE:
        before = (
            *fixed,
            None,
            None,
            kernel.packed_metadata,
            None,
            None,
            None,
        )  # scratch memory, metadata and hooks: none
        call = _without_descriptors(owner.launch)
        return DirectLauncher(
            kernel, lambda programs, stream, arguments: call(programs, 1, 1, stream, *before, *arguments)
        )
    if len(owner.arg_annotations) != argument_count:
        return DirectLauncher(kernel, None)
    from triton import runtime

    before = (
        *fixed,
        kernel.packed_metadata,
        None,
        None,
        None,
        None,
        None,
        owner.arg_annotations,
        owner.kernel_signature,
    )
    call = runtime.driver.active.utils.launch
    return DirectLauncher(
        kernel, lambda programs, stream, arguments: call(programs, 1, 1, stream, *before, arguments)
    )


def _without_descriptors(launch: Any) -> Callable[..., None]:
    """Triton 3.6 wraps the launcher of a kernel with descriptors into a function that encodes them first."""
    if not hasattr(launch, "__closure__"):
        return launch
    return dict(zip(launch.__code__.co_freevars, launch.__closure__, strict=True))["launcher"].cell_contents

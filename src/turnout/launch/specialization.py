"""Kernels that are compiled once for all values of some numbers.

Triton compiles a kernel anew where a number is 1, where 16 divides it, and where it does not. That pays for a
stride, which says how wide a load may be. A number that only bounds a loop or a mask of rows differs from one
picture to the next, and the code is the same but for a few instructions: NOTES.md of the ops that name such
numbers say how many.

A kernel may say so itself (`do_not_specialize`); that is part of its source. What is said here belongs to the
launch, as its constants do.
"""
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def unspecialized(kernel: Any, *names: str) -> Any:
    """The same kernel, compiled without looking at the values of these numbers.

    Their types still count: a number that needs 64 bits is another one. Triton's interpreter, which compiles
    nothing, gets the kernel as it is.
    """
    if not names or not hasattr(kernel, "device_caches"):
        return kernel
    numbers = [parameter.name for parameter in kernel.params if not parameter.is_constexpr]
    for name in names:
        if name not in numbers:
            raise ValueError(f"kernel {kernel.fn.__name__} has no number {name!r}, only {', '.join(numbers)}")
    alike = type(kernel)(kernel.fn, do_not_specialize=[*kernel.do_not_specialize, *names])
    alike.unspecialized = names
    return alike


def names_of(kernel: Any) -> tuple[str, ...]:
    """The numbers that `unspecialized` was told, for another process to tell it."""
    return getattr(kernel, "unspecialized", ())

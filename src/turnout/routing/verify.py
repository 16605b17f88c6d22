"""Is an output right? The same question, asked by tune, by bench, by doctor and by the tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_WIDER = {torch.complex64: torch.complex128, torch.complex32: torch.complex128, torch.complex128: torch.complex128}
CLOSE = 1.5


def widened(x: Any) -> Any:
    """A tensor in float64 or complex128; integers and everything else as they are."""
    if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()):
        return x.detach().to(_WIDER.get(x.dtype, torch.float64))
    return x


def truth(reference: Callable[..., Any], args: tuple) -> Tensor:
    """The reference in the widest type there is."""
    return reference(*map(widened, args))


def relative_error(output: Tensor, true: Tensor) -> float:
    """The norm of the difference over the norm of the truth; infinite where one is finite and the other is not."""
    output, true = widened(output), widened(true)
    same = torch.isfinite(true) == torch.isfinite(output) if true.is_floating_point() or true.is_complex() else torch.tensor(True)
    if not bool(same.all()):
        return float("inf")
    finite = torch.isfinite(true) if true.is_floating_point() or true.is_complex() else torch.ones_like(true, dtype=torch.bool)
    difference = torch.linalg.vector_norm((output - true)[finite].to(torch.complex128 if true.is_complex() else torch.float64))
    size = torch.linalg.vector_norm(true[finite].to(torch.complex128 if true.is_complex() else torch.float64))
    return float(difference / size) if size > 0 else float(difference)


def complaint(numerics: str, output: Tensor, reference: Tensor, true: Tensor) -> str | None:
    """Why an output does not keep the promise of its numerics class, or None. Shape, dtype and strides belong to every promise."""
    for what in ("shape", "dtype", "device"):
        if getattr(output, what) != getattr(reference, what):
            return f"{what} is {getattr(output, what)}, the reference gives {getattr(reference, what)}"
    if output.stride() != reference.stride():
        return f"strides are {output.stride()}, the reference gives {reference.stride()}"
    if numerics == "exact":
        return None if torch.equal(output, reference) else "it is not bit-identical to the reference"
    error, allowed = relative_error(output, true), allowed_error(reference, true)
    return None if numerics == "lossy" or error <= allowed else f"its error against float64 is {error:.2e}, allowed are {allowed:.2e}"


def allowed_error(reference: Tensor, true: Tensor) -> float:
    """1.5 times the reference's own error, and never less than one rounding of the result, which the reference may avoid by luck."""
    if not (reference.is_floating_point() or reference.is_complex()):
        return 0.0
    rounding = torch.finfo(reference.dtype).eps * (8 if reference.dtype in (torch.float64, torch.complex128) else 1)
    return max(CLOSE * relative_error(reference, true), rounding)

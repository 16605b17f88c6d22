"""Is an output right? The same question, asked by tune, by bench, by doctor and by the tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from turnout.routing.op import Op

_WIDER = {torch.complex64: torch.complex128, torch.complex32: torch.complex128, torch.complex128: torch.complex128}
CLOSE = 1.5


def widened(x: Any) -> Any:
    """A tensor in float64 or complex128; integers and everything else as they are."""
    if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()):
        return x.detach().to(_WIDER.get(x.dtype, torch.float64))
    return x


def outputs(op: Op, run: Callable[..., Any], args: tuple) -> tuple[Tensor, ...]:
    """Everything a run gives back, and everything it writes into, as one tuple; the given arguments stay as they are."""
    args = tuple(x.clone() if name in op.mutates and isinstance(x, Tensor) else x for name, x in zip(op.signature.parameters, args, strict=True))
    found = run(*args)
    written = tuple(x for name, x in zip(op.signature.parameters, args, strict=True) if name in op.mutates)
    return (*(found if isinstance(found, (tuple, list)) else (found,)), *written)


def truth(op: Op, args: tuple) -> tuple[Tensor, ...]:
    """What the reference gives in the widest type there is."""
    return outputs(op, op.reference, tuple(map(widened, args)))


def relative_error(output: Tensor, true: Tensor) -> float:
    """The norm of the difference over the norm of the truth; infinite where one is finite and the other is not."""
    wide = torch.complex128 if true.is_complex() else torch.float64
    output, true = output.detach().to(wide), true.detach().to(wide)
    finite = torch.isfinite(true)
    if not torch.equal(finite, torch.isfinite(output)):
        return float("inf")
    difference, size = torch.linalg.vector_norm((output - true)[finite]), torch.linalg.vector_norm(true[finite])
    return float(difference / size) if size > 0 else float(difference)


def complaint(numerics: str, output: tuple[Tensor, ...], reference: tuple[Tensor, ...], true: tuple[Tensor, ...]) -> str | None:
    """Why outputs do not keep the promise of their numerics class, or None. Shape, dtype and strides belong to every promise."""
    if len(output) != len(reference):
        return f"{len(output)} outputs, the reference gives {len(reference)}"
    return next((why for parts in zip(output, reference, true, strict=True) if (why := _complaint(numerics, *parts)) is not None), None)


def _complaint(numerics: str, output: Tensor, reference: Tensor, true: Tensor) -> str | None:
    for what in ("shape", "dtype", "device"):
        if getattr(output, what) != getattr(reference, what):
            return f"{what} is {getattr(output, what)}, the reference gives {getattr(reference, what)}"
    if output.numel() and output.stride() != reference.stride():
        return f"strides are {output.stride()}, the reference gives {reference.stride()}"
    if numerics == "exact":
        same = torch.equal(output, reference) or torch.equal(output.nan_to_num(), reference.nan_to_num())
        return None if same else "it is not bit-identical to the reference"
    error, allowed = relative_error(output, true), allowed_error(reference, true)
    return None if numerics == "lossy" or error <= allowed else f"its error against float64 is {error:.2e}, allowed are {allowed:.2e}"


def allowed_error(reference: Tensor, true: Tensor) -> float:
    """1.5 times the reference's own error, and never less than one rounding of the result, which the reference may avoid by luck."""
    if not (reference.is_floating_point() or reference.is_complex()):
        return 0.0
    rounding = torch.finfo(reference.dtype).eps * (8 if reference.dtype in (torch.float64, torch.complex128) else 1)
    return max(CLOSE * relative_error(reference, true), rounding)

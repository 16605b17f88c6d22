"""Decide whether an output is right, for tune, bench, doctor and the tests alike."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from turnout.routing.case import copy, laid_like
from turnout.routing.precision import strict_float32

if TYPE_CHECKING:
    from turnout.routing.op import Op

_COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
CLOSE = 1.5  # times the reference's own error: what a route with "close" numerics may have
_FEW, _ENOUGH = 256, 4096  # numbers in an output: too few to judge by one draw; enough in any case
_DRAWS = 8
_MANY = 10**12  # operations, which would take minutes in float64


def widened(x: Any, wide: torch.dtype = torch.float64) -> Any:
    """Convert a tensor to float64 (or `wide`), or to complex128; integers and other values stay unchanged."""
    if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()):
        return x.detach().to(torch.complex128 if x.dtype in _COMPLEX else wide)
    return x


def outputs(op: Op, run: Callable[..., Any], args: tuple) -> tuple[Tensor, ...]:
    """Call `run` on copies of what it writes, and return its outputs and all it has written, as one tuple."""
    args = tuple(
        copy(x) if name in op.mutates and isinstance(x, Tensor) else x
        for name, x in zip(op.signature.parameters, args, strict=True)
    )
    result = run(*args)
    written = tuple(x for name, x in zip(op.signature.parameters, args, strict=True) if name in op.mutates)
    if result is None and op.mutates:
        return written
    returned: Any = result if isinstance(result, tuple) and op.returns_several else (result,)
    return (*returned, *written)


def truth(op: Op, args: tuple) -> tuple[Tensor, ...]:
    """The outputs of the reference in float64.

    Where that would take minutes and all arguments are of half types, in strict float32, whose error is a
    thousandth of theirs.
    """
    halves = all(
        x.dtype in (torch.float16, torch.bfloat16)
        for x in args
        if isinstance(x, Tensor) and x.is_floating_point()
    )
    wide = torch.float32 if halves and op.work(op.problem(*args)).flops > _MANY else torch.float64
    with strict_float32(("cuda", "conv")) if wide is torch.float32 else contextlib.nullcontext():
        return outputs(op, op.reference, tuple(widened(x, wide) for x in args))


def relative_error(output: Tensor, true: Tensor) -> float:
    """The norm of the difference over the norm of `true`; infinite if an element is finite in only one."""
    wide = torch.complex128 if true.is_complex() else torch.float64
    difference = size = 0.0
    for x, y in zip(_parts(output.detach()), _parts(true.detach()), strict=True):
        x, y = x.to(wide), y.to(wide)
        finite = torch.isfinite(y)
        if not torch.equal(finite, torch.isfinite(x)):
            return float("inf")
        if not finite.all():
            x, y = x[finite], y[finite]
        size += float(torch.linalg.vector_norm(y)) ** 2
        difference += float(torch.linalg.vector_norm(x - y)) ** 2
    return (difference / size if size > 0 else difference) ** 0.5


def _parts(x: Tensor) -> tuple[Tensor, ...]:
    """Split a tensor into parts of about 2^28 numbers: a whole video in float64 takes too much memory."""
    if not x.numel() or not x.dim():
        return (x,)
    axis = max(range(x.dim()), key=lambda dim: x.shape[dim])
    return x.split(max(1, x.shape[axis] * 2**28 // x.numel()), axis)


class Verifier:
    """Compares routes with the reference, in the same dtype and in float64, for one set of arguments.

    An output of a few numbers says little about the error of the code that made it: by chance it may be far
    smaller or larger. Such a call is made eight times (`draws`), each time with other arguments: all tensors
    but the first are rolled along the last of their dimensions that is longer than 1. Errors are taken over
    all draws. The same is done for an output of up to a few thousand numbers that seems too far off, as the
    numbers of one query have most of their error in common.
    """

    def __init__(self, op: Op, args: tuple, draws: int | None = None):
        self.op, self.args = op, args
        first = outputs(op, op.reference, args)
        self.draws = draws or (_DRAWS if sum(x.numel() for x in first) <= _FEW else 1)
        self.expected = [first, *(outputs(op, op.reference, self._drawn(i)) for i in range(1, self.draws))]
        self.true = [truth(op, self._drawn(i)) for i in range(self.draws)]

    def _drawn(self, i: int) -> tuple:
        if i == 0:
            return self.args
        tensors = [
            n
            for n, x in enumerate(self.args)
            if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()) and x.dim()
        ]
        return tuple(
            laid_like(x, rolled(x, i * 97)) if n in tensors[1:] else x for n, x in enumerate(self.args)
        )

    def mismatch(self, numerics: str, run: Callable[..., Any]) -> str | None:
        """Why a function does not keep the promise of its numerics class; None if it does.

        Every class promises the reference's shape, dtype and strides.
        """
        drawn_outputs = [outputs(self.op, run, self._drawn(i)) for i in range(self.draws)]
        for output, reference in zip(drawn_outputs, self.expected, strict=True):
            if len(output) != len(reference):
                return f"{len(output)} outputs, the reference gives {len(reference)}"
            why = next(
                (
                    why
                    for x, y in zip(output, reference, strict=True)
                    if (why := _misfit(x, y, numerics == "exact")) is not None
                ),
                None,
            )
            if why is not None:
                return why
        if numerics != "close":
            return None
        for output, reference, true in zip(
            *(map(_stacked, zip(*parts, strict=True)) for parts in (drawn_outputs, self.expected, self.true)),
            strict=True,
        ):
            why = self.error_mismatch(output, reference, true)
            if why is not None and self.draws == 1 and reference.numel() <= _ENOUGH:
                # That may be chance too: decide by more draws.
                return Verifier(self.op, self.args, draws=_DRAWS).mismatch(numerics, run)
            if why is not None:
                return why
        return None

    def error_mismatch(self, output: Tensor, reference: Tensor, true: Tensor) -> str | None:
        """Why an output is further from float64 than `close` allows; None if it is not."""
        error, allowed = relative_error(output, true), allowed_error(reference, true)
        if error <= allowed:
            return None
        return f"its error against float64 is {error:.2e}, allowed are {allowed:.2e}"

    def error(self, run: Callable[..., Any]) -> float:
        """The relative error of a function's first output against float64."""
        drawn_outputs = [outputs(self.op, run, self._drawn(i))[0] for i in range(self.draws)]
        return relative_error(_stacked(drawn_outputs), _stacked(true[0] for true in self.true))


def rolled(x: Tensor, by: int) -> Tensor:
    """Roll a tensor along the last of its dimensions that is longer than 1."""
    return x.roll(by, next((dim for dim in reversed(range(x.dim())) if x.shape[dim] > 1), -1))


def _stacked(parts: Iterable[Tensor]) -> Tensor:
    return torch.stack(tuple(parts))


def _misfit(output: Any, reference: Tensor, exact: bool) -> str | None:
    if not isinstance(output, Tensor):
        return f"it is a {type(output).__name__}, the reference gives a tensor"
    for attribute in ("shape", "dtype", "device"):
        actual, expected = getattr(output, attribute), getattr(reference, attribute)
        if actual != expected:
            return f"{attribute} is {actual}, the reference gives {expected}"
    if output.numel() and output.stride() != reference.stride():
        return f"strides are {output.stride()}, the reference gives {reference.stride()}"
    if exact and not torch.equal(output.nan_to_num(nan=123.0), reference.nan_to_num(nan=123.0)):
        return "it is not bit-identical to the reference"
    return None


def allowed_error(reference: Tensor, true: Tensor) -> float:
    """The relative error that "close" numerics allow: 1.5 times the reference's own.

    It is never less than the error of rounding a result once, which the reference may avoid by chance, more
    often the fewer numbers there are. For float64 there is no wider dtype to compare with: reordered sums
    must agree with the reference to 1e-10.
    """
    if not (reference.is_floating_point() or reference.is_complex()):
        return 0.0
    if reference.dtype in (torch.float64, torch.complex128):
        return max(CLOSE * relative_error(reference, true), 1e-10)
    # Results of half types are rounded once, by eps / sqrt(12) on average; in float32 every step rounds as
    # much as the last one.
    roundings = 2.0 if reference.numel() < _ENOUGH else 0.35 if reference.element_size() == 2 else 1.0
    return max(CLOSE * relative_error(reference, true), roundings * torch.finfo(reference.dtype).eps)

"""Check in every call, before a route runs, what the cache key of the call does not show.

Calls that only torch can handle go to plain PyTorch: transforms, modes, subclasses, lazy negation and
conjugation, tensors on another device (`fallback`). Before a route writes, overlapping tensors go to the
reference (`mutation`). The checks are generated as code for the tensors of a call: a loop over the tensors
would take 30 ns more for each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from turnout.routing.fallback import PLAIN_TENSORS
from turnout.routing.mutation import WriteChecks
from turnout.routing.torch_private import (
    IN_FORWARD_AD,
    autocasting,
    count_dispatch_modes,
    functorch_level,
    increment_version,
)

_KNOWN: dict[str, Any] = {
    "plain": PLAIN_TENSORS,
    "functorch_level": functorch_level,
    "count_modes": count_dispatch_modes,
    "forward_ad": forward_ad,
    "autocasting": autocasting,
    "in_inference_mode": torch.is_inference_mode_enabled,
    "increment_version": increment_version,
}


class Form(NamedTuple):
    """All that the generated code depends on. Tensors are given by their argument numbers."""

    op: str
    names: tuple[str, ...]
    tensors: tuple[int, ...]
    elsewhere: str  # an expression that tells whether tensor "{x}" is on another device
    may_be_conjugate: bool
    minds_autocast: bool
    written: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...]  # (a tensor that is written, another tensor)


def with_runtime_checks(
    op: str,
    names: tuple[str, ...],
    example_args: tuple,
    run: Callable[..., Any],
    reference: Callable[..., Any],
    left_to_torch: Callable[..., Any],
    failed: Callable[..., Any],
    *,
    minds_autocast: bool,
    writes: WriteChecks | None,
) -> Callable[..., Any]:
    """Put the checks in front of `run`, for calls with the cache key of `example_args`.

    The result calls `left_to_torch` where no route may run, `reference` where tensors overlap, and otherwise
    `run`; where that raises, `failed(failure, *args)`.
    """
    tensors = tuple(i for i, x in enumerate(example_args) if isinstance(x, Tensor))
    device = example_args[tensors[0]].device
    form = Form(
        op,
        names,
        tensors,
        _elsewhere(device),
        any(example_args[i].is_complex() for i in tensors),
        minds_autocast,
        () if writes is None else writes.written,
        () if writes is None else tuple((pair.written, pair.other) for pair in writes.pairs),
    )
    overlap, sizes = (None, [0] * len(names)) if writes is None else (writes.overlap, writes.bytes)
    extents = [number for size in sizes for number in (size, -size)]
    return _maker(form)(run, reference, left_to_torch, failed, device, overlap, *extents)


def _elsewhere(device: torch.device) -> str:
    """The cheapest expression that tells whether tensor "{x}" is on another device."""
    if device.type == "cpu":
        return "not {x}.is_cpu"
    if device.type == "cuda" and torch.cuda.device_count() == 1:
        return "not {x}.is_cuda"
    return "{x}.device != device"


@functools.lru_cache(512)
def _maker(form: Form) -> Callable[..., Callable[..., Any]]:
    """Generate a function that makes the checked functions of one form."""
    names, arguments = form.names, ", ".join(form.names)
    left = f"type({{x}}) not in plain or {form.elsewhere} or {{x}}.is_neg()"
    left += " or {x}.is_conj()" if form.may_be_conjugate else ""
    autocast = " or autocasting()" if form.minds_autocast else ""
    extents = ", ".join(f"{n}_bytes, {n}_before" for n in names)
    source = f"""
def make(run, reference, left_to_torch, failed, device, overlap, {extents}):
    def {form.op}({arguments}):
        if functorch_level() is not None or count_modes() or {IN_FORWARD_AD}{autocast}:
            return left_to_torch({arguments})
        if {" or ".join(left.format(x=names[i]) for i in form.tensors)}:
            return left_to_torch({arguments})
{_before_writing(form) if form.written else ""}
        try:
            return run({arguments})
        except Exception as failure:
            return failed(failure, {arguments})
    return {form.op}
"""
    scope = dict(_KNOWN)
    exec(source, scope)
    return scope["make"]


def _before_writing(form: Form) -> str:
    """The code that runs before a route writes.

    Where tensors overlap, the reference takes the call. It also takes tensors of inference mode outside of
    that mode, to refuse them.
    """
    names, arguments = form.names, ", ".join(form.names)
    meet = [
        f"{names[j]}_before < {names[j]}.data_ptr() - {names[i]}_at < {names[i]}_bytes" for i, j in form.pairs
    ]
    frozen = " or ".join(f"{names[i]}.is_inference()" for i in form.written)
    return f"""
        {"; ".join(f"{names[i]}_at = {names[i]}.data_ptr()" for i in form.written)}
        if ({" or ".join(meet) or "False"}) and overlap({arguments}):
            return reference({arguments})
        if ({frozen}) and not in_inference_mode():
            return reference({arguments})
        increment_version(({"".join(f"{names[i]}, " for i in form.written)}))"""

"""Register an op with torch, for `torch.compile`, gradients and fake tensors."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from turnout.routing import mutation
from turnout.routing.choose import REFERENCE
from turnout.routing.fallback import autocasting, differentiable_backward
from turnout.routing.torch_private import without_saved_tensors_hooks

if TYPE_CHECKING:
    from turnout.routing.op import Op

_LIBRARY = torch.library.Library("turnout", "DEF")


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Autocast off for CPU and GPU, whichever is on."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


def register(op: Op) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Register two torch ops, and return both.

    `turnout::<op>` is opaque, and chooses a route when it runs. `turnout::<op>_when_compiled` is what traced
    programs call. While a graph is traced with known sizes and the reference is chosen, it is replaced by the
    plain reference: torch.compile then sees PyTorch's own ops, and the router costs nothing. Otherwise it is
    replaced by the opaque op.
    """
    schema = torch.library.infer_schema(op.reference, mutates_args=op.mutates)
    qualified = f"turnout::{op.name}"
    _LIBRARY.define(op.name + schema)
    _LIBRARY.impl(op.name, op.below_autograd, "CompositeExplicitAutograd")
    torch.library.register_fake(qualified, op.reference, lib=_LIBRARY)
    if not op.mutates:
        torch.library.register_autograd(
            qualified, functools.partial(_backward, op), setup_context=_save, lib=_LIBRARY
        )
    opaque = getattr(torch.ops.turnout, op.name).default

    def when_compiled(*args: Any) -> Any:
        if autocasting():
            if op.autocast == "reference":
                return op.reference(*args)
            cast = op.cast(args, Tensor.to)
            with without_autocast():
                return when_compiled(*cast)
        tensors = [x for x in args if isinstance(x, Tensor)]
        sizes_known = all(isinstance(n, int) for x in tensors for n in (*x.shape, *x.stride()))
        if op.mutates:
            if sizes_known:
                mutation.refuse_self_overlap(op, args)
            if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
                return op.reference(*args)
        return (
            op.reference(*args)
            if sizes_known and op.verdict(op.key(args)).chosen == REFERENCE
            else opaque(*args)
        )

    traced = f"{op.name}_when_compiled"
    _LIBRARY.define(traced + schema)
    _LIBRARY.impl(traced, when_compiled, "CompositeImplicitAutograd")
    return opaque, getattr(torch.ops.turnout, traced).default


def _save(ctx: Any, inputs: tuple, output: Any) -> None:
    ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
    ctx.plain = tuple(None if isinstance(x, Tensor) else (x,) for x in inputs)


def _backward(op: Op, ctx: Any, *grads: Tensor | None) -> tuple:
    """The op's own vector-Jacobian product, or that of the reference, on the saved inputs."""
    saved = iter(ctx.saved_tensors)
    inputs = [next(saved) if plain is None else plain[0] for plain in ctx.plain]
    if op.vjp is not None:
        return tuple(op.vjp(tuple(inputs), grads))
    wanted = [
        i
        for i, (plain, needed) in enumerate(zip(ctx.plain, ctx.needs_input_grad, strict=True))
        if plain is None and needed
    ]

    def reference(*differentiated: Tensor) -> Any:
        replaced = dict(zip(wanted, differentiated, strict=True))
        result = op.reference(*(replaced.get(i, x) for i, x in enumerate(inputs)))
        return result if isinstance(result, tuple) else (result,)

    # Grad mode is on for create_graph.
    again = differentiable_backward() if torch.is_grad_enabled() else contextlib.nullcontext()
    with again, without_saved_tensors_hooks():
        outputs, vjp, *_ = torch.func.vjp(reference, *(inputs[i] for i in wanted))
        pairs = zip(outputs, grads, strict=True)
        full = tuple(torch.zeros_like(out) if grad is None else grad for out, grad in pairs)
        gradients = dict(zip(wanted, vjp(full), strict=True))
    return tuple(gradients.get(i) for i in range(len(inputs)))

"""Check calls that write into tensors of their caller: `out=`, a state, a cache.

One set of rules holds for every op that writes, whichever route it takes:

1. A tensor that is written must not overlap itself (expanded, unfolded) or another tensor that is written.
   Such a call is refused before anything changes, as torch refuses it.
2. It may overlap a tensor that is read. The reference then takes the call, as it reads everything before it
   writes. A route that can work in place declares so (`in_place=("x",)`), and takes calls where both tensors
   are the same memory with the same strides. A pinned route that cannot is refused.
3. Where gradients are wanted, the reference takes the call with autograd's own rules: leaves that require
   grad are refused, and gradients pass as through `Tensor.copy_`.
4. The version of what is written goes up before a route runs, so that backward notices the change, as with
   torch's own ops.

What follows from shapes and strides is decided once, when a call is dispatched. Addresses are compared in
every call, by `runtime_checks`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from turnout.routing import settings
from turnout.routing.choose import Refused
from turnout.routing.fallback import PLAIN_TENSORS, functorch_level
from turnout.routing.overlap import Layout, overlaps_itself, share_memory

if TYPE_CHECKING:
    from turnout.routing.op import Op

_MOST_DISTANCES = 256  # remembered for one dispatched call


class WriteRefused(ValueError, RuntimeError):
    """A call would write where it must not.

    It is both kinds of error: torch raises RuntimeError for this, turnout's checks of arguments ValueError.
    """


def refuse_write(call: str, name: str, x: Tensor) -> None:
    """Raise `WriteRefused` if a function must not write into its argument `name`.

    torch's `copy_` misses some of these cases, and looks for tensors of inference mode only after it has
    written.

    >>> refuse_write("turnout.f", "out", torch.zeros(1, 3).expand(2, 3))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    turnout.routing.mutation.WriteRefused: turnout.f: out is [2, 3] with strides [0, 1], so that some of ...
    """
    if overlaps_itself(Layout.of(x)):
        raise WriteRefused(
            f"{call}: {name} is {list(x.shape)} with strides {list(x.stride())}, so that some of its "
            f"elements share memory; it is written to, so each needs a place of its own: pass {name}.clone()"
        )
    _refuse_state(call, name, x)


def _refuse_state(call: str, name: str, x: Tensor) -> None:
    """Raise for a tensor that must not be written for a reason that its cache key does not show."""
    if x.is_inference() and not torch.is_inference_mode_enabled():
        raise WriteRefused(
            f"{call}: {name} is a tensor of inference mode, which is off; it is written to, so it needs to "
            f"be another one, or the call to be under torch.inference_mode(): pass {name}.clone()"
        )
    if torch.is_grad_enabled() and x.requires_grad and x.is_leaf:
        raise WriteRefused(
            f"{call}: {name} is a leaf that requires grad, and gradients are enabled; it is written to, so "
            "it needs to be a tensor without grad, or the call to be under torch.no_grad()"
        )


def refuse_self_overlap(op: Op, args: tuple) -> None:
    """Raise `WriteRefused` if a tensor that the op writes overlaps itself."""
    for name, x in _written_tensors(op, args):
        if overlaps_itself(Layout.of(x)):
            refuse_write(f"turnout.{op.name}", name, x)


def checked_reference(op: Op, args: tuple) -> Callable[..., Any]:
    """The op's reference behind the checks it needs before it writes, for calls with these arguments' key."""
    refuse_self_overlap(op, args)
    reference, names = op.plain, list(op.signature.parameters)
    written = [names.index(name) for name, _ in _written_tensors(op, args)]
    if not written:
        return reference
    first = written[0]
    wants_grad = torch.is_grad_enabled() and any(x.requires_grad for x in args if isinstance(x, Tensor))
    always_checked = wants_grad or len(written) > 1

    def run(*args: Any) -> Any:
        if always_checked or args[first].is_inference():
            _refuse_unless_writable(op, args)
        return reference(*args)

    return run


def _refuse_unless_writable(op: Op, args: tuple) -> None:
    """Raise where a tensor must not be written for another reason than its own layout."""
    written = _written_tensors(op, args)
    for i, (name, x) in enumerate(written):
        _refuse_state(f"turnout.{op.name}", name, x)
        for other_name, other in written[i + 1 :]:
            if _have_addresses(x, other):
                distance = other.data_ptr() - x.data_ptr()
                if share_memory(Layout.of(x), Layout.of(other), distance):
                    raise _both_written(op, name, other_name)


def _have_addresses(*tensors: Tensor) -> bool:
    """Whether tensors are memory of their own, not those of a subclass or of a transform."""
    return functorch_level() is None and all(type(x) in PLAIN_TENSORS for x in tensors)


def _written_tensors(op: Op, args: tuple) -> list[tuple[str, Tensor]]:
    """The tensors that a call writes, with the names of their arguments."""
    pairs = zip(op.signature.parameters, args, strict=True)
    return [(name, x) for name, x in pairs if name in op.mutates and isinstance(x, Tensor)]


def _both_written(op: Op, name: str, other: str) -> WriteRefused:
    return WriteRefused(
        f"turnout.{op.name}: {name} and {other} overlap and both are written to; "
        f"each needs memory of its own: pass {other}.clone()"
    )


class Pair(NamedTuple):
    """A tensor that is written and another tensor of the call: their argument numbers and their layouts."""

    written: int
    other: int
    layouts: tuple[Layout, Layout]
    in_place: bool  # the two may be the same memory, element by element


class WriteChecks:
    """Decides whether a route may write, for calls with the cache key of `example_args`.

    It knows the pairs of tensors whose addresses matter. `runtime_checks` compares the ranges of their
    addresses in every call, and asks `overlap` only where two ranges meet.
    """

    def __init__(self, op: Op, example_args: tuple, in_place: Sequence[str]):
        self.op, self.names = op, tuple(op.signature.parameters)
        layouts = {i: Layout.of(x) for i, x in enumerate(example_args) if isinstance(x, Tensor)}
        self.written = tuple(i for i in layouts if self.names[i] in op.mutates)
        self.pairs = [
            Pair(i, j, (layouts[i], layouts[j]), self.names[j] in in_place and layouts[i] == layouts[j])
            for i in self.written
            for j in layouts
            if j not in self.written or j > i
        ]
        self.bytes = [layouts[i].bytes if i in layouts else 0 for i in range(len(self.names))]
        self._shared: dict[tuple[int, int, int], bool] = {}  # by (written, other, distance in bytes)

    def overlap(self, *args: Any) -> bool:
        """Whether the route would read what it writes, so that the reference must take this call.

        Raises `WriteRefused` where two tensors that are written overlap, and `Refused` where the route is
        pinned.
        """
        overlapping: Pair | None = None
        for pair in self.pairs:
            distance = args[pair.other].data_ptr() - args[pair.written].data_ptr()
            if (pair.in_place and distance == 0) or not self._share_memory(pair, distance):
                continue
            if pair.other in self.written:
                raise _both_written(self.op, self.names[pair.written], self.names[pair.other])
            overlapping = pair
        if overlapping is None:
            return False
        pin = settings.current().pins.get(self.op.name)
        if pin is None:
            return True
        into, read = self.names[overlapping.written], self.names[overlapping.other]
        raise Refused(
            f"{self.op.name} is pinned to {pin!r}, which refuses this call: {read} overlaps {into}, "
            f"this route needs {read} and {into} apart from each other"
        )

    def _share_memory(self, pair: Pair, distance: int) -> bool:
        key = (pair.written, pair.other, distance)
        shared = self._shared.get(key)
        if shared is None:
            if len(self._shared) >= _MOST_DISTANCES:
                self._shared.clear()
            shared = self._shared[key] = share_memory(*pair.layouts, distance)
        return shared

"""Ops that write into tensors of their caller: `out=`, a state, a cache. One rule for all of them, whatever
route is taken.

1. A tensor that is written must not overlap itself (expanded, unfolded) nor another one that is written: the
   call is refused, as torch refuses it, and every tensor stays as it was. 2. It may overlap what is read.
   Then the reference takes the call: it reads everything before it writes anything. A route that can work in
   place says so (`in_place=("x",)`); it then takes calls where the two are the same memory with the same
   strides. A pinned route that cannot is refused. 3. Where gradients are wanted, the reference takes the
   call, and autograd's own rules hold: leaves that require grad are refused, and gradients pass as they do
   through `Tensor.copy_`. 4. The version of what is written goes up before a route runs, so that backward
   notices, as with torch's own ops.

What follows from shapes and strides is decided once, when a call settles. Addresses are looked at in every
call (`driving`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from turnout.routing import settings
from turnout.routing.choose import Refused

if TYPE_CHECKING:
    from turnout.routing.op import Op

_MOST_STEPS = 100_000  # of one search for a shared address
_MOST_DISTANCES = 256  # kept for one settled call

_PLAIN_TENSORS = {Tensor, torch.nn.Parameter, torch.nn.Buffer}
_functorch_level: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack  # pyright: ignore[reportAttributeAccessIssue]


class WriteRefused(ValueError, RuntimeError):
    """A call would write where it must not. Both kinds of error: torch raises RuntimeError for this,
    turnout's checks of arguments raise ValueError."""


class Layout(NamedTuple):
    """Where the elements of a tensor lie, counted from the first: strides in elements, which are `itemsize`
    bytes.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @staticmethod
    def of(x: Tensor) -> Layout:
        return Layout(tuple(x.shape), x.stride(), x.element_size())

    @property
    def steps(self) -> list[tuple[int, int]]:
        """For each axis along which memory changes, the step in bytes and how often it is taken at most."""
        pairs = zip(self.shape, self.strides, strict=True)
        return [(stride * self.itemsize, size - 1) for size, stride in pairs if size > 1 and stride]

    @property
    def bytes(self) -> int:
        """From the first byte to the last."""
        return 0 if 0 in self.shape else self.itemsize + sum(step * most for step, most in self.steps)


def share_memory(a: Layout, b: Layout, distance: int) -> bool:
    """Whether two tensors have a byte in common, when b begins `distance` bytes after a. Exact, for any
    strides.

    >>> even = Layout((4,), (2,), 4)  # every second element of eight
    >>> share_memory(even, even, 4), share_memory(even, even, 8)
    (False, True)
    """
    if not a.bytes or not b.bytes or not -b.bytes < distance < a.bytes:
        return False
    # An element of a begins at a sum of a's steps, one of b at `distance` plus a sum of b's. Counting b's
    # steps from its last element instead makes it one sum, which is to fall into a range.
    end = distance + sum(step * most for step, most in b.steps)
    return _reaches([*a.steps, *b.steps], end - (a.itemsize - 1), end + (b.itemsize - 1))


def overlaps_itself(layout: Layout) -> bool:
    """Whether two elements of a tensor lie in one place. Exact, for any strides.

    >>> overlaps_itself(Layout((3, 4), (1, 3), 4)), overlaps_itself(Layout((3, 4), (1, 2), 4))
    (False, True)
    """
    if 0 in layout.shape:
        return False
    if any(size > 1 and stride == 0 for size, stride in zip(layout.shape, layout.strides, strict=True)):
        return True
    steps = sorted(layout.steps, reverse=True)
    for i, (step, most) in enumerate(steps):
        # Two such elements differ along some axes. The one of the longest step among these differs by 1 to
        # `most`, and the others, by up to `n` either way, make up for it. Counting these from -n gives sums
        # of positive numbers.
        others = steps[i + 1 :]
        end = sum(other * n for other, n in others) - step
        if end >= 0 and _reaches([(step, most - 1), *((other, 2 * n) for other, n in others)], end, end):
            return True
    return False


def _reaches(steps: list[tuple[int, int]], lowest: int, highest: int) -> bool:
    """Whether some sum of steps, each taken 0 to so many times, is in a range.

    True where that takes too long to say.
    """
    merged: list[tuple[int, int]] = []
    for step, most in sorted(steps):
        # A step that is a multiple of a shorter one, and no longer than all of those together, only adds more
        # of them.
        if merged and step % merged[-1][0] == 0 and step // merged[-1][0] <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], merged[-1][1] + step // merged[-1][0] * most)
        else:
            merged.append((step, most))
    steps = merged[::-1]
    farthest, divisor = [0], [0]
    for step, most in merged:
        farthest.append(farthest[-1] + step * most)
        divisor.append(gcd(divisor[-1], step))
    farthest.reverse()
    divisor.reverse()
    left = _MOST_STEPS

    def search(i: int, lowest: int, highest: int) -> bool:
        nonlocal left
        if lowest <= 0 <= highest:
            return True
        if highest < 0 or lowest > farthest[i] or highest // divisor[i] * divisor[i] < lowest:
            return False
        step, most = steps[i]
        fewest = max(0, -((farthest[i + 1] - lowest) // step))
        for taken in range(min(most, highest // step), fewest - 1, -1):
            left -= 1
            if left < 0 or search(i + 1, lowest - taken * step, highest - taken * step):
                return True
        return False

    return search(0, lowest, highest)


def refuse_write(call: str, name: str, x: Tensor) -> None:
    """Raise where argument `name` of a function must not be written. torch's `copy_` misses some of this, and
    looks for tensors of inference mode only after it has written.

    >>> refuse_write("turnout.f", "out", torch.zeros(1, 3).expand(2, 3))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    turnout.routing.writing.WriteRefused: turnout.f: out is [2, 3] with strides [0, 1], so that some of ...
    """
    if overlaps_itself(Layout.of(x)):
        raise WriteRefused(
            f"{call}: {name} is {list(x.shape)} with strides {list(x.stride())}, so that some of its "
            f"elements share memory; it is written to, so each needs a place of its own: pass {name}.clone()"
        )
    _refuse_state(call, name, x)


def _refuse_state(call: str, name: str, x: Tensor) -> None:
    """What does not follow from the facts of a call."""
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
    """Raise where a tensor that the op writes overlaps itself."""
    for name, x in _written(op, args):
        if overlaps_itself(Layout.of(x)):
            refuse_write(f"turnout.{op.name}", name, x)


def reference_run(op: Op, args: tuple) -> Callable[..., Any]:
    """The reference, with what is asked before it may write, for calls with the facts of these arguments."""
    refuse_self_overlap(op, args)
    reference, names = op.plain, list(op.signature.parameters)
    written = [names.index(name) for name, _ in _written(op, args)]
    if not written:
        return reference
    first, wants_grad = (
        written[0],
        torch.is_grad_enabled() and any(x.requires_grad for x in args if isinstance(x, Tensor)),
    )
    always = wants_grad or len(written) > 1

    def run(*args: Any) -> Any:
        if always or args[first].is_inference():
            _refuse_writing(op, args)
        return reference(*args)

    return run


def _refuse_writing(op: Op, args: tuple) -> None:
    """Raise where a tensor must not be written for another reason than its layout."""
    written = _written(op, args)
    for i, (name, x) in enumerate(written):
        _refuse_state(f"turnout.{op.name}", name, x)
        for other, y in written[i + 1 :]:
            if _have_addresses(x, y) and share_memory(
                Layout.of(x), Layout.of(y), y.data_ptr() - x.data_ptr()
            ):
                raise _both_written(op, name, other)


def _have_addresses(*tensors: Tensor) -> bool:
    """Whether tensors are memory of their own, rather than a subclass's or a transform's."""
    return _functorch_level() is None and all(type(x) in _PLAIN_TENSORS for x in tensors)


def _written(op: Op, args: tuple) -> list[tuple[str, Tensor]]:
    pairs = zip(op.signature.parameters, args, strict=True)
    return [(name, x) for name, x in pairs if name in op.mutates and isinstance(x, Tensor)]


def _both_written(op: Op, name: str, other: str) -> WriteRefused:
    return WriteRefused(
        f"turnout.{op.name}: {name} and {other} overlap and both are written to; "
        f"each needs memory of its own: pass {other}.clone()"
    )


class Pair(NamedTuple):
    """A tensor that is written and another one, by their places among the arguments, and how both lie in
    memory.
    """

    written: int
    other: int
    layouts: tuple[Layout, Layout]
    in_place: bool  # the two may be the same memory, element by element


class Writes:
    """What a route writes, for calls with the facts of `like`: the pairs of tensors whose addresses are to be
    looked at.

    `driving` compares the ranges of the addresses in every call, and asks `overlap` where two of them meet.
    """

    def __init__(self, op: Op, like: tuple, in_place: Sequence[str]):
        self.op, self.names = op, tuple(op.signature.parameters)
        layouts = {i: Layout.of(x) for i, x in enumerate(like) if isinstance(x, Tensor)}
        self.written = tuple(i for i in layouts if self.names[i] in op.mutates)
        self.pairs = [
            Pair(i, j, (layouts[i], layouts[j]), self.names[j] in in_place and layouts[i] == layouts[j])
            for i in self.written
            for j in layouts
            if j not in self.written or j > i
        ]
        self.bytes = [layouts[i].bytes if i in layouts else 0 for i in range(len(self.names))]
        self._known: dict[
            tuple[int, int, int], bool
        ] = {}  # by the places of a pair and the distance of their addresses

    def overlap(self, *args: Any) -> bool:
        """Whether the route would read what it writes, so that the reference is to take the call. Raises
        where two tensors that are written overlap, and where the route is pinned."""
        overlapping: Pair | None = None
        for pair in self.pairs:
            distance = args[pair.other].data_ptr() - args[pair.written].data_ptr()
            if (pair.in_place and distance == 0) or not self._share(pair, distance):
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

    def _share(self, pair: Pair, distance: int) -> bool:
        key = (pair.written, pair.other, distance)
        shared = self._known.get(key)
        if shared is None:
            if len(self._known) >= _MOST_DISTANCES:
                self._known.clear()
            shared = self._known[key] = share_memory(*pair.layouts, distance)
        return shared

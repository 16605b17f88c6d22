"""Tell whether strided tensors share memory: exactly, for any strides, from layouts and addresses alone."""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

from torch import Tensor

_MOST_STEPS = 100_000  # of one search for a shared byte; beyond it the answer is that there is one


class Layout(NamedTuple):
    """Where the elements of a tensor lie, relative to the first: strides in elements of `itemsize` bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @staticmethod
    def of(x: Tensor) -> Layout:
        return Layout(tuple(x.shape), x.stride(), x.element_size())

    @property
    def steps(self) -> list[tuple[int, int]]:
        """(bytes, most) of each axis along which addresses change: the step, and how often it is taken."""
        pairs = zip(self.shape, self.strides, strict=True)
        return [(stride * self.itemsize, size - 1) for size, stride in pairs if size > 1 and stride]

    @property
    def bytes(self) -> int:
        """The distance from the first byte to the end of the last, gaps included; 0 without elements."""
        return 0 if 0 in self.shape else self.itemsize + sum(step * most for step, most in self.steps)


def share_memory(a: Layout, b: Layout, distance: int) -> bool:
    """Whether two tensors have a byte in common, where b begins `distance` bytes after a.

    >>> even = Layout((4,), (2,), 4)  # every second element of eight
    >>> share_memory(even, even, 4), share_memory(even, even, 8)
    (False, True)
    """
    if not a.bytes or not b.bytes or not -b.bytes < distance < a.bytes:
        return False
    # An element of a begins at a sum of a's steps, one of b at `distance` plus a sum of b's. With b's steps
    # counted from its last element, the difference is one sum of positive steps, and the question is whether
    # that sum can fall into a range.
    end = distance + sum(step * most for step, most in b.steps)
    return _can_reach([*a.steps, *b.steps], end - (a.itemsize - 1), end + (b.itemsize - 1))


def overlaps_itself(layout: Layout) -> bool:
    """Whether two elements of one tensor lie in the same place, as in an expanded or an unfolded tensor.

    >>> overlaps_itself(Layout((3, 4), (1, 3), 4)), overlaps_itself(Layout((3, 4), (1, 2), 4))
    (False, True)
    """
    if 0 in layout.shape:
        return False
    if any(size > 1 and stride == 0 for size, stride in zip(layout.shape, layout.strides, strict=True)):
        return True
    steps = sorted(layout.steps, reverse=True)
    for i, (step, most) in enumerate(steps):
        # Two such elements differ along some axes: by 1 to `most` steps along the one with the longest step,
        # and by up to n steps in either direction along the others, which make up for it. With those counted
        # from -n, this too is a sum of positive steps.
        others = steps[i + 1 :]
        end = sum(other * n for other, n in others) - step
        if end >= 0 and _can_reach([(step, most - 1), *((other, 2 * n) for other, n in others)], end, end):
            return True
    return False


def _can_reach(steps: list[tuple[int, int]], lowest: int, highest: int) -> bool:
    """Whether a sum of steps, each (bytes, most) taken 0 to `most` times, can lie in lowest..highest.

    The search is bounded: where it takes too long to tell, the answer is True.
    """
    merged: list[tuple[int, int]] = []
    for step, most in sorted(steps):
        # A multiple of a shorter step that is no longer than all of those together only adds more of them.
        if merged and step % merged[-1][0] == 0 and step // merged[-1][0] <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], merged[-1][1] + step // merged[-1][0] * most)
        else:
            merged.append((step, most))
    steps = merged[::-1]
    farthest, divisor = [0], [0]  # of the steps from index i on: the largest sum, and what divides every sum
    for step, most in merged:
        farthest.append(farthest[-1] + step * most)
        divisor.append(gcd(divisor[-1], step))
    farthest.reverse()
    divisor.reverse()
    steps_left = _MOST_STEPS

    def search(i: int, lowest: int, highest: int) -> bool:
        nonlocal steps_left
        if lowest <= 0 <= highest:
            return True
        if highest < 0 or lowest > farthest[i] or highest // divisor[i] * divisor[i] < lowest:
            return False
        step, most = steps[i]
        fewest = max(0, -((farthest[i + 1] - lowest) // step))
        for count in range(min(most, highest // step), fewest - 1, -1):
            steps_left -= 1
            if steps_left < 0 or search(i + 1, lowest - count * step, highest - count * step):
                return True
        return False

    return search(0, lowest, highest)

"""One rank's compute alone, with copies of as many bytes in the place of messages: to time a rank on one
card.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


class Fake:
    """Rank `rank` of so many, of which no other is there. Stands in for a `DeviceMesh`: what is computed is
    of the right size and takes the right time, but the parts of other ranks are filled with this rank's
    bytes.

    messages: the bytes of every exchange since `messages.clear()`, those sent to all ranks together.

    >>> import torch
    >>> fake = Fake(rank=1, ranks=4)
    >>> fake.exchange([(0, torch.ones(8))], [(2, torch.empty(8))])
    >>> fake.messages
    [32]
    """

    is_alone, compares_all = True, False

    def __init__(self, rank: int, ranks: int):
        if type(rank) is not int or type(ranks) is not int or not 0 <= rank < ranks:
            raise ValueError(f"Fake: rank {rank!r} of {ranks!r}, it needs numbers, 0 to one less than ranks")
        self.rank, self.ranks = rank, ranks
        self.messages: list[int] = []

    def __repr__(self) -> str:
        return f"Fake(rank={self.rank}, ranks={self.ranks})"

    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        if sends or receives:
            self.messages.append(sum(x.nbytes for _, x in sends))
        own = [x.reshape(-1) for _, x in sends]
        for i, (_, place) in enumerate(receives):
            flat = place.view(-1)
            if own and own[i % len(own)].dtype is flat.dtype and own[i % len(own)].numel() >= flat.numel():
                flat.copy_(own[i % len(own)][: flat.numel()])
            else:
                flat.zero_()

    def agree(self, said: Any) -> list[Any]:
        return [said] * self.ranks

    def begin(self) -> None:
        """Nothing is opened."""

    def fail(self, failure: BaseException) -> None:
        """Nobody waits."""

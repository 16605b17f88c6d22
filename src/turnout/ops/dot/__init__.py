"""dot: the inner product of two vectors, exactly `torch.dot`."""

from __future__ import annotations

import torch
from torch import Tensor

from turnout.ops.dot import contraction as shared
from turnout.routing.op import Op
from turnout.routing.public import public


class Dot(shared.Pair):
    """One dot."""

    __slots__ = ()

    def contraction(self) -> shared.Contraction | str:
        """The sum this call takes, or why it is none."""
        if len(self.a) != 1 or len(self.b) != 1 or self.a != self.b:
            return f"shapes {list(self.a)} and {list(self.b)}, this route needs two vectors of one length"
        return shared.Contraction(self.a[0], 1, self.a_strides[0], self.b_strides[0], 0, 0, ())


def reference(a: Tensor, b: Tensor) -> Tensor:
    return torch.dot(a, b)


reference_cost = shared.cost("dot.reference", "cuda", "cpu")

DOT = Op(
    "dot",
    reference,
    problem_type=Dot,
    cost=reference_cost,
    work=shared.work,
    cases="turnout.ops.dot.cases",
    family=shared.family,
    autocast="ignore",
    builtin=torch.dot,
)


@public(DOT)
@DOT.public
def dot(a: Tensor, b: Tensor) -> Tensor:  # pyright: ignore[reportReturnType]
    """Inner product of two vectors, exactly `torch.dot`.

    a, b: `[K]`, one dtype, any strides. Returns a scalar tensor `[]` of that dtype.

    >>> import torch, turnout
    >>> turnout.dot(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0]))
    tensor(32.)
    """

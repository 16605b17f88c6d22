"""inner: the sum over the last dimension of two tensors, exactly `torch.inner`."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from turnout.ops.dot import contraction as shared
from turnout.routing.op import Op
from turnout.routing.public import public


class Inner(shared.Pair):
    """One inner product."""

    __slots__ = ()

    def contraction(self) -> shared.Contraction | str:
        """The sum this call takes, or why it is none."""
        if not self.a or not self.b or self.a[-1] != self.b[-1]:
            return f"shapes {list(self.a)} and {list(self.b)}, this route needs the last sizes equal"
        outputs = prod(self.a[:-1]), prod(self.b[:-1])
        if outputs != (1, 1):
            return f"{outputs[0]} x {outputs[1]} outputs, this route needs 1 x 1"
        return shared.Contraction(
            self.a[-1],
            1,
            self.a_strides[-1],
            self.b_strides[-1],
            0,
            0,
            tuple(self.a[:-1]) + tuple(self.b[:-1]),
        )


def reference(a: Tensor, b: Tensor) -> Tensor:
    return torch.inner(a, b)


# inner hands two vectors to dot; with more dimensions it is a matrix product.
reference_cost = shared.cost("inner.reference", "cuda", "cpu")

INNER = Op(
    "inner",
    reference,
    problem_type=Inner,
    cost=reference_cost,
    work=shared.work,
    cases="turnout.ops.inner.cases",
    family=shared.family,
    builtin=torch.inner,
)


@public(INNER)
@INNER.public
def inner(a: Tensor, b: Tensor) -> Tensor:  # pyright: ignore[reportReturnType]
    """Sum of products over the last dimension, exactly `torch.inner`.

    a: `[*, K]`, b: `[*, K]`, or either a scalar tensor. Returns `[*a.shape[:-1], *b.shape[:-1]]`.

    >>> import torch, turnout
    >>> turnout.inner(torch.arange(6.0).reshape(2, 3), torch.ones(3))
    tensor([ 3., 12.])
    """

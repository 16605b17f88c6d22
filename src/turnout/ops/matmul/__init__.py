"""matmul: the matrix product of two tensors, exactly `torch.matmul`."""

from __future__ import annotations

import itertools
from math import prod

import torch
from torch import Tensor

from turnout.ops.dot import contraction as shared
from turnout.routing.device import Device
from turnout.routing.op import Op
from turnout.routing.public import public


class Matmul(shared.Pair):
    """One matrix product."""

    __slots__ = ()

    def contraction(self) -> shared.Contraction | str:
        """The sums this call takes, one per batch element, or why it is a matrix product."""
        if len(self.a) == 0 or len(self.b) == 0:
            return f"shapes {list(self.a)} and {list(self.b)}, this route needs at least one dimension each"
        rows, cols = (self.a[-2] if len(self.a) > 1 else 1), (self.b[-1] if len(self.b) > 1 else 1)
        along = -2 if len(self.b) > 1 else -1
        if self.a[-1] != self.b[along]:
            return f"inner sizes {self.a[-1]} and {self.b[along]}, this route needs them equal"
        if (rows, cols) != (1, 1):
            return f"{rows} x {cols} outputs, this route needs 1 x 1"
        batch = tuple(self.a[:-2])
        if batch != tuple(self.b[:-2]):
            return f"batches {list(batch)} and {list(self.b[:-2])}, this route needs them equal"
        a_step, b_step = even_stride(batch, self.a_strides[:-2]), even_stride(batch, self.b_strides[:-2])
        if a_step is None or b_step is None:
            strides = f"{list(self.a_strides[:-2])} and {list(self.b_strides[:-2])}"
            return f"batch strides {strides}, this route needs one even step each"
        output = batch + (1,) * ((len(self.a) > 1) + (len(self.b) > 1))
        return shared.Contraction(
            self.a[-1], prod(batch), self.a_strides[-1], self.b_strides[along], a_step, b_step, output
        )


def even_stride(sizes: tuple[int, ...], strides: tuple[int, ...]) -> int | None:
    """The one step that walks these dimensions in order, or None where there is none.

    >>> even_stride((2, 3), (30, 10)), even_stride((2, 3), (99, 10))
    (10, None)
    """
    moving = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if size != 1]
    if not moving:
        return 0
    uneven = any(outer != inner * size for (_, outer), (size, inner) in itertools.pairwise(moving))
    return None if uneven else moving[-1][1]


def reference(a: Tensor, b: Tensor) -> Tensor:
    return torch.matmul(a, b)


_on_gpu = shared.cost("matmul.reference", "cuda")
_long_sums = shared.cost("matmul.few-long-sums", "cpu")
_short_sums = shared.cost("matmul.many-short-sums", "cpu")


def reference_cost(problem: Matmul, device: Device) -> float | None:
    """On a CPU torch reads many short sums well, and few long ones badly."""
    if device.type != "cpu":
        return _on_gpu(problem, device)
    sums = problem.contraction()
    return (_short_sums if not isinstance(sums, str) and sums.length < 1024 else _long_sums)(problem, device)


MATMUL = Op(
    "matmul",
    reference,
    problem_type=Matmul,
    cost=reference_cost,
    work=shared.work,
    cases="turnout.ops.matmul.cases",
    family=shared.family,
    autocast="cast",
    builtin=torch.matmul,
)


@public(MATMUL)
@MATMUL.public
def matmul(a: Tensor, b: Tensor) -> Tensor:  # pyright: ignore[reportReturnType]
    """Matrix product with broadcast batches, exactly `torch.matmul`.

    a: `[K]`, `[M, K]` or `[*, M, K]`, b: `[K]`, `[K, N]` or `[*, K, N]`. Returns what `torch.matmul` returns.

    >>> import torch, turnout
    >>> turnout.matmul(torch.ones(1, 1000), torch.ones(1000, 1))
    tensor([[1000.]])
    """

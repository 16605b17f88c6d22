"""Routes that declare where a cut of the input changes no bit: parts with the border that they see, against
the whole. In Triton's interpreter, on CPU tensors, collected by tests/interpret; kernels of Hopper run on a
card only, where `turnout race --ranks 2 --engine lockstep` compares every call.

The interpreter multiplies blocks by BLAS, whose sums depend on the row of a block. Here it adds up the terms
of each element in their order, as a GPU does wherever the element lies.
"""

import itertools

import numpy as np
import pytest
import torch
from torch.nn.functional import pad

from turnout.ops.causal_conv3d import CAUSAL_CONV3D
from turnout.ops.conv2d import CONV2D
from turnout.ops.conv3d import CONV3D
from turnout.ops.upsample_conv2d import UPSAMPLE_CONV2D
from turnout.routing.op import OPS
from turnout.routing.route import ANYWHERE, UNKNOWN

NAME = "implicit-gemm"
SMALL = {"pixels": 16, "filters": 16, "channels": 16}
CUTS = (0, 3, 4, 7)
KINDS = {"rows": -2, "columns": -1}


@pytest.fixture(autouse=True)
def in_order(monkeypatch):
    def matmul(a, b, dtype=None):
        total = np.zeros((a.shape[0], b.shape[1]), dtype or a.dtype)
        for k in range(a.shape[1]):
            total += a[:, k, None] * b[None, k]
        return total

    monkeypatch.setattr(np, "matmul", matmul)


def run(op, *args):
    return op.routes[NAME].run(*args, **SMALL)


def last(*shape):
    x = torch.randn(shape)
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.contiguous(memory_format=formats[x.dim()])


def parts(x, axis, extra=1):
    """Each part with `extra` rows or columns of its neighbours, zeros beyond the first and the last."""
    sides = (0, 0, extra, extra) if axis == -2 else (extra, extra)
    whole = pad(x, sides)
    return [whole.narrow(axis, begin, end - begin + 2 * extra) for begin, end in itertools.pairwise(CUTS)]


def test_declared_are_the_routes_of_the_implicit_gemms():
    declared = {(op.name, name) for op in OPS.values() for name, r in op.routes.items() if r.grain != UNKNOWN}
    of = (CONV2D, CONV3D, CAUSAL_CONV3D, UPSAMPLE_CONV2D)
    assert declared == {(op.name, name) for op in of for name in (NAME, f"{NAME}-hopper")}
    assert all(op.routes[name].grain == ANYWHERE for op in of for name in (NAME, f"{NAME}-hopper"))


@pytest.mark.parametrize("axis", KINDS.values(), ids=KINDS)
def test_conv2d(axis):
    x, weight, bias = last(2, 17, 7, 7), last(20, 17, 3, 3), torch.randn(20)
    whole = run(CONV2D, x, weight, bias, [1, 1], [1, 1], [1, 1], 1, None)
    padding = [0, 1] if axis == -2 else [1, 0]
    actual = [run(CONV2D, part, weight, bias, [1, 1], padding, [1, 1], 1, None) for part in parts(x, axis)]
    assert torch.equal(torch.cat(actual, axis), whole)
    samples = [run(CONV2D, each, weight, bias, [1, 1], [1, 1], [1, 1], 1, None) for each in x.split(1)]
    assert torch.equal(torch.cat(samples), whole)


@pytest.mark.parametrize("axis", KINDS.values(), ids=KINDS)
def test_conv3d(axis):
    x, weight, residual = last(1, 6, 3, 7, 7), last(5, 6, 3, 3, 3), last(1, 5, 3, 7, 7)
    whole = run(CONV3D, x, weight, None, [1] * 3, [1] * 3, [1] * 3, 1, residual)
    padding, beside = [1, 0, 1] if axis == -2 else [1, 1, 0], []
    for begin, end in itertools.pairwise(CUTS):
        beside.append(residual.narrow(axis, begin, end - begin))
    actual = [
        run(CONV3D, part, weight, None, [1] * 3, padding, [1] * 3, 1, own)
        for part, own in zip(parts(x, axis), beside, strict=True)
    ]
    assert torch.equal(torch.cat(actual, axis), whole)


@pytest.mark.parametrize("each", [1, 2, 4])
def test_frames_of_causal_conv3d(each):
    """Behind what was kept of those before."""
    x, weight, bias = last(1, 6, 4, 5, 4), last(7, 6, 3, 3, 3), torch.randn(7)
    rest = ([1] * 3, [1, 1], [1] * 3, 1, "zeros", None)
    before = last(1, 6, 2, 5, 4)
    whole = run(CAUSAL_CONV3D, x, weight, bias, before, *rest)
    actual, frames = [], torch.cat([before, x], 2)
    for begin in range(0, 4, each):
        cache, own = frames[:, :, begin : begin + 2], x[:, :, begin : begin + each]
        actual.append(run(CAUSAL_CONV3D, own, weight, bias, cache, *rest))
    assert torch.equal(torch.cat(actual, 2), whole)


@pytest.mark.parametrize("axis", KINDS.values(), ids=KINDS)
def test_upsample_conv2d(axis):
    """A neighbour beside each part; what is computed of the neighbours is dropped."""
    x, weight, bias = last(1, 9, 7, 7), last(6, 9, 3, 3), torch.randn(6)
    whole = run(UPSAMPLE_CONV2D, x, weight, bias, 2, [1, 1])
    actual = []
    for begin, end in itertools.pairwise(CUTS):
        first, behind = max(0, begin - 1), min(7, end + 1)
        y = run(UPSAMPLE_CONV2D, x.narrow(axis, first, behind - first), weight, bias, 2, [1, 1])
        actual.append(y.narrow(axis, 2 * (begin - first), 2 * (end - begin)))
    assert torch.equal(torch.cat(actual, axis), whole)

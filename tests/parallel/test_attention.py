"""Attention of a rank's own pixels has the bits of the attention of all, on a CPU by torch's kernel."""

import pytest
import torch

from turnout.models.sdpa import attend
from turnout.parallel import Lockstep
from turnout.parallel.attention import OwnQueries
from turnout.parallel.exchange import Exchange


def attended(ranks, axis, height, width, calls):
    """Rows of each rank's own pixels, of each call of `calls`, and how many kinds of calls ran whole."""

    def run(engine):
        exchange = Exchange(engine, axis=axis, units=(height, width)[axis])
        queries = OwnQueries(exchange)
        collected = []
        with queries.of_frames(height, width):
            for q, k, v in calls:
                attend(q, k, v)  # computed both ways
                y = attend(q, k, v).unflatten(2, (-1, height, width))  # [B, heads, frames, H, W, D]
                collected.append(exchange.own(y, axis - 1))
        return collected, sum(run is None for run in queries.runs.values())

    results = Lockstep(ranks).run(run)
    return [
        torch.cat(parts, axis - 1) for parts in zip(*(collected for collected, _ in results), strict=True)
    ], [n for _, n in results]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("axis", [-2, -1], ids=["height", "width"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_own_rows_have_the_bits_of_all(dtype, axis, ranks):
    """Frames whose pixels end in a block of one to three rows of torch's kernel, and others; several frames
    and heads.
    """
    torch.manual_seed(0)
    for height, width, frames, heads, channels in (
        (10, 10, 1, 1, 16),
        (9, 11, 2, 2, 32),
        (14, 14, 1, 1, 64),
        (29, 31, 1, 1, 64),
    ):
        shape = (1, heads, frames * height * width, channels)
        q, k, v = (torch.randn(shape).to(dtype) for _ in range(3))
        causal = (q[:, :, : height * width], k, v)  # one frame's queries, all frames' keys
        expected = [attend(*call) for call in ((q, k, v), causal)]
        actual, whole = attended(ranks, axis, height, width, [(q, k, v), causal])
        for y, true in zip(actual, expected, strict=True):
            assert torch.equal(y, true.unflatten(2, (-1, height, width)))
        if height * width >= 192:  # worth it: fewer rows are filled up to nearly all
            assert whole == [0] * ranks, (height, width)


@torch.no_grad()
def test_only_own_rows_are_computed():
    calls = []

    def whole(q, k, v):
        calls.append(q.shape[2])
        return attend(q, k, v)

    def run(engine):
        queries = OwnQueries(Exchange(engine, axis=-2, units=16))
        q = torch.randn(1, 1, 256, 32)
        for _ in range(3):
            y = queries.attend(16, 16, whole, q, q, q)
        return y

    first, last = Lockstep(2).run(run)
    assert calls == [256, 256]  # once on each rank, when it was first seen
    assert not first[:, :, 128:].any()
    assert not last[:, :, :128].any()


@torch.no_grad()
def test_other_queries_than_pixels_are_left_alone():
    """A text's, for example."""
    q = torch.randn(1, 1, 7, 8)

    def run(engine):
        queries = OwnQueries(Exchange(engine, axis=-2, units=4))
        with queries.of_frames(4, 3):
            return attend(q, q, q), len(queries.runs)

    for y, runs in Lockstep(2).run(run):
        assert torch.equal(y, attend(q, q, q))
        assert runs == 0

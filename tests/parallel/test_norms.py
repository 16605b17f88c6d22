"""Group norms of a split model have the bits of the whole, and send sums where the whole call takes sums of
blocks.
"""

import contextlib

import pytest
import torch

import turnout
from turnout.ops.group_norm_silu.block_routes import NAME
from turnout.ops.group_norm_silu.blocks import grain
from turnout.ops.group_norm_silu.cases import inside_border
from turnout.parallel import Lockstep
from turnout.parallel.exchange import Exchange
from turnout.parallel.split import Split
from turnout.routing import settings

pytest.importorskip("numba")
OPS = ("group_norm_silu", "group_norm_silu_into", "group_norm_silu_pad", "spatial_norm_silu")
AXES = {"height": -2, "width": -1}


def pinned(route):
    return turnout.pin(**dict.fromkeys(OPS, route)) if route else contextlib.nullcontext()


def on_ranks(ranks, axis, units, call, *tensors):
    """What `call` of their own parts gives ranks, side by side, and how many calls ran on parts."""

    def run(engine):
        split = Split(Exchange(engine, axis=axis, units=units, grain=grain(units)))
        split.settings = settings.split_by(split)
        own = [x if x is None else split.exchange.own(x) for x in tensors]
        with settings.entering(split.settings):
            first, repeated = call(*own), call(*own)
        assert torch.equal(first, repeated)
        return first, split.counts["part"]

    actual = Lockstep(ranks).run(run)
    return [y for y, _ in actual], {parts for _, parts in actual}


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def last(x):
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


@pytest.mark.parametrize("route", [NAME, "reference"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("split", AXES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_every_norm_has_the_bits_of_the_whole(dtype, split, ranks, route):
    axis = AXES[split]
    x = (2 + torch.randn(1, 12, 3, 70, 33)).to(dtype)
    small = [torch.randn(x.shape[0], 12, 3, 35, 33).to(dtype) for _ in range(2)]
    weight, bias = torch.randn(12).to(dtype), torch.randn(12).to(dtype)

    def norms(x, scale, shift):
        x, scale, shift = (last(t) for t in (x, scale, shift))
        into = inside_border(x)
        return [
            turnout.group_norm_silu(x, 4, weight, bias),
            turnout.group_norm_silu(x.contiguous(), 4, weight, None, silu=False),
            turnout.group_norm_silu(x, 4, weight, bias, out=into),
            turnout.spatial_norm_silu(x, 4, weight, bias, scale, shift, first_apart=True),
        ]

    with pinned(route):
        units = {"height": 35, "width": 33}[split]
        for i, alone in enumerate(norms(x, *small)):
            actual, parts = on_ranks(ranks, axis, units, lambda *own, i=i: norms(*own)[i], x, *small)
            assert torch.equal(torch.cat(actual, axis), alone), i
            assert parts == ({0} if route == "reference" else parts - {0})


@pytest.mark.parametrize("route", [NAME, "reference"])
@pytest.mark.parametrize("split", ["height", "width"])
@pytest.mark.parametrize("mode", ["replicate", "reflect", "constant"])
@torch.no_grad()
def test_a_border_has_the_rows_of_the_neighbours(mode, split, route):
    axis, x = AXES[split], last(torch.randn(1, 6, 2, 36, 40))
    padding = (2, 1, 1, 2, 1, 0)
    before, after = padding[-2 * axis - 2], padding[-2 * axis - 1]

    def norm(x):
        return turnout.group_norm_silu_pad(x, 3, padding=padding, mode=mode)

    with pinned(route):
        whole, (actual, _) = norm(x), on_ranks(3, axis, x.shape[axis], norm, x)
    begin = 0
    for part in actual:
        size = part.shape[axis] - before - after
        assert torch.equal(part, whole.narrow(axis, begin, before + size + after))
        begin += size
    assert begin == x.shape[axis]


@torch.no_grad()
def test_parts_between_blocks_are_gathered():
    """66 rows have blocks of two: an exchange without a grain cuts at 33."""
    x = torch.randn(1, 4, 66, 8)

    def run(engine):
        split = Split(Exchange(engine, axis=-2, units=66))
        split.settings = settings.split_by(split)
        with settings.entering(split.settings):
            return turnout.group_norm_silu(split.exchange.own(x).contiguous(), 2), split.counts["whole"]

    with pinned(NAME):
        (first, whole), (second, _) = Lockstep(2).run(run)
        assert whole == 1
        assert torch.equal(torch.cat([first, second], -2), turnout.group_norm_silu(x, 2))

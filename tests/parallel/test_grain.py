"""What routes declare of cuts: trusted between processes, compared by ranks in lockstep."""

import dataclasses

import pytest
import torch

import turnout
from turnout.ops.conv2d import CONV2D
from turnout.parallel import Lockstep
from turnout.parallel.exchange import Exchange
from turnout.parallel.lockstep import Rank
from turnout.parallel.split import Split
from turnout.routing import settings
from turnout.routing.op import forget_choices
from turnout.routing.route import ANYWHERE, Grain


@pytest.fixture
def declare(monkeypatch):
    """Declare the grain of a route, for the length of a test."""

    def declared(op, name, grain):
        monkeypatch.setitem(op.routes, name, dataclasses.replace(op.routes[name], grain=grain))
        forget_choices()

    yield declared
    forget_choices()


def convolved(x, weight, axis, size):
    """By two ranks, joined; and how many calls ran whole."""

    def run(engine):
        split = Split(Exchange(engine, axis=axis, units=size))
        split.settings = settings.split_by(split)
        own = split.exchange.own(x).contiguous()
        with settings.entering(split.settings):
            y = [turnout.conv2d(own, weight, padding=1) for _ in range(2)][-1]
        return y, split.counts["whole"]

    (first, whole), (second, _) = Lockstep(2).run(run)
    return torch.cat([first, second], axis), whole


@torch.no_grad()
def test_a_false_grain_raises_in_lockstep(declare):
    """Winograd sums tiles of several rows: a cut between them has other bits."""
    pytest.importorskip("numba")
    x, weight = torch.randn(1, 32, 62, 64), torch.randn(32, 32, 3, 3)
    with turnout.pin(conv2d="winograd"):
        alone = turnout.conv2d(x, weight, padding=1)
        joined, whole = convolved(x, weight, -2, 62)
        assert torch.equal(joined, alone)
        assert whole == 1  # cut at 31, which is odd
        declare(CONV2D, "winograd", ANYWHERE)
        with pytest.raises(RuntimeError, match="route 'winograd' declares where cuts change nothing"):
            convolved(x, weight, -2, 62)


@pytest.mark.parametrize("axis", [-2, -1])
@torch.no_grad()
def test_parts_between_multiples_of_a_grain_compute_more_and_drop_it(declare, axis):
    pytest.importorskip("numba")
    size = 62
    shape = (1, 32, 62, 64) if axis == -2 else (1, 32, 64, 62)
    x, weight = torch.randn(shape), torch.randn(32, 32, 3, 3)
    declare(CONV2D, "winograd", Grain(rows=2, columns=2))
    with turnout.pin(conv2d="winograd"):
        alone = turnout.conv2d(x, weight, padding=1)
        joined, whole = convolved(x, weight, axis, size)
    assert torch.equal(joined, alone)
    assert whole == 0


@torch.no_grad()
def test_what_is_declared_is_not_computed_whole_by_processes(declare, monkeypatch):
    """Only calls of routes that declare nothing are compared when they are first seen."""
    pytest.importorskip("numba")
    monkeypatch.setattr(Rank, "compares_all", False)
    gathered, gather = [], Exchange.all_gather
    monkeypatch.setattr(
        Exchange, "all_gather", lambda self, *args: gathered.append(self.rank) or gather(self, *args)
    )
    x, weight = torch.randn(1, 32, 64, 64), torch.randn(32, 32, 3, 3)
    with turnout.pin(conv2d="winograd"):
        alone = turnout.conv2d(x, weight, padding=1)
        assert torch.equal(convolved(x, weight, -2, 64)[0], alone)
        assert sorted(gathered) == [0, 1]
        gathered.clear()
        declare(CONV2D, "winograd", Grain(rows=2, columns=2))
        assert torch.equal(convolved(x, weight, -2, 64)[0], alone)
        assert not gathered

from dataclasses import replace

import pytest
import torch

import turnout
from turnout.bench.timer import Timing
from turnout.ops.dot import DOT
from turnout.routing import tune
from turnout.routing.device import Device
from turnout.routing.op import OPS
from turnout.routing.table import folder

SMALL = torch.ones(4096, dtype=torch.bfloat16), torch.ones(4096, dtype=torch.bfloat16)


def test_tuning_a_call_is_remembered_and_taken():
    [row] = turnout.tune("dot", *SMALL, budget=1, progress=False)
    assert set(row.us) == {"cpu-chunks", "reference"}
    assert row.version == {"cpu-chunks": 1}
    assert row.source == {"cpu-chunks": DOT.routes["cpu-chunks"].source}
    found = turnout.explain("dot", *SMALL)
    assert found.authority == "measured here"
    assert found.microseconds["cpu-chunks"] == row.us["cpu-chunks"]


def test_save_false_keeps_nothing():
    turnout.tune("dot", *SMALL, budget=1, progress=False, save=False)
    assert not folder(Device.of("cpu")).exists()


def test_a_wrong_route_is_left_out_with_a_warning(monkeypatch):
    route = DOT.routes["cpu-chunks"]
    wrong = type(route)(
        route.name, lambda a, b: torch.dot(a, b) * 1.1, route.refuses, route.cost, route.numerics, route.version, route.configs
    )
    monkeypatch.setitem(DOT.routes, route.name, wrong)
    with pytest.warns(turnout.TurnoutWarning, match="'cpu-chunks' {} is left out: its error against float64 is"):
        [row] = turnout.tune("dot", *SMALL, budget=1, progress=False)
    assert set(row.us) == {"reference"}


def test_a_configuration_is_chosen_by_the_cards_time(monkeypatch):
    """Where the host sets how long a call takes, it says nothing of configurations."""
    route = DOT.routes["cpu-chunks"]

    def run(a, b, *, size=1):
        return route.run(a, b)

    monkeypatch.setitem(DOT.routes, route.name, replace(route, run=run, configs=lambda problem, device: [{"size": 1}, {"size": 2}]))
    times = {"{'size': 1}": Timing(20, 0, 9, 20), "{'size': 2}": Timing(21, 0, 8, 21)}
    monkeypatch.setattr(tune, "time_variants", lambda runs, *_, **__: {name: times.get(name, Timing(30, 0, 10, 30)) for name in runs})
    row, _ = tune.measure(DOT, SMALL, seconds=0.1)
    assert row.config == {"cpu-chunks": {"size": 2}}


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (lambda a, b: torch.dot(a, b)[None], "shape is"), (lambda a, b: torch.dot(a, b).float(), "dtype is"),
        (lambda a, b: torch.dot(a, b) * float("nan"), "error against float64 is inf"), (lambda a, b: 1 / 0, "it failed: ZeroDivisionError"),
    ],
)  # fmt: skip
def test_every_kind_of_wrong_is_noticed(monkeypatch, broken, said):
    route = DOT.routes["cpu-chunks"]
    monkeypatch.setitem(DOT.routes, route.name, type(route)(route.name, broken, *list(vars(route).values())[2:7]))
    with pytest.warns(turnout.TurnoutWarning, match=said):
        turnout.tune("dot", *SMALL, budget=1, progress=False, save=False)


def test_the_budget_ends_it(monkeypatch):
    cases = DOT.cases()[:4]
    monkeypatch.setattr(DOT, "cases", lambda: cases * 50)
    with pytest.warns(turnout.TurnoutWarning, match=r"0.5 s are over, \d+ of 200 calls were measured"):
        rows = turnout.tune("dot", budget=0.5, progress=False, save=False, device="cpu")
    assert 0 < len(rows) < 200


def test_tune_all_walks_every_op(monkeypatch):
    for op in OPS.values():
        first = op.cases()[:1]
        monkeypatch.setattr(op, "cases", lambda first=first: first)
    assert [row.op for row in turnout.tune(budget=30, progress=False, save=False, device="cpu")] == list(OPS)


def test_mistakes():
    with pytest.raises(ValueError, match="budget 0 seconds, it needs to be more than 0"):
        turnout.tune("dot", budget=0)
    with pytest.raises(ValueError, match="op 'x' is not known"):
        turnout.tune("x")


def test_exact_is_held_to_every_bit(monkeypatch):
    route = DOT.routes["cpu-chunks"]
    nearly = type(route)(
        route.name, lambda a, b: torch.nextafter(torch.dot(a, b), torch.tensor(0.0)), route.refuses, route.cost, "exact", 1, route.configs
    )
    monkeypatch.setitem(DOT.routes, route.name, nearly)
    with pytest.warns(turnout.TurnoutWarning, match="not bit-identical"):
        turnout.tune("dot", torch.ones(100), torch.ones(100), budget=1, progress=False, save=False)

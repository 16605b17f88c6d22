import threading
import time
from dataclasses import replace

import pytest
import torch

import turnout
from turnout.measure import tune
from turnout.measure.timer import Timing
from turnout.ops.dot import DOT
from turnout.routing.device import Device
from turnout.routing.op import OPS
from turnout.routing.store import folder

SMALL = torch.ones(4096, dtype=torch.bfloat16), torch.ones(4096, dtype=torch.bfloat16)


def test_tuning_a_call_is_remembered_and_taken():
    [row] = turnout.tune("dot", *SMALL, budget=1, progress=False)
    assert set(row.us) == {"cpu-chunks", "reference"}
    assert row.version == {"cpu-chunks": 1}
    assert row.code_hash == {"cpu-chunks": DOT.routes["cpu-chunks"].code_hash}
    assert row.versions["torch"] == torch.__version__
    assert row.machine["threads"] == torch.get_num_threads()
    verdict = turnout.explain("dot", *SMALL)
    assert verdict.authority == "measured here"
    assert verdict.microseconds["cpu-chunks"] == row.us["cpu-chunks"]


def test_save_false_keeps_nothing():
    turnout.tune("dot", *SMALL, budget=1, progress=False, save=False)
    assert not folder(Device.of("cpu")).exists()


def test_a_wrong_route_is_left_out_with_a_warning(monkeypatch):
    route = DOT.routes["cpu-chunks"]
    wrong = type(route)(
        route.name,
        lambda a, b: torch.dot(a, b) * 1.1,
        route.refuses,
        route.cost,
        route.numerics,
        route.version,
        route.configs,
    )
    monkeypatch.setitem(DOT.routes, route.name, wrong)
    with pytest.warns(
        turnout.TurnoutWarning, match="'cpu-chunks' {} is left out: its error against float64 is"
    ):
        [row] = turnout.tune("dot", *SMALL, budget=1, progress=False)
    assert set(row.us) == {"reference"}


def test_a_configuration_is_chosen_by_the_cards_time(monkeypatch):
    """Where the host sets how long a call takes, it says nothing of configurations."""
    route = DOT.routes["cpu-chunks"]

    def run(a, b, *, size=1):
        return route.run(a, b)

    monkeypatch.setitem(
        DOT.routes,
        route.name,
        replace(route, run=run, configs=lambda problem, device: [{"size": 1}, {"size": 2}]),
    )
    times = {"{'size': 1}": Timing(20, 0, 9, 20), "{'size': 2}": Timing(21, 0, 8, 21)}
    monkeypatch.setattr(
        tune,
        "time_variants",
        lambda runs, *_, **__: {name: times.get(name, Timing(30, 0, 10, 30)) for name in runs},
    )
    row, _ = tune.measure(DOT, SMALL, seconds=0.1)
    assert row.config == {"cpu-chunks": {"size": 2}}


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda a, b: torch.dot(a, b)[None], "shape is"),
        (lambda a, b: torch.dot(a, b).float(), "dtype is"),
        (lambda a, b: torch.dot(a, b) * float("nan"), "error against float64 is inf"),
        (lambda a, b: 1 / 0, "it failed: ZeroDivisionError"),
    ],
)
def test_every_kind_of_wrong_is_noticed(monkeypatch, broken, message):
    route = DOT.routes["cpu-chunks"]
    monkeypatch.setitem(
        DOT.routes, route.name, type(route)(route.name, broken, *list(vars(route).values())[2:7])
    )
    with pytest.warns(turnout.TurnoutWarning, match=message):
        turnout.tune("dot", *SMALL, budget=1, progress=False, save=False)


def test_tune_stops_when_the_budget_is_over(monkeypatch):
    cases = DOT.cases()[:4]
    monkeypatch.setattr(DOT, "cases", lambda: cases * 50)
    with pytest.warns(turnout.TurnoutWarning, match=r"0.1 s are over, \d+ of 200 calls were measured"):
        rows = turnout.tune("dot", budget=0.1, progress=False, save=False, device="cpu")
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
        route.name,
        lambda a, b: torch.nextafter(torch.dot(a, b), torch.tensor(0.0)),
        route.refuses,
        route.cost,
        "exact",
        1,
        route.configs,
    )
    monkeypatch.setitem(DOT.routes, route.name, nearly)
    with pytest.warns(turnout.TurnoutWarning, match="not bit-identical"):
        turnout.tune("dot", torch.ones(100), torch.ones(100), budget=1, progress=False, save=False)


def asked(length, times=1):
    """A function that asks for dot products of that length, and of one more."""
    a, b = torch.randn(length, dtype=torch.bfloat16), torch.randn(length + 1, dtype=torch.bfloat16)
    return lambda: [turnout.dot(x, x) for x in (a, b) for _ in range(times)]


def test_what_a_function_asks_for_is_measured_once():
    run = asked(5000, times=3)
    before = run()
    rows = turnout.tune(during=run, budget=5, progress=False)
    assert [row.problem["a"] for row in rows] == [[5000], [5001]]
    assert turnout.explain("dot", *[torch.ones(5001, dtype=torch.bfloat16)] * 2).authority == "measured here"
    assert turnout.tune(during=run, budget=5, progress=False) == []
    assert len(turnout.tune(during=run, again=True, budget=5, progress=False, save=False)) == 2
    assert run() == before


def test_only_of_the_ops_that_are_named():
    a = torch.randn(1, 5000, dtype=torch.bfloat16)
    run = lambda: (turnout.dot(a[0], a[0]), turnout.matmul(a, a.mT))  # noqa: E731
    assert {row.op for row in turnout.tune(during=run, budget=5, progress=False, save=False)} == {
        "dot",
        "matmul",
    }
    assert [row.op for row in turnout.tune("dot", during=run, budget=5, progress=False, save=False)] == [
        "dot"
    ]


def test_arguments_are_measured_as_they_come():
    """In their layout and with their values, and a call that no route takes is not."""
    x = torch.randn(2, 96, 7, 5)[:, ::2].transpose(2, 3)
    weight = torch.randn(8, 48, 3, 3)
    whole = torch.ones(9, dtype=torch.int64)
    rows = turnout.tune(
        during=lambda: (turnout.conv2d(x, weight), turnout.dot(whole, whole)),
        budget=5,
        progress=False,
        save=False,
    )
    assert [row.problem["input_strides"] for row in rows] == [list(x.stride())]


def test_exceptions_of_the_measured_function_are_raised():
    calls = []
    with pytest.raises(ZeroDivisionError):
        turnout.tune(during=lambda: 1 / 0, progress=False)
    measured, tune.measure = tune.measure, lambda *a, **k: calls.append(a)
    try:
        asked(5000)()
    finally:
        tune.measure = measured
    assert not calls, "nobody watches any more"


def test_when_the_budget_is_over_the_function_goes_on(monkeypatch):
    def slow(op, args, *, seconds):
        time.sleep(0.06)
        return tune.Row(op.name, {}, {"reference": 1.0}), Device.of("cpu")

    monkeypatch.setattr(tune, "measure", slow)
    with pytest.warns(
        turnout.TurnoutWarning,
        match="0.05 s are over, 1 calls were measured and 1 were not; the same .* measures those",
    ):
        rows = turnout.tune(during=asked(5000), budget=0.05, progress=False, save=False)
    assert len(rows) == 1


def test_a_call_that_cannot_be_measured_is_left_out(monkeypatch):
    def fails(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(tune, "measure", fails)
    with pytest.warns(turnout.TurnoutWarning, match="a call of dot is left out: CUDA out of memory"):
        assert turnout.tune(during=asked(5000), progress=False) == []


def test_transforms_and_other_threads_are_left_alone():
    a = torch.randn(3, 5000, dtype=torch.bfloat16)
    results = []

    def run():
        results.append(torch.func.vmap(turnout.dot)(a, a))
        threads = [threading.Thread(target=asked(5000)) for _ in range(2)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]

    rows = turnout.tune(during=run, budget=5, progress=False, save=False)
    assert {row.problem["a"][0] for row in rows} <= {5000, 5001}
    assert results[0].shape == (3,)


def test_during_is_instead_of_arguments():
    with pytest.raises(TypeError, match="arguments of a call and during="):
        turnout.tune("dot", *SMALL, during=lambda: None)

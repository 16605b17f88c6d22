import threading

import pytest
import torch

import turnout
from turnout.routing import settings

A = torch.ones(1, 4)
B = torch.ones(4, 1)


def chosen():
    return turnout.explain("matmul", A, B).chosen


def test_pins_nest_and_leave_nothing_behind():
    assert chosen() == "reference"
    with turnout.pin(matmul="as-dot"):
        assert chosen() == "as-dot"
        with turnout.pin(matmul="reference", dot="cpu-chunks"):
            assert chosen() == "reference"
        assert chosen() == "as-dot"
    assert chosen() == "reference"
    with pytest.raises(KeyError), turnout.pin(matmul="as-dot"):
        raise KeyError
    assert chosen() == "reference"


def test_unknown_pins_list_the_known():
    with pytest.raises(ValueError, match=r"op 'nope' is not known; did you mean norm_rope\? One of: .*dot"):
        turnout.pin(nope="x")
    with pytest.raises(
        ValueError, match="op dot has no route 'x'; one of: single-launch, two-stage, cpu-chunks, reference"
    ):
        turnout.pin(dot="x")
    with pytest.raises(ValueError, match="numerics level 'x' is not known; one of: exact, close, lossy"):
        turnout.numerics("x")


def test_environment_pins(monkeypatch):
    monkeypatch.setenv("TURNOUT_PIN", "matmul=as-dot, dot=reference")
    settings.from_environment.cache_clear()
    assert chosen() == "as-dot"
    with turnout.pin(matmul="reference"):
        assert chosen() == "reference"


@pytest.mark.parametrize(
    ("value", "message"),
    [("matmul", "op=route pairs"), ("nope=x", "op 'nope' is not known"), ("dot=x", "has no route 'x'")],
)
def test_a_mistake_in_the_environment_raises_at_every_call(monkeypatch, value, message):
    monkeypatch.setenv("TURNOUT_PIN", value)
    settings.from_environment.cache_clear()
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            turnout.dot(torch.ones(77), torch.ones(77))


def test_numerics_and_its_environment(monkeypatch):
    big = torch.ones(1, 10_000_000), torch.ones(10_000_000, 1)
    assert turnout.explain("matmul", *big).chosen != "reference"
    with turnout.numerics("exact"):
        assert turnout.explain("matmul", *big).chosen == "reference"
    monkeypatch.setenv("TURNOUT_NUMERICS", "exact")
    settings.from_environment.cache_clear()
    assert turnout.explain("matmul", *big).chosen == "reference"


def test_a_pin_holds_in_its_thread_only():
    inside, done = threading.Event(), threading.Event()
    seen = {}

    def other():
        inside.wait(10)
        seen["other"] = chosen()
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with turnout.pin(matmul="as-dot"):
        inside.set()
        done.wait(10)
        assert chosen() == "as-dot"
    thread.join()
    assert seen == {"other": "reference"}


def test_a_refused_pin_raises_and_says_why():
    with (
        turnout.pin(dot="two-stage"),
        pytest.raises(
            turnout.Refused, match=r"pinned to 'two-stage', which refuses .* this route needs a GPU"
        ),
    ):
        turnout.dot(torch.ones(3), torch.ones(3))


def test_choices_in_many_threads_are_the_same():
    results = []

    def work(route):
        with turnout.pin(matmul=route):
            results.extend((route, turnout.matmul(A, B).item(), chosen()) for _ in range(200))

    threads = [
        threading.Thread(target=work, args=(route,)) for route in ("as-dot", "reference", "cpu-chunks") * 2
    ]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert len(results) == 1200
    assert all(value == 4 and route == selected for route, value, selected in results)

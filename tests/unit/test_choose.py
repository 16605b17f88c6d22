"""The order of authority, on an op made of plain functions."""

from math import inf
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from turnout.routing.choose import Refused, choose
from turnout.routing.device import Device
from turnout.routing.settings import Preference
from turnout.routing.table import Measurement

CPU = Device.of("cpu")


class Size(NamedTuple):
    n: int


def route(name, cost, numerics="close", refuses=lambda problem, device: ()):
    return SimpleNamespace(
        name=name,
        refuses=refuses,
        cost=lambda p, d: cost,
        numerics=numerics,
        version=1,
        configs=lambda p, d: ({"block": 8}, {"block": 16}),
    )


def op(*routes, cost=10e-6):
    return SimpleNamespace(name="toy", routes={r.name: r for r in routes}, cost=lambda p, d: cost)


def measured(note="measured", config=None, **us):
    return Measurement({name.replace("_", "-"): time for name, time in us.items()}, config or {}, note)


def picked(*args, **kwargs):
    verdict = choose(*args, **kwargs)
    return verdict.chosen, verdict.authority


def test_model_takes_the_cheapest():
    assert picked(op(route("a", 5e-6), route("b", 3e-6)), Size(1), CPU) == ("b", "model")


def test_model_gives_ties_to_the_reference():
    assert picked(op(route("a", 9.5e-6)), Size(1), CPU) == ("reference", "model")


def test_unknown_costs_leave_the_reference():
    assert picked(op(route("a", None)), Size(1), CPU) == ("reference", "reference")
    assert picked(op(route("a", 1e-6), cost=None), Size(1), CPU) == ("reference", "reference")


def test_every_reason_is_kept():
    def fussy(problem, device):
        yield "one, this route needs two"
        yield "three, this route needs four"

    verdict = choose(op(route("a", 1e-6, refuses=fussy)), Size(1), CPU)
    assert verdict.refused == {"a": ["one, this route needs two", "three, this route needs four"]}
    assert (verdict.chosen, verdict.authority) == ("reference", "reference")


def test_measured_here_beats_shipped_beats_model():
    toy = op(route("a", 1e-6), route("b", 2e-6))
    here = ("measured here", measured(a=50, b=5, reference=10))
    shipped = ("measured, shipped", measured(a=5, b=50, reference=10))
    assert picked(toy, Size(1), CPU, measured=[here, shipped]) == ("b", "measured here")
    assert picked(toy, Size(1), CPU, measured=[shipped]) == ("a", "measured, shipped")


def test_measured_ties_go_to_the_reference():
    assert picked(
        op(route("a", 1e-6)), Size(1), CPU, measured=[("measured here", measured(a=9.9, reference=10))]
    ) == (
        "reference",
        "measured here",
    )


def test_a_refused_route_is_not_taken_though_measured_the_next_is():
    toy = op(route("a", 1e-6, refuses=lambda p, d: ["no, this route needs yes"]), route("b", 2e-6))
    assert picked(toy, Size(1), CPU, measured=[("measured here", measured(a=1, b=5, reference=10))]) == (
        "b",
        "measured here",
    )


def test_the_configuration_comes_with_the_measurement_or_first():
    toy = op(route("a", 1e-6))
    row = measured(a=1, reference=10, config={"a": {"block": 16}})
    assert choose(toy, Size(1), CPU, measured=[("measured here", row)]).config == {"block": 16}
    assert choose(toy, Size(1), CPU).config == {"block": 8}


def test_pin_beats_everything_and_raises_with_all_reasons_when_refused():
    toy = op(
        route("a", 1e-6),
        route("b", 99e-6),
        route("c", 1e-6, refuses=lambda p, d: ["x, this route needs y", "z, this route needs w"]),
    )
    shipped = ("measured, shipped", measured(a=1, b=99, reference=10))
    assert picked(toy, Size(1), CPU, pin="b", measured=[shipped]) == ("b", "pin")
    assert picked(toy, Size(1), CPU, pin="reference", measured=[shipped]) == ("reference", "pin")
    with pytest.raises(
        Refused, match=r"pinned to 'c', which refuses n=7: x, this route needs y; z, this route needs w"
    ):
        choose(toy, Size(7), CPU, pin="c")


def test_a_preferred_route_is_taken_unless_the_choice_is_preferred_or_much_faster():
    close = op(route("fast", 2e-6), route("slow", 4e-6), route("slower", 2.9e-6), route("unknown", None))
    assert picked(close, Size(1), CPU, preferred=Preference(("slow", "slower"), 1.5)) == (
        "slower",
        "preferred",
    )
    assert picked(close, Size(1), CPU, preferred=Preference(("slow",), 1.5)) == ("fast", "model")
    assert picked(close, Size(1), CPU, preferred=Preference(("slow", "fast"), 1.5)) == ("fast", "model")
    assert picked(close, Size(1), CPU, preferred=Preference(("unknown",), 1.5)) == ("unknown", "preferred")
    assert picked(close, Size(1), CPU, preferred=Preference(("slow", "unknown"), 1.5)) == ("fast", "model")
    assert picked(close, Size(1), CPU, preferred=Preference(("slow",), inf)) == ("slow", "preferred")
    times = [("measured here", measured(fast=1, reference=9, slower=1.4, config={"slower": {"block": 16}}))]
    verdict = choose(close, Size(1), CPU, measured=times, preferred=Preference(("slower",), 1.5))
    assert (verdict.chosen, dict(verdict.config)) == ("slower", {"block": 16})


def test_a_preferred_route_gives_way_to_a_pin_to_reasons_and_to_numerics():
    routes = op(route("a", 2e-6), route("b", 3e-6, refuses=lambda problem, device: ["no"]))
    assert picked(routes, Size(1), CPU, preferred=Preference(("b",), 1.5)) == ("a", "model")
    assert picked(routes, Size(1), CPU, preferred=Preference(("a",), 1.5), pin="reference") == (
        "reference",
        "pin",
    )
    assert picked(routes, Size(1), CPU, preferred=Preference(("a",), 1.5), numerics="exact")[0] == "reference"
    assert (
        picked(routes, Size(1), CPU, preferred=Preference(("a",), 1.5), blocked_by="blocked")[0]
        == "reference"
    )


def test_numerics_limits_the_choice_and_a_pin_may_go_beyond():
    toy = op(route("quick", 1e-6, "lossy"), route("near", 2e-6, "close"), route("same", 3e-6, "exact"))
    assert picked(toy, Size(1), CPU, numerics="lossy") == ("quick", "model")
    assert picked(toy, Size(1), CPU) == ("near", "model")
    assert picked(toy, Size(1), CPU, numerics="exact") == ("same", "model")
    assert picked(toy, Size(1), CPU, pin="quick") == ("quick", "pin")
    assert choose(toy, Size(1), CPU).refused["quick"] == [
        "numerics lossy, the level in force allows exact and close"
    ]


def test_failed_routes_are_refused():
    toy = op(route("a", 1e-6), route("b", 2e-6))
    verdict = choose(toy, Size(1), CPU, failed={"a": "failed at launch: out of memory"})
    assert verdict.chosen == "b"
    assert verdict.refused == {"a": ["failed at launch: out of memory"]}


def test_overhead_counts_against_routes_only():
    assert picked(op(route("a", 5e-6)), Size(1), CPU, overhead=6e-6) == ("reference", "model")
    assert (
        picked(
            op(route("a", 5e-6)),
            Size(1),
            CPU,
            overhead=6e-6,
            measured=[("measured here", measured(a=5, reference=10))],
        )[0]
        == "reference"
    )


def test_a_guard_that_raises_is_a_bug_and_raises():
    def broken(problem, device):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        choose(op(route("a", 1e-6, refuses=broken)), Size(1), CPU)


def test_same_arguments_same_verdict():
    toy = op(route("a", 5e-6), route("b", 3e-6))
    assert choose(toy, Size(1), CPU) == choose(toy, Size(1), CPU)

"""Targets are judged by rows as they are written, and each can be reached and missed."""

import json

import pytest

from benchmarks import targets
from benchmarks.targets import MISSED, REACHED, UNKNOWN, judge
from turnout.race.models import RACERS


def race_row(model="flux", dtype="bfloat16", **lanes):
    rows = {name: {"ms": ms, "peak_mib": 10.0} for name, ms in lanes.items()}
    return {"model": model, "size": "full", "dtype": dtype, "lanes": rows, "speedup": 2.0}


def state(target, *rows):
    return judge({"name": "it", "file": "race", **target}, list(rows)).state


def test_figure_is_compared_with_its_bound():
    target = {"where": {"model": "flux"}, "figure": "lanes.graph.ms", "at_most": 24.5}
    assert state(target, race_row(graph=24.5)) == REACHED
    assert state(target, race_row(graph=24.6)) == MISSED
    assert state(target, race_row("wan", graph=1.0)) == UNKNOWN
    assert state(target, race_row(stock=1.0)) == UNKNOWN


def test_least_of_several_lanes_counts():
    target = {"figure": ["lanes.accelerated.ms", "lanes.graph.ms"], "at_most": 60}
    assert state(target, race_row(accelerated=70, graph=50)) == REACHED
    assert state(target, race_row(accelerated=50)) == REACHED
    assert state(target, race_row(accelerated=70, graph=65)) == MISSED


def test_ratio_and_difference():
    over = {"figure": "lanes.accelerated.ms", "over": "lanes.stock.ms", "at_most": 0.95}
    assert state(over, race_row(stock=100, accelerated=94)) == REACHED
    assert state(over, race_row(stock=100, accelerated=96)) == MISSED
    assert state(over, race_row(accelerated=96)) == UNKNOWN
    less = {"figure": "other_size_s", "less": "other_size_second_s", "at_most": 2}
    assert state(less, {"other_size_s": 2.5, "other_size_second_s": 0.5}) == REACHED
    assert state(less, {"other_size_s": 2.6, "other_size_second_s": 0.5}) == MISSED
    assert state(less, {"other_size_s": None, "other_size_second_s": None}) == UNKNOWN


def test_median_over_rows():
    target = {"figure": "turnout_us", "median": True, "at_most": 12}
    assert state(target, *({"turnout_us": us} for us in (5, 11, 90))) == REACHED
    assert state(target, *({"turnout_us": us} for us in (5, 13, 13))) == MISSED


def test_every_row_and_enough_of_them():
    target = {"figure": "speedup", "at_least": 1, "rows": 3}
    assert state(target, *[race_row()] * 3) == REACHED
    assert state(target, *[race_row()] * 2) == UNKNOWN
    slow = race_row("wan") | {"speedup": 0.9}
    result = judge({"name": "it", **target}, [race_row(), slow])
    assert (result.state, result.value) == (MISSED, 0.9)
    assert "wan" in result.note


def test_worst_of_a_list_counts():
    target = {"figure": "of_ranks.*.peak_mib", "over": "one_rank_peak_mib", "at_most": 0.2}
    row = {"one_rank_peak_mib": 100, "of_ranks": [{"peak_mib": 10}, {"peak_mib": 20}]}
    assert state(target, row) == REACHED
    assert state(target, row | {"of_ranks": [{"peak_mib": 10}, {"peak_mib": 21}]}) == MISSED
    assert state(target, row | {"of_ranks": [{"peak_mib": None}]}) == UNKNOWN


def test_yes_or_no():
    target = {"figure": "same_bits", "equal": True}
    assert state(target, {"same_bits": True}) == REACHED
    assert state(target, {"same_bits": True}, {"same_bits": False}) == MISSED


def test_lane_that_failed_says_why():
    row = race_row() | {"lanes": {"graph": {"failed": "nothing was replayed"}}}
    result = judge({"name": "it", "figure": "lanes.graph.ms", "at_most": 1}, [row])
    assert result.state == UNKNOWN
    assert "nothing was replayed" in str(result)


@pytest.mark.parametrize("target", targets.load(), ids=lambda target: target["name"])
def test_target_is_complete(target):
    assert len(targets.BOUNDS.keys() & target.keys()) == 1
    assert target["source"]
    model = target.get("where", {}).get("model")
    assert model is None or model in RACERS
    dtype = target.get("where", {}).get("dtype")
    assert model is None or dtype is None or dtype in RACERS[model].dtypes


def test_names_of_targets_are_their_own():
    names = [target["name"] for target in json.loads(targets.FILE.read_text(encoding="utf-8"))]
    assert len(names) == len(set(names))

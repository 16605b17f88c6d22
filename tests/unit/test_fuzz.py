"""The fuzzer finds what is wrong, takes what is right, and goes on where it stopped."""

import pytest
import torch

from tests import fuzz, walk
from turnout.ops.dot import DOT
from turnout.ops.group_norm_silu import GROUP_NORM_SILU

pytestmark = pytest.mark.usefixtures("poison")


@pytest.fixture(autouse=True)
def _fewer_draws(monkeypatch):
    monkeypatch.setattr(fuzz, "MANY", 16)


def wrong_lines(op, count, file):
    result = fuzz.Counts(file, 0).of(op.name)
    lines = [line for seed in range(count) for line in fuzz.try_case(op, seed, walk.CPU, result)]
    return lines, result


@walk.ops
def test_cases_are_the_same_for_a_seed_and_nothing_is_wrong(op, tmp_path):
    lines, result = wrong_lines(op, 8, tmp_path / "state.json")
    repeated, _ = wrong_lines(op, 8, tmp_path / "other.json")
    assert lines == repeated == []
    assert result["cases"] == 8
    assert result["calls"] >= result["cases"] - result["refused"] > 0


@pytest.mark.parametrize(
    ("mistake", "why"),
    [
        (lambda right: right * (1 + 1e-4), "its error against float64"),
        (lambda right: torch.full_like(right, float("nan")), "finite where they should not be"),
        (lambda right: right.reshape(1), "shape is"),
        (lambda right: right.double(), "dtype is"),
    ],
)
def test_fuzz_finds_wrong_routes(mistake, why, monkeypatch, tmp_path):
    right = DOT.reference
    monkeypatch.setattr(DOT, "call", lambda *args: mistake(right(*args)))
    lines, actual = wrong_lines(DOT, 12, tmp_path / "state.json")
    assert any(why in line for line in lines)
    assert all(wrong["route"] == fuzz.ROUTED for wrong in actual["wrong"])


def test_fuzz_finds_writes_outside_the_output(monkeypatch, tmp_path):
    right = DOT.reference

    def careless(a, b):
        whole = torch.empty(0, dtype=a.dtype).set_(a.untyped_storage())
        whole += 1
        result = right(a, b)
        whole[-1:] -= 1  # all but the last element are changed
        return result

    monkeypatch.setattr(DOT, "call", careless)
    lines, _ = wrong_lines(DOT, 6, tmp_path / "state.json")
    assert lines


# A norm of three values that has one finite output, and one of a single value of 3e17, where float64 itself
# has no digit right.
LUCKY, UNKNOWN = 430881339535, 653684160029


@pytest.mark.parametrize("seed", [LUCKY, UNKNOWN])
def test_routes_are_not_held_to_the_luck_of_the_reference(seed, tmp_path):
    found = fuzz.Counts(tmp_path / "state.json", 0).of(GROUP_NORM_SILU.name)
    assert list(fuzz.try_case(GROUP_NORM_SILU, seed, walk.CPU, found)) == []
    assert found["routes"]["cpu-block-sums"] == 1


@pytest.mark.parametrize(("seed", "factor"), [(LUCKY, 1 + 1e-6), (UNKNOWN, 1.05)])
def test_wrong_routes_are_found_in_such_calls(seed, factor):
    args, changes = fuzz.call_of(GROUP_NORM_SILU, seed, walk.CPU)
    trial = fuzz.Fuzzed(GROUP_NORM_SILU, args, outliers=fuzz.EDGES in changes, draws=16)
    mistaken = trial.mismatch("close", lambda *args: GROUP_NORM_SILU.reference(*args) * factor)
    assert "its error against float64" in (mistaken or "")


def test_fuzz_continues_where_the_last_run_stopped(tmp_path):
    messages = []
    file = tmp_path / "state.json"
    fuzz.run(fuzz.Counts(file, 5), 20, walk.CPU, [DOT], messages.append)
    first = fuzz.Counts(file, 5)
    assert 20 <= first.calls < 30
    fuzz.run(first, 40, walk.CPU, [DOT], messages.append)
    at_once = fuzz.Counts(tmp_path / "other.json", 5)
    fuzz.run(at_once, 40, walk.CPU, [DOT], messages.append)
    assert fuzz.Counts(file, 5).ops == at_once.ops

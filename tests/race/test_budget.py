"""Several races in one run, within a budget, with a row of each."""

import json

import pytest

from tests.race.races import race_on_a_gpu, rows_in, run_command
from turnout.bench import sweep
from turnout.bench.sweep import commit
from turnout.race import many
from turnout.race.models import RACERS


@pytest.fixture
def clock(monkeypatch):
    """A race takes ten seconds of a clock that only it moves."""
    at = [0.0]
    ran = []

    def quick(name, size, dtype, device, **options):
        ran.append(name)
        if name == "sd-vae":
            raise KeyboardInterrupt
        if name == "flux2-vae":
            raise RuntimeError("no such luck\nsecond line")
        at[0] += 10.0
        result = race_on_a_gpu(1)
        result.model, result.what, result.dtype = (
            name,
            RACERS[name].describe(size),
            str(dtype).removeprefix("torch."),
        )
        result.commit = commit()
        return result

    monkeypatch.setattr(many, "race", quick)
    monkeypatch.setattr(many.time, "perf_counter", lambda: at[0])
    return ran


def test_budget_runs_as_many_models_as_fit(clock, tmp_path):
    run = run_command("all", "--budget", "25", "--out", str(tmp_path))
    assert run.exit_code == 0, run.output
    assert clock == list(RACERS)[:3] == [row["model"] for row in rows_in(tmp_path)]
    assert "the budget is spent, 40 races were not run" in run.stderr
    assert list(RACERS)[3] in run.stderr


def test_a_run_that_is_cut_off_loses_nothing(clock, tmp_path):
    run = run_command("flux-vae", "sdxl-vae", "sd-vae", "wan-vae", "--out", str(tmp_path))
    assert run.exit_code != 0
    assert [(row["model"], row["dtype"]) for row in rows_in(tmp_path)] == [
        ("flux-vae", "bfloat16"), ("sdxl-vae", "bfloat16"), ("sdxl-vae", "float32"),
    ]  # fmt: skip


def test_missing_leaves_out_what_has_a_row_of_this_code(clock, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "commit", lambda: "abc1234")
    monkeypatch.setitem(globals(), "commit", lambda: "abc1234")
    run_command("flux-vae", "ltx-vae", "--out", str(tmp_path))
    path = tmp_path / "cpu" / "race.jsonl"
    rows = rows_in(tmp_path)
    for row in rows:
        row["versions"].pop("triton")  # a CPU's row has none
    rows[1]["commit"] = "before"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    clock.clear()
    run_command("flux-vae", "ltx-vae", "wan-vae", "--missing", "--out", str(tmp_path))
    assert clock == ["ltx-vae", "wan-vae"]


def test_a_model_that_fails_does_not_end_the_others(clock, tmp_path):
    run = run_command("flux-vae", "flux2-vae", "wan-vae", "--out", str(tmp_path))
    assert run.exit_code == 1
    assert clock == ["flux-vae", "flux2-vae", "wan-vae"]
    assert "RuntimeError: no such luck (in quick, test_budget.py" in run.stdout
    assert "second line" not in run.stdout
    assert [row["model"] for row in rows_in(tmp_path)] == ["flux-vae", "wan-vae"]

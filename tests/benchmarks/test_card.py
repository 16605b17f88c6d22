"""`make card`: steps run one after the other, go on where they stopped, and say what became of targets."""

import json
import os
import subprocess
import sys
import time

import pytest

from benchmarks import card, targets
from benchmarks.card import DONE, FAILED, OUT_OF_TIME, ROOT, Settings, Step
from turnout.bench import sweep
from turnout.race.ahead import numbers_of
from turnout.race.models import RACERS


@pytest.fixture
def settings(tmp_path, monkeypatch):
    monkeypatch.setenv("TURNOUT_COMMIT", "abc")
    sweep.commit.cache_clear()
    yield Settings(tmp_path / "results", "cpu", 60.0, 120.0, 1, "tiny")
    sweep.commit.cache_clear()


def only(monkeypatch, *steps):
    monkeypatch.setattr(card, "steps", lambda settings: iter(steps))
    monkeypatch.setattr(card, "ROOT", ROOT)


def log(settings):
    lines = (settings.folder / card.LOG).read_text().splitlines()
    return {row["step"]: row for row in map(json.loads, lines)}


def test_steps_go_on_where_the_last_run_stopped(settings, monkeypatch, tmp_path):
    mark = tmp_path / "mark"
    first = Step("first", ("-c", f"open({str(mark)!r}, 'a').write('x')"))
    second = Step("second", ("-c", "print('because'); raise SystemExit(3)"))
    only(monkeypatch, first, second)
    assert card.measure(settings) == 1
    assert {name: row["state"] for name, row in log(settings).items()} == {"first": DONE, "second": FAILED}
    assert log(settings)["second"]["said"] == "because"
    assert card.measure(settings) == 1
    assert mark.read_text() == "x", "what is done is not done again"
    card.measure(settings, again=True)
    assert mark.read_text() == "x"
    only(monkeypatch, first, second._replace(words=("-c", "pass")))
    assert card.measure(settings, again=True) == 0


def test_steps_that_fail_with_the_same_words_end_a_run(settings, monkeypatch, capsys):
    fails = ("-c", "raise ModuleNotFoundError('no pydantic')")
    only(monkeypatch, *(Step(str(i), fails) for i in range(5)))
    assert card.measure(settings) == 5
    assert list(log(settings)) == ["0", "1", "2"]
    said = capsys.readouterr().out
    assert "3 steps in a row failed with the same words" in said
    assert "the others are left: ModuleNotFoundError: no pydantic" in said


def test_steps_that_fail_with_other_words_or_not_in_a_row_end_nothing(settings, monkeypatch):
    words = ["a", "a", None, "a", "a", "b", "a"]
    bodies = ["pass" if word is None else f"raise SystemExit({word!r})" for word in words]
    only(monkeypatch, *(Step(str(i), ("-c", body)) for i, body in enumerate(bodies)))
    assert card.measure(settings) == 6
    assert len(log(settings)) == 7


def test_nothing_is_measured_where_the_command_line_does_not_run(settings, monkeypatch, tmp_path, capsys):
    """As where a package that typer needs is missing: typer itself is there."""
    assert card.broken_commands(tmp_path / "good.log") == []
    (tmp_path / "typer").mkdir()
    (tmp_path / "typer" / "__init__.py").write_text("raise ModuleNotFoundError('no pydantic')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(card, "measure", lambda *given: pytest.fail("it measures"))
    assert card.main(["--device", "cpu", "--size", "tiny", "--out", str(settings.out)]) == 2
    said = capsys.readouterr().out
    assert "python -m turnout --version: failed: ModuleNotFoundError: no pydantic" in said
    assert "python -m turnout race --list: failed" in said


def test_step_that_takes_too_long_ends_with_all_that_it_began(settings, monkeypatch, tmp_path):
    alive = tmp_path / "alive"
    inner = f"import time\nwhile True: open({str(alive)!r}, 'a').write('x'); time.sleep(0.05)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    only(monkeypatch, Step("endless", ("-c", outer)), Step("other", ("-c", "pass")))
    assert card.measure(settings._replace(step=3.0, budget=60.0)) == 1
    assert {name: row["state"] for name, row in log(settings).items()} == {
        "endless": OUT_OF_TIME,
        "other": DONE,
    }
    time.sleep(0.2)
    size = alive.stat().st_size
    time.sleep(0.3)
    assert alive.stat().st_size == size


def test_budget_ends_a_run_between_steps(settings, monkeypatch):
    only(monkeypatch, *(Step(str(i), ("-c", "pass")) for i in range(3)))
    assert card.measure(settings._replace(budget=1.0)) == 2
    assert list(log(settings)) == ["0"], "the first one runs all the same"


def test_steps_not_tried_come_before_those_that_ran_out_of_time():
    steps = [Step(name, ()) for name in "abcd"]
    known = [
        {"step": "a", "state": OUT_OF_TIME},
        {"step": "b", "state": DONE},
        {"step": "c", "state": FAILED},
    ]
    assert [step.name for step in card.pending(steps, known, again=False)] == ["d", "a"]
    assert [step.name for step in card.pending(steps, known, again=True)] == ["d", "a", "c"]


def test_rows_of_other_code_do_not_count(settings, monkeypatch):
    only(monkeypatch, Step("it", ("-c", "pass")))
    assert card.measure(settings) == 0
    monkeypatch.setenv("TURNOUT_COMMIT", "def")
    sweep.commit.cache_clear()
    only(monkeypatch, Step("it", ("-c", "raise SystemExit(1)")))
    assert card.measure(settings) == 1


def test_summary_is_of_rows_of_one_state_of_the_code(settings, capsys):
    lane = {"ms": 20.0}
    row = {"model": "flux", "size": "full", "dtype": "bfloat16", "lanes": {"graph": lane}, "commit": "old"}
    folder = settings.out / "nvidia-h200"
    folder.mkdir(parents=True)
    (folder / "race.jsonl").write_text(json.dumps(row) + "\n")
    for code, state in (("old", targets.REACHED), ("abc", targets.UNKNOWN)):
        words = ["--summary", "--card", "h200", "--commit", code, "--out", str(settings.out)]
        assert card.main(words) == 0
        said = capsys.readouterr().out
        assert f"{state:12} Flux transformer, with graphs: at most 24.5 ms" in said
        assert f"code {code}" in said


def test_every_race_is_a_step_and_every_target_has_its_step(settings):
    steps = list(card.steps(settings._replace(size="full")))
    assert len({step.name for step in steps}) == len(steps)
    races = {(name, dtype) for name, racer in RACERS.items() for dtype in racer.dtypes}
    assert {
        (step.words[3], step.words[step.words.index("--dtype") + 1])
        for step in steps
        if "--graph" in step.words and "--compile" not in step.words
    } == races
    said = [" ".join(step.words) for step in steps]
    for target in targets.load():
        where = target.get("where", {})
        named = [f"race {where['model']}"] if "model" in where else []
        needed = {
            "race": ["--graph", *named],
            "first-call": ["--first-call", *named],
            "ranks": [f"--ranks {where.get('ranks')}", f"--size {where.get('size', 'full')}", *named],
            "router": ["bench router"],
            "gpu-tests": ["-m gpu"],
        }[target["file"]]
        assert any(all(word in words for word in needed) for words in said), target["name"]


def test_every_size_of_a_step_is_one_of_its_model(settings):
    for step in card.steps(settings._replace(size="full")):
        if step.words[2] == "race":
            name, size = step.words[3], step.words[step.words.index("--size") + 1]
            _, numbers = numbers_of(name, RACERS[name], size)
            assert len(numbers) == len(RACERS[name].sizes["full"])


def test_every_command_of_a_step_is_known():
    """Its options exist: asked for with --help."""
    from typer.testing import CliRunner

    from turnout.cli import app

    helped = {name: CliRunner().invoke(app, [*name.split(), "--help"]).output for name in ("race", "bench")}
    for step in card.steps(Settings(ROOT, "cpu", 1, 1)):
        if step.words[:2] == ("-m", "turnout") and step.words[2] in helped:
            options = [word for word in step.words if word.startswith("--")]
            assert all(option in helped[step.words[2]] for option in options), step.words


def test_steps_run_on_a_cpu_in_small(settings, monkeypatch):
    """One of each kind that a CPU can do, as the steps have them."""
    wanted = (
        "race flux-vae bfloat16",
        "first call flux-vae",
        "2 ranks lockstep flux-vae",
        "2 ranks fake flux-vae",
    )
    found = [step for step in card.steps(settings) if step.name in wanted]
    assert len(found) == len(wanted)
    only(monkeypatch, *found)
    assert card.measure(settings) == 0, log(settings)
    files = {path.name for path in settings.folder.glob("*.jsonl")}
    assert files == {"race.jsonl", "first-call.jsonl", "ranks.jsonl", card.LOG}
    before = {
        path.name: path.read_text() for path in settings.folder.glob("*.jsonl") if path.name != card.LOG
    }
    (settings.folder / card.LOG).unlink()
    assert card.measure(settings) == 0
    assert {name: (settings.folder / name).read_text() for name in before} == before, (
        "rows were left as they are"
    )
    row = json.loads((settings.folder / "first-call.jsonl").read_text())
    assert (row["model"], row["compilations"], row["warmed_s"]) == ("flux-vae", 0, None)
    assert row["cold_s"] > 0
    results = {result.name: result.state for result in card.show(settings.folder)}
    assert results["Flux VAE on 2 ranks: the bits of one"] == targets.REACHED
    assert results["Wan 2.1 VAE decode"] == targets.UNKNOWN


def test_recorded_tests_go_on_after_a_run_that_was_cut_off(settings, tmp_path):
    (tmp_path / "test_three.py").write_text(
        "import os, pathlib, pytest\n"
        "@pytest.mark.parametrize('i', range(3))\n"
        "def test_it(i):\n"
        "    with pathlib.Path('seen').open('a') as file: file.write(str(i))\n"
        "    assert i != 1 or pathlib.Path('mended').exists()\n"
    )
    kept = settings.folder / "gpu-tests.jsonl"
    words = ["-m", "pytest", "-q", "-p", "benchmarks.recorded_tests", "--recorded", str(kept), "-n", "2"]
    paths = os.pathsep.join((str(ROOT), str(ROOT / "src")))

    def run():
        environment = {**os.environ, "PYTHONPATH": paths, "TURNOUT_COMMIT": "abc", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *words, "test_three.py"]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    done = run()
    assert "2 of 3 tests passed" in done.stdout, done.stdout + done.stderr
    (row,) = map(json.loads, kept.read_text().splitlines())
    assert (row["tests"], row["passed"], row["failed"]) == (3, 2, ["test_three.py::test_it[1]"])
    (tmp_path / "mended").touch()
    (tmp_path / "seen").unlink()
    done = run()
    assert "3 of 3 tests passed" in done.stdout, done.stdout + done.stderr
    assert (tmp_path / "seen").read_text() == "1", "what has passed is not run again"
    (row,) = map(json.loads, kept.read_text().splitlines())
    assert (row["tests"], row["passed"], row["failed"]) == (3, 3, [])

"""`turnout race`: what it prints and writes; a mistake ends with one line and exit code 2."""

import importlib
import json
import sys
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from turnout import cli
from turnout.bench.writable import check_file
from turnout.cli import app
from turnout.race import many
from turnout.race.models import RACERS


def test_row_is_printed_as_json_and_written_to_out(tmp_path):
    words = [
        "race",
        "wan-vae",
        "--size",
        "tiny",
        "--rounds",
        "3",
        "--device",
        "cpu",
        "--json",
        "--out",
        str(tmp_path),
    ]
    run = CliRunner().invoke(app, words)
    assert run.exit_code == 0, run.output
    line = next(line for line in run.stdout.splitlines() if line.startswith("{"))
    assert json.loads(line)["model"] == "wan-vae"
    assert json.loads((tmp_path / "cpu" / "race.jsonl").read_text())["dtype"] == "bfloat16"


def test_list_names_every_model():
    run = CliRunner().invoke(app, ["race", "--list"])
    assert run.exit_code == 0
    assert all(name in run.stdout for name in RACERS)
    rows = json.loads(CliRunner().invoke(app, ["race", "--list", "--json"]).stdout)
    assert [row["model"] for row in rows] == list(RACERS)


@pytest.fixture
def error_line(monkeypatch, capsys):
    """What the run_command line says of a mistake."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["turnout", "race", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        lines = captured.err.strip().splitlines()
        assert ended.value.code == 2, captured
        assert lines[-1].startswith("error: ")
        assert "Traceback" not in captured.err + captured.out
        return lines[-1]

    return run


def test_mistakes_in_names_and_options_are_one_line(error_line):
    line = error_line("wan-vea")
    assert "model 'wan-vea' is not known; did you mean wan-vae?" in line
    assert all(name in line for name in RACERS)
    assert "one of: hunyuan-vae" in error_line("nothing at all")
    assert "no size 'huge'" in error_line("wan-vae", "--size", "huge")
    assert "no model was given" in error_line("--json")
    assert "--report shows one race, 2 models were given" in error_line(
        "wan-vae", "flux-vae", "--report", "x.html"
    )
    assert "--missing was given without --out" in error_line("all", "--missing")


@pytest.mark.parametrize(("package", "model"), [("diffusers", "flux-vae"), ("transformers", "mamba")])
def test_missing_package_is_one_line_with_its_extra(error_line, monkeypatch, package, model):
    monkeypatch.setitem(sys.modules, package, None)  # an import of it finds nothing
    assert f"needs {package}, which is not installed; pip install 'turnout[race]'" in error_line(
        model, "--size", "tiny"
    )


def test_packages_that_are_too_old_or_broken_are_named(monkeypatch):
    racer = replace(RACERS["flux-vae"], model="AutoencoderKLOfTomorrow")
    with pytest.raises(
        ValueError, match=r"diffusers .* has no AutoencoderKLOfTomorrow; pip install --upgrade"
    ):
        racer.load_class()

    def broken(name):
        raise ImportError("libcudart.so.99 is missing\nmore")

    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(
        ValueError, match=r"diffusers is installed, but cannot be imported: libcudart\.so\.99 is missing$"
    ):
        racer.load_class()


def test_folder_without_the_models_weights_is_refused(error_line, tmp_path):
    assert "there is no such folder" in error_line("flux-vae", "--weights", tmp_path / "nowhere")
    assert "no config.json, and no vae/config.json" in error_line("flux-vae", "--weights", tmp_path)
    (tmp_path / "config.json").write_text('{"_class_name": "FluxTransformer2DModel"}')
    assert "it is a FluxTransformer2DModel, this race needs a AutoencoderKL" in error_line(
        "flux-vae", "--weights", tmp_path
    )
    (tmp_path / "config.json").write_text("{")
    assert "cannot be read as JSON" in error_line("flux-vae", "--weights", tmp_path)
    (tmp_path / "config.json").write_text('{"_class_name": "AutoencoderKL"}')  # and no weights beside it
    assert "cannot be loaded" in error_line(
        "flux-vae", "--size", "tiny", "--device", "cpu", "--weights", tmp_path
    )


def test_report_that_cannot_be_written_is_refused_before_the_race(error_line, tmp_path, monkeypatch):
    monkeypatch.setattr(many, "race", lambda *args, **options: pytest.fail("it ran"))
    (tmp_path / "file").write_text("")
    assert "cannot be written (" in error_line("flux-vae", "--report", tmp_path / "file" / "race.html")
    assert "this is a folder" in error_line("flux-vae", "--report", tmp_path)
    assert "the folder cannot be made" in error_line("flux-vae", "--out", tmp_path / "file" / "rows")
    check_file("--report", tmp_path / "new" / "race.html")
    assert not (tmp_path / "new" / "race.html").exists()


@pytest.mark.parametrize("package", ["jinja2", "PIL"])
def test_a_report_without_its_packages_is_refused_before_the_race(monkeypatch, tmp_path, package):
    monkeypatch.setitem(sys.modules, package, None)  # as where it is not installed
    monkeypatch.setattr(many, "race", lambda *args, **options: pytest.fail("it raced"))
    words = ["race", "flux-vae", "--size", "tiny", "--device", "cpu", "--report", str(tmp_path / "race.html")]
    run = CliRunner().invoke(app, words)
    assert run.exit_code == 2
    assert "pip install 'turnout[race]'" in run.stderr
    assert len(run.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "race.html").exists()


def test_a_race_needs_neither_jinja2_nor_pillow(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.setitem(sys.modules, "PIL", None)
    run = CliRunner().invoke(
        app, ["race", "flux-vae", "--size", "tiny", "--device", "cpu", "--rounds", "2", "--seconds", "0"]
    )
    assert run.exit_code == 0, run.output

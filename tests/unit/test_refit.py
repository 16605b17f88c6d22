"""refit: constants of cost models move to where times say they are."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from turnout.bench import refit
from turnout.cli import app
from turnout.routing import device_files
from turnout.routing.case import outline
from turnout.routing.choose import plain
from turnout.routing.device import Device
from turnout.routing.op import OPS

H200 = Device.named("h200")
SECTIONS = ("dot.two-stage", "norm_rope.one-pass")
TRUE = {"dot.two-stage": {"share": 0.72, "start": 5e-6, "host": 11e-6}, "norm_rope.one-pass": {"share": 0.6}}


def measured_with(constants):
    """Times as a card with these constants would take them."""
    there = replace(H200, refitted=constants)
    for name, route in (("dot", "two-stage"), ("norm_rope", "one-pass")):
        op = OPS[name]
        for case in op.cases():
            problem = outline(op, case).problem
            if not any(op.routes[route].refuses(problem, there)):
                yield refit.Sample(op, route, problem, op.routes[route].cost(problem, there))


def test_constants_are_found_again_in_times_that_they_gave():
    fits = {(fit.section, fit.name): fit for fit in refit.refit(H200, list(measured_with(TRUE)))}
    assert {section for section, _ in fits} == set(SECTIONS)
    assert fits["dot.two-stage", "share"].old == 0.9
    assert fits["dot.two-stage", "share"].new == pytest.approx(0.72, rel=0.02)
    assert fits["norm_rope.one-pass", "share"].new == pytest.approx(0.6, rel=0.03)
    assert (
        fits["norm_rope.one-pass", "share"].off_after < 1.01 < fits["norm_rope.one-pass", "share"].off_before
    )


def test_constants_that_fit_stay():
    fits = refit.refit(H200, list(measured_with({"": {}})))
    assert fits
    assert all(fit.new == fit.old and fit.off_after == pytest.approx(1.0) for fit in fits)


def test_only_numbers_and_sources_of_the_file_change():
    text = (device_files.FOLDER / "nvidia-h200.toml").read_text()
    fit = refit.Fit("attention", "cudnn", 0.63, 0.612, 1.2, 1.1, 14)
    once = refit.rewritten(text, H200, [fit])
    changed = [
        (old, new) for old, new in zip(text.splitlines(), once.splitlines(), strict=True) if old != new
    ]
    assert [new for _, new in changed] == [
        'source = "H200, bfloat16, torch 2.11, cuDNN 9.19, triton 3.6: shares of the peak; ops/attention/NOTES.md; '
        'refitted to 14 times measured on NVIDIA H200"',
        "cudnn = 0.612  # at head dims beyond 64",
    ]
    again = refit.rewritten(once, H200, [fit._replace(old=0.612, new=0.6, samples=15)])
    assert again.count("refitted to") == 1
    assert "refitted to 15 times" in again


def test_rows_that_say_nothing_are_left_out():
    row = {"op": "dot", "problem": {"a": [3]}, "us": {"reference": 1.0}}
    assert refit.samples_of([row, {"op": "gone", "problem": {}, "us": {}}, {"model": "wan-vae"}]) == []


def test_a_folder_without_rows_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no rows of NVIDIA H200: .* name the folder with --results"):
        refit.load_rows(tmp_path, H200)


def test_the_command_line_shows_and_says_what_it_needs(tmp_path):
    [dot] = [sample for sample in measured_with(TRUE) if sample.route == "two-stage"][:1]
    problem = {name: plain(value) for name, value in dot.problem._asdict().items()}
    file = tmp_path / "nvidia-h200" / "dot.jsonl"
    file.parent.mkdir()
    file.write_text(json.dumps({"op": "dot", "problem": problem, "us": {"two-stage": 1e6 * dot.seconds}}))
    runner = CliRunner()
    shown = runner.invoke(app, ["bench", "refit", "--device", "h200", "--results", str(tmp_path), "--json"])
    assert {fit["section"] for fit in json.loads(shown.stdout)} == {"dot.two-stage"}
    assert runner.invoke(app, ["bench", "refit"]).exit_code == 2
    assert runner.invoke(app, ["bench", "dot", "--write"]).exit_code == 2

"""refit: constants of cost models move to where times say they are."""

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from turnout.bench import refit
from turnout.cli import app
from turnout.routing import device_files
from turnout.routing.case import outline
from turnout.routing.choose import plain
from turnout.routing.device import Device
from turnout.routing.op import OPS

H200 = Device.named("h200")
ROUTES = {"dot.two-stage": ("dot", "two-stage"), "norm_rope.one-pass": ("norm_rope", "one-pass")}
TRUE = {"dot.two-stage": {"share": 0.72, "start": 5e-6, "host": 11e-6}, "norm_rope.one-pass": {"share": 0.6}}


def problems(op_name):
    """Calls of ever larger tensors, from those that take a launch to those that take milliseconds."""
    if op_name == "dot":
        one = outline(OPS["dot"], OPS["dot"].cases()[0]).problem
        return [one._replace(a=(4**exponent,), b=(4**exponent,)) for exponent in range(5, 16)]
    q = torch.empty(1, 1024, 24, 128, dtype=torch.bfloat16, device="meta")
    one = OPS["norm_rope"].problem(q, None, q, *[None] * 7, 1e-6, "head", 0, "half", "bhsd", False)
    return [one._replace(batch=4**exponent) for exponent in range(7)]


def samples_with(constants):
    """The times that a card with these constants would take, computed by the cost models themselves."""
    device = replace(H200, refitted=constants)
    for op_name, route_name in ROUTES.values():
        op, route = OPS[op_name], OPS[op_name].routes[route_name]
        yield from (
            refit.Sample(op, route_name, problem, route.cost(problem, device))
            for problem in problems(op_name)
        )


def test_refit_finds_the_constants_that_the_times_were_computed_with():
    fits = {(fit.section, fit.name): fit for fit in refit.refit(H200, list(samples_with(TRUE)))}
    assert {section for section, _ in fits} == set(ROUTES)
    dot_share, norm_share = (fits[section, "share"] for section in ROUTES)
    assert (dot_share.old, norm_share.old) == (0.9, 0.76)
    assert dot_share.new == pytest.approx(0.72, rel=0.02)
    assert norm_share.new == pytest.approx(0.6, rel=0.02)
    assert norm_share.off_after < 1.01 < norm_share.off_before


def test_refit_leaves_constants_that_fit():
    fits = refit.refit(H200, list(samples_with({"": {}})))
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
        'source = "H200, bfloat16, torch 2.11, cuDNN 9.19, triton 3.6: shares of the peak; '
        'ops/attention/NOTES.md; refitted to 14 times measured on NVIDIA H200"',
        "cudnn = 0.612  # at head dims beyond 64",
    ]
    repeated = refit.rewritten(once, H200, [fit._replace(old=0.612, new=0.6, samples=15)])
    assert repeated.count("refitted to") == 1
    assert "refitted to 15 times" in repeated


def test_rows_that_say_nothing_are_left_out():
    row = {"op": "dot", "problem": {"a": [3]}, "us": {"reference": 1.0}}
    assert refit.samples_of([row, {"op": "gone", "problem": {}, "us": {}}, {"model": "wan-vae"}]) == []


def test_a_folder_without_rows_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no rows of NVIDIA H200: .* name the folder with --results"):
        refit.load_rows(tmp_path, H200)


def test_the_command_line_shows_and_says_what_it_needs(tmp_path):
    [dot] = [sample for sample in samples_with(TRUE) if sample.route == "two-stage"][:1]
    problem = {name: plain(value) for name, value in dot.problem._asdict().items()}
    file = tmp_path / "nvidia-h200" / "dot.jsonl"
    file.parent.mkdir()
    file.write_text(json.dumps({"op": "dot", "problem": problem, "us": {"two-stage": 1e6 * dot.seconds}}))
    runner = CliRunner()
    shown = runner.invoke(app, ["bench", "refit", "--device", "h200", "--results", str(tmp_path), "--json"])
    assert {fit["section"] for fit in json.loads(shown.stdout)} == {"dot.two-stage"}
    assert runner.invoke(app, ["bench", "refit"]).exit_code == 2
    assert runner.invoke(app, ["bench", "dot", "--write"]).exit_code == 2

"""The lanes of a race: what runs in them, their figures, and the verdict."""

import json
import math
import re
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from tests.models.played import Recorded, play_graphs
from tests.race.races import CPU, race_on_a_gpu
from turnout.cli import app
from turnout.models.patch import patched
from turnout.race import page
from turnout.race.models import RACERS
from turnout.race.run import ACCELERATED, COMPILED, GRAPH, STOCK, _Contestant, compare, race


def test_one_round_is_no_race():
    with pytest.raises(ValueError, match="needs 2 at least"):
        race("wan-vae", "tiny", torch.bfloat16, CPU, rounds=1)


def test_row_has_every_figure_of_a_race(wan_race):
    row = json.loads(json.dumps(wan_race.row()))
    stock, fast = row["lanes"]["stock"], row["lanes"]["accelerated"]
    assert row["speedup"] == pytest.approx(
        wan_race.lanes[STOCK].ms / wan_race.lanes[ACCELERATED].ms, rel=1e-3
    )
    assert {"stock", "accelerated"} == set(row["lanes"])
    assert stock["peak_mib"] is None
    assert stock["host_ms"] is None  # a CPU is its own host
    assert stock["first_ms"] > 0
    assert stock["psnr_stock"] is stock["max_error"] is None  # it is stock
    assert fast["psnr"] > stock["psnr"] - 1
    assert fast["max_error"] == 0 or fast["psnr_stock"] > 40  # None where nothing differs
    assert 0 <= fast["max_error"] < 0.1
    assert len(stock["samples"]) == len(fast["samples"]) in (2, 3)
    assert row["speedup_range"][0] <= row["speedup_range"][1]
    assert {"causal_conv3d", "rms_norm_silu"} <= {share["op"] for share in row["routes"]}
    assert all(share["why"] and share["calls"] > 0 for share in row["routes"])
    for name, times in row[
        "kinds_ms"
    ].items():  # of the median call, not of the one that the profiler slowed down
        assert sum(times.values()) == pytest.approx(row["lanes"][name]["ms"], rel=1e-2)
    assert row["machine"]["cpu"]
    assert row["machine"]["cores"] >= 1
    assert row["machine"]["card"] is None
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", row["date"])
    assert row["versions"]["torch"] == torch.__version__


def test_lanes_take_turns(monkeypatch):
    order = []
    keep = _Contestant.prepared

    def prepared(self, lane):
        order.append(lane)
        return keep(self, lane)

    monkeypatch.setattr(_Contestant, "prepared", prepared)
    race("flux-vae", "tiny", torch.float32, CPU, rounds=4, seconds=60, profiled=())
    assert order == [STOCK, ACCELERATED, ACCELERATED, STOCK, STOCK, ACCELERATED, ACCELERATED, STOCK]


@pytest.mark.parametrize(
    ("stock", "fast", "verdict"),
    [
        ([20.0, 21.0, 20.0], [10.0, 10.0, 11.0], "faster"),
        ([10.0, 10.0, 11.0], [20.0, 20.0, 20.0], "slower"),
        ([10.0, 11.0, 12.0], [10.0, 10.0, 10.0], "within noise"), ([10.0, 10.0], [5.0, 12.0], "within noise"),
        ([10.0, 10.0], [10.0, 10.0], "within noise"),
    ],
)  # fmt: skip
def test_headline_is_no_surer_than_the_rounds(stock, fast, verdict):
    result = race_on_a_gpu()
    for name, samples in ((STOCK, stock), (ACCELERATED, fast)):
        result.lanes[name].samples = samples
        result.lanes[name].summarize(True)
    assert result.verdict == result.row()["verdict"] == verdict
    assert verdict in result.headline()
    assert f"{verdict}: " in page.page(result)


def test_psnr_and_largest_difference():
    truth = torch.zeros(4)
    assert compare(truth, truth, 2.0) == (math.inf, 0.0)
    assert compare(truth + 0.2, truth, 2.0) == pytest.approx((20.0, 0.2), abs=1e-4)
    assert all(map(math.isnan, compare(torch.tensor([0.0, math.nan, 0.0, 0.0]), truth, 2.0)))
    with pytest.raises(ValueError, match="cannot be compared"):
        compare(torch.zeros(3), truth)


def test_psnr_of_outputs_that_are_compared_in_chunks(monkeypatch):
    monkeypatch.setattr("turnout.race.run.CHUNK", 3)
    torch.manual_seed(0)
    one, two = torch.randn(4, 5), torch.randn(4, 5)
    error = (one.double() - two.double()).square().mean()
    assert compare(one, two, 2.0) == pytest.approx(
        (10 * math.log10(4 / error), float((one - two).abs().max()))
    )


def test_nan_in_the_output_makes_a_race_wrong(monkeypatch, tmp_path):
    racer = RACERS["flux-vae"]

    def broken(model, settings):
        call = racer.call(model, settings)

        def run(model):
            accelerated = patched(model.decoder) is not None
            return call(model) * (math.nan if accelerated else 1.0)

        return run

    monkeypatch.setitem(RACERS, "flux-vae", replace(racer, call=broken))
    result = race("flux-vae", "tiny", torch.bfloat16, CPU, rounds=2, seconds=0)
    assert result.verdict == "wrong"
    assert result.row()["speedup"] is None
    assert "NaN" in result.headline()
    assert "NaN" in page.page(result)
    run = CliRunner().invoke(app, ["race", "flux-vae", "--size", "tiny", "--device", "cpu", "--rounds", "2"])
    assert run.exit_code == 1
    assert "no speed" in run.stdout


def test_a_model_that_does_not_run_in_float32_still_races(monkeypatch):
    racer = RACERS["flux-vae"]

    def half_only(model, settings):
        call = racer.call(model, settings)

        def run(model):
            if model.dtype is torch.float32:
                raise RuntimeError("mat_a must be bfloat16\nmore")
            return call(model)

        return run

    monkeypatch.setitem(RACERS, "flux-vae", replace(racer, call=half_only))
    result = race("flux-vae", "tiny", torch.bfloat16, CPU, rounds=2, seconds=0, profiled=())
    assert result.no_truth == "the stock model does not run in float32 here (mat_a must be bfloat16)"
    assert result.row()["lanes"]["accelerated"]["psnr"] is None
    assert result.row()["lanes"]["accelerated"]["psnr_stock"] > 30


@pytest.mark.parametrize("name", ["hunyuan-vae", "sd-vae-encode", "wan", "mamba-decode"])
def test_torch_compile_gets_the_module_that_the_call_runs(name):
    """Not a `forward` beside the call: `decode` runs the decoder, `generate` the model."""
    ran = []

    def backend(graph, inputs):
        def run(*args):
            ran.append(graph)
            return graph(*args)

        return run

    with torch.no_grad():
        model, call = RACERS[name].make("tiny", torch.float32, CPU)
        contestant = _Contestant(model, call, RACERS[name], None, backend)
        outputs = {}
        for lane, runs in (
            (STOCK, False),
            (COMPILED, True),
            (ACCELERATED, False),
            (COMPILED, True),
            (STOCK, False),
        ):
            ran.clear()
            with contestant.prepared(lane) as run:
                outputs[lane] = run()
            assert bool(ran) == runs, lane
    torch.testing.assert_close(outputs[COMPILED], outputs[STOCK])
    assert all("forward" not in vars(module) for module in model.modules())
    torch.compiler.reset()


def test_a_model_that_cannot_be_compiled_still_races():
    def backend(graph, inputs):
        raise RuntimeError("no compiler today\nand a second line")

    result = race(
        "flux-vae",
        "tiny",
        torch.float32,
        CPU,
        rounds=2,
        seconds=0,
        compiled=True,
        profiled=(),
        backend=backend,
    )
    row = result.row()
    assert "no compiler today" in row["lanes"][COMPILED]["failed"]
    assert row["speedup"] > 0
    assert row["compiled"] == "decoder"
    assert "no compiler today" in page.page(result)
    torch.compiler.reset()


def test_graphs_of_the_accelerated_model_race_too(monkeypatch):
    count = play_graphs(monkeypatch, Recorded)
    result = race("flux", "tiny", torch.float32, CPU, rounds=3, seconds=9, graph=True, profiled=())
    lane = result.row()["lanes"][GRAPH]
    assert lane["max_error"] < 1e-4
    assert len(lane["samples"]) == 3
    assert count.replays == 3, "every sample is a replay"
    assert "graph" in page.page(result)


def test_lane_without_a_replay_says_why():
    result = race("flux", "tiny", torch.float32, CPU, rounds=2, seconds=0, graph=True, profiled=())
    assert "3 not captured: cpu: CUDA graphs need a CUDA device" in result.row()["lanes"][GRAPH]["failed"]
    assert result.row()["speedup"] > 0

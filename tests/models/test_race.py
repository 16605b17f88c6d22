"""The race: its figures, its page, its command."""

import html.parser
import importlib
import io
import json
import math
import os
import random
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import turnout
from tests.models.played import Recorded, play_graphs
from turnout import cli
from turnout.bench.sweep import commit
from turnout.bench.writable import check_file
from turnout.cli import app
from turnout.models.accelerate import Entry, Report
from turnout.models.patch import patched
from turnout.race import many, page, perfetto, pictures
from turnout.race.kernels import (
    KINDS,
    Kernel,
    Share,
    Trace,
    kind_of,
    launched_in,
    traced,
    without_profiler_lines,
)
from turnout.race.looks import LOOKS
from turnout.race.models import RACERS
from turnout.race.run import ACCELERATED, COMPILED, GRAPH, STOCK, Lane, Race, _Contestant, compare, race

CPU = torch.device("cpu")


@pytest.fixture
def found():
    return race("wan-vae", "tiny", torch.bfloat16, CPU, rounds=3, seconds=1)


def test_one_round_is_no_race():
    with pytest.raises(ValueError, match="needs 2 at least"):
        race("wan-vae", "tiny", torch.bfloat16, CPU, rounds=1)


def test_figures(found):
    row = json.loads(json.dumps(found.row()))
    stock, fast = row["lanes"]["stock"], row["lanes"]["accelerated"]
    assert row["speedup"] == pytest.approx(found.lanes[STOCK].ms / found.lanes[ACCELERATED].ms, rel=1e-3)
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


# ---- which models race


def modules_of(racer, size):
    """Every class in a model, which is built without its weights."""
    with torch.device("meta"):
        model = racer.load_class()(**racer._arguments(size))
    return {f"{cls.__module__}.{cls.__qualname__}" for cls in map(type, model.modules())}


def test_every_known_model_has_a_race():
    from turnout.models import diffusers, transformers

    raced = set().union(*(modules_of(racer, "tiny") for racer in RACERS.values()))
    assert sorted((diffusers.MODELS | transformers.MODELS) - raced) == []


def test_every_vae_races_both_ways_and_every_state_space_model_too():
    for name, racer in RACERS.items():
        if racer.part == "vae":
            other = RACERS[name.removesuffix("-encode") if name.endswith("-encode") else f"{name}-encode"]
            assert {racer.compiled, other.compiled} == {"decoder", "encoder"}
        if racer.package == "transformers":
            assert f"{name.removesuffix('-decode')}-decode" in RACERS
        assert set(racer.sizes) == set(racer.configs) == {"tiny", "small", "full"}


def test_full_sizes_are_the_published_ones():
    def shown(name):
        return " x ".join(map(str, RACERS[name].sizes["full"]))

    sizes = {
        "hunyuan-vae": "544 x 960 x 33",
        "cogvideox-vae": "480 x 720 x 49",
        "qwen-image-vae": "1328 x 1328",
        "sd-vae": "4 x 512 x 512",
        "sdxl-unet": "2 x 1024 x 1024",
        "sd15-unet": "2 x 512 x 512",
    }
    assert {name: shown(name) for name in sizes} == sizes
    assert RACERS["sdxl-vae"].dtypes == ("float16", "float32")
    weights = {"sdxl-unet": 2567.5, "sd15-unet": 859.5, "sd-vae": 83.65, "flux2-vae": 84.05, "wan-vae": 126.9}
    for name, millions in weights.items():  # as their makers count them
        with torch.device("meta"):
            model = RACERS[name].load_class()(**RACERS[name]._arguments("full"))
        assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=1e-3), name


def test_all_race(tmp_path):
    words = [
        "race",
        "all",
        "--size",
        "tiny",
        "--device",
        "cpu",
        "--rounds",
        "2",
        "--seconds",
        "0",
        "--no-profile",
    ]
    run = CliRunner().invoke(app, [*words, "--out", str(tmp_path)])
    assert run.exit_code == 0, run.output
    rows = [json.loads(line) for line in (tmp_path / "cpu" / "race.jsonl").read_text().splitlines()]
    expected = [
        (name, dtype)
        for name, racer in RACERS.items()
        for dtype in (racer.default_dtype(CPU), *racer.dtypes[1:])
    ]
    assert [(row["model"], row["dtype"]) for row in rows] == expected
    assert run.stdout.count(f" of {len(expected)}  ") == len(rows)
    for row in rows:
        stock, fast = row["lanes"]["stock"], row["lanes"]["accelerated"]
        assert row["patched"] > 0, row["model"]
        if row["dtype"] == "float32":
            assert fast["max_error"] < 1e-4
        else:  # an exact match of float32 has no decibels
            assert fast["psnr"] is None or fast["psnr"] > stock["psnr"] - 3, row["model"]


@pytest.mark.parametrize("name", ["hunyuan-vae", "sd-vae-encode", "wan", "mamba-decode"])
def test_what_runs_is_what_torch_compile_was_given(name):
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

    found = race(
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
    row = found.row()
    assert "no compiler today" in row["lanes"][COMPILED]["failed"]
    assert row["speedup"] > 0
    assert row["compiled"] == "decoder"
    assert "no compiler today" in page.page(found)
    torch.compiler.reset()


def test_graphs_of_the_accelerated_model_race_too(monkeypatch):
    count = play_graphs(monkeypatch, Recorded)
    found = race("flux", "tiny", torch.float32, CPU, rounds=3, seconds=9, graph=True, profiled=())
    lane = found.row()["lanes"][GRAPH]
    assert lane["max_error"] < 1e-4
    assert len(lane["samples"]) == 3
    assert count.replays == 3, "every sample is a replay"
    assert "graph" in page.page(found)


def test_lane_without_a_replay_says_why():
    found = race("flux", "tiny", torch.float32, CPU, rounds=2, seconds=0, graph=True, profiled=())
    assert "3 not captured: cpu: CUDA graphs need a CUDA device" in found.row()["lanes"][GRAPH]["failed"]
    assert found.row()["speedup"] > 0


def test_an_output_with_nan_has_no_speed(monkeypatch, tmp_path):
    racer = RACERS["flux-vae"]

    def broken(model, settings):
        call = racer.call(model, settings)

        def run(model):
            accelerated = patched(model.decoder) is not None
            return call(model) * (math.nan if accelerated else 1.0)

        return run

    monkeypatch.setitem(RACERS, "flux-vae", replace(racer, call=broken))
    found = race("flux-vae", "tiny", torch.bfloat16, CPU, rounds=2, seconds=0)
    assert found.verdict == "wrong"
    assert found.row()["speedup"] is None
    assert "NaN" in found.headline()
    assert "NaN" in page.page(found)
    run = CliRunner().invoke(app, ["race", "flux-vae", "--size", "tiny", "--device", "cpu", "--rounds", "2"])
    assert run.exit_code == 1
    assert "no speed" in run.stdout


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
    made_up = gpu_race()
    for name, samples in ((STOCK, stock), (ACCELERATED, fast)):
        made_up.lanes[name].samples = samples
        made_up.lanes[name].summarize(True)
    assert made_up.verdict == made_up.row()["verdict"] == verdict
    assert verdict in made_up.headline()
    assert f"{verdict}: " in page.page(made_up)


def test_lanes_take_turns(monkeypatch):
    order = []
    keep = _Contestant.prepared

    def prepared(self, lane):
        order.append(lane)
        return keep(self, lane)

    monkeypatch.setattr(_Contestant, "prepared", prepared)
    race("flux-vae", "tiny", torch.float32, CPU, rounds=4, seconds=60, profiled=())
    assert order == [STOCK, ACCELERATED, ACCELERATED, STOCK, STOCK, ACCELERATED, ACCELERATED, STOCK]


def gpu_race(latents=21):
    """A race as on a GPU: three lanes, thousands of kernels with gaps between them, names as long as they are
    there.
    """
    draw = random.Random(0)
    convolution = "void cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816fprop_optimized_bf16_128x128_32x4_nhwc_align8>(Params)"  # noqa: E501
    layer = [
        (
            "void cudnn::engines_precompiled::nchwToNhwcKernel<__nv_bfloat16, __nv_bfloat16, float, false, true>(...)",  # noqa: E501
            0.06,
        ),
        (convolution, 0.4),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::silu_kernel(at::TensorIteratorBase&)>",  # noqa: E501
            0.05,
        ),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<c10::BFloat16>>", 0.07),
        ("void at::native::CatArrayBatchedCopy", 0.09),
    ]
    fused = [
        ("rms_rows", 0.05),
        ("implicit_gemm_hopper", 0.22),
        ("wide_head", 0.01),
        ("nvjet_hsh_128x256", 0.01),
    ]

    def trace(parts, gap):
        kernels, at = [], 100.0
        for _ in range(latents * 60):
            for name, ms in parts:
                kernels.append(Kernel(name, at, ms * draw.uniform(0.5, 1.5)))
                at += kernels[-1].length + draw.expovariate(1 / gap)
        return Trace(kernels)

    frames = torch.linspace(-1, 1, 320).expand(1, 3, 1, 180, 320).clone()

    def lane(ms, apart, host, mib, psnr, trace, output=None):
        samples = [ms - apart, ms, ms + apart]
        return Lane(
            ms,
            2 * apart,
            60e3,
            host,
            mib,
            psnr,
            trace=trace,
            output=output,
            samples=samples,
            host_samples=[host] * 3,
        )

    lanes = {
        STOCK: lane(1836.2, 3.1, 1610.0, 4486.0, 47.7, trace(layer, 0.004), frames),
        ACCELERATED: lane(582.4, 0.9, 391.0, 2532.0, 51.2, trace(fused, 0.03), frames + 0.01),
        COMPILED: lane(1102.7, 2.2, 60.5, 3920.0, 47.9, trace(layer[1:3], 0.002)),
    }
    lanes[ACCELERATED].trace.routes = [
        Share(
            "causal_conv3d",
            "implicit-gemm-hopper",
            1323,
            441.5,
            0.772,
            "measured and shipped: 2.86x as fast as the reference",
        ),
        Share(
            "rms_norm_silu",
            "rows",
            1218,
            61.0,
            0.107,
            "measured and shipped: 14.90x as fast as the reference",
        ),
        Share(
            "attention",
            "reference",
            21,
            3.0,
            0.005,
            "model: nothing is estimated to beat it by 15%; <escape & me>",
        ),
    ]
    report = Report(
        {"": "AutoencoderKLWan is known"},
        [Entry("decoder", "WanDecoder3d", "channels-last from the first convolution to the last")],
    )
    versions = {"torch": "2.11.0", "triton": "3.6.0", "diffusers": "0.42.1", "turnout": "0.1.0"}
    machine = {"cpu": "EPYC", "cores": 16, "threads": 16, "card": "NVIDIA H200", "driver": "580.1"}
    return Race(
        "wan-vae",
        "full",
        "Wan 2.1 VAE decode, full: 480 x 832 x 81",
        "bfloat16",
        "NVIDIA H200",
        lanes,
        report,
        versions,
        machine,
        "2026-03-01 12:00 UTC",
        "abc1234",
        "decoder",
    )


class Reader(html.parser.HTMLParser):
    """Reads a page as a browser does, and holds on to what must be true of it."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.words, self.tops = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.tags.append((tag, found))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    def all(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]


@pytest.mark.parametrize("made_up", [False, True])
def test_page_is_one_file_that_says_everything(found, tmp_path, made_up):
    found = gpu_race() if made_up else found
    page.write(found, tmp_path / "race.html")
    text = (tmp_path / "race.html").read_text()
    assert "http" not in text
    assert "@import" not in text
    read = Reader(text)
    assert not read.open
    said = " ".join(read.words)
    for needed in (
        found.what,
        f"{found.speedup:.2f}\N{MULTIPLICATION SIGN}",
        f"{found.verdict}: ",
        found.machine["cpu"],
        found.date,
        found.versions["torch"],
        "The time, by kind of",
        "Where the time went",
        "causal_conv3d",
        "PSNR",
        found.dtype,
    ):
        assert needed in said
    assert len(read.all("svg")) == len(found.lanes)
    assert all(svg["aria-label"] for svg in read.all("svg"))
    assert [img["alt"] for img in read.all("img")] == [
        "first frame of the stock model",
        "first frame of the accelerated model",
    ]
    assert all(img["src"].startswith("data:image/png;base64,") for img in read.all("img"))
    kinds = {kind for lane in found.lanes.values() for kind in lane.trace.by_kind()}
    assert {rect["class"] for rect in read.all("rect")} == kinds | ({page.WAITING} if made_up else set())
    assert len(text) < 2**21
    assert (tmp_path / "race.png").read_bytes().startswith(b"\x89PNG")


def test_bars_cannot_contradict_the_headline():
    """They are as long as the medians, however long the profiler took: it slows the accelerated model down
    more.
    """
    made_up = gpu_race(1)
    made_up.machine["card"] = None  # as on a CPU, where what it says of time is longer than the truth
    for name, ms in ((STOCK, 100.0), (ACCELERATED, 80.0), (COMPILED, 90.0)):
        lane = made_up.lanes[name]
        lane.ms = ms
        lane.trace = Trace([Kernel("conv", 0.0, 3.0), Kernel("Memcpy", 3.0, 1.0 if name == STOCK else 500.0)])
    read = Reader(page.page(made_up))
    ends: list[float] = []
    for rect in read.all("rect"):
        if float(rect["x"]) == 0:
            ends.append(0.0)
        ends[-1] += float(rect["width"])
    assert ends == pytest.approx([100.0, 80.0, 90.0], abs=0.01)
    assert page.shares(made_up, STOCK) == pytest.approx({"conv": 0.75, "copy": 0.25})
    assert made_up.kinds_ms(ACCELERATED)["conv"] == pytest.approx(80 * 3 / 503, abs=1e-3)


def test_a_card_that_waits_is_seen_to_wait():
    made_up = gpu_race(1)
    lane = made_up.lanes[STOCK]
    lane.ms, lane.trace = 10.0, Trace([Kernel("conv", 0.0, 4.0)])
    assert page.shares(made_up, STOCK) == pytest.approx({"conv": 0.4, page.WAITING: 0.6})
    lane.trace = Trace([Kernel("conv", 0.0, 20.0)])  # two streams at once: more than there is time for
    assert page.shares(made_up, STOCK) == pytest.approx({"conv": 1.0})


def test_every_kind_has_a_look_that_stands_out():
    def brightness(colour):  # relative luminance
        parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
        return sum(
            share * ((x + 0.055) / 1.055) ** 2.4
            for share, x in zip((0.2126, 0.7152, 0.0722), parts, strict=True)
        )

    assert set(LOOKS) == {*KINDS, "other"}
    grounds = re.findall(r"--card: (#\w+)", page.page(gpu_race(1)))
    assert len(grounds) == 2
    for kind, look in LOOKS.items():
        for ground in grounds:
            dark, bright = sorted((brightness(look.colour), brightness(ground)))
            assert (bright + 0.05) / (dark + 0.05) >= 3, (kind, ground)


def test_page_says_what_was_not_measured(found):
    found.lanes[STOCK].psnr = found.lanes[ACCELERATED].psnr = math.nan
    found.no_truth = "reasons"
    text = page.page(found)
    assert "not counted on a CPU" in text
    assert "not measured: reasons" in text
    assert (
        race("flux-vae", "tiny", torch.float32, CPU, rounds=2, seconds=0, profiled=()).no_truth
        == "this race is in float32"
    )


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
    found = race("flux-vae", "tiny", torch.bfloat16, CPU, rounds=2, seconds=0, profiled=())
    assert found.no_truth == "the stock model does not run in float32 here (mat_a must be bfloat16)"
    assert found.row()["lanes"]["accelerated"]["psnr"] is None
    assert found.row()["lanes"]["accelerated"]["psnr_stock"] > 30


def test_picture_holds_what_was_put_in():
    picture = torch.randint(256, (3, 5, 3), dtype=torch.uint8)
    with Image.open(io.BytesIO(pictures.png(picture))) as image:
        assert (image.format, image.mode, image.size) == ("PNG", "RGB", (5, 3))
        assert list(image.tobytes()) == picture.flatten().tolist()


def test_names_and_reasons_are_text_on_the_page():
    """The template escapes what it is given: a reason may have any sign in it."""
    made_up = gpu_race(1)
    made_up.lanes[COMPILED].failed = "<script>alert(1)</script> & [bold]"
    text = page.page(made_up)
    assert "&lt;escape &amp; me&gt;" in text
    assert "<script>" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; [bold]" in text


def test_trace_for_perfetto(tmp_path):
    made_up = gpu_race(1)
    perfetto.write(made_up, tmp_path / "trace.json")
    content = json.loads((tmp_path / "trace.json").read_text())
    names = {event["pid"]: event["args"]["name"] for event in content["traceEvents"] if event["ph"] == "M"}
    assert list(names.values()) == [f"wan-vae, {lane}" for lane in made_up.lanes]
    for process, lane in enumerate(made_up.lanes.values()):
        kernels = [
            event for event in content["traceEvents"] if event["ph"] == "X" and event["pid"] == process
        ]
        assert [event["name"] for event in kernels] == [kernel.name for kernel in lane.trace.kernels]
        assert kernels[0]["ts"] == 0
        assert sum(event["dur"] for event in kernels) == pytest.approx(1e3 * lane.trace.busy, rel=1e-3)


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


def test_frames_are_bytes():
    video = torch.tensor([-1.0, 0.0, 1.0, 5.0]).view(1, 1, 1, 1, 4).expand(1, 3, 2, 1, 4)
    assert pictures.frame(video)[0, :, 0].tolist() == [0, 128, 255, 255]
    assert pictures.side_by_side(pictures.frame(video), pictures.frame(video), gap=2).shape == (1, 10, 3)


def test_kinds_of_kernels():
    names = {
        "sm90_xmma_fprop_implicit_gemm_bf16": "conv",
        "implicit_gemm": "conv",
        "nvjet_hsh_128x256": "gemm",
        "rms_rows": "norm",
        "void at::native::vectorized_elementwise_kernel<4>": "elementwise",
        "void cudnn::engines_precompiled::nchwToNhwcKernel": "layout",
        "Memcpy DtoD": "copy",
        "flash_fwd": "attention",
        "something": "other",
    }
    assert {name: kind_of(name) for name in names} == names


def test_trace_adds_up():
    trace = Trace([Kernel("conv_a", 0.0, 2.0), Kernel("conv_b", 2.0, 1.0), Kernel("Memcpy", 3.0, 0.5)])
    assert trace.by_kind() == {"conv": 3.0, "copy": 0.5}
    assert trace.longest(1) == [("conv_a", 1, 2.0)]


def event(name, start=0.0, end=0.0, number=0, where="CPU"):
    """As torch's profiler gives them, in microseconds."""
    device, times = SimpleNamespace(name=where), SimpleNamespace(start=start, end=end)
    return SimpleNamespace(
        name=name, id=number, device_type=device, time_range=times, device_time=end - start
    )


def test_kernels_belong_to_the_call_that_launched_them():
    """By the number of their launch, whenever they run; of calls in one another to the inner one."""
    calls = [event("turnout::a/x", 0, 100), event("turnout::b/y", 20, 50), event("turnout::a/x", 200, 300)]
    others = [
        event("cudaLaunchKernel", 10, 12, 1),
        event("cuLaunchKernelEx", 30, 31, 2),
        event("cuLaunchKernelEx", 150, 151, 3),
        event("cudaMemcpyAsync", 210, 220, 4),
        event("aten::add", 230, 240, 5),
    ]
    kernels = [
        event(f"kernel {i}", 1000 * i, 1000 * i + ms * 1000, i, "CUDA")
        for i, ms in ((1, 1), (2, 2), (3, 4), (4, 8), (5, 16))
    ]
    ranges = [event("turnout::a/x", 1000, 4000, 1, "CUDA")]  # a range repeats its kernels
    assert launched_in(calls, [*calls, *others, *kernels, *ranges]) == [1.0, 2.0, 8.0]


@pytest.mark.gpu
def test_kernels_of_ours_have_time_in_a_trace():
    x = torch.randn(1, 96, 4, 120, 208, device="cuda").to(memory_format=torch.channels_last_3d)
    weight = torch.ones(96, device="cuda")
    with turnout.pin(rms_norm_silu="rows"):
        turnout.rms_norm_silu(x, weight, eps=1e-6)
        trace = traced(
            lambda: [turnout.rms_norm_silu(x, weight, eps=1e-6) for _ in range(3)],
            torch.device("cuda"),
            routes=True,
        )
    assert [(share.op, share.route, share.calls) for share in trace.routes] == [("rms_norm_silu", "rows", 3)]
    assert trace.routes[0].ms == pytest.approx(trace.busy, rel=0.01)


def test_likeness():
    truth = torch.zeros(4)
    assert compare(truth, truth, 2.0) == (math.inf, 0.0)
    assert compare(truth + 0.2, truth, 2.0) == pytest.approx((20.0, 0.2), abs=1e-4)
    assert all(map(math.isnan, compare(torch.tensor([0.0, math.nan, 0.0, 0.0]), truth, 2.0)))
    with pytest.raises(ValueError, match="two shapes"):
        compare(torch.zeros(3), truth)


def test_likeness_of_more_than_one_piece(monkeypatch):
    monkeypatch.setattr("turnout.race.run.CHUNK", 3)
    torch.manual_seed(0)
    one, two = torch.randn(4, 5), torch.randn(4, 5)
    error = (one.double() - two.double()).square().mean()
    assert compare(one, two, 2.0) == pytest.approx(
        (10 * math.log10(4 / error), float((one - two).abs().max()))
    )


def test_command(tmp_path):
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


def test_list():
    run = CliRunner().invoke(app, ["race", "--list"])
    assert run.exit_code == 0
    assert all(name in run.stdout for name in RACERS)
    rows = json.loads(CliRunner().invoke(app, ["race", "--list", "--json"]).stdout)
    assert [row["model"] for row in rows] == list(RACERS)


# ---- several within a budget


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
        found = gpu_race(1)
        found.model, found.what, found.dtype = (
            name,
            RACERS[name].describe(size),
            str(dtype).removeprefix("torch."),
        )
        found.commit = commit()
        return found

    monkeypatch.setattr(many, "race", quick)
    monkeypatch.setattr(many.time, "perf_counter", lambda: at[0])
    return ran


def command(*words):
    return CliRunner().invoke(app, ["race", *words, "--size", "tiny", "--device", "cpu"])


def rows_in(folder):
    return [json.loads(line) for line in (folder / "cpu" / "race.jsonl").read_text().splitlines()]


def test_budget_runs_as_many_as_fit(clock, tmp_path):
    run = command("all", "--budget", "25", "--out", str(tmp_path))
    assert run.exit_code == 0, run.output
    assert clock == list(RACERS)[:3] == [row["model"] for row in rows_in(tmp_path)]
    assert "40 left when the budget was spent" in run.stderr
    assert list(RACERS)[3] in run.stderr


def test_a_run_that_is_cut_off_loses_nothing(clock, tmp_path):
    run = command("flux-vae", "sdxl-vae", "sd-vae", "wan-vae", "--out", str(tmp_path))
    assert run.exit_code != 0
    assert [(row["model"], row["dtype"]) for row in rows_in(tmp_path)] == [
        ("flux-vae", "bfloat16"), ("sdxl-vae", "bfloat16"), ("sdxl-vae", "float32"),
    ]  # fmt: skip


def test_missing_leaves_out_what_has_a_row_of_this_code(clock, tmp_path, monkeypatch):
    monkeypatch.setattr(many, "commit", lambda: "abc1234")
    monkeypatch.setitem(globals(), "commit", lambda: "abc1234")
    command("flux-vae", "ltx-vae", "--out", str(tmp_path))
    path = tmp_path / "cpu" / "race.jsonl"
    rows = rows_in(tmp_path)
    for row in rows:
        row["versions"].pop("triton")  # a CPU's row has none
    rows[1]["commit"] = "before"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    clock.clear()
    command("flux-vae", "ltx-vae", "wan-vae", "--missing", "--out", str(tmp_path))
    assert clock == ["ltx-vae", "wan-vae"]


def test_a_model_that_fails_does_not_end_the_others(clock, tmp_path):
    run = command("flux-vae", "flux2-vae", "wan-vae", "--out", str(tmp_path))
    assert run.exit_code == 1
    assert clock == ["flux-vae", "flux2-vae", "wan-vae"]
    assert "RuntimeError: no such luck (in quick, test_race.py" in run.stdout
    assert "second line" not in run.stdout
    assert [row["model"] for row in rows_in(tmp_path)] == ["flux-vae", "wan-vae"]


# ---- mistakes: one line and exit code 2


@pytest.fixture
def said(monkeypatch, capsys):
    """What the command line says of a mistake."""

    def told(*words):
        monkeypatch.setattr(sys, "argv", ["turnout", "race", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        lines = captured.err.strip().splitlines()
        assert ended.value.code == 2, captured
        assert lines[-1].startswith("error: ")
        assert "Traceback" not in captured.err + captured.out
        return lines[-1]

    return told


def test_unknown_names(said):
    line = said("wan-vea")
    assert "model 'wan-vea' is not known; did you mean wan-vae?" in line
    assert all(name in line for name in RACERS)
    assert "one of: hunyuan-vae" in said("nothing at all")
    assert "no size 'huge'" in said("wan-vae", "--size", "huge")
    assert "no model was named" in said("--json")
    assert "--report is of one race" in said("wan-vae", "flux-vae", "--report", "x.html")
    assert "--missing needs --out" in said("all", "--missing")


@pytest.mark.parametrize(("package", "model"), [("diffusers", "flux-vae"), ("transformers", "mamba")])
def test_packages_that_are_not_there(said, monkeypatch, package, model):
    monkeypatch.setitem(sys.modules, package, None)  # an import of it finds nothing
    assert f"needs {package}, which is not installed; pip install 'turnout[race]'" in said(
        model, "--size", "tiny"
    )


def test_packages_that_are_too_old_or_broken(monkeypatch):
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


def test_weights_that_are_not_there(said, tmp_path):
    assert "there is no such folder" in said("flux-vae", "--weights", tmp_path / "nowhere")
    assert "no config.json, and no vae/config.json" in said("flux-vae", "--weights", tmp_path)
    (tmp_path / "config.json").write_text('{"_class_name": "FluxTransformer2DModel"}')
    assert "it is a FluxTransformer2DModel, this race needs a AutoencoderKL" in said(
        "flux-vae", "--weights", tmp_path
    )
    (tmp_path / "config.json").write_text("{")
    assert "cannot be read as JSON" in said("flux-vae", "--weights", tmp_path)
    (tmp_path / "config.json").write_text('{"_class_name": "AutoencoderKL"}')  # and no weights beside it
    assert "cannot be loaded" in said("flux-vae", "--size", "tiny", "--device", "cpu", "--weights", tmp_path)


def test_weights_of_a_folder_race(tmp_path):
    model, _ = RACERS["ltx-vae"].make("tiny", torch.float32, CPU)
    with torch.no_grad():
        model.decoder.conv_in.conv.weight.mul_(3.0)
    model.save_pretrained(tmp_path / "vae")
    for folder in (tmp_path, tmp_path / "vae"):  # a pipeline's folder, the model's own
        loaded, call = RACERS["ltx-vae"].make("tiny", torch.float32, CPU, folder)
        assert torch.equal(loaded.decoder.conv_in.conv.weight, model.decoder.conv_in.conv.weight)
        with torch.no_grad():
            assert call(loaded).shape == (1, 3, 9, 32, 32)
    run = CliRunner().invoke(
        app,
        [
            "race",
            "ltx-vae",
            "--size",
            "tiny",
            "--device",
            "cpu",
            "--rounds",
            "2",
            "--weights",
            str(tmp_path),
            "--json",
        ],
    )
    row = json.loads(run.stdout.splitlines()[-1])
    assert row["weights"] == "given"
    assert row["what"].endswith(
        "weights and layers of a folder"
    )  # no row of random weights is replaced by it


def test_a_report_that_cannot_be_written_is_told_before_the_race(said, tmp_path, monkeypatch):
    monkeypatch.setattr(many, "race", lambda *args, **options: pytest.fail("it ran"))
    (tmp_path / "file").write_text("")
    assert "cannot be written (" in said("flux-vae", "--report", tmp_path / "file" / "race.html")
    assert "this is a folder" in said("flux-vae", "--report", tmp_path)
    assert "the folder cannot be made" in said("flux-vae", "--out", tmp_path / "file" / "rows")
    check_file("--report", tmp_path / "new" / "race.html")
    assert not (tmp_path / "new" / "race.html").exists()


# ---- what libraries print


def test_lines_of_the_profiler_are_not_shown(capfd):
    race("flux-vae", "tiny", torch.float32, CPU, rounds=2, seconds=0)
    out, err = capfd.readouterr()
    assert "profiler_st" not in out + err
    with without_profiler_lines():
        os.write(
            2,
            b"before\nUSDT:2026-11-16 17:54:04 19877:19877 SyncActivityProfilerHandler.cpp:52] profiler_start\nafter\n",  # noqa: E501
        )
        os.write(2, b"ERROR:2026-11-16 17:54:04 1:2 CuptiActivityApi.cpp:5] no privileges\n")
        os.write(1, b"INFO:2026-11-16 17:54:04 1:2 a.cpp:5] hello\nkept without an end")
    out, err = capfd.readouterr()
    assert out == "kept without an end"
    assert err == "before\nafter\nERROR:2026-11-16 17:54:04 1:2 CuptiActivityApi.cpp:5] no privileges\n"

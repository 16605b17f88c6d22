"""The race: its figures, its page, its command."""

import html.parser
import json
import math
import random
import re
import struct
import zlib
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import turnout
from turnout.cli import app
from turnout.models.accelerate import Entry, Report
from turnout.race import page, pictures
from turnout.race.kernels import KINDS, Kernel, Share, Trace, kind_of, launched_in, traced
from turnout.race.looks import LOOKS, STYLE
from turnout.race.models import RACERS, Racer
from turnout.race.run import ACCELERATED, COMPILED, STOCK, Lane, Race, psnr, race


@pytest.fixture
def small(monkeypatch):
    """A Wan decoder that takes no time."""
    from tests.models.zoo import made, random

    def make(settings):
        z = random(1, 4, 2, 4, 6).to(settings.dtype)
        return made("wan", settings.dtype), lambda model: model.decode(z.to(model.dtype)).sample

    monkeypatch.setitem(RACERS, "wan-vae", Racer("Wan", {"tiny": (1,), "small": (2,)}, make, True))


@pytest.fixture
def found(small):
    return race("wan-vae", "tiny", torch.bfloat16, torch.device("cpu"), rounds=3, seconds=1)


def test_one_round_is_no_race():
    with pytest.raises(ValueError, match="needs 2 at least"):
        race("wan-vae", "tiny", torch.bfloat16, torch.device("cpu"), rounds=1)


def test_figures(found):
    row = json.loads(json.dumps(found.row()))
    assert row["speedup"] == pytest.approx(found.lanes[STOCK].ms / found.lanes[ACCELERATED].ms, rel=1e-3)
    assert {"stock", "accelerated"} == set(row["lanes"])
    assert row["lanes"]["stock"]["peak_mib"] is None
    assert row["lanes"]["stock"]["host_ms"] is None  # a CPU is its own host
    assert row["lanes"]["accelerated"]["psnr"] > row["lanes"]["stock"]["psnr"] - 1
    assert {"causal_conv3d", "rms_norm_silu"} <= {share["op"] for share in row["routes"]}
    assert all(share["why"] and share["calls"] > 0 for share in row["routes"])
    assert 0 < sum(row["kinds_ms"]["accelerated"].values()) == pytest.approx(found.lanes[ACCELERATED].trace.busy, rel=1e-2)


def gpu_race(latents=21):
    """A race as on a GPU: three lanes, thousands of kernels with gaps between them, names as long as they are there."""
    draw = random.Random(0)
    convolution = "void cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816fprop_optimized_bf16_128x128_32x4_nhwc_align8>(Params)"
    layer = [
        ("void cudnn::engines_precompiled::nchwToNhwcKernel<__nv_bfloat16, __nv_bfloat16, float, false, true>(...)", 0.06),
        (convolution, 0.4),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::silu_kernel(at::TensorIteratorBase&)>", 0.05),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<c10::BFloat16>>", 0.07),
        ("void at::native::CatArrayBatchedCopy", 0.09),
    ]
    fused = [("rms_rows", 0.05), ("implicit_gemm_hopper", 0.22), ("wide_head", 0.01), ("nvjet_hsh_128x256", 0.01)]

    def trace(parts, gap):
        kernels, at = [], 100.0
        for _ in range(latents * 60):
            for name, ms in parts:
                kernels.append(Kernel(name, at, ms * draw.uniform(0.5, 1.5)))
                at += kernels[-1].length + draw.expovariate(1 / gap)
        return Trace(kernels)

    frames = torch.linspace(-1, 1, 320).expand(1, 3, 1, 180, 320).clone()
    lanes = {
        STOCK: Lane(1836.2, 3.1, 1610.0, 4486.0, 47.7, trace(layer, 0.004), frames),
        ACCELERATED: Lane(582.4, 0.9, 391.0, 2532.0, 51.2, trace(fused, 0.03), frames + 0.01),
        COMPILED: Lane(1102.7, 2.2, 60.5, 3920.0, 47.9, trace(layer[1:3], 0.002)),
    }
    lanes[ACCELERATED].trace.routes = [
        Share("causal_conv3d", "implicit-gemm-hopper", 1323, 441.5, 0.772, "measured and shipped: 2.86x the reference"),
        Share("rms_norm_silu", "rows", 1218, 61.0, 0.107, "measured and shipped: 14.90x the reference"),
        Share("attention", "reference", 21, 3.0, 0.005, "model: nothing is estimated to beat it by 15%; <escape & me>"),
    ]
    report = Report(
        {"": "AutoencoderKLWan is known"}, [Entry("decoder", "WanDecoder3d", "channels-last from the first convolution to the last")]
    )
    versions = {"torch": "2.11.0", "triton": "3.6.0", "diffusers": "0.42.1", "turnout": "0.1.0"}
    return Race("wan-vae", "Wan 2.1 VAE decode, full: 480 x 832 x 81", "bfloat16", "NVIDIA H200", lanes, report, versions)


class Reader(html.parser.HTMLParser):
    """Reads a page as a browser does, and holds on to what must be true of it."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.words, self.tops = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.tags.append((tag, found))
        if tag not in ("meta", "img", "rect"):
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
        "When each",
        "Where the time went",
        "causal_conv3d",
        "PSNR",
        found.dtype,
    ):
        assert needed in said
    assert len(read.all("svg")) == len(found.lanes) == said.count("under the profiler")
    assert all(svg["aria-label"] for svg in read.all("svg"))
    assert [img["alt"] for img in read.all("img")] == ["first frame of the stock model", "first frame of the accelerated model"]
    assert all(img["src"].startswith("data:image/png;base64,") for img in read.all("img"))
    assert {rect["class"] for rect in read.all("rect")} == {kind for lane in found.lanes.values() for kind in lane.trace.by_kind()}
    assert len(text) < 2**21
    assert (tmp_path / "race.png").read_bytes().startswith(b"\x89PNG")


def test_timeline_fills_each_column_once():
    kernels = [Kernel("conv", 0.0, 4.0), Kernel("Memcpy", 1.0, 3.0), Kernel("rms_rows", 6.0, 1.0)]  # two at the same time, then a gap
    step = 7.0 / page.SLICES
    columns = list(page._columns(Trace(kernels), step))
    assert len(columns) == pytest.approx(page.SLICES * 5 / 7, abs=2)
    assert re.findall(r"class=(\w+) x=\d+ y=([\d.]+)", columns[page.SLICES * 2 // 7]) == [("copy", "0.0"), ("conv", "50.0")]
    assert "conv 50 %, copy 50 %" in columns[page.SLICES * 2 // 7]
    assert "longest: rms_rows" in columns[-1]
    drawn = sum(ms for ran in page._slices(Trace(kernels), step) for _, ms in ran)
    assert drawn == pytest.approx(8.0)


def test_every_kind_has_a_look_that_stands_out():
    def brightness(colour):  # relative luminance
        parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
        return sum(share * ((x + 0.055) / 1.055) ** 2.4 for share, x in zip((0.2126, 0.7152, 0.0722), parts, strict=True))

    assert set(LOOKS) == {*KINDS, "other"}
    grounds = re.findall(r"--card: (#\w+)", STYLE)
    assert len(grounds) == 2
    for kind, look in LOOKS.items():
        for ground in grounds:
            dark, bright = sorted((brightness(look.colour), brightness(ground)))
            assert (bright + 0.05) / (dark + 0.05) >= 3, (kind, ground)


@pytest.mark.parametrize(("stock", "fast", "word"), [(20.0, 10.0, "faster"), (10.0, 20.0, "slower"), (10.0, 10.1, "about as fast")])
def test_tiles_say_who_won(stock, fast, word):
    made_up = gpu_race(1)
    made_up.lanes[STOCK].ms, made_up.lanes[ACCELERATED].ms = stock, fast
    assert f"{word}: {stock:.2f} &rarr; {fast:.2f} ms" in page.page(made_up)


def test_page_says_what_was_not_measured(found):
    found.lanes[STOCK].psnr = found.lanes[ACCELERATED].psnr = math.nan
    text = page.page(found)
    assert "not counted on a CPU" in text
    assert "this race is in float32" in text


@pytest.mark.parametrize("longest", [0.013, 1.0, 7.0, 24.9, 25.1, 662.4, 1836.0, 100000.0])
def test_axis_has_a_few_round_times(longest):
    marks = re.findall(r"left:([\d.]+)%'>([\d.,e-]+) ms", page._axis(longest))
    assert 2 <= len(marks) <= 6
    assert all(float(left) == pytest.approx(100 * float(at.replace(",", "")) / longest, abs=0.1) for left, at in marks)


def test_picture_holds_what_was_put_in():
    picture = torch.randint(256, (3, 5, 3), dtype=torch.uint8)
    data = pictures.png(picture)
    assert struct.unpack(">II", data[16:24]) == (5, 3)
    start = data.index(b"IDAT") + 4
    rows = zlib.decompress(data[start : start + struct.unpack(">I", data[start - 8 : start - 4])[0]])
    assert rows == b"".join(b"\0" + bytes(row.flatten().tolist()) for row in picture)


def test_frames_are_bytes():
    video = torch.tensor([-1.0, 0.0, 1.0, 5.0]).view(1, 1, 1, 1, 4).expand(1, 3, 2, 1, 4)
    assert pictures.frame(video)[0, :, 0].tolist() == [0, 128, 255, 255]
    assert pictures.side_by_side(pictures.frame(video), pictures.frame(video), gap=2).shape == (1, 10, 3)


def test_kinds_of_kernels():
    names = {
        "sm90_xmma_fprop_implicit_gemm_bf16": "conv", "implicit_gemm": "conv", "nvjet_hsh_128x256": "gemm", "rms_rows": "norm",
        "void at::native::vectorized_elementwise_kernel<4>": "elementwise", "void cudnn::engines_precompiled::nchwToNhwcKernel": "layout",
        "Memcpy DtoD": "copy", "flash_fwd": "attention", "something": "other",
    }  # fmt: skip
    assert {name: kind_of(name) for name in names} == names


def test_trace_adds_up():
    trace = Trace([Kernel("conv_a", 0.0, 2.0), Kernel("conv_b", 2.0, 1.0), Kernel("Memcpy", 3.0, 0.5)])
    assert trace.by_kind() == {"conv": 3.0, "copy": 0.5}
    assert trace.longest(1) == [("conv_a", 1, 2.0)]


def event(name, start=0.0, end=0.0, number=0, where="CPU"):
    """As torch's profiler gives them, in microseconds."""
    device, times = SimpleNamespace(name=where), SimpleNamespace(start=start, end=end)
    return SimpleNamespace(name=name, id=number, device_type=device, time_range=times, device_time=end - start)


def test_kernels_belong_to_the_call_that_launched_them():
    """By the number of their launch, whenever they run; of calls in one another to the inner one."""
    calls = [event("turnout::a/x", 0, 100), event("turnout::b/y", 20, 50), event("turnout::a/x", 200, 300)]
    others = [
        event("cudaLaunchKernel", 10, 12, 1), event("cuLaunchKernelEx", 30, 31, 2), event("cuLaunchKernelEx", 150, 151, 3),
        event("cudaMemcpyAsync", 210, 220, 4), event("aten::add", 230, 240, 5),
    ]  # fmt: skip
    kernels = [event(f"kernel {i}", 1000 * i, 1000 * i + ms * 1000, i, "CUDA") for i, ms in ((1, 1), (2, 2), (3, 4), (4, 8), (5, 16))]
    ranges = [event("turnout::a/x", 1000, 4000, 1, "CUDA")]  # a range repeats its kernels
    assert launched_in(calls, [*calls, *others, *kernels, *ranges]) == [1.0, 2.0, 8.0]


@pytest.mark.gpu
def test_kernels_of_ours_have_time_in_a_trace():
    x = torch.randn(1, 96, 4, 120, 208, device="cuda").to(memory_format=torch.channels_last_3d)
    weight = torch.ones(96, device="cuda")
    with turnout.pin(rms_norm_silu="rows"):
        turnout.rms_norm_silu(x, weight, eps=1e-6)
        trace = traced(lambda: [turnout.rms_norm_silu(x, weight, eps=1e-6) for _ in range(3)], torch.device("cuda"), routes=True)
    assert [(share.op, share.route, share.calls) for share in trace.routes] == [("rms_norm_silu", "rows", 3)]
    assert trace.routes[0].ms == pytest.approx(trace.busy, rel=0.01)


def test_psnr():
    truth = torch.zeros(4)
    assert psnr(truth, truth, 2.0) == math.inf
    assert psnr(truth + 0.2, truth, 2.0) == pytest.approx(20.0, abs=1e-4)


def test_command(small, tmp_path):
    run = CliRunner().invoke(
        app, ["race", "wan-vae", "--size", "tiny", "--rounds", "3", "--device", "cpu", "--json", "--out", str(tmp_path)]
    )
    assert run.exit_code == 0, run.output
    line = next(line for line in run.stdout.splitlines() if line.startswith("{"))
    assert json.loads(line)["model"] == "wan-vae"
    assert json.loads((tmp_path / "cpu" / "race.jsonl").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("words", "said"), [(["race", "nothing"], "one of: wan-vae"), (["race", "wan-vae", "--size", "huge"], "no size 'huge'")]
)
def test_mistakes_are_told(words, said):
    run = CliRunner().invoke(app, words)
    assert run.exit_code != 0
    assert said in str(run.exception)

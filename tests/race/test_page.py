"""The page of a race: one HTML file whose bars, figures and pictures are those of the race."""

import html.parser
import io
import math
import re

import pytest
import torch
from PIL import Image

from tests.race.races import CPU, race_on_a_gpu
from turnout.race import page, pictures
from turnout.race.kernels import (
    KINDS,
    Kernel,
    Trace,
)
from turnout.race.looks import LOOKS
from turnout.race.run import ACCELERATED, COMPILED, STOCK, race


class Reader(html.parser.HTMLParser):
    """Reads a page as a browser does, and holds on to what must be true of it."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.words, self.tops = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
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


@pytest.mark.parametrize("on_a_gpu", [False, True])
def test_page_is_one_file_with_every_result(wan_race, tmp_path, on_a_gpu):
    result = race_on_a_gpu() if on_a_gpu else wan_race
    page.write(result, tmp_path / "race.html")
    text = (tmp_path / "race.html").read_text()
    assert "http" not in text
    assert "@import" not in text
    read = Reader(text)
    assert not read.open
    words = " ".join(read.words)
    for needed in (
        result.what,
        f"{result.speedup:.2f}\N{MULTIPLICATION SIGN}",
        f"{result.verdict}: ",
        result.machine["cpu"],
        result.date,
        result.versions["torch"],
        "The time, by kind of",
        "Where the time went",
        "causal_conv3d",
        "PSNR",
        result.dtype,
    ):
        assert needed in words
    assert len(read.all("svg")) == len(result.lanes)
    assert all(svg["aria-label"] for svg in read.all("svg"))
    assert [img["alt"] for img in read.all("img")] == [
        "first frame of the stock model",
        "first frame of the accelerated model",
    ]
    assert all(img["src"].startswith("data:image/png;base64,") for img in read.all("img"))
    kinds = {kind for lane in result.lanes.values() for kind in lane.trace.by_kind()}
    assert {rect["class"] for rect in read.all("rect")} == kinds | ({page.WAITING} if on_a_gpu else set())
    assert len(text) < 2**21
    assert (tmp_path / "race.png").read_bytes().startswith(b"\x89PNG")


def test_bars_are_as_long_as_the_medians():
    """They are as long as the medians, however long the profiler took: it slows the accelerated model down
    more.
    """
    result = race_on_a_gpu(1)
    result.machine["card"] = None  # as on a CPU, where what it says of time is longer than the truth
    for name, ms in ((STOCK, 100.0), (ACCELERATED, 80.0), (COMPILED, 90.0)):
        lane = result.lanes[name]
        lane.ms = ms
        lane.trace = Trace([Kernel("conv", 0.0, 3.0), Kernel("Memcpy", 3.0, 1.0 if name == STOCK else 500.0)])
    read = Reader(page.page(result))
    ends: list[float] = []
    for rect in read.all("rect"):
        if float(rect["x"]) == 0:
            ends.append(0.0)
        ends[-1] += float(rect["width"])
    assert ends == pytest.approx([100.0, 80.0, 90.0], abs=0.01)
    assert page.shares(result, STOCK) == pytest.approx({"conv": 0.75, "copy": 0.25})
    assert result.kinds_ms(ACCELERATED)["conv"] == pytest.approx(80 * 3 / 503, abs=1e-3)


def test_time_without_a_kernel_is_shown_as_waiting():
    result = race_on_a_gpu(1)
    lane = result.lanes[STOCK]
    lane.ms, lane.trace = 10.0, Trace([Kernel("conv", 0.0, 4.0)])
    assert page.shares(result, STOCK) == pytest.approx({"conv": 0.4, page.WAITING: 0.6})
    lane.trace = Trace([Kernel("conv", 0.0, 20.0)])  # two streams at once: more than there is time for
    assert page.shares(result, STOCK) == pytest.approx({"conv": 1.0})


def test_every_kind_has_a_colour_with_enough_contrast():
    def brightness(colour):  # relative luminance
        parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
        return sum(
            share * ((x + 0.055) / 1.055) ** 2.4
            for share, x in zip((0.2126, 0.7152, 0.0722), parts, strict=True)
        )

    assert set(LOOKS) == {*KINDS, "other"}
    grounds = re.findall(r"--card: (#\w+)", page.page(race_on_a_gpu(1)))
    assert len(grounds) == 2
    for kind, look in LOOKS.items():
        for ground in grounds:
            dark, bright = sorted((brightness(look.colour), brightness(ground)))
            assert (bright + 0.05) / (dark + 0.05) >= 3, (kind, ground)


def test_page_names_what_was_not_measured(wan_race):
    wan_race.lanes[STOCK].psnr = wan_race.lanes[ACCELERATED].psnr = math.nan
    wan_race.no_truth = "reasons"
    text = page.page(wan_race)
    assert "not counted on a CPU" in text
    assert "not measured: reasons" in text
    assert (
        race("flux-vae", "tiny", torch.float32, CPU, rounds=2, seconds=0, profiled=()).no_truth
        == "this race is in float32"
    )


def test_page_escapes_names_and_reasons():
    """The template escapes what it is given: a reason may have any sign in it."""
    result = race_on_a_gpu(1)
    result.lanes[COMPILED].failed = "<script>alert(1)</script> & [bold]"
    text = page.page(result)
    assert "&lt;escape &amp; me&gt;" in text
    assert "<script>" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; [bold]" in text


def test_png_holds_the_pixels():
    picture = torch.randint(256, (3, 5, 3), dtype=torch.uint8)
    with Image.open(io.BytesIO(pictures.png(picture))) as image:
        assert (image.format, image.mode, image.size) == ("PNG", "RGB", (5, 3))
        assert list(image.tobytes()) == picture.flatten().tolist()


def test_frames_of_a_video_become_bytes():
    video = torch.tensor([-1.0, 0.0, 1.0, 5.0]).view(1, 1, 1, 1, 4).expand(1, 3, 2, 1, 4)
    assert pictures.frame(video)[0, :, 0].tolist() == [0, 128, 255, 255]
    assert pictures.side_by_side(pictures.frame(video), pictures.frame(video), gap=2).shape == (1, 10, 3)

"""The race: its figures, its page, its command."""

import json
import math
import struct
import zlib

import pytest
import torch
from typer.testing import CliRunner

from turnout.cli import app
from turnout.race import page, pictures
from turnout.race.kernels import Kernel, Trace, kind_of
from turnout.race.models import RACERS, Racer
from turnout.race.run import ACCELERATED, STOCK, psnr, race


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


def test_figures(found):
    row = json.loads(json.dumps(found.row()))
    assert row["speedup"] == pytest.approx(found.lanes[STOCK].ms / found.lanes[ACCELERATED].ms, rel=1e-3)
    assert {"stock", "accelerated"} == set(row["lanes"])
    assert row["lanes"]["stock"]["peak_mib"] is None
    assert row["lanes"]["accelerated"]["psnr"] > row["lanes"]["stock"]["psnr"] - 1
    assert {"causal_conv3d", "rms_norm_silu"} <= {share["op"] for share in row["routes"]}
    assert all(share["why"] and share["calls"] > 0 for share in row["routes"])
    assert 0 < sum(row["kinds_ms"]["accelerated"].values()) == pytest.approx(found.lanes[ACCELERATED].trace.busy, rel=1e-2)


def test_page_is_one_file_with_everything(found, tmp_path):
    page.write(found, tmp_path / "race.html")
    text = (tmp_path / "race.html").read_text()
    assert "http" not in text.replace("http-equiv", "")
    assert f"{found.speedup:.2f}&times;" in text
    assert text.count("under the profiler") == 2
    assert "causal_conv3d" in text
    assert "data:image/png;base64," in text
    assert (tmp_path / "race.png").read_bytes().startswith(b"\x89PNG")


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

"""The models that race: all known ones, in their published sizes, with given weights too."""

import copy
import json

import pytest
import torch
from typer.testing import CliRunner

from tests.race.races import CPU
from turnout.cli import app
from turnout.race.models import RACERS


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


@pytest.mark.parametrize("name", [name for name, racer in RACERS.items() if racer.package == "diffusers"])
@torch.no_grad()
def test_calls_look_for_their_dtype_without_a_walk(name, monkeypatch):
    """`model.dtype` goes through all modules: what the race pays for it would be part of every lane."""
    from diffusers import ModelMixin

    def walk(model):
        raise AssertionError("a call asked for model.dtype")

    model, call = RACERS[name].make("tiny", torch.bfloat16, CPU)
    wide = copy.deepcopy(model).float()
    monkeypatch.setattr(ModelMixin, "dtype", property(walk))
    assert call(model).dtype is torch.bfloat16
    assert call(wide).dtype is torch.float32  # the truth of a race
    assert call(model).dtype is torch.bfloat16


def test_every_model_races(tmp_path):
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


def test_model_races_with_the_weights_of_a_folder(tmp_path):
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

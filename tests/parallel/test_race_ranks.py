"""`turnout race MODEL --ranks N` on one device."""

import json

import pytest
import torch
from typer.testing import CliRunner

from turnout.cli import app
from turnout.race.ranks import race_ranks, read_links


def test_lockstep_compares_bits():
    row = race_ranks("wan-vae", "tiny", "bfloat16", torch.device("cpu"), 2, "lockstep", read_links(None), 2)
    assert (row["same_bits"], row["same_bits_as_plain"]) == (True, True)


def test_a_size_in_pixels_is_raced():
    row = race_ranks("flux-vae", "64x96", "float32", torch.device("cpu"), 2, "lockstep", read_links(None), 2)
    assert (row["size"], row["title"]) == ("64x96", "Flux VAE decode, 64 x 96 (height x width)")
    assert row["same_bits"] is True


def test_fake_times_every_rank_and_counts_its_messages(tmp_path):
    links = tmp_path / "links.json"
    links.write_text('{"1000": 1000000}')  # a second each
    row = race_ranks("wan-vae", "tiny", "bfloat16", torch.device("cpu"), 2, "fake", read_links(links), 2)
    assert len(row["of_ranks"]) == 2
    for share in row["of_ranks"]:
        assert share["seconds"] > 0
        assert share["messages"] > 10
        assert share["message_seconds"] >= share["messages"]
    slowest = max(share["seconds"] + share["message_seconds"] for share in row["of_ranks"])
    assert row["predicted_speedup"] == row["one_rank_seconds"] / slowest


def test_command_writes_a_row(tmp_path):
    arguments = [
        "race",
        "wan-vae",
        "--size",
        "tiny",
        "--dtype",
        "bfloat16",
        "--device",
        "cpu",
        "--ranks",
        "2",
    ]
    done = CliRunner().invoke(app, [*arguments, "--engine", "lockstep", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    (path,) = tmp_path.glob("*/ranks.jsonl")
    assert json.loads(path.read_text())["same_bits"] is True


def test_unknown_engines_and_broken_links_are_errors(tmp_path):
    with pytest.raises(ValueError, match="one of: fake, lockstep"):
        race_ranks("wan-vae", "tiny", None, torch.device("cpu"), 2, "nccl", read_links(None), 2)
    broken = tmp_path / "links.json"
    broken.write_text("[1]")
    with pytest.raises(ValueError, match="a JSON object of bytes to microseconds"):
        read_links(broken)

"""Golden texts: what explain says is part of the interface."""

import json

import pytest
import torch

import turnout


@pytest.fixture(autouse=True)
def _no_tables(monkeypatch, tmp_path):
    monkeypatch.setattr("turnout.routing.store.SHIPPED", tmp_path)


def test_golden_text_for_an_absent_card():
    a, b = (
        torch.empty(1, 50_000_000, dtype=torch.bfloat16, device="meta"),
        torch.empty(50_000_000, 1, dtype=torch.bfloat16, device="meta"),
    )
    assert str(turnout.explain("matmul", a, b, device="h200")) == (
        "matmul(a=[1, 50000000], b=[50000000, 1], a_strides=[50000000, 1], b_strides=[1, 1],\n"
        "       a_dtype=bfloat16, b_dtype=bfloat16)\n"
        "  device  NVIDIA H200\n"
        "  chosen  two-stage (cost model: estimated 3.98x as fast as the reference)\n"
        "  config  block=2048, warps=4, waves=8\n"
        "  routes\n"
        "    as-dot         refused: device NVIDIA H200, this route needs a CPU\n"
        "    single-launch  3639.9 us estimated\n"
        "    two-stage      51.3 us estimated\n"
        "    cpu-chunks     refused: device NVIDIA H200, this route needs a CPU\n"
        "    reference      204.4 us estimated"
    )


def test_golden_reasons():
    verdict = turnout.explain(
        "matmul", torch.ones(2, 3, dtype=torch.float64), torch.ones(3, 5, dtype=torch.float64)
    )
    assert verdict.chosen == "reference"
    assert verdict.authority == "reference"
    assert verdict.why == "no other route can take this call"
    assert list(verdict.refused["two-stage"]) == [
        "2 x 5 outputs, this route needs 1 x 1",
        "device cpu, this route needs a GPU",
        "dtype float64, this route needs one of float32, float16, bfloat16, complex64",
    ]


def test_json_holds_the_verdict():
    verdict = turnout.explain("dot", torch.ones(3), torch.ones(3))
    content = json.loads(verdict.json())
    assert content["chosen"] == verdict.chosen
    assert content["problem"] == {
        "a": [3],
        "b": [3],
        "a_strides": [1],
        "b_strides": [1],
        "a_dtype": "float32",
        "b_dtype": "float32",
    }
    assert content["refused"] == {name: list(why) for name, why in verdict.refused.items()}
    assert set(content["us"]) == {"single-launch", "two-stage", "cpu-chunks", "reference"}


def test_explain_takes_the_function_itself():
    assert turnout.explain(turnout.dot, torch.ones(3), b=torch.ones(3)).op == "dot"


def test_unknown_names_list_the_known():
    with pytest.raises(
        ValueError, match=r"op 'dott' is not known; did you mean dot\? One of: .*dot, .*inner, .*matmul"
    ):
        turnout.explain("dott", torch.ones(3), torch.ones(3))
    with pytest.raises(
        ValueError, match=r"device 'h2000' is not known; did you mean nvidia-h200\? One of: cpu, nvidia-h200"
    ):
        turnout.explain("dot", torch.ones(3), torch.ones(3), device="h2000")
    with pytest.raises(ValueError, match=r"One of: .*dot"):
        turnout.routes("nope")


def test_every_known_device_can_be_asked_and_every_peak_has_a_source():
    from turnout.routing.device import known_cards

    for device in known_cards():
        assert turnout.explain("dot", torch.ones(3), torch.ones(3), device=device.slug).device == device
        assert device.bandwidth.source
        assert all(figure.source for figure in device.flops.values())

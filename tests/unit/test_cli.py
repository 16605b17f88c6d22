"""The command line as a person uses it."""

import json
import subprocess
import sys

import pytest


def turnout(*words, code=0):
    done = subprocess.run([sys.executable, "-m", "turnout", *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr + done.stdout


def test_help_has_examples():
    said, commands = turnout("--help"), ("doctor", "explain", "bench", "tune", "race")
    assert all(command in said for command in commands)
    assert all("Example" in turnout(command, "--help") for command in commands)


def test_explain_for_a_card_that_is_not_here():
    said = turnout("explain", "matmul", "--a", "1,50000000", "--b", "50000000,1", "--dtype", "bf16", "--device", "h200")
    assert "NVIDIA H200" in said
    assert "two-stage" in said
    told = json.loads(turnout("explain", "dot", "--a=3", "--b=3", "--device", "a100", "--json"))
    assert told["device"] == "NVIDIA A100-SXM4-80GB"


def test_explain_takes_words_flags_and_other_dtypes():
    words = (
        "--x",
        "2,64,128",
        "--weight",
        "64,4:float32",
        "--activation",
        "silu",
        "--seq-idx",
        "2,128:int32",
        "--return_final_states",
        "true",
    )
    told = json.loads(turnout("explain", "causal_conv1d", *words, "--dtype", "bf16", "--device", "h200", "--json"))
    assert told["problem"]["weight_dtype"] == "float32"
    assert told["problem"]["activation"] == "silu"
    assert told["problem"]["seq_idx"] is True


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("explain", "nope"), "op 'nope' is not known; one of:"), (("explain", "dot", "--a", "3"), "missing a required argument: 'b'"),
        (("explain", "dot", "--a", "x", "--b", "3"), "whole numbers with commas"),
        (("explain", "dot", "--c", "3"), "has no argument c; it has: a, b"),
        (("explain", "dot", "--a", "3", "--b", "3", "--dtype", "bf17"), "dtype 'bf17' is not known"),
        (("explain", "dot", "3"), "cannot be read"),
        (("bench", "dot", "--only", "nothing like it"), "no case of dot contains"), (("bench", "dot", "--device", "cuda:7"), "no CUDA GPU"),
        (("tune", "nope"), "op 'nope' is not known"), (("tune", "--race", "nope"), "model 'nope' is not known"),
        (("tune", "dot", "--budget", "-1"), "more than 0"),
    ],
)  # fmt: skip
def test_mistakes_end_with_one_line(words, said):
    out = turnout(*words, code=2)
    assert said in " ".join(out.split())
    assert "Traceback" not in out


def test_doctor():
    told = json.loads(turnout("doctor", "--json"))
    assert told["environment"]["devices"][0] == "cpu"
    states = {check["what"]: check["state"] for check in told["checks"]}
    assert states["dot cpu-chunks on cpu"] == "ok"
    assert states["dot two-stage on cpu"] == "refused"
    assert "failed" not in states.values()
    assert "agrees with the reference" in turnout("doctor")


def test_bench_writes_rows_and_a_picture(tmp_path):
    picture = tmp_path / "roof.png"
    words = ("bench", "dot", "--only", "K=4096", "--seconds", "0.1", "--device", "cpu")
    said = turnout(*words, "--out", str(tmp_path), "--roofline", str(picture))
    assert "reference" in said
    rows = [json.loads(line) for line in (tmp_path / "cpu" / "dot.jsonl").read_text().splitlines()]
    fields = [
        "op",
        "case",
        "problem",
        "dtype",
        "chosen",
        "us",
        "iqr",
        "bound_us",
        "error",
        "reference_error",
        "peak_mib",
        "device",
        "versions",
    ]
    assert all(set(fields) <= set(row) for row in rows)
    assert all("peer:torch.dot" in row["us"] for row in rows)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_bench_replaces_rows_of_the_same_cases_and_leaves_others(tmp_path):
    rows = tmp_path / "cpu" / "dot.jsonl"
    words = ("bench", "dot", "--seconds", "0.05", "--device", "cpu", "--out", str(tmp_path), "--tune")
    turnout(*words, "--only", "K=16 ")
    before = rows.read_text().splitlines()
    turnout(*words, "--only", "K=16 float32")
    turnout(*words, "--only", "K=16 ", "--missing")  # were measured just now
    after = rows.read_text().splitlines()
    assert [json.loads(line)["case"] for line in after] == [json.loads(line)["case"] for line in before]
    assert [line == old for line, old in zip(after, before, strict=True)] == [json.loads(line)["dtype"] != "float32" for line in after]
    assert all("commit" in json.loads(line) for line in after)


def test_tune_and_export(tmp_path):
    words = ("tune", "dot", "--budget", "2", "--device", "cpu", "--export", str(tmp_path / "t.json"))
    assert "rows in" in turnout(*words)
    assert json.loads((tmp_path / "t.json").read_text())["rows"]


def test_tune_what_a_model_calls(tmp_path):
    words = ("tune", "conv2d", "--race", "flux-vae", "--size", "tiny", "--dtype", "fp32", "--budget", "1", "--device", "cpu")
    told = turnout(*words, "--export", str(tmp_path / "t.json"))
    assert "input 1x4x16x16, weight 32x4x3x3, float32" in told
    assert {row["op"] for row in json.loads((tmp_path / "t.json").read_text())["rows"]} == {"conv2d"}


def test_bench_router():
    told = json.loads(turnout("bench", "router", "--json"))
    assert set(told["dot"]) == {"torch_us", "turnout_us", "added_us"}


def test_the_small_calls_of_bench_router_are_cases():
    """They are timed on a GPU only; a case that was renamed would be noticed there only."""
    from turnout.bench import router
    from turnout.routing.op import OPS

    for name, wanted in router._SMALL.items():
        assert [str(case) for case in OPS[name].cases() if str(case) == wanted], name


def test_missing_cases_of_a_card_that_is_not_here_are_listed():
    told = json.loads(turnout("bench", "dot", "inner", "--missing", "--device", "4090", "--only", "bfloat16", "--json"))
    assert {row["op"] for row in told} == {"dot", "inner"}
    assert all("bfloat16" in row["case"] and "tiny" not in row["case"] for row in told)

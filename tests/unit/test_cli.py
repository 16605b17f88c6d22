"""The command line as a person uses it."""

import functools
import json
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import turnout as package
from tests.faults.public_calls import MAKERS, Made, changed
from turnout import doctor
from turnout.cli import app


def turnout(*words, code=0):
    done = subprocess.run(
        [sys.executable, "-m", "turnout", *words], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr + done.stdout


def in_process(*words):
    run = CliRunner().invoke(app, words)
    assert run.exit_code == 0, run.output
    return run.stdout


def test_help_has_examples():
    message, commands = in_process("--help"), ("doctor", "explain", "bench", "tune", "race", "warm")
    assert all(command in message for command in commands)
    assert all("Example" in in_process(command, "--help") for command in commands)


def test_explain_answers_for_an_absent_card():
    message = in_process(
        "explain", "matmul", "--a", "1,50000000", "--b", "50000000,1", "--dtype", "bf16", "--device", "h200"
    )
    assert "NVIDIA H200" in message
    assert "two-stage" in message
    output = json.loads(in_process("explain", "dot", "--a=3", "--b=3", "--device", "a100", "--json"))
    assert output["device"] == "NVIDIA A100-SXM4-80GB"


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
    output = json.loads(
        in_process("explain", "causal_conv1d", *words, "--dtype", "bf16", "--device", "h200", "--json")
    )
    assert output["problem"]["weight_dtype"] == "float32"
    assert output["problem"]["activation"] == "silu"
    assert output["problem"]["seq_idx"] is True


@pytest.mark.parametrize(
    ("words", "layouts"),
    [
        (("--layout", "channels-last"), ([2048, 1, 128, 8], [72, 1, 24, 8])),
        ((), ([2048, 256, 16, 1], [72, 9, 3, 1])),
        (("--input", "1,8,16,16:channels-last"), ([2048, 1, 128, 8], [72, 9, 3, 1])),
        (("--input", "1,8,16,16:strides=4096,512,32,2"), ([4096, 512, 32, 2], [72, 9, 3, 1])),
        (("--layout", "channels-last", "--weight", "8,8,3,3:contiguous"), ([2048, 1, 128, 8], [72, 9, 3, 1])),
    ],
)
def test_explain_takes_layouts(words, layouts):
    output = json.loads(
        in_process("explain", "conv2d", "--input=1,8,16,16", "--weight=8,8,3,3", *words, "--json")
    )
    assert (output["problem"]["input_strides"], output["problem"]["weight_strides"]) == layouts


def test_explain_takes_shapes_and_names_as_people_write_them():
    output = json.loads(
        in_process("explain", "dot", "--a", "[16]", "--b=(16,)", "--dtype", "torch.BFloat16", "--json")
    )
    assert (output["problem"]["a"], output["problem"]["b_dtype"]) == ([16], "bfloat16")
    shapes = ("--input", "1,8,4,4", "--weight", "8,8,3,3")
    output = json.loads(in_process("explain", "conv2d", *shapes, "--layout", "Channels_Last", "--json"))
    assert output["problem"]["input_strides"] == [128, 1, 32, 8]


@pytest.mark.parametrize("device", ["cpu", "h200"])
def test_explain_answers_for_a_device_wherever_the_tensors_are(device):
    """TF32 flags of a GPU and of a CPU differ."""
    shapes = {"input": (1, 8, 6, 6), "weight": (8, 8, 3, 3)}
    words = [f"--{name}={','.join(map(str, shape))}" for name, shape in shapes.items()]
    output = json.loads(in_process("explain", "conv2d", *words, "--device", device, "--json"))
    tensors = {name: torch.empty(shape) for name, shape in shapes.items()}
    verdict = json.loads(package.explain("conv2d", **tensors, device=device).json())
    assert output == verdict
    here = json.loads(package.explain("conv2d", **tensors).json())
    assert (here["problem"] == verdict["problem"]) == (device == "cpu")


def test_explain_takes_floats_and_none():
    words = (
        "explain",
        "rms_norm_silu",
        "--x=1,8,4,4",
        "--weight=None",
        "--eps=1e-6",
        "--silu=False",
        "--json",
    )
    output = json.loads(in_process(*words))
    assert output["problem"]["weight_dtype"] is None
    assert output["problem"]["silu"] is False
    qkv = [f"--{name}=1,2,8,16" for name in "qkv"]
    assert (
        json.loads(in_process("explain", "attention", *qkv, "--scale=0.25", "--mask=none", "--json"))["op"]
        == "attention"
    )


def test_explain_takes_every_public_call():
    """The check of shapes refuses no call that runs: all of the tests' small ones, as meta tensors."""
    from turnout.asking import check_shapes

    checked = 0
    for name, make in MAKERS.items():
        for call in make(Made()):
            check_shapes(name, **changed(call, lambda tensor: tensor.to("meta")))
            checked += 1
    assert checked > 50


CONVOLUTION = ("explain", "conv3d", "--input", "1,3,4,8,8", "--weight", "4,3,3,3,3")
MISTAKES = [
    (("docter",), "no such command 'docter'"),
    (("doctor", "--jsno"), "no such option: --jsno"),
    (("doctor", "extra"), "unexpected extra argument"),
    (("explain",), "missing argument 'op'"),
    (("bench", "dot", "--seconds", "x"), "'--seconds'"),
    (("bench", "dot", "--seconds", "nan"), "--seconds nan: it needs to be at least 0"),
    (("bench", "dot", "--device"), "requires an argument"),
    (("bench", "dot", "--missing", "--device", "h200", "--only", "zzz"), "no case of dot contains it"),
    (("explain", "dot", "--a", "3", "--b"), "--b has no value"),
    (("explain", "dot", "--a", "1,,3", "--b", "3"), "--a 1,,3: it takes a shape"),
    (
        ("explain", "dot", "--a", "3", "--b", "3", "--device", "cuda:7"),
        "no CUDA GPU; give cpu, or name a card",
    ),
    (
        ("explain", "dot", "--a", "3", "--b", "3:contigous"),
        "'contigous' is no layout; did you mean contiguous?",
    ),
    (("race", "all", "nope"), "model 'nope' is not known"),
    (("race", "wan-vae", "--numerics", "exect"), "'exect' is not known; did you mean exact?"),
    (("race", "wan-vae", "--rounds", "1"), "--rounds 1: it needs to be at least 2"),
    (("race", "wan-vae", "--dtype", "int32"), "a model runs in bfloat16, float16, float32 or float64"),
    (("race", "wan-vae", "--ranks", "2", "--compile"), "--compile was given with --ranks"),
    (("race", "wan-vae", "--first-call", "--report", "x.html"), "--report was given with --first-call"),
    (("race", "wan-vae", "--engine", "lockstep"), "--engine was given without --ranks"),
    (("warm", "all", "nope", "--device", "h200"), "model 'nope' is not known"),
    (("tune", "dot", "--size", "tiny"), "--size was given without --race"),
    (("explain", "zzz"), "op 'zzz' is not known; one of:"),
    (("explain", "atention"), "op 'atention' is not known; did you mean attention? One of:"),
    (
        ("explain", "dot", "--a", "3"),
        "missing a required argument: 'b'; it takes a, b: turnout explain dot --a",
    ),
    (("explain", "dot", "--a", "x", "--b", "3"), "--a x: it takes a shape, whole numbers with commas"),
    (("explain", "dot", "--a", "3:bf17", "--b", "3"), "dtype 'bf17' is not known; did you mean bf16?"),
    (("explain", "dot", "--a", "3", "--b", "4"), "dot: inconsistent tensor size"),
    (("explain", "dot", "--a", "-3", "--b", "3"), "--a: shape [-3] has a negative size"),
    (("explain", "dot", "--a", "none", "--b", "3"), "--a none: it takes Tensor and cannot be left empty"),
    (("explain", "dot", "--c", "3"), "dot has no argument c; one of: a, b"),
    (("explain", "conv2d", "--wieght", "3"), "conv2d has no argument wieght; did you mean weight?"),
    (("explain", "conv2d", "--input", "1,8,4,4", "--weight", "8,9,3,3"), "conv2d: "),
    (
        ("explain", "conv2d", "--input", "1,8,4,4", "--weight", "8,8,3,3", "--layout", "nhwc"),
        "'nhwc' is not known",
    ),
    (
        ("explain", "conv2d", "--input", "8,4,4:channels-last", "--weight", "8,8,3,3"),
        "needs four or five dimensions",
    ),
    (("explain", "dot", "--a", "3:strides=1,2", "--b", "3"), "2 strides for a shape of 1 sizes"),
    (
        ("explain", "conv2d", "--input", "1,8,4,4", "--weight", "8,8,3,3", "--groups", "1,2"),
        "it takes int, not several",
    ),
    (("explain", "rms_norm_silu", "--x", "1,8", "--eps", "small"), "--eps small: it takes a number"),
    (
        ("explain", "rms_norm_silu", "--x", "1,8", "--eps", "1", "--silu", "maybe"),
        "--silu maybe: it takes true or false",
    ),
    (("explain", "dot", "--a", "3", "--b", "3", "--dtype", "bf17"), "dtype 'bf17' is not known"),
    (
        ("explain", "dot", "--a", "3", "--b", "3", "--device", "h20"),
        "device 'h20' is not known; did you mean nvidia-h200?",
    ),
    (
        ("explain", "dot", "--a", "3", "--b", "3", "--device", "rtx 4900"),
        "did you mean nvidia-geforce-rtx-4090?",
    ),
    (("explain", "dot", "3"), "cannot be read"),
    ((*CONVOLUTION, "--stride", "0"), "stride is [0, 0, 0], it needs to be at least 1"),
    ((*CONVOLUTION, "--dilation", "1,0,1"), "dilation is [1, 0, 1], it needs to be at least 1"),
    ((*CONVOLUTION, "--padding", "-1"), "padding is [-1, -1, -1], it needs to be at least 0"),
    ((*CONVOLUTION, "--bias", "5"), "bias is [5], it needs to be [4]"),
    (
        ("explain", "conv2d", "--input", "1,8,6,6", "--weight", "8,8,3,3", "--groups", "3"),
        "; the tensors are input [1, 8, 6, 6], weight [8, 8, 3, 3]",
    ),
    (("race", "flux-vae", "--seconds", "-1"), "--seconds -1.0: it needs to be at least 0"),
    (("race", "flux-vae", "--budget", "nan"), "--budget nan: it needs to be at least 0"),
    (("race", "flux-vae", "--ranks", "0"), "--ranks 0: it needs to be at least 1"),
    (("race", "flux-vae", "--links", "links.json"), "--links was given without --ranks"),
    (("tune", "dot", "--budget", "nan"), "budget nan seconds"),
    (("explain", "dot", "--a", "99999999999999999999", "--b", "3"), "too large"),
    (("explain", "dot", "--a", "4294967296,4294967296", "--b", "3"), "too large"),
    (("explain", "dot", "--a", "3:float16:bfloat16", "--b", "3"), "are 2 dtypes; give one"),
    (("explain", "dot", "--a", "3:strides=1:contiguous", "--b", "3"), "are 2 layouts; give one"),
    (("explain", "dot", "--a", "3:strides=-1", "--b", "3"), "torch has no negative strides"),
    (("warm", "wan-va"), "model 'wan-va' is not known; did you mean wan-vae?"),
    (("bench", "dot", "--only", "nothing like it"), "no case of dot contains"),
    (("bench", "dot", "--device", "cuda:7"), "no CUDA GPU"),
    (("bench", "dot", "--device", "cudda"), "did you mean cuda?"),
    (("bench", "dot", "--export", "x.json"), "give both"),
    (("tune", "nope"), "op 'nope' is not known"),
    (("tune", "--race", "wan-vea"), "model 'wan-vea' is not known; did you mean wan-vae?"),
    (("tune", "dot", "--budget", "-1"), "more than 0"),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES)
def test_errors_are_one_line(words, message):
    run = CliRunner().invoke(app, words)
    assert run.exit_code == 2, run.output
    assert message in run.stderr
    assert len(run.stderr.strip().splitlines()) == 1
    assert run.stderr.startswith("error: ")
    assert run.stdout == ""


def test_errors_are_one_line_in_a_new_process():
    message = turnout("explain", "zzz", code=2)
    assert message.startswith("error: op 'zzz' is not known; one of: ")
    assert len(message.splitlines()) == 1


def test_pin_of_an_unknown_route_lists_the_known(monkeypatch):
    monkeypatch.setenv("TURNOUT_PIN", "dot=two-stge")
    run = CliRunner().invoke(app, ["explain", "dot", "--a=3", "--b=3"])
    assert run.exit_code == 2
    assert "op dot has no route 'two-stge'; did you mean two-stage?" in run.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("bench", "dot", "--out", "FILE/rows"),
        ("bench", "dot", "--roofline", "FILE/roof.png"),
        ("bench", "dot", "--roofline", "FOLDER"),
        ("bench", "dot", "--roofline", "FOLDER/roof.nope"),
        ("bench", "dot", "--tune", "--export", "FILE/table.json"),
        ("tune", "dot", "--export", "FILE/table.json"),
        ("tune", "dot", "--export", "FOLDER"),
    ],
)
def test_paths_are_checked_before_anything_is_measured(words, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    measured = pytest.fail
    monkeypatch.setattr("turnout.bench.sweep.ceilings", lambda *_: measured("it measured"))
    monkeypatch.setattr(package, "tune", lambda *_, **__: measured("it measured"))
    places = {"FILE": str(tmp_path / "file"), "FOLDER": str(tmp_path)}
    words = [
        functools.reduce(lambda word, place: word.replace(place, places[place]), places, word)
        for word in words
    ]
    run = CliRunner().invoke(app, words)
    assert run.exit_code == 2, run.output
    assert words[-2] in run.stderr
    assert len(run.stderr.strip().splitlines()) == 1


def test_tune_says_before_it_measures_that_rows_cannot_be_kept(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TURNOUT_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(package, "tune", lambda *_, **__: pytest.fail("it measured"))
    run = CliRunner().invoke(app, ["tune", "dot"])
    assert run.exit_code == 2
    assert "the folder cannot be made" in run.stderr
    assert "TURNOUT_CACHE_DIR" in run.stderr


def test_a_package_that_is_missing_is_one_line_with_its_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run = CliRunner().invoke(app, ["bench", "dot", "--roofline", str(tmp_path / "roof.png")])
    assert run.exit_code == 2
    assert (
        run.stderr == "error: matplotlib is not installed, --roofline needs it: pip install 'turnout[plot]'\n"
    )


@pytest.mark.parametrize(
    ("failure", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (PermissionError(13, "Permission denied", "/a/[b]"), 2, "error: /a/[b]: Permission denied"),
        (OSError("disk [full]"), 2, "error: disk [full]"),
        (
            ModuleNotFoundError("No module named 'x'", name="x"),
            2,
            "error: the package x is not installed; pip install x",
        ),
        (RuntimeError("[red]two\nlines[/red]"), 2, "error: [red]two lines[/red]"),
    ],
)
def test_every_exception_of_a_command_is_one_line(monkeypatch, failure, code, message):
    def fail():
        raise failure

    monkeypatch.setattr("turnout.doctor.environment", fail)
    run = CliRunner().invoke(app, ["doctor"])
    assert run.exit_code == code
    assert run.stderr.strip().startswith(message)
    assert len(run.stderr.strip().splitlines()) == 1


def test_traceback_on_demand(monkeypatch):
    monkeypatch.setenv("TURNOUT_TRACEBACK", "1")
    run = CliRunner().invoke(app, ["explain", "nope"])
    assert isinstance(run.exception, ValueError)


def test_control_c_ends_with_130():
    code = (
        "import signal, sys, turnout.doctor; from turnout.cli import main;"
        "signal.signal(signal.SIGINT, signal.default_int_handler);"  # a background shell has it ignored
        "turnout.doctor.environment = lambda: signal.raise_signal(signal.SIGINT);"
        "sys.argv = ['turnout', 'doctor']; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 130
    assert done.stderr.startswith("interrupted")
    assert len(done.stderr.splitlines()) == 1


def test_output_may_be_closed():
    words = f"{sys.executable} -m turnout explain dot --a 3 --b 3 >&-"
    done = subprocess.run(words, shell=True, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


def test_version():
    assert turnout("--version") == f"turnout {package.__version__}\n"


def test_doctor(monkeypatch):
    """The wheel's test runs it in a process of its own."""
    checks = doctor.routes()
    monkeypatch.setattr(doctor, "routes", lambda: checks)  # once for both
    output = json.loads(in_process("doctor", "--json"))
    assert output["environment"]["devices"][0] == "cpu"
    states = {check["what"]: check["state"] for check in output["checks"]}
    assert states["dot cpu-chunks on cpu"] == "ok"
    assert states["dot two-stage on cpu"] == "refused"
    assert "failed" not in states.values()
    assert "agrees with the reference" in in_process("doctor")


def test_bench_writes_rows_and_a_picture(tmp_path):
    picture = tmp_path / "roof.png"
    words = ("bench", "dot", "--only", "K=4096", "--seconds", "0.1", "--device", "cpu")
    message = in_process(*words, "--out", str(tmp_path), "--roofline", str(picture))
    assert "reference" in message
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
    in_process(*words, "--only", "K=16 ")
    before = rows.read_text().splitlines()
    in_process(*words, "--only", "K=16 float32")
    in_process(*words, "--only", "K=16 ", "--missing")  # were measured just now
    after = rows.read_text().splitlines()
    assert [json.loads(line)["case"] for line in after] == [json.loads(line)["case"] for line in before]
    assert [line == old for line, old in zip(after, before, strict=True)] == [
        json.loads(line)["dtype"] != "float32" for line in after
    ]
    assert all("commit" in json.loads(line) for line in after)


def test_tune_and_export(tmp_path):
    words = ("tune", "dot", "--budget", "1", "--device", "cpu", "--export", str(tmp_path / "t.json"))
    assert "rows in" in in_process(*words)
    assert json.loads((tmp_path / "t.json").read_text())["rows"]


def test_tune_measures_the_calls_of_a_model(tmp_path):
    words = (
        "tune",
        "conv2d",
        "--race",
        "flux-vae",
        "--size",
        "tiny",
        "--dtype",
        "fp32",
        "--budget",
        "1",
        "--device",
        "cpu",
    )
    output = in_process(*words, "--export", str(tmp_path / "t.json"))
    assert "input 1x4x16x16, weight 32x4x3x3, float32" in output
    assert {row["op"] for row in json.loads((tmp_path / "t.json").read_text())["rows"]} == {"conv2d"}


def test_bench_router_times_a_case_of_every_op_that_models_call_often():
    """They are timed on a GPU only; an op without cases there would be noticed there only."""
    from turnout.bench import router

    timed = {(kind, op.name) for kind, op, _ in router.cases_of(torch.device("cuda"))}
    assert timed == {(kind, name) for kind, names in router.KINDS.items() for name in names}


def test_missing_cases_of_an_absent_card_are_listed():
    output = json.loads(
        in_process("bench", "dot", "inner", "--missing", "--device", "4090", "--only", "bfloat16", "--json")
    )
    assert {row["op"] for row in output} == {"dot", "inner"}
    assert all("bfloat16" in row["case"] and "tiny" not in row["case"] for row in output)

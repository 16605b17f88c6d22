"""turnout.warm and its command: what is planned, what is said, and that nothing stays behind."""

import contextlib
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import turnout
from turnout.cli import app
from turnout.launch.ahead import Spec
from turnout.launch.pretended import PRETENDED, NeedsValuesError
from turnout.models import wan_steps
from turnout.models.wan_steps import Steps
from turnout.race.ahead import specs_of_race
from turnout.race.models import RACERS
from turnout.routing.op import OPS
from turnout.warming import compiling
from turnout.warming.compiling import Compiler
from turnout.warming.planning import specs_of_call
from turnout.warming.warmed import card_named, compile_specs

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
X = torch.empty(1, 128, 512, 512, dtype=torch.bfloat16, device="meta").contiguous(
    memory_format=torch.channels_last
)


@pytest.fixture
def card():
    return card_named("h200")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A fresh folder for what Triton compiles."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path


def norm():
    return nn.GroupNorm(32, 128).to(torch.bfloat16)


def kernels(specs):
    return [spec.name for spec in specs]


def planned(call, *args, **kwargs):
    return kernels(specs_of_call(call, args, kwargs, card_named("h200"), turnout.accelerate))


def test_a_model_its_method_and_functions_that_use_it_are_planned_alike():
    model = norm()
    expected = planned(model, X)
    assert expected == ["row_moments bfloat16", "row_apply bfloat16"]
    assert planned(model.forward, X) == expected
    assert planned(functools.partial(model, X)) == expected
    assert planned(lambda x: model(x), X) == expected
    assert planned(lambda: model(X)) == expected
    assert planned(lambda xs: [model(x) for x in xs], [X]) == expected


MODELS = {"norm": norm()}


@torch.no_grad()
def decorated(x):
    return one_by_one([x], 2)


def one_by_one(xs, times):
    return one_by_one(xs, times - 1) if times else [MODELS["norm"](x) for x in xs]


class Runner:
    def __init__(self):
        self.models = [norm()]

    def run(self, x):
        return self.models[0](x)

    __call__ = run


@pytest.mark.parametrize(
    "call", [decorated, functools.partial(decorated), Runner(), Runner().run], ids=["function", "partial",
    "object", "method"]
)  # fmt: skip
def test_models_are_found_behind_decorators_helpers_and_objects(call):
    assert planned(call, X) == ["row_moments bfloat16", "row_apply bfloat16"]
    assert all(x.is_cpu for x in MODELS["norm"].parameters())


def test_a_compiled_model_is_refused_with_what_to_give_instead():
    with pytest.raises(ValueError, match=r"give turnout\.warm the model that was"):
        planned(torch.compile(norm(), backend="eager"), X)


class Norms(nn.Module):
    """Takes tensors by position, by keyword and in a list."""

    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(32, 128)

    def forward(self, x, *, y, more):
        return [self.norm(each) for each in (x, y, *more)]


def test_the_dtype_is_that_of_all_arguments(monkeypatch):
    seen = []
    module = importlib.import_module("turnout.models.warm")
    monkeypatch.setattr(
        module, "specs_of_call", lambda call, args, kwargs, *rest: seen.append((args, kwargs))
    )
    monkeypatch.setattr(module, "compile_specs", lambda *args, **kwargs: None)
    monkeypatch.setattr(module, "Compiler", contextlib.nullcontext)
    x, tokens = X.float(), torch.ones(2, dtype=torch.long)
    for dtype in (torch.bfloat16, "bf16"):
        turnout.warm(Norms(), x, y=x, more=[x, {"mask": tokens}], device="h200", dtype=dtype)
        [(args, kwargs)] = seen
        dtypes = [each.dtype for each in torch.utils._pytree.tree_leaves((args, kwargs))]
        assert dtypes == [torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.long]
        seen.clear()


def test_planning_changes_nothing():
    model, cache = norm(), OPS["group_norm_silu"].dispatch_cache
    before = {name: (x, x.device, x._version) for name, x in model.state_dict(keep_vars=True).items()}
    planned(model, X)
    assert type(model) is nn.GroupNorm
    assert {name: (x, x.device, x._version) for name, x in model.state_dict(keep_vars=True).items()} == before
    assert not [key for key in cache if PRETENDED.index in key]


def test_a_call_that_reads_values_is_refused_with_the_reason():
    class Reads(nn.Module):
        def forward(self, x):
            return x * x.sum().item()

    with pytest.raises(NeedsValuesError, match="`item` of a tensor"):
        planned(Reads(), X)


def test_integers_that_a_program_wrote_down_keep_their_values():
    class Loops(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = norm()

        def forward(self, x):
            ends = torch.arange(3, device=x.device).cumsum(0)
            for _ in range(int(ends[-1])):
                x = self.norm(x)
            return x

    assert len(planned(Loops(), X)) == 2


def test_a_function_without_a_model_is_refused():
    with pytest.raises(TypeError, match=r"give turnout\.warm the model"):
        planned(len, [])


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cpu", "has no kernels to compile"), ("h2000", "did you mean"), (None, "no GPU is here"),
        ("cuda", "no GPU is here"), (torch.device("cuda", 1), "no GPU is here"),
        (torch.device("cpu"), "has no kernels to compile"),
    ],
)  # fmt: skip
def test_devices_that_nothing_is_compiled_for(device, message):
    if message == "no GPU is here" and torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ValueError, match=message):
        turnout.warm(norm(), X, device=device)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"device": 0}, "device is 0"), ({"jobs": 1.5}, "whole number"), ({"jobs": 0}, "jobs is 0"),
        ({"dtype": torch.int8}, "a model runs in"), ({"dtype": "bf17"}, "did you mean bf16"),
        ({"dtype": 16}, "dtype is 16"),
    ],
)  # fmt: skip
def test_arguments_that_cannot_be(given, message):
    with pytest.raises((ValueError, TypeError), match=message):
        turnout.warm(norm(), X, **{"device": "h200", **given})


def test_words_of_what_the_process_imports_are_no_answers(card, monkeypatch, tmp_path):
    (tmp_path / "triton_plugin.py").write_text("print('loaded')")
    start = compiling._START.replace("from turnout", "import triton_plugin\nfrom turnout", 1)
    monkeypatch.setattr(compiling, "_START", start)
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path, 3])  # of which some are no words
    with Compiler() as compiler:
        assert list(compiler.answers([], card, jobs=1)) == [0]


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("huge", "has no size 'huge'"),
        ("480x832", "has 2 numbers"),
        ("481x832x5", "481 is no multiple of 8"),
        ("0x832x5", "a zero"),
    ],
)
def test_sizes_that_do_not_fit(size, message, card):
    pytest.importorskip("diffusers")
    with pytest.raises(ValueError, match=message):
        specs_of_race("wan-vae", size, None, card)


@pytest.mark.parametrize("name", RACERS)
def test_every_model_that_races_can_be_planned(name, card):
    pytest.importorskip(RACERS[name].package)
    assert isinstance(specs_of_race(name, "tiny", None, card), list)


@pytest.mark.parametrize(("name", "size"), [("wan-vae", "480x832x81"), ("wan22-vae", "704x1280x61")])
def test_steps_that_repeat_are_planned_once(name, size, card, monkeypatch):
    """And no launch is missed by that."""
    steps = []
    run = Steps.run
    monkeypatch.setattr(Steps, "run", lambda self, latent: steps.append(1) or run(self, latent))
    planned = set(specs_of_race(name, size, None, card))
    assert len(steps) < 6
    monkeypatch.setattr(wan_steps, "is_planning", lambda: False)
    assert set(specs_of_race(name, size, None, card)) == planned
    assert len(steps) > 15


def test_check_says_what_is_missing_until_it_is_compiled(cache):
    missing = turnout.warm(norm(), X, device="h200", check=True)
    assert not missing.ready
    assert [kernel.state for kernel in missing.kernels] == ["missing", "missing"]
    assert [path for path in cache.rglob("*") if path.is_file()] == []
    told = []
    compiled = turnout.warm(
        norm(), X, device="h200", jobs=2, progress=lambda *progress: told.append(progress)
    )
    assert [kernel.state for kernel in compiled.kernels] == ["compiled", "compiled"]
    assert [(done, total) for done, total, _ in told] == [(0, 2), (1, 2), (2, 2)]
    assert turnout.warm(norm(), X, device="h200", check=True).ready


def test_a_kernel_that_does_not_compile_does_not_stop_the_others(cache, card):
    specs = specs_of_call(norm(), (X,), {}, card, turnout.accelerate)
    odd: Spec = specs[0]._replace(constants=tuple((name, 3) for name, _ in specs[0].constants))
    with Compiler() as compiler:
        result = compile_specs(
            compiler, [odd, *specs], card, jobs=1, progress=None, begun=time.perf_counter()
        )
    assert len(result.named("compiled")) == 2
    [failed] = result.named("failed")
    assert failed.name == odd.name
    assert failed.error
    assert not result.ready


def run(*words):
    return CliRunner().invoke(app, ["warm", *words])


def test_the_command_ends_with_1_while_anything_is_missing(cache):
    pytest.importorskip("diffusers")
    result = run("flux", "--size", "tiny", "--device", "h200", "--check", "--json")
    assert result.exit_code == 1
    row = json.loads(result.stdout)
    assert not row["ready"]
    assert {kernel["state"] for kernel in row["kernels"]} == {"missing"}


@pytest.mark.parametrize(
    "words",
    [
        ("flx", "--device", "h200"), ("flux", "--device", "cpu"), ("flux", "--device", "h200", "--jobs", "0"),
        ("flux", "--device", "h200", "--dtype", "int8"),
    ],
)  # fmt: skip
def test_the_command_ends_with_2_for_what_cannot_be(words):
    pytest.importorskip("diffusers")
    assert run(*words).exit_code == 2


def alive(group):
    """The processes of a group that still run."""
    results = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                state, _, process_group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            except OSError:
                continue
            if int(process_group) == group and state != "Z":
                results.append(int(folder.name))
    return results


PROGRAM = """
import turnout
from tests.warming.test_warm import X, norm
from turnout.warming import compiling
from turnout.warming.compiling import Compiler
from turnout.warming.planning import specs_of_call
from turnout.warming.warmed import card_named
card = card_named("h200")
specs = specs_of_call(norm(), (X,), {}, card, turnout.accelerate)
with Compiler() as compiler:
    for answer in compiler.answers(specs, card, jobs=2):
        print(compiler.process.pid, flush=True)
"""


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="asks Linux for its processes")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_the_program(how, cache):
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert program.stdout is not None
    group = int(program.stdout.readline())  # told as soon as compilations begin
    program.send_signal(how)
    program.wait(60)
    end = time.monotonic() + 60
    while alive(group) and time.monotonic() < end:
        time.sleep(0.1)
    assert alive(group) == []

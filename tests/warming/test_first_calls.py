"""The first call of an accelerated model compiles together what it lacks; nothing is lost where it cannot."""

import copy
import json
import os
import pickle
import signal
import subprocess
import sys
import time
import types
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import turnout
from tests.launch.test_direct import libcuda  # noqa: F401  a fixture
from tests.models.zoo import made
from tests.warming.test_warm import alive
from turnout.launch import launcher
from turnout.models import calls, first_calls
from turnout.models.state import FIRST_CALLS
from turnout.routing import settings
from turnout.warming import compiling
from turnout.warming.warmed import Kernel, Warmed, card_named

triton = pytest.importorskip("triton")
pytest.importorskip("diffusers")
ROOT = Path(__file__).parents[2]
REAL = first_calls.compile_specs


def flux_inputs(dtype=torch.float32, batch=2, tokens=12):
    x = torch.zeros(batch, tokens, 4, dtype=dtype)
    return {
        "hidden_states": x, "encoder_hidden_states": x.new_zeros(batch, 5, 8),
        "pooled_projections": x.new_zeros(batch, 8), "timestep": x.new_zeros(batch),
        "guidance": x.new_zeros(batch), "img_ids": torch.zeros(tokens, 3), "txt_ids": torch.zeros(5, 3),
    }  # fmt: skip


class Miss:
    """Makes Triton's discovery that a kernel is missing: calls what a launch would."""

    def __init__(self):
        self.missing, self.planned, self.result = True, [], None

    def call(self, model, method="forward", *args, **kwargs):
        first = vars(model)[FIRST_CALLS]
        with first.of(model, method, args, kwargs):
            self.discover()
            self.discover()  # by another kernel of the same call
        return first

    def discover(self):
        before = launcher.watching.get()
        assert before is not None
        before(lambda: self.missing)


@pytest.fixture
def miss(monkeypatch):
    """On a CPU as on an H200; what is planned is noted, and nothing is compiled."""
    miss, card = Miss(), card_named("h200")
    monkeypatch.setattr(first_calls, "Device", types.SimpleNamespace(of=lambda device: card))
    monkeypatch.setattr(first_calls, "_no_compiler", None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def compile_specs(compiler, specs, card, *, fewest, **options):
        miss.planned.append([spec.name for spec in specs])
        if miss.result is not None:
            raise miss.result
        return Warmed(card.name, tuple(Kernel(spec.name, "compiled") for spec in specs), 1, 1.0)

    monkeypatch.setattr(first_calls, "compile_specs", compile_specs)
    return miss


@pytest.fixture
def flux():
    model = made("flux", torch.bfloat16)
    turnout.accelerate(model)
    return model


INPUTS = flux_inputs(torch.bfloat16)


# What happens


def test_a_call_that_lacks_kernels_is_planned_once(flux, miss):
    with torch.no_grad():
        first = miss.call(flux, **INPUTS)
    expected = turnout.warm(flux, **INPUTS, device="h200", check=True)
    assert len(miss.planned) == 1
    assert sorted(set(miss.planned[0])) == sorted({kernel.name for kernel in expected.kernels})
    assert first.together == len(miss.planned[0]) > 0
    assert next(first.lines()).startswith(f"{first.together} kernels compiled together")


def test_what_another_thread_or_process_has_compiled_meanwhile_is_not_planned(flux, miss):
    miss.missing = False
    first = miss.call(flux, **INPUTS)
    assert miss.planned == []
    assert not first.left


def test_planning_changes_neither_the_model_nor_the_random_numbers(flux, miss):
    state = torch.random.get_rng_state()
    before = {name: (x, x._version) for name, x in flux.state_dict(keep_vars=True).items()}
    classes = [type(module) for module in flux.modules()]
    with torch.no_grad():
        miss.call(flux, **INPUTS)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert {name: (x, x._version) for name, x in flux.state_dict(keep_vars=True).items()} == before
    assert [type(module) for module in flux.modules()] == classes


def test_a_call_with_gradients_is_planned(flux, miss):
    miss.call(flux, **INPUTS)
    assert len(miss.planned) == 1


def test_a_cache_among_the_arguments_is_planned_with_a_copy(miss):
    pytest.importorskip("transformers")
    model = made("mamba")
    turnout.accelerate(model)
    tokens = torch.ones(1, 4, dtype=torch.long)
    with torch.no_grad():
        cache = model(tokens, use_cache=True).cache_params
        held = [x for x in torch.utils._pytree.tree_leaves(vars(cache)) if isinstance(x, torch.Tensor)]
        before = copy.deepcopy(vars(cache))
        first = miss.call(model, input_ids=tokens[:, :1], cache_params=cache, use_cache=True)
    assert not first.left
    assert len(miss.planned) == 1
    assert vars(cache).keys() == before.keys()
    assert all(x.device.type == "cpu" for x in held)


# Where it is left as it was


def test_nothing_is_planned_on_a_cpu(monkeypatch, flux):
    monkeypatch.setattr(first_calls.FirstCalls, "compile", lambda *args: pytest.fail("planned"))
    with torch.no_grad():
        flux(**INPUTS)


def hooked(model):
    model.transformer_blocks[0].register_forward_hook(lambda *args: None)


def replaced(model):
    model.transformer_blocks[0].attn.to_q = type("Own", (nn.Linear,), {})(4, 4)


def whole(model):
    model.forward = lambda *args, **kwargs: None


def compiled_part(model):
    model.transformer_blocks[0].compile(backend="eager")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (hooked, "transformer_blocks.0 has a hook"),
        (replaced, "Own"),
        (whole, "a forward of its own"),
        (compiled_part, "transformer_blocks.0 is compiled"),
    ],
)
def test_code_of_others_is_not_run_to_plan(flux, miss, change, reason):
    change(flux)
    first = miss.call(flux, **INPUTS)
    assert miss.planned == []
    assert any(reason in said for said in first.left)


def test_situations_that_are_not_planned(flux, miss, monkeypatch):
    def reasons(**inputs):
        first = vars(flux)[FIRST_CALLS]
        first.left.clear()
        miss.call(flux, **{**INPUTS, **inputs})
        assert miss.planned == []
        [(reason, count)] = first.left.items()
        assert count == 1
        return reason

    with monkeypatch.context() as patch:
        patch.setenv("TURNOUT_WARM", "0")
        assert reasons() == "TURNOUT_WARM=0"
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert "captured" in reasons()
    with monkeypatch.context() as patch:
        patch.setenv("TRITON_ALWAYS_COMPILE", "1")
        assert "ALWAYS_COMPILE" in reasons()
    with torch.autocast("cpu", torch.bfloat16):
        assert reasons() == "autocast"
    with torch.autograd.graph.save_on_cpu():
        assert "saved tensors" in reasons()
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        assert "mode" in reasons()
    token = settings.entered.set(settings.Split({}, "close", lambda op, args: op.plain))
    assert "distributed" in reasons()
    settings.entered.reset(token)
    assert "object" in reasons(joint_attention_kwargs={"callback": object()})


def test_a_call_that_cannot_be_planned_is_tried_once(flux, miss, monkeypatch):
    tried = []

    def specs_of_call(*args):
        tried.append(args)
        raise RuntimeError("reads a value")

    monkeypatch.setattr(first_calls, "specs_of_call", specs_of_call)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = miss.call(flux, **INPUTS)
        miss.call(flux, **flux_inputs(torch.bfloat16, tokens=6))
    assert len(tried) == 1
    assert first.left == {"the call cannot be planned (RuntimeError: reads a value)": 2}


def test_a_process_that_cannot_compile_is_warned_of_once(flux, miss, monkeypatch):
    monkeypatch.setattr(compiling, "_START", "raise SystemExit('no room left on this disk')")
    monkeypatch.setattr(first_calls, "compile_specs", REAL)
    with pytest.warns(turnout.TurnoutWarning, match="no room left on this disk") as caught:
        miss.call(flux, **INPUTS)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        miss.call(flux, **INPUTS)


def test_no_process_at_all(flux, miss, monkeypatch):
    def refuse(*args, **kwargs):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.warns(turnout.TurnoutWarning, match="TURNOUT_WARM=0"):
        miss.call(flux, **INPUTS)
    assert miss.planned == []


def test_an_interrupt_ends_the_compiler_and_is_raised(flux, miss, monkeypatch):
    begun = []
    monkeypatch.setattr(first_calls, "Compiler", lambda: begun.append(compiling.Compiler()) or begun[0])
    miss.result = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        miss.call(flux, **INPUTS)
    assert begun[0].process.poll() is not None
    assert launcher.watching.get() is None
    miss.result = None
    miss.call(flux, **INPUTS)  # nothing stays locked
    assert len(miss.planned) == 2


# The model stays what it was


def test_restore_undoes_it():
    model = made("flux")
    stock = type(model)
    turnout.accelerate(model)
    assert FIRST_CALLS in vars(model)
    turnout.restore(model)
    assert type(model) is stock
    assert FIRST_CALLS not in vars(model)


@pytest.mark.parametrize("name", ["flux", "wan"])  # the class of Wan's autoencoder has an adapter of its own
@pytest.mark.parametrize("graph", [False, True])
def test_copies_have_first_calls_of_their_own(name, graph):
    model = made(name)
    stock = type(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        turnout.accelerate(model, graph=graph)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin) is type(model)
        assert vars(twin)[FIRST_CALLS] is not vars(model)[FIRST_CALLS]
        assert turnout.restore(twin)
        assert type(twin) is stock


def test_warm_false_asks_for_none():
    model = made("flux")
    report = turnout.accelerate(model, warm=False)
    assert FIRST_CALLS not in vars(model)
    assert report.first_calls == {}
    assert "first calls" not in report.details()


def test_the_report_says_what_will_be_and_what_was(miss):
    model = made("flux", torch.bfloat16)
    report = turnout.accelerate(model)
    assert "first calls of model: kernels that are missing will be compiled together" in report.details()
    with torch.no_grad():
        miss.call(model, **INPUTS)
    assert "kernels compiled together in 1.0 s" in report.details()


def test_a_compiled_model_is_one_graph_and_is_not_watched(flux, monkeypatch):
    monkeypatch.setattr(calls, "_first_call", lambda *args: pytest.fail("watched"))
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(flux, backend="eager", fullgraph=True)(**INPUTS)


# Locks


HOLD = """
import sys, time
from turnout.warming.compiling import one_at_a_time
with one_at_a_time():
    print(time.time(), flush=True)
    time.sleep(float(sys.argv[1]))
    print(time.time(), flush=True)
"""


def test_processes_of_a_user_compile_one_after_the_other(tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT / "src")}

    def begin(seconds):
        command = [sys.executable, "-c", HOLD, str(seconds)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)

    several = [begin(0.5) for _ in range(2)]
    spans = sorted(tuple(map(float, each.communicate(timeout=120)[0].split())) for each in several)
    assert spans[0][1] <= spans[1][0]


def test_a_lock_that_cannot_be_had_is_done_without(monkeypatch, tmp_path):
    monkeypatch.setattr(compiling.tempfile, "gettempdir", lambda: str(tmp_path / "is not there"))
    with compiling.one_at_a_time():
        pass


# As on a card


def together(libcuda, cache, *words):  # noqa: F811
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {
        "TRITON_LIBCUDA_PATH": str(libcuda), "LD_LIBRARY_PATH": str(libcuda), "OMP_NUM_THREADS": "1",
        "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": path,
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "tests.warming.together", *words],
        env={**os.environ, **environment}, cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.timeout(600)
def test_first_calls_on_a_card_compile_nothing_one_by_one(libcuda, tmp_path):  # noqa: F811
    process = together(libcuda, tmp_path)
    said, errors = process.communicate(timeout=590)
    assert process.returncode == 0, said + errors
    first, again, size, dtype = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert [step["failures"] for step in (first, again, size, dtype)] == [[]] * 4
    assert first["compiled"] == 0
    assert first["found"] == first["together"] >= first_calls.FEWEST
    assert (again["compiled"], again["found"], again["together"]) == (0, 0, first["together"])
    assert size["compiled"] < first_calls.FEWEST
    assert dtype["compiled"] == 0
    assert dtype["found"] >= dtype["together"] >= first_calls.FEWEST
    assert len(dtype["lines"]) == 1


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="asks Linux for its processes")
def test_ctrl_c_while_compiling_ends_all_processes(libcuda, tmp_path):  # noqa: F811
    process = together(libcuda, tmp_path, "interrupted")
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "begin\n"
        end = time.monotonic() + 120
        while not (groups := compilers_of(process.pid)) and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert "KeyboardInterrupt" in errors
    assert len(groups) == 1
    end = time.monotonic() + 30
    while alive(groups[0]) and time.monotonic() < end:
        time.sleep(0.1)
    assert alive(groups[0]) == []


def compilers_of(parent):
    """The children of a process that lead a group of their own."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                _, above, group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            except OSError:
                continue
            if int(above) == parent and group == folder.name:
                found.append(int(group))
    return found

"""What `turnout.warm` compiles is what the first call on a card asks for, kernel by kernel."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.launch.test_direct import libcuda  # noqa: F401  a fixture
from tests.warming.things import CALLS
from turnout.launch.ahead import specs_of
from turnout.launch.pretended import PRETENDED
from turnout.warming.compiling import Compiler
from turnout.warming.planning import planning
from turnout.warming.warmed import card_named, compile_specs

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]


def compiled_ahead(device, names=tuple(CALLS), jobs=2):
    """Calls of `things`, planned and compiled for a card."""
    card = card_named(device)
    specs = []
    for name in names:
        with planning(card) as launches, torch.no_grad():
            CALLS[name](PRETENDED)()
        specs += specs_of(launches)
    with Compiler() as compiler:
        return compile_specs(compiler, specs, card, jobs=jobs, progress=None, begun=time.perf_counter())


def first_calls(where, names=tuple(CALLS), **environment):
    """The same calls in a fresh process: what each compiles, and what it finds in the cache."""
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "tests.warming.first_call", where, *names]
    done = subprocess.run(
        command,
        env={**os.environ, **environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def check(warmed, calls):
    """Nothing was compiled by the calls, nothing in vain before."""
    assert warmed.ready
    assert len(warmed.named("compiled")) == len(warmed.kernels) > 25
    assert [call["name"] for call in calls] == list(CALLS)
    assert [call for call in calls if call["compiled"]] == []
    assert sum(call["found"] for call in calls) == len(warmed.kernels)


@pytest.mark.timeout(600)
def test_first_calls_ask_for_exactly_what_warm_compiled(libcuda, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    results = {"TRITON_LIBCUDA_PATH": str(libcuda), "LD_LIBRARY_PATH": str(libcuda), "OMP_NUM_THREADS": "1"}
    check(compiled_ahead("h200"), first_calls("stand-in", **results))


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(3))
def test_first_calls_on_a_card_compile_nothing_after_warm(part, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    names = list(CALLS)[part::3]
    warmed, calls = compiled_ahead(None, names, jobs=4), first_calls("card", names)
    assert warmed.ready
    assert [call["name"] for call in calls] == names
    assert [call for call in calls if call["compiled"]] == []

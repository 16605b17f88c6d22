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
H200 = "h200"


def planned(name):
    """What the first call of a model launches, found without running it."""
    with planning(card_named(H200)) as launches, torch.no_grad():
        CALLS[name](PRETENDED)()
    return specs_of(launches)


def on_the_stand_in(libcuda):  # noqa: F811
    """The first calls on a card that a stand-in driver pretends: what each compiles, and what it finds."""
    found = {"TRITON_LIBCUDA_PATH": str(libcuda), "LD_LIBRARY_PATH": str(libcuda), "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "tests.warming.first_call", *CALLS]
    done = subprocess.run(command, env={**os.environ, **found, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_first_calls_ask_for_exactly_what_warm_compiled(libcuda, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    specs = [spec for name in CALLS for spec in planned(name)]
    with Compiler() as compiler:
        warmed = compile_specs(compiler, specs, card_named(H200), jobs=2, check=False, progress=None, begun=time.perf_counter())
    assert warmed.ready
    assert len(warmed.named("compiled")) == len(warmed.kernels) > 25
    calls = on_the_stand_in(libcuda)
    assert [call["name"] for call in calls] == list(CALLS)
    assert [call for call in calls if call["compiled"]] == []
    assert sum(call["found"] for call in calls) == len(warmed.kernels)  # so nothing was compiled in vain

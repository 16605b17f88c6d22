"""`import turnout` is quick and asks for neither Triton, Numba nor a GPU."""

import os
import statistics
import subprocess
import sys

import pytest


def run(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_takes_less_than_300_ms_beyond_torch(tmp_path):
    """With compiled bytecode, as pip leaves it: the first import makes it.

    Time of the processor, not of whoever else uses it.
    """
    code = (
        "import torch, time; before = time.process_time(); import turnout;print(time.process_time() - before)"
    )
    kept = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    run(code, **kept)
    assert statistics.median(float(run(code, **kept)) for _ in range(3)) < 0.3


def test_import_loads_no_compiler_no_plotting_no_command_line():
    loaded = run(
        "import torch, sys; before = set(sys.modules); import turnout;"
        "print(*sorted(set(sys.modules) - before))"
    ).split()
    heavy = (
        "triton",
        "numba",
        "llvmlite",
        "matplotlib",
        "rich",
        "typer",
        "diffusers",
        "transformers",
        "torch._inductor",
        "torch._dynamo",
    )
    assert not [name for name in loaded if name.startswith(heavy)]


@pytest.mark.parametrize("missing", ["triton", "numba"])
def test_works_without(missing):
    code = f"""
import sys
sys.modules["{missing}"] = None
import torch, turnout
a = torch.ones(1, 3_000_000, dtype=torch.bfloat16)
assert turnout.matmul(a, a.T).item() == torch.matmul(a, a.T).item()
assert turnout.dot(a[0], a[0]).isfinite()
found = turnout.explain("dot", a[0], a[0])
print(found)
"""
    said = run(code)
    assert {
        "triton": "Triton is not installed, this route needs triton>=3.6",
        "numba": "Numba is not installed, this route needs",
    }[missing] in said

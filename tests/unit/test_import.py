"""`import turnout` is quick and asks for neither Triton, Numba nor a GPU."""

import functools
import json
import os
import statistics
import subprocess
import sys

import pytest

import turnout


def run(code, *words, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


FUNCTIONS = {
    "accelerate": "models",
    "accelerated": "models",
    "restore": "models",
    "distribute": "parallel",
    "tune": "measure",
    "warm": "warming",
}
IMPORT = "import turnout"
FIRST_USES = [
    statement
    for name in FUNCTIONS
    for statement in (f"import turnout; turnout.{name}", f"from turnout import {name}")
]

# Each statement runs in a child of one process that has torch: importing that takes longer than all else.
LOADED = """
import json, os, sys, torch
before = set(sys.modules)
for statement in json.loads(sys.argv[1]):
    if os.fork() == 0:
        exec(statement)
        print(json.dumps([statement, sorted(set(sys.modules) - before)]), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, statement
"""


def loaded_by(statement):
    """The modules that a statement loads in a process that has torch, by name."""
    return _all_loaded()[statement]


@functools.cache
def _all_loaded():
    lines = run(LOADED, json.dumps([IMPORT, *FIRST_USES])).splitlines()
    return dict(json.loads(line) for line in lines)


def test_import_takes_less_than_300_ms_beyond_torch(tmp_path):
    """With compiled bytecode, as pip leaves it: the first import makes it.

    Processor time, which other processes do not lengthen much; the bound on modules below is the strict one.
    """
    code = "import torch, time; t = time.process_time(); import turnout; print(time.process_time() - t)"
    bytecode = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    run(code, **bytecode)
    assert statistics.median(float(run(code, **bytecode)) for _ in range(3)) < 0.3


def test_import_loads_no_compiler_no_plotting_no_command_line():
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
    assert not [name for name in loaded_by(IMPORT) if name.startswith(heavy)]


def test_import_loads_only_what_calls_of_ops_need():
    """Each module costs 1 to 2 ms: their number bounds the time of an import on any machine."""
    loaded = loaded_by(IMPORT)
    own = {name.split(".")[1] for name in loaded if name.startswith("turnout.")}
    assert own == {"_version", "asking", "launch", "ops", "routing"}
    assert len([name for name in loaded if name.startswith("turnout")]) <= 124
    packages = {name.split(".")[0] for name in loaded}
    assert packages - sys.stdlib_module_names - {"torch"} == {"turnout"}


@pytest.mark.parametrize(("name", "package"), FUNCTIONS.items())
def test_first_use_of_a_function_on_models_loads_its_code(name, package):
    assert f"turnout.{package}" not in loaded_by(IMPORT)
    assert f"turnout.{package}" in loaded_by(f"import turnout; turnout.{name}")
    assert f"turnout.{package}" in loaded_by(f"from turnout import {name}")


def test_every_public_name_is_listed_before_its_first_use():
    code = "import turnout; print(set(turnout.__all__) | {'models', 'parallel'} <= set(dir(turnout)))"
    assert run(code) == "True"


def test_every_public_name_can_be_imported():
    assert (
        run("from turnout import *; import turnout; print(set(turnout.__all__) <= set(globals()))") == "True"
    )


def test_public_subpackages_need_no_import_of_their_own():
    assert run("import turnout; print(turnout.models.DecodeStream.__name__)") == "DecodeStream"
    assert run("import turnout; print(turnout.parallel.Lockstep.__name__)") == "Lockstep"


def test_an_unknown_name_is_an_attribute_error():
    misspelled = "acelerate"
    with pytest.raises(AttributeError, match="module 'turnout' has no attribute 'acelerate'"):
        getattr(turnout, misspelled)


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
    message = run(code)
    assert {
        "triton": "Triton is not installed, this route needs triton>=3.6",
        "numba": "Numba is not installed, this route needs",
    }[missing] in message

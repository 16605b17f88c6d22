import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# All files but one are of single ops; that of all routes is shared by several runs: processes take turns with
# the tests.
FILES = sorted(path.relative_to(ROOT) for path in ROOT.glob("tests/ops/interpreted*.py"))
ALL_ROUTES = "tests/interpret/interpreted.py"
TESTS = ("test_interpreted", "test_nan_and_inf", "test_outputs", "test_in_place")
RUNS = {
    **{f"{ALL_ROUTES} {name}": (ALL_ROUTES, "-k", name) for name in TESTS},
    **{str(path): (str(path),) for path in FILES},
}


@pytest.mark.parametrize("run", RUNS)
def test_gpu_routes_in_the_interpreter(run):
    """The interpreter must be asked for before Triton is imported, hence the process of its own."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *RUNS[run]]
    done = subprocess.run(
        command,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_every_test_of_the_interpreter_is_run():
    names = {
        line.split("(")[0][4:]
        for line in (ROOT / ALL_ROUTES).read_text().splitlines()
        if line.startswith("def test")
    }
    assert len(names) == 4
    assert all(any(name.startswith(words[-1]) for words in RUNS.values()) for name in names)

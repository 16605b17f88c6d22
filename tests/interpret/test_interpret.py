import os
import subprocess
import sys
from pathlib import Path


def test_gpu_routes_in_the_interpreter():
    """The interpreter must be asked for before Triton is imported, hence the process of its own."""
    root = Path(__file__).parents[2]
    files = sorted(map(str, root.glob("tests/*/interpreted*.py")))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=root, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout

import os
import subprocess
import sys
from pathlib import Path


def test_gpu_routes_in_the_interpreter():
    """The interpreter must be asked for before Triton is imported, hence the process of its own."""
    here = Path(__file__).with_name("interpreted.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(here)]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=here.parents[2], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout

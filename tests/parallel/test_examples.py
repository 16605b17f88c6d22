"""The examples of several ranks run as their first lines say, and find the same bits."""

import os
import subprocess
import sys

import pytest

from tests.parallel.processes import ROOT


def run(tmp_path, *command):
    """What a command printed. HOME is elsewhere: Ray keeps a token there."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT / "src"),
        "HOME": str(tmp_path),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_processes_of_torchrun(tmp_path):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    said = run(tmp_path, *launch, "examples/multi_gpu_decode.py", "--small", "--check")
    assert [f"rank {rank}: the same bits as alone" in said for rank in range(2)] == [True, True], said


def test_actors_of_ray(tmp_path):
    pytest.importorskip("ray")
    example = "examples/multi_gpu_decode_ray.py"
    said = run(tmp_path, sys.executable, example, "--ranks", "2", "--small", "--check")
    assert "decode and encode on 2 ranks" in said
    assert "\nthe same bits as alone" in said, said

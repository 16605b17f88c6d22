"""Launching by address asks the driver for exactly what an ordinary launch does, with the Triton that is
installed.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from turnout.launch import support
from turnout.launch.direct import launcher_kind
from turnout.routing import versions

pytest.importorskip("triton")
HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def test_fast_launch_is_active():
    """A Triton whose launcher is not known costs every call 10 to 20 us: this fails before anybody pays for
    it.
    """
    assert versions.minor(versions.triton()) in support.COMPILED
    assert launcher_kind() is not None
    assert support.fast_launch() is None


@pytest.fixture(scope="module")
def libcuda(tmp_path_factory):
    """A folder with a stand-in for the driver's library."""
    import triton

    folder = tmp_path_factory.mktemp("cuda")
    include = Path(triton.__file__).parent / "backends/nvidia/include"
    library = folder / "libcuda.so.1"
    command = [
        "gcc",
        "-shared",
        "-fPIC",
        "-w",
        "-Wl,-soname,libcuda.so.1",
        f"-I{include}",
        str(HERE / "recording_cuda.c"),
        "-o",
        str(library),
    ]
    subprocess.run(command, check=True)
    (folder / "libcuda.so").symlink_to(library)
    return folder


def test_direct_launches_are_ordinary_launches(libcuda, tmp_path):
    """Grid, block, shared memory, stream, attributes and every byte of every parameter."""
    results = {
        "TRITON_LIBCUDA_PATH": str(libcuda),
        "LD_LIBRARY_PATH": str(libcuda),
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, str(HERE / "launched_directly.py")]
    done = subprocess.run(
        command,
        env={**os.environ, **results, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first, *every = done.stdout.splitlines()
    lines = [line for line in every if not line.startswith("prepared")]
    assert first.startswith("kind iii")
    kernels = {line.split()[1] for line in lines}
    assert {"dot_chunks", "rows", "norm_rope", "update", "implicit_gemm", "wide_kernel"} <= kernels
    prepared = {tuple(line.split()[1:3]): int(line.split()[3]) for line in every if line not in lines}
    assert prepared["norm_rope", "one-pass"] == prepared["conv2d", "implicit-gemm-hopper"] == 1
    assert prepared["group_norm_silu", "rows"] == 2
    assert prepared["upsample_conv2d", "implicit-gemm-hopper"] == 5
    assert [line for line in every if not line.endswith(" same")] == []

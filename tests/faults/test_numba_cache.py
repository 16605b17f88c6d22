"""Compiled kernels on disk: found only if they are right, in a folder of the user's own, never fatal."""

import importlib
import os
import shutil
import stat
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path

import pytest

import turnout
from turnout.ops import numba_cache
from turnout.routing.op import TurnoutWarning

numba = pytest.importorskip("numba")
np = pytest.importorskip("numpy")

posix = pytest.mark.skipif(os.name != "posix", reason="other systems keep others out with access lists")

SHARED = """
from turnout.ops.numba_cache import inlined, kernel

@inlined
def twice(x):
    return x + x

@kernel
def add(x, y):
    y += twice(x[0])
    return y
"""
KERNELS = """
from shared_kernels import add
from turnout.ops.numba_cache import kernel

@kernel(fastmath={"nsz"})
def total(x, first, last):
    y = x[0] * 0
    for i in range(first, last):
        y = add(x[i:], y)
    return y
"""


class Package:
    """Two files of kernels that count as turnout's. `process` is what a new process would find."""

    def __init__(self, root, monkeypatch):
        self.root, self.folder = root, root / "cache" / "numba"
        self.shared, self.kernels = root / "shared_kernels.py", root / "own_kernels.py"
        self.shared.write_text(SHARED)
        self.kernels.write_text(KERNELS)
        self.monkeypatch = monkeypatch
        monkeypatch.syspath_prepend(str(root))
        own = numba_cache._module
        files = {"shared_kernels.kernel": None, "shared_kernels": self.shared}
        monkeypatch.setattr(numba_cache, "_module", lambda name: files.get(name) or own(name))
        monkeypatch.setattr(numba_cache, "folder", lambda: self.folder)
        monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a change of the same size in the same second

    def process(self, *dtypes):
        """Results for the dtypes and how many functions were compiled, after a fresh import."""
        self.monkeypatch.setattr(numba_cache, "_given_up", set())
        numba_cache._source.cache_clear()
        importlib.invalidate_caches()
        for name in ("shared_kernels", "own_kernels"):
            sys.modules.pop(name, None)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            module = importlib.import_module("own_kernels")
            arrays = [np.arange(1, 5).astype(dtype) for dtype in dtypes or (np.float32,)]
            results = [float(module.total(array, 0, 4)) for array in arrays]
        self.warned = [str(warning.message) for warning in warned if warning.category is TurnoutWarning]
        dispatchers = (module.total, importlib.import_module("shared_kernels").add)
        self.found = sum(sum(dispatcher.stats.cache_hits.values()) for dispatcher in dispatchers)
        return results, sum(sum(dispatcher.stats.cache_misses.values()) for dispatcher in dispatchers)

    def files(self):
        return sorted(self.folder.iterdir())


@pytest.fixture
def package(tmp_path, monkeypatch):
    yield Package(tmp_path, monkeypatch)
    for name in ("shared_kernels", "own_kernels"):
        sys.modules.pop(name, None)
    numba_cache._source.cache_clear()


def test_a_second_process_compiles_nothing(package):
    assert package.process(np.float32, np.int16) == ([20.0, 20.0], 4)
    assert package.process(np.float32, np.int16) == ([20.0, 20.0], 0)
    assert package.found == 2  # `add` is part of what was kept of `total`
    assert not package.warned
    assert not [file for file in package.files() if file.suffix == ".part"]


def test_a_change_in_a_shared_file_is_noticed(package):
    package.process()
    package.shared.write_text(SHARED.replace("x + x", "x - x"))
    assert package.process() == ([0.0], 2)
    package.shared.write_text(SHARED)
    assert package.process() == ([20.0], 0)  # what was compiled before the change is right again


def test_a_change_in_the_kernels_own_file_is_noticed(package):
    package.process()
    package.kernels.write_text(KERNELS.replace("x[0] * 0", "x[0] * 1"))
    assert package.process() == ([21.0], 1)


def test_other_versions_and_settings_are_other_entries(package, monkeypatch):
    package.process()
    environment = numba_cache._environment()
    for i in range(len(environment)):
        changed = (*environment[:i], "another", *environment[i + 1 :])
        monkeypatch.setattr(numba_cache, "_environment", lambda changed=changed: changed)
        assert package.process() == ([20.0], 2), environment[i]


def test_what_is_changed_after_the_import_does_not_count(package):
    """The code of a process is what it imported, so it is kept under that source."""
    package.process()
    numba_cache._source.cache_clear()
    sys.modules.pop("own_kernels")
    module = importlib.import_module("own_kernels")
    package.kernels.write_text(KERNELS.replace("x[0] * 0", "x[0] * 1"))
    assert module.total(np.arange(1, 5).astype(np.float64), 0, 4) == 20
    assert package.process(np.float64) == ([21.0], 1)


@posix
def test_the_folder_is_the_users_own(package):
    before = os.umask(0)
    try:
        package.process()
    finally:
        os.umask(before)
    assert stat.S_IMODE(package.folder.stat().st_mode) == 0o700
    assert [stat.S_IMODE(file.stat().st_mode) for file in package.files()] == [0o600] * 2


@posix
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o720, 0o1777])
@pytest.mark.parametrize("linked", [False, True])
def test_a_folder_that_others_may_write_is_refused(package, mode, linked):
    package.process()
    if linked:
        package.folder.rename(package.root / "elsewhere")
        package.folder.symlink_to(package.root / "elsewhere")
    package.folder.chmod(mode)
    before = package.files()
    assert package.process(np.float32, np.float64, np.int16) == ([20.0] * 3, 6)
    assert package.files() == before
    (message,) = package.warned
    assert f"{package.folder} may be written by others (mode {mode:04o})" in message
    assert "Set TURNOUT_CACHE_DIR to a folder that only you can write" in message
    package.folder.chmod(0o755)
    assert package.process() == ([20.0], 0)  # to be read by others is no harm


@posix
@pytest.mark.skipif(getattr(os, "geteuid", int)() != 0, reason="only root can give a folder away")
def test_a_folder_of_someone_else_is_refused(package):
    package.process()
    os.chown(package.folder, 12345, 12345)
    assert package.process(np.float32, np.int16) == ([20.0] * 2, 4)
    (message,) = package.warned
    assert "belongs to user 12345, and you are user 0" in message


@posix
@pytest.mark.parametrize("harm", ["writable", "link", "fifo", "folder", "of another"])
def test_a_file_that_cannot_be_trusted_is_a_miss(package, harm):
    package.process()
    kept = package.root / "kept"
    for file in package.files():
        if harm == "writable":
            file.chmod(0o666)
        elif harm == "of another":
            if os.geteuid() != 0:
                pytest.skip("only root can give a file away")
            os.chown(file, 12345, 12345)
        else:
            file.rename(kept)
            if harm == "link":
                file.symlink_to(kept)
            elif harm == "fifo":
                os.mkfifo(file)
            else:
                file.mkdir()
    assert package.process() == ([20.0], 2)


@pytest.mark.parametrize("harm", ["empty", "cut", "garbage", "one bit", "swapped", "another pickle"])
def test_a_broken_file_is_a_miss_and_replaced(package, harm):
    package.process()
    first, second = package.files()
    contents = {file: file.read_bytes() for file in (first, second)}
    for file, other in ((first, second), (second, first)):
        content = contents[file]
        middle = len(content) // 2
        file.write_bytes(
            {
                "empty": b"",
                "cut": content[:middle],
                "garbage": os.urandom(5000),
                "one bit": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
                "swapped": contents[other],
                "another pickle": b"\x80\x04N.",
            }[harm]
        )
    assert package.process() == ([20.0], 2)
    assert not package.warned
    assert package.process() == ([20.0], 0)


@pytest.mark.parametrize("place", ["file", "full"])
def test_a_folder_that_cannot_be_written(package, place, monkeypatch):
    """One warning and one attempt, however many types there are; what can be read is still found."""
    attempts = []
    if place == "file":
        package.folder.parent.mkdir()
        package.folder.write_text("not a folder")
    else:
        package.process()

        def write(*args):
            attempts.append(args)
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(numba_cache, "_write", write)
    results, compiled = package.process(np.float32, np.float64, np.int16, np.int32)
    assert results == [20.0] * 4
    assert compiled == (8 if place == "file" else 6)
    assert len(package.warned) == 1
    assert len(attempts) == (place == "full")
    assert ("is not a folder" if place == "file" else "No space left on device") in package.warned[0]


def test_what_was_not_used_for_a_month_is_deleted(package):
    package.process(np.float32)
    kept = package.files()
    month = time.time() - 31 * 86400
    for file in kept:
        os.utime(file, (month, month))
    abandoned = package.folder / ".abandoned.part"
    abandoned.write_text("half")
    os.utime(abandoned, (month, month))
    numba_cache._prune.cache_clear()
    package.process(np.float32, np.int16)  # uses one of the old ones, and keeps two new ones
    assert not abandoned.exists()
    (used,) = [file for file in kept if file.exists()]
    assert used.stat().st_mtime > month + 86400
    assert package.process(np.float32, np.int16) == ([20.0, 20.0], 0)


def test_installed_numba_has_the_private_names_in_use():
    assert numba_cache.missing_from_numba() is None


def test_a_numba_that_has_changed_still_compiles(package, monkeypatch):
    package.process()
    monkeypatch.setattr(numba_cache, "missing_from_numba", lambda: "CompileResult._reduce")
    assert package.process(np.float32, np.int16) == ([20.0] * 2, 4)
    (message,) = package.warned
    assert "this version of Numba has no CompileResult._reduce" in message


def test_sources_of_a_kernel():
    ops = Path(turnout.__file__).parent / "ops"
    reached = [name for name, _ in numba_cache.sources(ops / "convolution" / "cpu" / "kernels.py")]
    convolution = ["ops/convolution/cpu/kernels.py", "ops/convolution/cpu/product_kernels.py"]
    expected = ["ops/common_cpu_kernels.py", *convolution, "ops/numba_cache.py"]
    assert [name.replace(os.sep, "/") for name in reached] == expected


def test_one_home_for_the_options():
    """Every kernel is declared with `kernel` or `inlined`."""
    files = Path(turnout.__file__).parent.rglob("*.py")
    assert [file.name for file in files if "njit" in file.read_text()] == ["numba_cache.py"]


# With real processes


PROGRAM = """
import sys, warnings
import numpy as np
import torch
import turnout
from turnout.ops import numba_cache
assert "numba" not in sys.modules, "imported too early"

with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    with turnout.pin(dot="cpu-chunks"):
        for dtype in sys.argv[1].split(","):
            x = torch.ones(1000, dtype=getattr(torch, dtype))
            print(float(turnout.dot(x, x)))
from turnout.ops.dot import cpu_kernels
print("compiled", sum(cpu_kernels.sum_chunks.stats.cache_misses.values()))
print("warned", sum("compiled CPU kernels are not kept" in str(warning.message) for warning in warned))
"""


@pytest.fixture
def start(tmp_path):
    """Starts a program with a cache of its own and a copy of the package, which can be changed."""
    source, without = Path(turnout.__file__).parent, shutil.ignore_patterns("__pycache__")
    shutil.copytree(source, tmp_path / "turnout", ignore=without)
    own = {"PYTHONPATH": str(tmp_path), "TURNOUT_CACHE_DIR": str(tmp_path / "cache")}

    def start(dtypes, **environment):
        command = [sys.executable, "-c", textwrap.dedent(PROGRAM), dtypes]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, env={**os.environ, **own, **environment}, **pipes)

    start.package = tmp_path / "turnout"
    return start


def ended(process):
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    return out.splitlines()


def test_processes_change_and_warm_start(start):
    halves = "float32,bfloat16"
    assert ended(start(halves)) == ["1000.0", "1000.0", "compiled 2", "warned 0"]
    assert ended(start(halves)) == ["1000.0", "1000.0", "compiled 0", "warned 0"]
    shared = start.package / "ops" / "common_cpu_kernels.py"
    text = shared.read_text()
    old = "_of(_SINGLE, bits.type))\n    return bits\n"
    assert old in text
    shared.write_text(text.replace(old, old.replace("return bits", "return builder.fadd(bits, bits)")))
    assert ended(start("float32")) == ["4000.0", "compiled 1", "warned 0"]


def test_processes_at_once(start):
    """Some compile the same, some other types of the same kernel, all into one folder."""
    kinds = ("float32,float16", "float16,float32", "bfloat16,float32", "float32")
    processes = [start(dtypes) for dtypes in kinds]
    for process, dtypes in zip(processes, kinds, strict=True):
        result = ended(process)
        assert result[: dtypes.count(",") + 1] == ["1000.0"] * (dtypes.count(",") + 1)
        assert result[-1] == "warned 0"
    assert ended(start("float32,float16,bfloat16"))[-2:] == ["compiled 0", "warned 0"]


def test_a_process_without_a_folder(start, tmp_path):
    (tmp_path / "file").write_text("")
    process = start("float32,float16,bfloat16", TURNOUT_CACHE_DIR=str(tmp_path / "file" / "below"))
    assert ended(process) == ["1000.0"] * 3 + ["compiled 3", "warned 1"]

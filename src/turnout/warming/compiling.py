"""Hand launches to a process that compiles them, and stop it when nobody waits any more."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from turnout.launch.ahead import Spec
from turnout.routing.device import Device
from turnout.warming.worker import Answer, Request

# The parent's own path: a user's program may have changed it, and its main module is not to be imported
# again. Whatever prints when it is imported prints to standard error: the answers go to standard output.
_START = """
import os, sys
sys.path[:] = sys.argv[1:]
answers = os.dup(1)
os.dup2(2, 1)
from turnout.warming.worker import main
main(answers)
"""
# bytes: what a compilation may take at most (ptxas with Hopper's convolutions takes a third of it)
_MEMORY = 2**30
_PATIENCE = 5.0  # seconds
_LONGEST_WAIT = 600.0  # seconds, for another process of this user to have compiled
_one_thread = threading.RLock()


def most_jobs() -> int:
    """As many processes as this one may use cores, and as fit into the memory that is free."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        return max(1, min(cores, _free_memory() // _MEMORY))
    return cores


def _free_memory() -> int:
    """In bytes, what Linux keeps of files included: it gives that up. Others are asked for what is unused."""
    with contextlib.suppress(OSError, ValueError, StopIteration), open("/proc/meminfo") as lines:
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class Compiler:
    """A process that compiles. It imports torch and Triton as soon as it is made, while launches are planned.

    Left, it is gone, and so are those that it has forked: also by Ctrl-C, and where this process is killed.
    """

    def __init__(self) -> None:
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115  closed by close()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        if "triton" in sys.modules:  # the folder may have been set in the program
            environment["TRITON_CACHE_DIR"] = sys.modules["triton"].knobs.cache.dir
        folders = [os.fspath(each) for each in sys.path if each and isinstance(each, str | os.PathLike)]
        try:
            folders.append(os.getcwd())
            begin_in = None
        except OSError:  # the folder is gone, and Python would not start there
            begin_in = tempfile.gettempdir()
        command = [sys.executable, "-c", _START, *folders]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=environment,
            cwd=begin_in,
            start_new_session=True,
        )

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, *failure: Any) -> None:
        self.close()

    def close(self) -> None:
        """End the process, and all that it has begun."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        if self.process.poll() is None and hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait(_PATIENCE)
        self.process.stdout.close()
        self.errors.close()

    def answers(
        self, specs: list[Spec], device: Device, *, jobs: int, fewest: int | None = 1
    ) -> Iterator[Answer | int]:
        """What became of each kernel, and how many of them are missing, told as soon as that is known.

        fewest: how many must be missing for any to be compiled; None: only look.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            pickle.dump(Request(specs, device, jobs, fewest), self.process.stdin)
            self.process.stdin.flush()
            while (answer := pickle.load(self.process.stdout)) is not None:
                yield answer
        except (EOFError, OSError) as failure:
            self.process.wait(_PATIENCE)
            self.errors.seek(0)
            lines = self.errors.read().decode(errors="replace").strip().splitlines()
            last = lines[-1] if lines else f"status {self.process.returncode}"
            raise RuntimeError(f"the process that compiles has ended: {last}") from failure


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """While this is entered, no other thread is inside, and no other process of this user on this machine.

    So the ranks of a program do not compile the same kernels at once, each on all cores: what the first has
    compiled, the others find. Where there is nothing to lock, or after a long wait, it is entered all the
    same.
    """
    with _one_thread, contextlib.ExitStack() as entered:
        with contextlib.suppress(OSError, ImportError):
            entered.enter_context(_locked(Path(tempfile.gettempdir()) / f"turnout-warm-{os.getuid()}.lock"))
        yield


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    import fcntl  # not on every system

    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        end = time.monotonic() + _LONGEST_WAIT
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)  # so that Ctrl-C is heard
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # a process that was forked meanwhile has the file open too
    finally:
        os.close(file)


def can_compile() -> bool:
    """Whether another Python like this one can be started: not from within a program that embeds it."""
    return bool(sys.executable) and Path(sys.executable).is_file()

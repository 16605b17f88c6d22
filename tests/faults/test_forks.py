"""A process that forks while other threads of it choose, compile or import: the child can call ops.

Servers do that: a thread runs a model, and another one starts the workers of a DataLoader.
"""

import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")

BEGINNING = """
import os, signal, threading, time
import torch, turnout

torch.set_num_threads(1)

def in_a_child(call):
    "Fork, call a function in the child, and raise unless it returns within half a minute."
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        call()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""

# Each lock is held by another thread at the moment of the fork, and for a while after it was asked for.
HOLDING = """
held, done = threading.Event(), threading.Event()

def hold():
    with {lock}:
        held.set()
        done.wait(0.3)

thread = threading.Thread(target=hold)
thread.start()
held.wait()
in_a_child({call})
done.set()
thread.join()
"""

LOCKS = {
    "dispatch caches": (
        "from turnout.routing.dispatch_cache import _lock",
        "_lock",
        "lambda: turnout.dot(torch.ones(77), torch.ones(77))",
    ),
    "settings": (
        "from turnout.routing import settings",
        "settings._lock",
        "lambda: turnout.numerics('exact')",
    ),
    "hashes of kernels": (
        "from turnout.routing.code_hash import _lock, code_hash",
        "_lock",
        "lambda: code_hash('textwrap:dedent')",
    ),
    "failures": (
        "from turnout.routing import failures",
        "failures._lock",
        "failures.FailedRoutes().clear",
    ),
}


def run(code, cache):
    environment = {**os.environ, "TURNOUT_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", BEGINNING + code], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("guarded", LOCKS)
def test_a_lock_that_another_thread_holds_is_free_in_the_child(guarded, tmp_path):
    imports, lock, call = LOCKS[guarded]
    run(f"{imports}\n{HOLDING.format(lock=lock, call=call)}", tmp_path)


def test_a_child_compiles_kernels_though_another_thread_compiled_at_the_fork(tmp_path):
    pytest.importorskip("numba")
    run(
        textwrap.dedent("""
            def sums(length):
                a = torch.ones(1, length)
                with turnout.pin(matmul="cpu-chunks"):
                    return turnout.matmul(a, a.T)

            from numba.core.compiler_lock import global_compiler_lock
            compiling, compile = threading.Event(), global_compiler_lock.acquire

            def acquire():
                compile()
                compiling.set()

            global_compiler_lock.acquire = acquire
            thread = threading.Thread(target=sums, args=(2**16,))
            thread.start()
            compiling.wait()
            in_a_child(lambda: sums(2**17))
            thread.join()
        """),
        tmp_path,
    )

"""Every test starts with no entries of this machine, no failures remembered and no settings."""

import contextlib
import gc
import os
import tempfile
import time
from pathlib import Path

import pytest
import torch

import turnout  # noqa: F401  (declares the ops)
from tests.float32 import left_as_it_was
from tests.gpu import order
from turnout.ops import numba_cache
from turnout.routing import failures, settings
from turnout.routing.op import OPS, forget_choices
from turnout.routing.table import forget_tables

# Decided before tests get cache folders of their own: kernels are then compiled once, not in every run.
numba_cache.folder()

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.interpret.masks import keep_comparisons_boolean

    keep_comparisons_boolean()


@pytest.fixture(autouse=True)
def _clean(tmp_path, monkeypatch):
    monkeypatch.setenv("TURNOUT_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("TURNOUT_PIN", "TURNOUT_NUMERICS"):
        monkeypatch.delenv(name, raising=False)
    forget_everything()
    with left_as_it_was():
        yield
    forget_everything()


@pytest.fixture
def poison():
    """Fresh memory is full of NaN: what a kernel forgets to write shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def forget_everything():
    settings.from_environment.cache_clear()
    forget_choices()
    forget_tables()
    failures.forget_problems()
    for op in OPS.values():
        op.failed.clear()


@pytest.fixture(autouse=True)
def _gives_memory_back(request):
    """Several processes may test on one card (`pytest -n`), and torch keeps what is freed."""
    yield
    on_gpu = request.node.get_closest_marker("gpu") and torch.cuda.is_available()
    if on_gpu and torch.cuda.memory_reserved() > 2**28:
        gc.collect()
        torch.cuda.empty_cache()


NO_MEMORY = (
    "out of memory",
    "ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR",
)  # the last is what cuDNN says of memory it could not get


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """A GPU test for which there was no memory runs once more, when no other such test does, and then it
    counts.
    """
    try:
        return (yield)
    except Exception as failure:
        lacks_memory = any(text in str(failure) for text in NO_MEMORY)
        if pyfuncitem.get_closest_marker("gpu") is None or not lacks_memory:
            raise
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    with alone_among_large():
        pyfuncitem.obj(**arguments)
    return True


@contextlib.contextmanager
def alone_among_large():
    """While one test holds this, others that had no memory wait; small ones go on."""
    import fcntl

    with (Path(tempfile.gettempdir()) / "turnout-large-gpu-test.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        gc.collect()
        torch.cuda.empty_cache()
        end = time.monotonic() + 60
        while torch.cuda.mem_get_info()[0] < 0.7 * torch.cuda.mem_get_info()[1] and time.monotonic() < end:
            time.sleep(0.2)
        yield
        torch.cuda.empty_cache()


def pytest_collection_modifyitems(config, items):
    """GPU tests have an order of their own; on a machine without a GPU they are an error, not a skip."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]  # keywords have names of folders too
    if on_gpu:
        processes = getattr(config, "workerinput", {}).get("workercount", 1)
        others = [item for item in items if not item.get_closest_marker("gpu")]
        items[:] = others + order.arranged(on_gpu, processes, order.stored_seconds())
        fixture = "_attention_settled" if torch.cuda.is_available() else "_gpu_missing"
        for item in on_gpu:
            item.fixturenames = [fixture, *item.fixturenames]  # other cases of a test share its list


@pytest.fixture(scope="session")
def _attention_settled():
    """At its first attention in a process torch may put cuDNN's before the others, as on an H200: here, and
    not in the middle of whichever test comes first.
    """
    x = torch.zeros(1, 1, 1, 8, device="cuda", dtype=torch.float16)
    torch.nn.functional.scaled_dot_product_attention(x, x, x)


def pytest_collection_finish():
    """What is here before the first test stays: no collection of garbage walks it again.

    Many tests collect garbage, and modules and tests are some millions of objects.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def _gpu_missing():
    pytest.fail("this machine has no CUDA GPU; run without -m gpu")

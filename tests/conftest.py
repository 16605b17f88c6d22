"""Every test starts with no entries of this machine, no failures remembered and no settings."""

import pytest
import torch

import turnout  # noqa: F401  (declares the ops)
from turnout.routing import settings
from turnout.routing.op import OPS, forget_choices
from turnout.routing.table import forget_tables


@pytest.fixture(autouse=True)
def _clean(tmp_path, monkeypatch):
    monkeypatch.setenv("TURNOUT_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("TURNOUT_PIN", "TURNOUT_NUMERICS"):
        monkeypatch.delenv(name, raising=False)
    forget_everything()
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
    for op in OPS.values():
        op.failed.clear()


def pytest_collection_modifyitems(items):
    """GPU tests asked for on a machine without one are an error, not a skip."""
    if any("gpu" in item.keywords for item in items) and not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.usefixtures("_gpu_missing"))


@pytest.fixture
def _gpu_missing():
    pytest.fail("this machine has no CUDA GPU; run without -m gpu")

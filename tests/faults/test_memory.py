"""Memory stays flat, whatever changes from call to call.

`TURNOUT_CALLS=100000 pytest -s tests/faults/test_memory.py` (`make fault-test`) makes so many calls with new
shapes and prints what Python and the process have along the way.
"""

import gc
import json
import os
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn

import turnout
from turnout.models import patch
from turnout.ops import numba_cache
from turnout.routing import settings

CALLS = int(os.environ.get("TURNOUT_CALLS", "6000"))
SETTLED = min(10_000, CALLS * 3 // 4)  # calls after which all that is bounded is full
MOST_MIB = 5.0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["rss", "traced"])
def test_calls_with_ever_new_shapes(kind):
    compiled = str(numba_cache.folder().parent)  # or else the kernels would be compiled anew
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TURNOUT_CACHE_DIR": compiled}
    command = [sys.executable, "-m", "tests.faults.many_shapes", str(CALLS), kind]
    printed = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    lines = [json.loads(line) for line in printed.splitlines()]
    first, *later = [line for line in lines if line["calls"] >= SETTLED]
    print(f"\n{kind}: {first}, most {max(line['mib'] for line in later)}, last {later[-1]}")
    assert later[-1]["calls"] == CALLS
    for line in later:
        assert line["mib"] - first["mib"] <= MOST_MIB, f"{kind}: {first} became {line}"


def test_classes_of_patched_instances_go_with_them():
    gc.collect()
    before, seen = len(patch._classes), []
    for _ in range(50):

        class Layer(nn.Conv2d):
            pass

        layer = Layer(3, 4, 3)
        with turnout.accelerated(layer), torch.no_grad():
            assert patch.patched(layer) is not None
            layer(torch.ones(1, 3, 8, 8))
        seen.append(weakref.ref(Layer))
        del layer, Layer
    gc.collect()  # the classes of the patched instances
    gc.collect()  # those that were patched
    assert len(patch._classes) <= before
    assert not any(reference() for reference in seen)


def test_two_instances_have_one_class():
    first, second = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 8, 3)
    with turnout.accelerated(first), turnout.accelerated(second):
        assert type(first) is type(second) is not nn.Conv2d


def test_settings_are_bounded(monkeypatch):
    monkeypatch.setattr(settings, "_MOST_INTERNED", 4)
    for name in ("dot", "inner", "matmul", "conv2d", "conv3d", "attention", "norm_rope"):
        with turnout.pin(**{name: "reference"}), turnout.pin(selective_scan="reference"):
            assert turnout.dot(torch.ones(3), torch.ones(3)).item() == 3
            assert len(settings._interned) <= 4

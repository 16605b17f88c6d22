"""On a CPU a stand-in for CUDA graphs freezes what runs, op by op, with the memory it reads
(`tests.models.played.Recorded`). On a GPU the same tests run with CUDA graphs.
"""

import sys
import warnings

import pytest
import torch

import turnout
from tests.models.played import Recorded, play_graphs
from tests.replays.graphed import Graphed, Small
from turnout.models import replayed_arguments
from turnout.routing.precision import strict_float32


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    """Tensors are tiny here: a second thread only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """Where graphs are: played on a CPU, real on a GPU."""
    if request.param == "cpu":
        play_graphs(monkeypatch, Recorded)
        yield torch.device("cpu")
    else:  # by default cuDNN takes 10 bits of each factor, and results are compared to 1e-4
        with strict_float32(("cuda", "conv")):
            yield torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def graphed(device):
    return Graphed(device)


@pytest.fixture(params=["carried", "in place"])
def carried(request, monkeypatch):
    """Whether the caches of a call are copied into graphs, or are read and written where they lie."""
    if request.param == "in place":
        monkeypatch.setattr(replayed_arguments, "MOST_CARRIED", 0)
    return request.param == "carried"


@pytest.fixture
def small(device, monkeypatch):
    """Makes a known model out of a function of it, x and scale."""
    monkeypatch.setattr(
        sys.modules["turnout.models.accelerate"], "WHOLE", {f"{Small.__module__}.{Small.__qualname__}"}
    )

    def make(body):
        torch.manual_seed(0)
        model = Small(body).to(device).eval()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            report = turnout.accelerate(model, graph=True)
        return model, report.graphs[""], torch.ones(2, 4, device=device)

    return make

import pytest
import torch

from tests.race.races import CPU
from turnout.race.run import race


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    """Tensors are tiny here: a second thread only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def wan_race():
    """A race of the tiny Wan VAE on the CPU."""
    return race("wan-vae", "tiny", torch.bfloat16, CPU, rounds=3, seconds=1)

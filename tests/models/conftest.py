import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    """Tensors are tiny here: a second thread only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

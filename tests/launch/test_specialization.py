"""Kernels that are compiled once for all values of some numbers."""

import pickle

import pytest
import torch

from turnout.launch import Launch, unspecialized
from turnout.launch.ahead import launch_of, look_up, specs_of
from turnout.routing.device import Device

pytest.importorskip("triton")
H200 = Device.named("h200")


@pytest.fixture
def kernel():
    from turnout.ops.convolution.gpu.kernels import transpose

    return transpose


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """How many times a kernel would be compiled for these numbers of pixels, by a process that is told."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def count(kernel, *pixels):
        tensors = (torch.empty(64, device="meta"), torch.empty(64, device="meta"))
        constants = {"LAST": True, "BC": 64, "BP": 64}
        launches = [Launch(kernel, 1, tensors, (64, n, 0, 1, 64, 0, 64, 1), constants, 4) for n in pixels]
        specs = pickle.loads(pickle.dumps(specs_of(launches)))
        return len({look_up(launch_of(spec), H200).key for spec in specs})

    return count


def test_numbers_that_are_unspecialized_are_compiled_once(kernel, compiled):
    assert compiled(kernel, 1, 3, 16, 33) == 3
    assert compiled(unspecialized(kernel, "pixels"), 1, 3, 16, 33) == 1
    assert compiled(kernel, 1, 3, 16, 33) == 3


def test_a_number_of_64_bits_is_another_one(kernel, compiled):
    assert compiled(unspecialized(kernel, "pixels"), 3, 2**31) == 2


def test_kernels_are_made_once(kernel):
    assert unspecialized(kernel, "pixels") is unspecialized(kernel, "pixels")
    assert unspecialized(kernel) is kernel


def test_a_name_that_is_no_number_is_an_error(kernel):
    with pytest.raises(ValueError, match="kernel transpose has no number 'LAST', only x, out, channels, pix"):
        unspecialized(kernel, "LAST")

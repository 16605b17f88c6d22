"""The shim: the package's own names and signatures over our ops."""

import pytest
import torch

from turnout.compat import causal_conv1d as shim
from turnout.ops.causal_conv1d import causal_conv1d
from turnout.ops.causal_conv1d_update import causal_conv1d_update


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def test_shim_has_the_package_semantics():
    x, weight, bias = torch.randn(2, 4, 9), torch.randn(4, 3), torch.randn(4)
    expected = causal_conv1d(x, weight, bias, activation="silu")
    assert torch.equal(shim.causal_conv1d_fn(x, weight, bias, None, None, False, None, "swish"), expected)
    room = torch.empty(2, 2, 4).transpose(1, 2)
    y, final = shim.causal_conv1d_fn(x, weight, bias, return_final_states=True, final_states_out=room, activation="silu")
    assert torch.equal(y, expected)
    assert final is room
    assert torch.equal(room, x[..., -2:])
    states = [torch.randn(2, 4, 3)] * 2
    states[1] = states[0].clone()
    y = shim.causal_conv1d_update(x[..., 0], states[0], weight, bias, "silu", None, None)
    assert torch.equal(y, causal_conv1d_update(x[..., 0], states[1], weight, bias, activation="silu"))
    assert torch.equal(*states)
    with pytest.raises(NotImplementedError, match="'gelu'"):
        shim.causal_conv1d_fn(x, weight, activation="gelu")
    with pytest.raises(NotImplementedError, match="'gelu'"):
        shim.causal_conv1d_update(x[..., 0], states[0], weight, activation="gelu")


def test_shim_varlen_states():
    x, ends = torch.randn(12, 5), torch.tensor([0, 1, 1, 8, 12], dtype=torch.int32)
    for size in (1, 3, 6):
        states = shim.causal_conv1d_varlen_states(x, ends, size)
        assert states.shape == (4, 5, size)
        for n, (a, b) in enumerate(zip(ends.tolist(), ends.tolist()[1:], strict=False)):
            expected = torch.cat([torch.zeros(size, 5), x[a:b]])[-size:].T
            assert torch.equal(states[n], expected)
    with pytest.raises(ValueError, match=r"x is \[5\], it needs"):
        shim.causal_conv1d_varlen_states(x[0], ends, 3)

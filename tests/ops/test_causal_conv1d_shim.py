"""The shim: the package's own names and signatures over our ops."""

import pytest
import torch

import turnout
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
    y, final = shim.causal_conv1d_fn(
        x, weight, bias, return_final_states=True, final_states_out=room, activation="silu"
    )
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


@pytest.mark.parametrize(
    ("route", "layout"),
    [
        ("cpu-rows", "channel-first"),
        ("cpu-cols", "channel-last"),
        ("reference", "channel-first"),
        ("reference", "channel-last"),
    ],
)
def test_output_and_final_states_are_written_in_place_as_the_package_allows(route, layout):
    """Its own tests add to the output while gradients are recorded, with states and without."""
    x, weight, bias, before = torch.randn(2, 4, 9), torch.randn(4, 3), torch.randn(4), torch.randn(2, 2, 4)
    if layout == "channel-last":
        x = x.transpose(1, 2).contiguous().transpose(1, 2)

    def gradients(in_place):
        arguments = [t.clone().requires_grad_() for t in (x, weight, bias, before)]
        with turnout.pin(causal_conv1d=route):
            y, final = shim.causal_conv1d_fn(
                *arguments[:3],
                initial_states=arguments[3].transpose(1, 2),
                return_final_states=True,
                activation="silu",
            )
        was = final.detach().clone()
        if in_place:
            y += 1
            y.mul_(2)
            assert torch.equal(final, was)
            final += y[..., :2]
        else:
            y = (y + 1) * 2
            final = final + y[..., :2]
        (y.square().sum() + final.square().sum()).backward()
        return [y, final, *[t.grad for t in arguments]]

    for actual, expected in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(actual, expected)


def test_shim_gives_the_states_of_each_sequence():
    x, ends = torch.randn(12, 5), torch.tensor([0, 1, 1, 8, 12], dtype=torch.int32)
    for size in (1, 3, 6):
        states = shim.causal_conv1d_varlen_states(x, ends, size)
        assert states.shape == (4, 5, size)
        for n, (a, b) in enumerate(zip(ends.tolist(), ends.tolist()[1:], strict=False)):
            expected = torch.cat([torch.zeros(size, 5), x[a:b]])[-size:].T
            assert torch.equal(states[n], expected)
    with pytest.raises(ValueError, match=r"x is \[5\], it needs"):
        shim.causal_conv1d_varlen_states(x[0], ends, 3)

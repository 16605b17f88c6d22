"""add_repeated: the bits of diffusers' shortcut, gradients, layouts, errors."""

import pytest
import torch
from torch import nn

import turnout


@pytest.mark.parametrize("first_chunk", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("before", "after"), [(8, 8), (16, 8), (8, 4), (8, 2)])
@pytest.mark.parametrize("in_time", [1, 2])
def test_equals_diffusers(first_chunk, dtype, before, after, in_time):
    from diffusers.models.autoencoders.autoencoder_kl_wan import DupUp3D

    from turnout.models.wan import _add_repeated

    shortcut: nn.Module = DupUp3D(before, after, in_time, 2)
    x = torch.randn(2, before, 1 if first_chunk else 3, 5, 3).to(dtype)
    y = torch.randn(2, after, 1 if first_chunk else 3 * in_time, 10, 6).to(dtype)
    for layout in (torch.contiguous_format, torch.channels_last_3d):
        x, y = x.contiguous(memory_format=layout), y.contiguous(memory_format=layout)
        actual = _add_repeated(y, x, shortcut, first_chunk)
        assert torch.equal(actual, y + shortcut(x, first_chunk=first_chunk))
        assert actual.stride() == y.stride()


def test_gradients_are_those_of_the_reference():
    """In float64 against differences."""
    x = torch.randn(1, 4, 1, 1, 2, dtype=torch.float64, requires_grad=True)
    y = torch.randn(1, 2, 1, 2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda y, x: turnout.add_repeated(y, x, times=(2, 2, 2)), (y, x))


X = torch.zeros(1, 4, 1, 2, 3)


@pytest.mark.parametrize(
    ("y", "times", "error"),
    [
        ((1, 4, 2, 4, 6), (2, 2), "three whole numbers"),
        ((1, 4, 2, 4, 6), (2, 2, 0), "three whole numbers"),
        ((1, 4, 3, 4, 6), (2, 2, 2), "as many of each of x's"),
        ((1, 4, 2, 4, 3), (2, 2, 2), "as many of each of x's"),
        ((1, 3, 2, 4, 6), (2, 2, 2), "of x's channels"),
        ((4, 2, 4, 6), (2, 2, 2), "batch, channels, frames"),
    ],
)
def test_shapes_that_do_not_fit_are_errors(y, times, error):
    with pytest.raises(ValueError, match=error):
        turnout.add_repeated(torch.zeros(y), X, times=times)


def test_other_dtypes_do_not_fit():
    with pytest.raises(ValueError, match="of one floating-point dtype"):
        turnout.add_repeated(torch.zeros(1, 4, 2, 4, 6, dtype=torch.float64), X, times=(2, 2, 2))


def test_a_wan_decoder_adds_its_shortcuts_by_it():
    """Two of its blocks double frames too, one does not."""
    from tests.models.test_models import counted_calls
    from tests.models.zoo import ZOO, made

    model = made("wan22")
    with torch.no_grad(), turnout.accelerated(model), counted_calls() as count:
        ZOO["wan22"][1](model)
    assert count["add_repeated"] == 3 + 4 + 4  # the last block sees two frames at a time

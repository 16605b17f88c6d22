"""Calls that are not captured run as without graphs, and what they write or return is the caller's."""

import itertools
import random
import types
import warnings

import numpy
import pytest
import torch
import torch.nn.functional as F

import turnout

pytestmark = pytest.mark.filterwarnings("ignore:turnout.accelerate patched nothing")


def test_inputs_that_overlap_themselves_are_not_captured(graphed):
    long = torch.randn(2, 200, device=graphed.device)
    for _ in range(3):
        assert not graphed.check(hidden_states=long.as_strided((2, 12, 4), (200, 2, 1)))
    assert "overlaps itself" in graphed.report.details()


def test_random_numbers_are_not_captured(small):
    model, replays, x = small(lambda model, x, scale: x + torch.rand_like(x))
    result = [model(x) for _ in range(4)]
    assert not any(torch.equal(result[0], other) for other in result[1:])
    assert replays.eager["it draws random numbers"] == 3


@pytest.mark.parametrize("draw", [random.random, numpy.random.rand], ids=["python", "numpy"])
def test_random_numbers_of_the_host_are_not_captured(draw, small):
    model, replays, x = small(lambda model, x, scale: x * float(draw()))
    result = [model(x) for _ in range(5)]
    assert not any(torch.equal(one, other) for one, other in itertools.pairwise(result))
    assert replays.captured == 0


def test_model_that_changes_itself_is_not_captured(small):
    def body(model, x, scale):
        model.steps += 1
        return x * model.steps

    model, replays, x = small(body)
    for i in range(1, 6):
        assert torch.equal(model(x), x * i)
    assert replays.captured == 0


def test_model_that_changes_in_every_call_is_given_up(small):
    model, replays, x = small(lambda model, x, scale: model.linear(x))
    for i in range(80):
        model.linear.bias.fill_(i)
        torch.testing.assert_close(model(x), F.linear(x, model.linear.weight, model.linear.bias))
        torch.testing.assert_close(model(x), F.linear(x, model.linear.weight, model.linear.bias))
    assert replays.captured <= 16
    assert replays.eager["the model changes from call to call"]


def test_inputs_that_are_written_are_the_callers(small):
    model, replays, x = small(lambda model, x, scale: x.add_(1) * 2)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            given = torch.zeros(2, 4, device=x.device)
            for i in range(1, 5):
                assert torch.equal(model(given), torch.full_like(given, 2 * i))
                assert torch.equal(given, torch.full_like(given, i))
    assert replays.captured == 0


def test_dict_that_is_changed_is_the_callers(small):
    def body(model, x, scale):
        return x * scale.pop("by", 1)

    model, replays, x = small(body)
    for _ in range(4):
        given = {"by": 3}
        assert torch.equal(model(x, given), x * 3)
        assert given == {}
    assert replays.captured == 0


def test_argument_that_is_returned_is_the_callers_own(small):
    model, replays, x = small(lambda model, x, scale: (x, model.linear(x), None, "yes"))
    for i in range(4):
        given = x + i
        same, made_new, *rest = model(given)
        assert same is given
        torch.testing.assert_close(made_new, model.linear(given))
        assert rest == [None, "yes"]
    assert replays.replayed == 2


@pytest.mark.parametrize("returned", ["view of the input", "weight", "object", "expanded", "with gaps"])
def test_outputs_of_every_kind_are_those_of_the_stock_call(returned, small):
    bodies = {
        "view of the input": lambda model, x, scale: x[:1],
        "weight": lambda model, x, scale: model.linear.weight,
        "object": lambda model, x, scale: types.SimpleNamespace(x=x * 2),
        "expanded": lambda model, x, scale: (x[:1] * 2).expand(3, 4),
        "with gaps": lambda model, x, scale: (x * 2)[:, ::2],
    }
    model, replays, x = small(bodies[returned])
    for i in range(4):
        result, expected = model(x + i), model.body(model, x + i, 1.0)
        if returned == "object":
            result, expected = result.x, expected.x
        assert torch.equal(result, expected)
        assert result.stride() == expected.stride()
    assert replays.replayed == (2 if returned in ("expanded", "with gaps") else 0)


def test_step_that_waits_for_the_device_is_left_to_the_stock_call(small):
    model, replays, x = small(lambda model, x, scale: x * (2 if x.sum().item() > 0 else 3))
    assert torch.equal(model(x), x * 2)
    with pytest.warns(turnout.TurnoutWarning, match="could not be captured .*capturing"):
        model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for sign in (-1, -1, 1):
            assert torch.equal(model(sign * x), sign * x * (2 if sign > 0 else 3))
    assert replays.captured == 0


def shared_with_more(output):
    output.more = 1
    return output


def outputs_of(x):
    """What a forward may return of one tensor, and how much of it is replayed."""
    from diffusers.models.modeling_outputs import Transformer2DModelOutput

    inside = [x]
    return {
        "one tensor twice": ((x, [x]), 2),
        "a tensor and a part of it": ((x, x[0]), 0),
        "parts of a tensor": (x.chunk(2, 1), 2),
        "parts that overlap": ((x[:, :3], x[:, 1:]), 0),
        "a list twice": ((inside, inside), 0),
        "a dict of numbers": ({0: x, 1.5: x + 1}, 2),
        "an attribute that its class does not have": (shared_with_more(Transformer2DModelOutput(x)), 0),
    }


@pytest.mark.parametrize("name", outputs_of(torch.ones(2, 4)))
def test_outputs_hang_together_as_those_of_the_stock_call(name, small):
    model, replays, x = small(lambda model, x, scale: outputs_of(x * 2)[name][0])
    for given in (x, x, x, x + 1):
        result, expected = model(given), model.body(model, given, 1.0)
    leaves, wanted = map(torch.utils._pytree.tree_leaves, (result, expected))
    leaves[0].zero_()
    wanted[0].zero_()
    assert all(map(torch.equal, leaves, wanted))
    assert type(result) is type(expected)
    assert not isinstance(result, dict) or list(result) == list(expected)
    assert getattr(result, "more", None) == getattr(expected, "more", None)
    assert replays.replayed == outputs_of(x)[name][1]


def test_container_of_the_caller_that_is_returned_is_the_callers_own(small):
    model, replays, x = small(lambda model, x, scale: (x * 2, scale))
    for _ in range(4):
        given = {"by": 3}
        assert model(x, given)[1] is given
    assert replays.captured == 0

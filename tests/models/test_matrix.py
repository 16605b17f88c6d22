"""Every known model, everything that users do to one, before `accelerate` and after it: the results are those
of the stock model.
"""

import collections

import pytest
import torch

import turnout
from tests.models.things import THINGS
from tests.models.zoo import ZOO, made, tokens
from turnout.models.accelerate import KNOWN, _instances, _key

pytestmark = pytest.mark.filterwarnings("ignore")


def steps(model):
    """A prompt, and steps of decoding, which have code of their own."""
    first = model(tokens(), use_cache=True)
    logits = [first.logits]
    for i in range(2):
        step = model(tokens()[:, i : i + 1], past_key_values=first.past_key_values, use_cache=True)
        logits.append(step.logits)
    return torch.cat(logits, 1)


CALLS = {name: (name, call) for name, (_, call, _) in ZOO.items()} | {"jamba-steps": ("jamba", steps)}


def done(name, thing, order):
    """The output of a model to which a thing was done, and how often each hook has run."""
    name, call = CALLS[name]
    model, seen = made(name), []
    undo = None
    try:
        if order == "accelerate first":
            turnout.accelerate(model)
        undo = THINGS[thing](model, seen)
        if order == "accelerate last":
            turnout.accelerate(model)
        torch.manual_seed(2)
        with torch.no_grad():
            return call(model), collections.Counter(seen)
    except Exception as error:
        return f"{type(error).__name__}: {error}", None
    finally:
        if undo is not None:
            undo()


@pytest.mark.parametrize("thing", THINGS)
@pytest.mark.parametrize("name", CALLS)
def test_results_are_those_of_stock(name, thing):
    expected, counts = done(name, thing, "stock")
    for order in ("accelerate first", "accelerate last"):
        actual, seen = done(name, thing, order)
        if isinstance(expected, str):
            assert isinstance(actual, str), f"stock cannot: {expected}"
            continue
        assert not isinstance(actual, str), actual
        assert actual.shape == expected.shape
        scale = expected.nan_to_num().abs().max().item()
        torch.testing.assert_close(actual, expected, rtol=0, atol=3e-5 * scale, equal_nan=True)
        assert seen == counts, order


def test_every_adapter_is_in_the_matrix():
    """A new adapter is tested by being declared, or this fails."""
    actual = {_key(instance, KNOWN) for name in ZOO for _, instance in _instances(made(name))}
    assert set(KNOWN) - actual == set()

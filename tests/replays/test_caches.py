"""Graphs of calls with caches: states are carried in and out, or read and written in place."""

import copy
import warnings

import pytest
import torch

import turnout
from tests.models.zoo import made, tokens
from tests.replays.graphed import states_of

pytestmark = pytest.mark.filterwarnings("ignore:turnout.accelerate patched nothing")


@pytest.mark.parametrize("name", ["mamba", "mamba2", "falcon-mamba"])
def test_generate_goes_on_with_the_callers_cache(name, device, carried):
    model = made(name).to(device).eval()
    ids = tokens().to(device)
    how = {
        "max_new_tokens": 12,
        "do_sample": False,
        "attention_mask": torch.ones_like(ids),
        "pad_token_id": 0,
    }
    expected = [model.generate(each, **how) for each in (ids, ids.flip(1))]
    report = turnout.accelerate(model, graph=True)
    (replays,) = report.graphs.values()
    for _ in range(2):
        for each, wanted in zip((ids, ids.flip(1)), expected, strict=True):
            assert torch.equal(model.generate(each, **how), wanted)
    assert replays.replayed >= (4 * 11 - 2 if carried else 4 * 9)
    assert replays.captured == 1 or not carried


@pytest.mark.parametrize("name", ["bamba", "zamba2"])
def test_caches_that_grow_are_not_captured(name, device):
    model = made(name).to(device).eval()
    ids = tokens().to(device)
    how = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    expected = model.generate(ids, **how)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = turnout.accelerate(model, graph=True)
        for _ in range(2):
            assert torch.equal(model.generate(ids, **how), expected)
    assert all(replays.replayed == 0 for replays in report.graphs.values())


def test_steps_of_two_caches_take_turns(device, carried):
    model = made("mamba").to(device).eval()
    stock = copy.deepcopy(model)
    turnout.accelerate(model, graph=True)
    prompts = tokens().to(device), tokens().flip(0).to(device)
    caches = [[each(p, use_cache=True).cache_params for p in prompts] for each in (model, stock)]
    places = [[id(x) for x in states_of(cache)] for cache in caches[0]]
    for i in range(6):
        for k in range(2):
            step = torch.full((2, 1), (7 * i + k) % 64, device=device)
            result, expected = (
                each(step, cache_params=held[k], use_cache=True)
                for each, held in zip((model, stock), caches, strict=True)
            )
            assert result.cache_params is caches[0][k]
            assert [id(x) for x in states_of(caches[0][k])] == places[k]
            torch.testing.assert_close(result.logits, expected.logits, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(*caches, strict=True):
        for state, wanted in zip(states_of(ours), states_of(theirs), strict=True):
            torch.testing.assert_close(state, wanted, rtol=1e-4, atol=1e-4)
    assert model._turnout_replays.replayed == (10 if carried else 8)


def test_cache_that_was_written_between_steps_is_read(device, carried):
    model = made("mamba").to(device).eval()
    stock = copy.deepcopy(model)
    turnout.accelerate(model, graph=True)
    caches = [each(tokens().to(device), use_cache=True).cache_params for each in (model, stock)]
    for i in range(8):
        step = torch.full((2, 1), 5 * i, device=device)
        result, expected = (
            each(step, cache_params=cache, use_cache=True).logits
            for each, cache in zip((model, stock), caches, strict=True)
        )
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
        for cache in caches:
            if i == 4:
                cache.reorder_cache(torch.tensor([1, 0], device=device))
            elif i % 3 == 2:
                cache.layers[0].conv_states[0].mul_(0.5)
    version = states_of(caches[0])[0]._version
    model(step, cache_params=caches[0], use_cache=True)
    assert states_of(caches[0])[0]._version > version, "whoever wants gradients sees that it was written"
    assert model._turnout_replays.replayed

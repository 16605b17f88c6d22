"""Decoding with Mamba: a forward of its own that says what the stock one says and writes where it writes."""

import pytest
import torch

import turnout
from tests.models.test_models import Calls, close

pytest.importorskip("transformers")


def mamba(**more):
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(MambaConfig(num_hidden_layers=2, hidden_size=16, vocab_size=64, state_size=4, **more))


def falcon_mamba():
    from transformers import FalconMambaConfig, FalconMambaForCausalLM

    return FalconMambaForCausalLM(FalconMambaConfig(num_hidden_layers=2, hidden_size=16, vocab_size=64, state_size=4))


def jamba():
    from transformers import JambaConfig, JambaForCausalLM

    return JambaForCausalLM(JambaConfig(
        num_hidden_layers=2, hidden_size=16, vocab_size=64, intermediate_size=16, num_attention_heads=2, num_key_value_heads=1,
        attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, num_experts=2, mamba_d_state=4, use_mamba_kernels=True,
    ))  # fmt: skip


MADE = {"mamba": mamba, "without biases": lambda: mamba(use_conv_bias=False), "falcon_mamba": falcon_mamba, "jamba": jamba}
TOKENS = torch.arange(10).view(2, 5)


@pytest.mark.parametrize("name", MADE)
@torch.no_grad()
def test_steps_say_what_the_stock_ones_say(name):
    torch.manual_seed(0)
    model = MADE[name]().eval()

    def generated():
        rules = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "output_logits": True, "return_dict_in_generate": True}
        return torch.stack(model.generate(TOKENS, max_new_tokens=5, **rules).logits)

    stock = generated()
    with turnout.accelerated(model), Calls() as count:
        close(generated(), stock)
    assert count["selective_scan_update"] == count["causal_conv1d_update"] > 0


def cached(model):
    found = model(TOKENS, use_cache=True)
    return found.cache_params


@torch.no_grad()
def test_states_stay_where_they_are():
    """Whoever captured a graph of a step, or compiled one, has their addresses."""
    model = mamba().eval()
    turnout.accelerate(model)
    cache = cached(model)
    before = [(layer.conv_states[0].data_ptr(), layer.recurrent_states[0].data_ptr()) for layer in cache.layers]
    values = [layer.recurrent_states[0].clone() for layer in cache.layers]
    model(TOKENS[:, :1], cache_params=cache, use_cache=True)
    assert before == [(layer.conv_states[0].data_ptr(), layer.recurrent_states[0].data_ptr()) for layer in cache.layers]
    assert not any(torch.equal(layer.recurrent_states[0], old) for layer, old in zip(cache.layers, values, strict=True))


@torch.no_grad()
def test_rates_that_were_changed_behind_our_back():
    model = mamba().eval()
    turnout.accelerate(model)
    for _ in range(2):
        cache, twin = cached(model), cached(model)
        fast = model(TOKENS[:, :1], cache_params=cache, use_cache=True).logits
        turnout.restore(model)
        close(fast, model(TOKENS[:, :1], cache_params=twin, use_cache=True).logits)
        turnout.accelerate(model)
        for layer in model.backbone.layers:
            layer.mixer.A_log.data.add_(0.5)


def test_steps_with_gradients_take_the_stock_forward():
    """Which has no backward either, the states are overwritten; but it says so."""
    model = mamba().eval()

    def step():
        with torch.no_grad():
            cache = cached(model)
        return model(TOKENS[:, :1], cache_params=cache, use_cache=True).logits

    stock = step()
    with turnout.accelerated(model), Calls() as count:
        close(step(), stock)
    assert count["selective_scan_update"] == count["causal_conv1d_update"] == 0


@torch.no_grad()
def test_a_mask_autocast_or_hooks_take_the_stock_forward():
    model = mamba().eval()
    turnout.accelerate(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("turnout.models.mamba._step", None)
        mask = torch.ones(2, 1, dtype=torch.long)
        model(TOKENS[:, :1], cache_params=cached(model), use_cache=True, attention_mask=mask)
        with torch.autocast("cpu", torch.bfloat16):
            model(TOKENS[:, :1], cache_params=cached(model), use_cache=True)
        for layer in model.backbone.layers:
            layer.mixer.conv1d._hf_hook = type("Hook", (), {"pre_forward": lambda *a: None, "post_forward": lambda *a: None})()
        model(TOKENS[:, :1], cache_params=cached(model), use_cache=True)

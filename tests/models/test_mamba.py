"""Decoding with Mamba: a forward of its own that says what the stock one says and writes where it writes."""

import pytest
import torch

import turnout
from tests.models.test_models import close, counted_calls

pytest.importorskip("transformers")


def mamba(**more):
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(
        MambaConfig(num_hidden_layers=2, hidden_size=16, vocab_size=64, state_size=4, **more)
    )


def falcon_mamba():
    from transformers import FalconMambaConfig, FalconMambaForCausalLM

    return FalconMambaForCausalLM(
        FalconMambaConfig(num_hidden_layers=2, hidden_size=16, vocab_size=64, state_size=4)
    )


def jamba():
    from transformers import JambaConfig, JambaForCausalLM

    return JambaForCausalLM(
        JambaConfig(
            num_hidden_layers=2,
            hidden_size=16,
            vocab_size=64,
            intermediate_size=16,
            num_attention_heads=2,
            num_key_value_heads=1,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            num_experts=2,
            mamba_d_state=4,
            use_mamba_kernels=True,
        )
    )


MADE = {
    "mamba": mamba,
    "without biases": lambda: mamba(use_conv_bias=False),
    "falcon_mamba": falcon_mamba,
    "jamba": jamba,
}
TOKENS = torch.arange(10).view(2, 5)


@pytest.mark.parametrize("name", MADE)
@torch.no_grad()
def test_steps_generate_the_tokens_of_the_stock_model(name):
    torch.manual_seed(0)
    model = MADE[name]().eval()

    def generated():
        rules = {
            "do_sample": False,
            "pad_token_id": 0,
            "eos_token_id": None,
            "output_logits": True,
            "return_dict_in_generate": True,
        }
        return torch.stack(model.generate(TOKENS, max_new_tokens=5, **rules).logits)

    stock = generated()
    with turnout.accelerated(model), counted_calls() as count:
        close(generated(), stock)
    assert count["selective_scan_update"] == count["causal_conv1d_update"] > 0


def cached(model):
    actual = model(TOKENS, use_cache=True)
    return actual.cache_params


@torch.no_grad()
def test_states_stay_where_they_are():
    """Whoever captured a graph of a step, or compiled one, has their addresses."""
    model = mamba().eval()
    turnout.accelerate(model)
    cache = cached(model)
    before = [
        (layer.conv_states[0].data_ptr(), layer.recurrent_states[0].data_ptr()) for layer in cache.layers
    ]
    values = [layer.recurrent_states[0].clone() for layer in cache.layers]
    model(TOKENS[:, :1], cache_params=cache, use_cache=True)
    assert before == [
        (layer.conv_states[0].data_ptr(), layer.recurrent_states[0].data_ptr()) for layer in cache.layers
    ]
    assert not any(
        torch.equal(layer.recurrent_states[0], old) for layer, old in zip(cache.layers, values, strict=True)
    )


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


class WithMore(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) + 0.25


def another_activation(model):
    for layer in mixers(model):
        layer.activation = "gelu"


def quantised(model):
    """Then the stock forward of Falcon Mamba and Jamba calls `dt_proj`, whatever has become of it."""
    model.config._is_quantized = True
    for layer in mixers(model):
        layer.dt_proj.__class__ = WithMore


def mixers(model):
    return [module for module in model.modules() if hasattr(module, "dt_proj")]


@pytest.mark.parametrize("change", [another_activation, quantised])
@pytest.mark.parametrize("name", ["mamba", "falcon_mamba", "jamba"])
@torch.no_grad()
def test_mixers_that_were_changed_since_run_the_stock_forward(name, change):
    torch.manual_seed(0)
    model = MADE[name]().eval()

    def logits():
        return torch.cat([model(TOKENS).logits, step_of(model, model)], 1)

    with turnout.accelerated(model):
        before = logits()
        change(model)
        actual = logits()
    expected = logits()
    close(actual, expected)
    assert not torch.allclose(actual, before) or (name, change) == ("mamba", quantised)


def test_steps_with_gradients_take_the_stock_forward():
    """Which has no backward either, the states are overwritten; but it says so."""
    model = mamba().eval()

    def step():
        with torch.no_grad():
            cache = cached(model)
        return model(TOKENS[:, :1], cache_params=cache, use_cache=True).logits

    stock = step()
    with turnout.accelerated(model), counted_calls() as count:
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
            layer.mixer.conv1d._hf_hook = type(
                "Hook", (), {"pre_forward": lambda *a: None, "post_forward": lambda *a: None}
            )()
        model(TOKENS[:, :1], cache_params=cached(model), use_cache=True)


# torch.compile. Stock compiles each of these into one graph, prefill and step (transformers 5.22, torch
# 2.13).

ATTENTION = {"intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
HEADS = {
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_d_state": 4,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 4,
}


def hybrid(kind, **more):
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        num_hidden_layers=2, hidden_size=16, vocab_size=64, **more
    )
    return getattr(transformers, f"{kind}ForCausalLM")(config)


COMPILED = {
    "mamba": mamba,
    "falcon_mamba": falcon_mamba,
    "jamba": jamba,
    "mamba2": lambda: hybrid("Mamba2", num_heads=4, head_dim=8, state_size=4, n_groups=2, chunk_size=4),
    "bamba": lambda: hybrid("Bamba", **ATTENTION, **HEADS, attn_layer_indices=[1]),
    "falcon_h1": lambda: hybrid("FalconH1", **ATTENTION, **HEADS, head_dim=8, mamba_d_ssm=32),
    "zamba2": lambda: hybrid(
        "Zamba2", **ATTENTION, layers_block_type=["mamba", "hybrid"], mamba_d_state=4, mamba_ngroups=2,
        n_mamba_heads=4, chunk_size=4, num_mem_blocks=1, mamba_headdim=8,
    ),
}  # fmt: skip


def step_of(model, call):
    actual = model(TOKENS, use_cache=True)
    cache = {
        name: actual[name] for name in ("cache_params", "past_key_values") if actual.get(name) is not None
    }
    return call(TOKENS[:, :1], use_cache=True, **cache).logits


class Graphs:
    """A backend of torch.compile that runs the graphs as they are, and names the ops of turnout in them."""

    def __init__(self):
        self.ops = []

    def __call__(self, graph, inputs):
        self.ops.append({str(node.target) for node in graph.graph.nodes if "turnout" in str(node.target)})
        return graph.forward


@pytest.mark.parametrize("name", COMPILED)
@torch.no_grad()
def test_compiles_into_one_graph(name):
    model = COMPILED[name]().eval()
    stock, stock_step = model(TOKENS, use_cache=False).logits, step_of(model, model)
    torch.compiler.reset()
    graphs = Graphs()
    turnout.accelerate(model)
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    close(compiled(TOKENS, use_cache=False).logits, stock)
    close(step_of(model, compiled), stock_step)
    assert len(graphs.ops) == 2
    assert all(any("causal_conv1d" in op for op in ops) for ops in graphs.ops)


@pytest.mark.parametrize("name", COMPILED)
@torch.no_grad()
def test_compiles_what_is_accelerated_later(name):
    model = COMPILED[name]().eval()
    stock = step_of(model, model)
    torch.compiler.reset()
    graphs = Graphs()
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    turnout.accelerate(model)
    close(step_of(model, compiled), stock)
    assert len(graphs.ops) == 1
    assert any("causal_conv1d" in op for op in graphs.ops[0])


@torch.no_grad()
def test_decorators_of_the_stock_forward_are_kept():
    """transformers moves the weights of offloaded modules in and out around it."""
    model, moved = mamba().eval(), []
    stock = model(TOKENS).logits
    turnout.accelerate(model)
    close(model(TOKENS).logits, stock)

    class Hook:
        def pre_forward(self, module, *args):
            moved.append("in")

        def post_forward(self, module, output):
            moved.append("out")
            return output

    with counted_calls() as count:
        mixer = model.backbone.layers[0].mixer
        mixer.conv1d._hf_hook = Hook()
        close(model(TOKENS).logits, stock)
    assert moved == ["in", "out"]
    assert count["causal_conv1d"] > 0


@torch.no_grad()
def test_globals_that_are_assigned_later_are_heard(monkeypatch):
    from transformers.models.mamba import modeling_mamba

    model, masked = mamba().eval(), []
    stock = modeling_mamba.apply_mask_to_padding_states
    with turnout.accelerated(model):
        model(TOKENS)
        monkeypatch.setattr(
            modeling_mamba, "apply_mask_to_padding_states", lambda *args: masked.append(1) or stock(*args)
        )
        model(TOKENS)
    seen = len(masked)
    model(TOKENS)
    assert len(masked) == 2 * seen > 0

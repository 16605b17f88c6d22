"""`accelerate(model, graph=True)`: nothing wrong is ever replayed, whatever changes between calls.

On a CPU a stand-in for CUDA graphs freezes what runs, op by op, with the memory it reads (`played.Recorded`).
On a GPU the same tests run with CUDA graphs.
"""

import contextlib
import copy
import gc
import pickle
import sys
import threading
import types
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F

import turnout
from tests.models.played import Recorded, play_graphs
from tests.models.zoo import KL, ZOO, made, tokens
from turnout.models import graphs
from turnout.models import replays as replays_module

pytestmark = pytest.mark.filterwarnings("ignore:turnout.accelerate patched nothing")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """Where graphs are: played on a CPU, real on a GPU."""
    if request.param == "cpu":
        play_graphs(monkeypatch, Recorded)
    else:  # by default cuDNN takes 10 bits of each factor, and results are compared to 1e-4
        monkeypatch.setattr(torch.backends.cudnn.conv, "fp32_precision", "ieee")
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


class Graphed:
    """A small Flux transformer with graph=True, and a stock copy to compare with."""

    def __init__(self, device):
        self.device = device
        self.model = made("flux").to(device).eval()
        self.stock = copy.deepcopy(self.model)
        self.report = turnout.accelerate(self.model, graph=True)
        (self.replays,) = self.report.graphs.values()
        self.inputs = flux_inputs(device)

    def __call__(self, model=None, **changes):
        return (self.model if model is None else model)(**{**self.inputs, **changes})

    def check(self, **changes):
        """A call gives what the stock model does; returns whether it was replayed."""
        before = self.replays.replayed
        found = self(**changes)
        expected = self(self.stock, **changes)
        assert type(found) is type(expected)
        torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-4)
        return self.replays.replayed > before

    def warm(self):
        """Call until the next call is replayed."""
        assert [self.check() for _ in range(3)] == [False, False, True]

    def both(self, change):
        for model in (self.model, self.stock):
            change(model)


def flux_inputs(device, batch=2, seed=0):
    random = torch.Generator().manual_seed(seed)
    places = torch.stack([torch.zeros(12), torch.arange(12) // 4, torch.arange(12) % 4], 1)
    given = {
        "hidden_states": torch.randn(batch, 12, 4, generator=random),
        "encoder_hidden_states": torch.randn(batch, 5, 8, generator=random),
        "pooled_projections": torch.randn(batch, 8, generator=random),
        "timestep": torch.rand(batch, generator=random), "guidance": torch.full((batch,), 0.5),
        "img_ids": places, "txt_ids": torch.zeros(5, 3),
    }  # fmt: skip
    return {name: x.to(device) for name, x in given.items()}


@pytest.fixture
def graphed(device):
    return Graphed(device)


# What is replayed


def test_third_call_alike_is_replayed_with_its_own_inputs(graphed):
    graphed.warm()
    for seed in range(1, 4):
        assert graphed.check(**flux_inputs(graphed.device, seed=seed))
    assert graphed.replays.captured == 1


def test_outputs_of_replays_are_the_callers_own(graphed):
    graphed.warm()
    first = graphed(**flux_inputs(graphed.device, seed=1)).sample
    kept = first.clone()
    second = graphed(**flux_inputs(graphed.device, seed=2)).sample
    assert torch.equal(first, kept)
    assert first.data_ptr() != second.data_ptr()
    second.zero_()
    assert graphed.check()


def test_every_call_returns_the_type_that_the_stock_model_does(graphed):
    for _ in range(4):
        assert isinstance(graphed(return_dict=False), tuple)
        assert type(graphed()).__name__ == "Transformer2DModelOutput"
    assert graphed.replays.captured == 2


@pytest.mark.parametrize(
    "name", ["wan-transformer", "qwen-image", "wan", "flux-vae", "ltx", "hunyuan", "cogvideox"]
)
def test_known_models_are_replayed(name, monkeypatch):
    play_graphs(monkeypatch, Recorded)
    model, call = made(name).eval(), ZOO[name][1]
    expected = call(copy.deepcopy(model))
    report = turnout.accelerate(model, graph=True)
    (replays,) = report.graphs.values()
    for _ in range(4):
        torch.testing.assert_close(call(model), expected, rtol=1e-4, atol=1e-4)
    assert (replays.captured, replays.replayed) == (1, 2)


def test_unet_of_sdxl_is_replayed(device):
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    unet = (
        UNet2DConditionModel(
            sample_size=8,
            block_out_channels=(16, 32),
            layers_per_block=1,
            cross_attention_dim=16,
            norm_num_groups=4,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            attention_head_dim=8,
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=8 * 6 + 16,
        )
        .to(device)
        .eval()
    )
    stock = copy.deepcopy(unet)
    report = turnout.accelerate(unet, graph=True)
    x, text = torch.randn(2, 4, 8, 8, device=device), torch.randn(2, 5, 16, device=device)
    added = {"text_embeds": torch.randn(2, 16, device=device), "time_ids": torch.ones(2, 6, device=device)}
    steps = torch.tensor([901, 801, 701, 601], device=device)
    for step in steps:  # as a scheduler hands them out
        given = {"timestep": step, "encoder_hidden_states": text, "added_cond_kwargs": added}
        torch.testing.assert_close(unet(x, **given).sample, stock(x, **given).sample, rtol=1e-4, atol=1e-4)
    assert report.graphs[""].replayed == 2


def test_pipeline_of_fifty_steps(device):
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline

    torch.manual_seed(0)
    transformer = made("flux").eval()
    parts = dict.fromkeys(["text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"])
    vae = AutoencoderKL(**KL, use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.1).eval()
    transformer = type(transformer).from_config({**transformer.config, "in_channels": 16}).eval()
    pipe = FluxPipeline(FlowMatchEulerDiscreteScheduler(), vae, transformer=transformer, **parts).to(device)
    pipe.set_progress_bar_config(disable=True)
    given = {
        "prompt_embeds": torch.randn(1, 5, 8, device=device),
        "pooled_prompt_embeds": torch.randn(1, 8, device=device),
        "latents": torch.randn(1, 16, 16, device=device),
        "height": 16,
        "width": 16,
        "num_inference_steps": 50,
        "output_type": "pt",
    }
    expected = pipe(**given).images
    report = turnout.accelerate(pipe, graph=True)
    torch.testing.assert_close(pipe(**given).images, expected, rtol=1e-3, atol=1e-3)
    assert report.graphs["transformer"].replayed == 48


@pytest.fixture(params=["carried", "in place"])
def carried(request, monkeypatch):
    """Whether the caches of a call are copied into graphs, or are read and written where they lie."""
    if request.param == "in place":
        monkeypatch.setattr(replays_module, "MOST_CARRIED", 0)
    return request.param == "carried"


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


def states_of(cache):
    return [held[0] for layer in cache.layers for held in (layer.conv_states, layer.recurrent_states)]


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
            found, expected = (
                each(step, cache_params=held[k], use_cache=True)
                for each, held in zip((model, stock), caches, strict=True)
            )
            assert found.cache_params is caches[0][k]
            assert [id(x) for x in states_of(caches[0][k])] == places[k]
            torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
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
        found, expected = (
            each(step, cache_params=cache, use_cache=True).logits
            for each, cache in zip((model, stock), caches, strict=True)
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        for cache in caches:
            if i == 4:
                cache.reorder_cache(torch.tensor([1, 0], device=device))
            elif i % 3 == 2:
                cache.layers[0].conv_states[0].mul_(0.5)
    version = states_of(caches[0])[0]._version
    model(step, cache_params=caches[0], use_cache=True)
    assert states_of(caches[0])[0]._version > version, "whoever wants gradients sees that it was written"
    assert model._turnout_replays.replayed


# What changes between calls


def scaled(model, name):
    weight = model.get_parameter(name)
    return weight * 1.5


def replace_parameter(model):
    model.proj_out.weight = torch.nn.Parameter(scaled(model, "proj_out.weight"))


def replace_data(model):
    model.proj_out.weight.data = scaled(model, "proj_out.weight")


def write_data(model):
    model.proj_out.weight.mul_(1.5)


def load(model):
    model.load_state_dict({name: x * 1.1 for name, x in model.state_dict().items()})


def replace_child(model):
    layer = torch.nn.Linear(model.proj_out.in_features, model.proj_out.out_features).to(model.device)
    torch.nn.init.constant_(layer.weight, 0.25)
    torch.nn.init.constant_(layer.bias, 0.5)
    model.proj_out = layer


def replace_forward(model):
    layer = model.transformer_blocks[0].ff
    layer.forward = lambda x, *rest: torch.zeros_like(x)


def hook(model):
    model.transformer_blocks[0].ff.register_forward_hook(lambda module, args, result: result * 2)


def pre_hook(model):
    model.proj_out.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def forget_hooks(model):
    layer = model.transformer_blocks[0].ff
    layer._forward_hooks = type(layer._forward_hooks)()
    layer.register_forward_hook(lambda module, args, result: result * 3)


def set_number(model):
    for block in model.transformer_blocks:
        block.norm2.eps = 0.5


def drop_block(model):
    del model.single_transformer_blocks[0]


def set_processor(model):
    from diffusers.models.transformers.transformer_flux import FluxAttnProcessor

    class Halved(FluxAttnProcessor):
        def __call__(self, *args, **kwargs):
            found = super().__call__(*args, **kwargs)
            return tuple(x / 2 for x in found) if isinstance(found, tuple) else found / 2

    model.set_attn_processor(Halved())


def cast(model):
    torch.nn.Module.to(model, torch.float64)
    torch.nn.Module.to(model, torch.float32)


CHANGES = [
    replace_parameter, replace_data, write_data, load, replace_child, replace_forward, hook, pre_hook,
    set_number, drop_block, set_processor, cast,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changed_model_is_not_replayed_as_it_was(change, graphed):
    graphed.warm()
    graphed.both(change)
    assert not graphed.check()
    for _ in range(3):
        graphed.check()


def test_hooks_that_were_forgotten_and_hung_anew_are_seen(graphed):
    graphed.both(hook)
    for _ in range(3):
        assert not graphed.check()
    graphed.both(forget_hooks)
    for _ in range(3):
        assert not graphed.check()
    assert "transformer_blocks.0.ff has a hook" in graphed.report.details()


def test_hooks_of_the_model_itself_run_around_replays(graphed):
    seen = []
    graphed.both(lambda model: model.register_forward_hook(lambda *given: seen.append(1)))
    graphed.warm()
    assert len(seen) == 6


def test_class_whose_forward_was_replaced_is_seen(graphed, monkeypatch):
    graphed.warm()
    cls = type(graphed.model.proj_out)
    forward = torch.nn.Linear.forward
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, x: forward(self, x) * 1.5)
    assert issubclass(cls, torch.nn.Linear)
    assert not graphed.check()


def test_weights_that_were_offloaded_and_came_back(graphed):
    graphed.warm()
    for parameter in graphed.model.parameters():
        parameter.data = parameter.data.clone()
    gc.collect()
    assert not graphed.check()
    assert [graphed.check() for _ in range(2)] == [False, True]
    assert any("moved" in line for line in graphed.report.graphs[""].lines())


def test_what_was_written_anew_as_it_was_is_no_change(graphed):
    graphed.warm()
    model = graphed.model
    model.config_of_mine = {"scale": [1.0, {"a": 2}]}
    assert not graphed.check()
    assert [graphed.check() for _ in range(2)] == [False, True]
    model.config_of_mine = {"scale": [1.0, {"a": 2}]}
    assert graphed.check()
    model.config_of_mine["scale"][1]["a"] = 3
    assert not graphed.check()


def test_training_mode_is_a_change(graphed):
    graphed.warm()
    for switch in (torch.nn.Module.train, torch.nn.Module.eval):
        switch(graphed.model.transformer_blocks[0])
        assert [graphed.check() for _ in range(3)] == [False, False, True]


def test_dropout_draws_new_numbers_in_every_call(device):
    graphed = Graphed(device)
    graphed.model.train()
    graphed.model.transformer_blocks[0].ff.net[1].p = 0.5
    found = [graphed().sample for _ in range(4)]
    assert not any(torch.equal(found[0], other) for other in found[1:])
    assert graphed.replays.captured == 0


def test_lora_is_toggled_scaled_and_taken_away(device):
    from peft import LoraConfig

    graphed = Graphed(device)

    def add(model):
        torch.manual_seed(1)
        model.add_adapter(LoraConfig(r=2, target_modules=["to_q", "proj_out"], init_lora_weights=False))

    graphed.warm()
    graphed.both(add)
    steps = [
        lambda model: None,
        lambda model: model.set_adapters("default", 0.25),
        lambda model: model.disable_adapters(),
        lambda model: model.enable_adapters(),
        lambda model: model.delete_adapters("default"),
    ]
    for step in steps:
        graphed.both(step)
        assert not graphed.check()
        assert [graphed.check() for _ in range(2)] == [False, True]


@contextlib.contextmanager
def precision():
    torch.backends.mkldnn.matmul.fp32_precision, before = "bf16", torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision, of_cuda = "tf32", torch.backends.cuda.matmul.fp32_precision
    try:
        yield
    finally:
        torch.backends.mkldnn.matmul.fp32_precision, torch.backends.cuda.matmul.fp32_precision = (
            before,
            of_cuda,
        )


@contextlib.contextmanager
def no_flash():
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_flash_sdp(True)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class Double(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        return found * 2 if func is F.scaled_dot_product_attention else found


class Halve(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        return found / 2 if func is torch.ops.aten.gelu.default else found


def backend():
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry, attention_backend

    active, _ = _AttentionBackendRegistry.get_active_backend()  # other tests may have set it
    return attention_backend("native" if active.value == "_native_math" else "_native_math")


SETTINGS = {
    "numerics": lambda: turnout.numerics("exact"),
    "pin": lambda: turnout.pin(norm_rope="reference"),
    "fp32 precision": precision,
    "sdpa backends": no_flash,
    "attention backend": backend,
    "deterministic": deterministic,
    "inference mode": torch.inference_mode,
    "function mode": Double,
    "dispatch mode": Halve,
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_other_settings_are_another_call(setting, graphed):
    graphed.warm()
    with SETTINGS[setting]():
        assert not graphed.check()
        graphed.check()
        graphed.check()
    assert graphed.check()


def test_autocast_is_another_call(graphed):
    graphed.warm()
    graphed.stock = turnout.restore(twin := copy.deepcopy(graphed.model)) and twin
    for _ in range(2):  # weights that were cast in one block are gone in the next
        with torch.autocast(graphed.device.type, torch.bfloat16):
            found = [graphed().sample for _ in range(4)]
            expected = graphed(graphed.stock).sample
        for each in found:
            torch.testing.assert_close(each.float(), expected.float(), rtol=0.05, atol=0.05)
            assert each.dtype == expected.dtype
    assert graphed.check()


def test_attention_that_was_put_in_the_place_of_torchs_is_called(graphed, monkeypatch):
    graphed.warm()
    sdpa = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args, **kwargs: sdpa(*args, **kwargs) * 2)
    assert not graphed.check()


def test_gradients_are_wanted(graphed):
    graphed.warm()
    with torch.enable_grad():
        for _ in range(3):
            found, expected = graphed().sample, graphed(graphed.stock).sample
            ours, theirs = (
                torch.autograd.grad(y.sum(), m.proj_out.weight)[0]
                for y, m in ((found, graphed.model), (expected, graphed.stock))
            )
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert "gradients are wanted: call it under torch.no_grad()" in graphed.report.details()
    assert graphed.check()


ARGUMENTS = {
    "shape": lambda given: flux_inputs(given["timestep"].device, batch=1),
    "strides": lambda given: {
        "hidden_states": given["hidden_states"].transpose(1, 2).contiguous().transpose(1, 2)
    },
    "dtype": lambda given: {"timestep": given["timestep"].double()},
    "left out": lambda given: {"guidance": given["guidance"].float().clone(), "joint_attention_kwargs": {}},
    "return_dict": lambda given: {"return_dict": False},
    "residuals": lambda given: {
        "controlnet_block_samples": [torch.ones_like(given["hidden_states"])[..., :1]]
    },
}


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_other_arguments_are_another_call(argument, graphed):
    graphed.warm()
    changes = ARGUMENTS[argument](graphed.inputs)
    assert not graphed.check(**changes)
    assert graphed.check()
    assert [graphed.check(**changes) for _ in range(2)] == [False, True]
    assert graphed.check()


def test_expanded_inputs_are_copied_in(graphed):
    for seed in range(5):
        one = torch.rand(1, generator=torch.Generator().manual_seed(seed)).to(graphed.device)
        replayed = graphed.check(timestep=one.expand(2))
    assert replayed


def test_inputs_that_overlap_themselves_are_not_captured(graphed):
    long = torch.randn(2, 200, device=graphed.device)
    for _ in range(3):
        assert not graphed.check(hidden_states=long.as_strided((2, 12, 4), (200, 2, 1)))
    assert "overlaps itself" in graphed.report.details()


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_values_on_the_host_are_a_part_of_the_call(small):
    """A tensor of one number on the host may stand beside those of a card, whose kernels are given it."""
    model, replays, x = small(lambda model, x, scale: model.linear(x) * scale)
    for value in (0.5, 0.5, 0.5, 0.75):
        found = model(x, torch.tensor(value))
        torch.testing.assert_close(found, model.linear(x) * value)
    assert replays.replayed == 1


def test_arguments_that_nobody_knows_are_left_to_the_stock_call(graphed):
    unknown = types.SimpleNamespace()
    for _ in range(3):
        assert not graphed.check(joint_attention_kwargs={"unknown": unknown})
    assert "an argument of type SimpleNamespace" in graphed.report.details()


# Models of a few lines


class Small(torch.nn.Module):
    """A known model for these tests: `known` says so to `accelerate`."""

    def __init__(self, body):
        super().__init__()
        self.linear, self.body, self.steps = torch.nn.Linear(4, 4), body, 0

    def forward(self, x, scale=1.0):
        return self.body(self, x, scale)


@pytest.fixture
def small(device, monkeypatch):
    """Makes a known model out of a function of it, x and scale."""
    monkeypatch.setattr(
        sys.modules["turnout.models.accelerate"], "GRAPHED", {f"{Small.__module__}.{Small.__qualname__}"}
    )

    def make(body):
        torch.manual_seed(0)
        model = Small(body).to(device).eval()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            report = turnout.accelerate(model, graph=True)
        return model, report.graphs[""], torch.ones(2, 4, device=device)

    return make


def test_branch_on_an_argument_is_another_call(small):
    model, replays, x = small(lambda model, x, scale: model.linear(x) * scale if scale > 1 else x - scale)
    for scale in (1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 1.0, -0.0, 0.0):
        expected = model.body(model, x, scale)
        torch.testing.assert_close(model(x, scale), expected)
    assert replays.captured == 2


def test_random_numbers_are_not_captured(small):
    model, replays, x = small(lambda model, x, scale: x + torch.rand_like(x))
    found = [model(x) for _ in range(4)]
    assert not any(torch.equal(found[0], other) for other in found[1:])
    assert replays.eager["it draws random numbers"] == 3


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
def test_other_outputs(returned, small):
    bodies = {
        "view of the input": lambda model, x, scale: x[:1],
        "weight": lambda model, x, scale: model.linear.weight,
        "object": lambda model, x, scale: types.SimpleNamespace(x=x * 2),
        "expanded": lambda model, x, scale: (x[:1] * 2).expand(3, 4),
        "with gaps": lambda model, x, scale: (x * 2)[:, ::2],
    }
    model, replays, x = small(bodies[returned])
    for i in range(4):
        found, expected = model(x + i), model.body(model, x + i, 1.0)
        if returned == "object":
            found, expected = found.x, expected.x
        assert torch.equal(found, expected)
        assert found.stride() == expected.stride()
    assert replays.replayed == (2 if returned in ("expanded", "with gaps") else 0)


def test_tensor_that_is_no_buffer_is_watched(small):
    model, replays, x = small(lambda model, x, scale: x * model.factors[0])
    model.factors = [torch.full((4,), 2.0, device=x.device)]
    for _ in range(3):
        assert torch.equal(model(x), x * 2)
    model.factors[0].fill_(3)
    assert torch.equal(model(x), x * 3)
    model.factors[0] = torch.full((4,), 5.0, device=x.device)
    for _ in range(4):
        assert torch.equal(model(x), x * 5)
    assert replays.captured == 2


def test_module_that_is_no_child_is_watched(small):
    model, replays, x = small(lambda model, x, scale: model.hidden[0](x))
    model.hidden = [torch.nn.Linear(4, 4).to(x.device).eval()]
    for _ in range(3):
        model(x)
    assert replays.replayed == 1
    model.hidden[0].weight.mul_(2)
    torch.testing.assert_close(model(x), F.linear(x, model.hidden[0].weight, model.hidden[0].bias))


def test_number_that_was_replaced_by_a_tensor_is_seen(small):
    model, _, x = small(lambda model, x, scale: x * model.steps)
    for _ in range(3):
        model(x)
    model.steps = torch.zeros((), device=x.device)
    model(x)
    for i in range(4):
        model.steps.fill_(i)
        assert torch.equal(model(x), x * i)


# Failures


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


@pytest.mark.parametrize("moment", ["copies of the inputs", "run beside", "capture", "outputs"])
def test_out_of_memory_costs_nothing_but_a_warning(moment, small, monkeypatch):
    model, replays, x = small(lambda model, x, scale: model.linear(x))
    expected = F.linear(x, model.linear.weight, model.linear.bias)
    engine = graphs.ENGINES[x.device.type]

    def fails(*args, **kwargs):
        raise torch.OutOfMemoryError("planted")

    where = {
        "copies of the inputs": (graphs, "buffer_like"), "run beside": (engine, "run_beside"),
        "capture": (engine, "capture"), "outputs": (replays_module.Outputs, "allocated"),
    }[moment]  # fmt: skip
    torch.testing.assert_close(model(x), expected)
    if moment == "outputs":
        model(x)
        model(x)
    replayed = replays.replayed
    with monkeypatch.context() as patch:
        patch.setattr(*where, fails)
        with pytest.warns(turnout.TurnoutWarning, match="out of memory"):
            found = model(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            again = [model(x) for _ in range(3)]
    for each in (found, *again, model(x)):
        torch.testing.assert_close(each, expected)
    assert replays.replayed == replayed
    assert replays.graphs == 0


def test_graphs_go_where_another_call_has_no_memory(small):
    room = [True]

    def body(model, x, scale):
        if scale > 1 and not room[0]:
            room[0] = True
            raise torch.OutOfMemoryError("planted")
        return model.linear(x) * scale

    model, replays, x = small(body)
    for _ in range(3):
        model(x)
    room[0] = False
    with pytest.warns(turnout.TurnoutWarning, match="graphs of this model were freed"):
        torch.testing.assert_close(model(x, 2.0), model.linear(x) * 2)
    assert replays.graphs == 0
    room[0] = False
    with pytest.raises(torch.OutOfMemoryError):  # nothing of ours is in the way
        model(x, 3.0)


def test_failure_of_the_model_is_the_callers(small):
    def body(model, x, scale):
        if model.steps:
            raise ValueError("planted")
        return x * 2

    model, _, x = small(body)
    model(x)
    model.steps = 1
    for _ in range(3):
        with pytest.raises(ValueError, match="planted"):
            model(x)
    model.steps = 0
    for _ in range(4):
        assert torch.equal(model(x), x * 2)


@pytest.mark.parametrize("moment", ["run beside", "capture"])
def test_interrupt_leaves_nothing_half_done(moment, small, monkeypatch):
    model, replays, x = small(lambda model, x, scale: model.linear(x))
    expected = model(x)
    engine = graphs.ENGINES[x.device.type]
    with monkeypatch.context() as patch:

        def interrupted(*args):
            raise KeyboardInterrupt

        patch.setattr(engine, moment.replace(" ", "_"), interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(x)
    for _ in range(4):
        torch.testing.assert_close(model(x), expected)
    assert replays.captured == 1


# How many, and for how long


def test_graphs_are_bounded_and_the_least_recently_used_goes(small):
    model, replays, x = small(lambda model, x, scale: x * scale)
    for scale in range(replays_module.MOST_GRAPHS + 2):
        for _ in range(3):
            assert torch.equal(model(x, scale), x * scale)
        model(x, 0)
    assert replays.graphs == replays_module.MOST_GRAPHS
    before = replays.replayed
    model(x, 0)
    assert replays.replayed == before + 1, "what was used between is still there"
    assert torch.equal(model(x, 1), x)
    assert replays.replayed == before + 1


def test_numbers_that_are_others_in_every_call_cost_few_captures(small):
    model, replays, x = small(lambda model, x, scale: x * scale)
    for _ in range(4):
        for scale in range(50):  # a timestep that is no tensor
            assert torch.equal(model(x, scale), x * scale)
    assert replays.captured == 2 * replays_module.MOST_GRAPHS
    assert any("is a number, or a tensor on the host, another one" in line for line in replays.lines())


def test_restore_frees_graphs_and_gives_the_class_back(graphed):
    graphed.warm()
    engine = weakref.ref(graphed.replays._engine)
    turnout.restore(graphed.model)
    gc.collect()
    assert engine() is None
    assert type(graphed.model) is type(graphed.stock)
    assert vars(graphed.model).keys() == vars(graphed.stock).keys()
    assert type(graphed.model).__mro__ == type(graphed.stock).__mro__


def test_model_is_collected_with_its_graphs(device):
    graphed = Graphed(device)
    graphed.warm()
    model = weakref.ref(graphed.model)
    del graphed
    gc.collect()
    assert model() is None


def test_copies_begin_without_graphs(graphed):
    graphed.warm()
    for other in (copy.deepcopy(graphed.model), pickle.loads(pickle.dumps(graphed.model))):
        other.proj_out.weight.mul_(2)
        torch.testing.assert_close(graphed(other).sample, graphed(other).sample)
        assert other._turnout_replays is not graphed.replays
    shallow = copy.copy(graphed.model)
    before = graphed.replays.replayed
    torch.testing.assert_close(graphed(shallow).sample, graphed(graphed.stock).sample, rtol=1e-4, atol=1e-4)
    assert graphed.replays.replayed == before
    assert graphed.check()


def test_accelerated_again_begins_anew(graphed):
    graphed.warm()
    turnout.accelerate(graphed.model)
    assert "_turnout_replays" not in vars(graphed.model)
    graphed(graphed.model)
    graphed.report = turnout.accelerate(graphed.model, graph=True)
    (graphed.replays,) = graphed.report.graphs.values()
    graphed.warm()


def test_threads_take_turns(graphed):
    graphed.warm()
    inputs = [flux_inputs(graphed.device, seed=seed) for seed in range(4)]
    expected = [graphed(graphed.stock, **given).sample for given in inputs]
    found = [None] * 4

    def run(i):
        with torch.no_grad():
            found[i] = [graphed(**inputs[i]).sample for _ in range(5)]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each, wanted in zip(found, expected, strict=True):
        for one in each:
            torch.testing.assert_close(one, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_streams_wait_for_each_other():
    graphed = Graphed(torch.device("cuda", 0))
    graphed.warm()
    inputs = [flux_inputs(graphed.device, seed=seed) for seed in range(8)]
    expected = [graphed(graphed.stock, **given).sample for given in inputs]
    streams, found = [torch.cuda.Stream() for _ in inputs], []
    torch.cuda.synchronize()
    for stream, given in zip(streams, inputs, strict=True):
        with torch.cuda.stream(stream):
            found.append(graphed(**given).sample)
    torch.cuda.synchronize()
    for each, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(each, wanted, rtol=1e-4, atol=1e-4)
    assert graphed.replays.replayed == 1 + len(inputs)


@pytest.mark.gpu
def test_memory_of_graphs_is_given_back():
    graphed = Graphed(torch.device("cuda", 0))
    graphed.warm()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()
    turnout.restore(graphed.model)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < held


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_random_numbers_go_on_after_a_capture_that_failed(small):
    model, _, x = small(lambda model, x, scale: x * (2 if x.sum().item() > 0 else 3))
    model(x)
    with pytest.warns(turnout.TurnoutWarning, match="could not be captured"):
        model(x)
    assert not torch.equal(torch.rand(8, device="cuda"), torch.rand(8, device="cuda"))
    other, replays, x = small(lambda model, x, scale: model.linear(x))
    for _ in range(3):
        torch.testing.assert_close(other(x), other.linear(x))
    assert replays.replayed == 1


@pytest.mark.gpu
def test_capture_of_the_caller_takes_the_call_as_it_is():
    graphed = Graphed(torch.device("cuda", 0))
    graphed.warm()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = graphed().sample
    graph.replay()
    torch.testing.assert_close(found, graphed(graphed.stock).sample, rtol=1e-4, atol=1e-4)
    assert "a capture of the caller's is under way" in graphed.report.details()


# What is said


def test_model_on_a_cpu_runs_without_and_the_report_says_so():
    model = made("flux").eval()
    report = turnout.accelerate(model, graph=True)
    assert "on cpu, CUDA graphs need a CUDA device" in str(report)
    inputs = flux_inputs("cpu")
    for _ in range(3):
        model(**inputs)
    assert "3 not captured: cpu: CUDA graphs need a CUDA device" in report.details()


def test_model_that_is_not_known_gets_none_and_the_report_says_so():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3))
    report = turnout.accelerate(model, graph=True)
    assert "graph=True needs a known model, Sequential is none" in str(report)
    assert not report.graphs


def test_report_tells_what_became_of_the_calls(graphed):
    graphed.warm()
    assert "graph of model: 1 captured, 1 replayed, 1 held" in str(graphed.report)
    assert "the first of its kind" not in str(graphed.report)
    assert "1 not captured: the first of its kind" in graphed.report.details()


def test_compiled_model_is_traced_as_without_graphs(graphed):
    compiled = torch.compile(graphed.model, backend="eager", fullgraph=True)
    for _ in range(4):
        torch.testing.assert_close(
            graphed(compiled).sample, graphed(graphed.stock).sample, rtol=1e-4, atol=1e-4
        )
    assert graphed.replays.captured == 0

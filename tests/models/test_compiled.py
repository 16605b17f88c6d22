"""`torch.compile` of an accelerated model: one graph, with our ops in it, and the same results."""

import copy

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

import turnout
from tests.models.zoo import made
from tests.models.zoo import random as random_tensor
from turnout.routing.precision import strict_float32


def flux_inputs(device):
    places = torch.stack([torch.zeros(12), torch.arange(12) // 4, torch.arange(12) % 4], 1)
    given = {
        "hidden_states": random_tensor(2, 12, 4),
        "encoder_hidden_states": random_tensor(2, 5, 8),
        "pooled_projections": random_tensor(2, 8),
        "timestep": torch.full((2,), 0.5),
        "guidance": torch.full((2,), 0.5),
        "img_ids": places,
        "txt_ids": torch.zeros(5, 3),
    }
    return {name: x.to(device) for name, x in given.items()}


def wan_inputs(device):
    step = torch.tensor([500], device=device)
    x, text = random_tensor(1, 4, 3, 4, 6).to(device), random_tensor(1, 7, 8).to(device)
    return {"hidden_states": x, "timestep": step, "encoder_hidden_states": text}


def qwen_inputs(device):
    return {
        "hidden_states": random_tensor(2, 12, 4).to(device),
        "encoder_hidden_states": random_tensor(2, 5, 8).to(device),
        "encoder_hidden_states_mask": torch.ones(2, 5, dtype=torch.bool, device=device),
        "timestep": torch.full((2,), 0.5, device=device),
        "img_shapes": [[(1, 3, 4)]] * 2,
    }


def unet():
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    return UNet2DConditionModel(
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
    ).eval()


def unet_inputs(device):
    added = {"text_embeds": random_tensor(2, 16).to(device), "time_ids": torch.ones(2, 6, device=device)}
    return {
        "sample": random_tensor(2, 4, 8, 8).to(device), "timestep": torch.tensor(901, device=device),
        "encoder_hidden_states": random_tensor(2, 5, 16).to(device), "added_cond_kwargs": added,
    }  # fmt: skip


# How a model is made, its inputs, and the ops that it must find in its graph.
MODELS = {
    "flux": (lambda: made("flux"), flux_inputs, {"norm_rope", "layer_norm_modulate", "gated_add"}),
    "wan": (lambda: made("wan-transformer"), wan_inputs, {"norm_rope", "layer_norm_modulate", "gated_add"}),
    "qwen-image": (lambda: made("qwen-image"), qwen_inputs, {"norm_rope", "layer_norm_modulate"}),
    "sdxl-unet": (unet, unet_inputs, {"conv2d", "group_norm_silu"}),
}


class Graphs:
    """A backend that runs graphs as they are, and remembers the ops of turnout: as they were traced, and once
    sizes were known and ops that are left to torch had become torch's."""

    def __init__(self):
        self.traced, self.lowered = [], []
        self._lower = aot_autograd(fw_compiler=self._compiler)

    def __call__(self, graph, inputs):
        self.traced.append(ours(graph))
        return self._lower(graph, inputs)

    def _compiler(self, graph, inputs):
        self.lowered.append(ours(graph))
        return graph.forward


def ours(graph):
    names = (str(node.target) for node in graph.graph.nodes if node.op == "call_function")
    return {
        name.split(".")[1].removesuffix("_when_compiled") for name in names if name.startswith("turnout.")
    }


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_accelerated_model_is_one_graph_with_our_ops(name):
    make, inputs, ops = MODELS[name]
    model, given = make(), inputs("cpu")
    expected = model(**given)[0]
    turnout.accelerate(model)
    torch.compiler.reset()
    graphs = Graphs()
    actual = torch.compile(model, fullgraph=True, backend=graphs)(**given)[0]
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)
    (traced,) = graphs.traced
    assert ops <= traced


@pytest.mark.parametrize("route", ["cpu-rows", "reference"])
@torch.no_grad()
def test_op_is_opaque_where_a_route_is_taken_and_torchs_where_none_is(route):
    model, given = made("wan-transformer"), wan_inputs("cpu")
    expected = model(**given)[0]
    turnout.accelerate(model)
    torch.compiler.reset()
    graphs = Graphs()
    with turnout.pin(norm_rope=route):
        actual = torch.compile(model, fullgraph=True, backend=graphs)(**given)[0]
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)
    (lowered,) = graphs.lowered
    assert ("norm_rope" in lowered) == (route != "reference")


@torch.no_grad()
def test_other_sizes_need_no_break():
    model = made("flux")
    stock = copy.deepcopy(model)
    turnout.accelerate(model)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend=Graphs(), dynamic=True)
    for tokens in (5, 9):
        given = flux_inputs("cpu") | {
            "encoder_hidden_states": random_tensor(2, tokens, 8), "txt_ids": torch.zeros(tokens, 3)
        }  # fmt: skip
        torch.testing.assert_close(compiled(**given)[0], stock(**given)[0], rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
@strict_float32(("cuda", "conv"))  # by default cuDNN takes 10 bits of each factor
def test_compiled_model_keeps_our_kernels(name, mode, graph):
    make, inputs, ops = MODELS[name]
    model, given = make().to("cuda"), inputs("cuda")
    expected = model(**given)[0]

    def compiled_and_called():
        torch.compiler.reset()
        counters.clear()
        compiled = torch.compile(model, fullgraph=True, mode=mode)
        for _ in range(4):  # the third is replayed, where it is
            torch.compiler.cudagraph_mark_step_begin()
            actual = compiled(**given)[0].clone()
            torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)
        assert not counters["graph_break"]
        return compiled, counters["inductor"]["cudagraph_skips"]

    _, skips_of_stock = compiled_and_called()
    turnout.accelerate(model, graph=graph)
    compiled, skips = compiled_and_called()
    assert skips <= skips_of_stock
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.compiler.cudagraph_mark_step_begin()
        compiled(**given)
        torch.cuda.synchronize()
    kernels = {event.key for event in profile.key_averages()}
    assert ("norm_rope" in kernels) == ("norm_rope" in ops)

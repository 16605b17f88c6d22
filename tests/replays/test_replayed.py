"""What is replayed: equal calls of known models, with the caller's inputs and outputs."""

import copy

import pytest
import torch

import turnout
from tests.models.played import Recorded, play_graphs
from tests.models.zoo import KL, ZOO, made
from tests.replays.graphed import flux_inputs

pytestmark = pytest.mark.filterwarnings("ignore:turnout.accelerate patched nothing")


def test_third_equal_call_is_replayed_with_its_own_inputs(graphed):
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


def test_pipeline_of_fifty_steps_replays_all_but_the_first_two(device):
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


def test_expanded_inputs_are_copied_in(graphed):
    for seed in range(5):
        one = torch.rand(1, generator=torch.Generator().manual_seed(seed)).to(graphed.device)
        replayed = graphed.check(timestep=one.expand(2))
    assert replayed


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

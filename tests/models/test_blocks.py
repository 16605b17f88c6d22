"""Blocks of diffusion transformers: what the walk over all models does not reach. Tiny, on the CPU."""

import pytest
import torch
from torch import nn

import turnout
from tests.models.test_models import close, counted_calls
from tests.models.zoo import random
from turnout.models import blocks

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def flux(layers=2, dtype=torch.float32):
    from diffusers import FluxTransformer2DModel

    return (
        FluxTransformer2DModel(
            num_layers=layers,
            num_single_layers=layers,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=8,
            pooled_projection_dim=8,
            in_channels=4,
            axes_dims_rope=(4, 4, 8),
        )
        .to(dtype)
        .eval()
    )


def call(model, batch=1, **rest):
    dtype = model.dtype
    return model(
        hidden_states=random(batch, 12, 4).to(dtype),
        encoder_hidden_states=random(batch, 5, 8).to(dtype),
        pooled_projections=random(batch, 8).to(dtype),
        timestep=torch.full((batch,), 0.5, dtype=dtype),
        img_ids=torch.rand(12, 3),
        txt_ids=torch.zeros(5, 3),
        **rest,
    ).sample


def agrees(model, run, share=2e-5):
    torch.manual_seed(1)
    stock = run(model)
    torch.manual_seed(1)
    with turnout.accelerated(model), counted_calls() as count:
        close(run(model), stock, share)
    return count


@pytest.mark.parametrize("batch", [1, 3])
@torch.no_grad()
def test_flux_of_several_blocks(batch):
    """One batch is written where it is wanted, more are joined; single blocks hand one tensor on in two
    parts.
    """
    count = agrees(flux(), lambda model: call(model, batch))
    assert count["layer_norm_modulate"] == 2 * 4 + 2 + 1
    assert count["gated_add"] == 2 * 2 + 2


@torch.no_grad()
def test_nothing_is_joined_twice():
    """Between single blocks there is one tensor of text and image."""
    model, joins = flux(3), []
    turnout.accelerate(model)
    stock = torch.cat
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch, "cat", lambda given, *rest, **named: joins.append(given) or stock(given, *rest, **named)
        )
        call(model)
    tokens = [given for given in joins if all(part.dim() == 3 and part.shape[-1] == 32 for part in given)]
    assert len(tokens) == 1


@torch.no_grad()
def test_control_nets():
    residuals = {
        "controlnet_block_samples": [random(1, 12, 32)],
        "controlnet_single_block_samples": [random(1, 12, 32)] * 2,
    }
    agrees(flux(), lambda model: call(model, **residuals))


@torch.no_grad()
def test_a_block_given_an_attention_mask_runs_the_stock_code():
    mask = torch.zeros(1, 1, 17, 17)
    count = agrees(flux(), lambda model: call(model, joint_attention_kwargs={"attention_mask": mask}))
    assert count["gated_add"] == 0
    assert count["layer_norm_modulate"] > 0  # the norms inside


@torch.no_grad()
def test_hooks_on_linear_layers_still_run():
    model, seen = flux(), []
    single, double = model.single_transformer_blocks[0], model.transformer_blocks[0]
    for layer in (single.proj_out, single.proj_mlp, double.attn.to_v, double.ff.net[0].proj):
        layer.register_forward_hook(lambda *given: seen.append(given[0]))
    agrees(model, call)
    assert len(seen) == 8


@torch.no_grad()
def test_a_linear_layer_of_another_kind_is_called():
    """Such as one with a LoRA beside it."""

    class Beside(nn.Linear):
        def forward(self, x):
            return super().forward(x) + x.sum(-1, keepdim=True)

    model = flux()
    for block in model.single_transformer_blocks:
        block.proj_out.__class__ = block.proj_mlp.__class__ = Beside
    agrees(model, call)


def test_gradient_checkpointing():
    model = flux().train()
    model.enable_gradient_checkpointing()

    def gradients():
        model.zero_grad()
        torch.manual_seed(1)
        call(model).square().mean().backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    stock = gradients()
    with turnout.accelerated(model):
        fast = gradients()
    for name, grad in stock.items():
        torch.testing.assert_close(fast[name], grad, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_float16_stays_finite():
    block = flux(1, torch.float16).single_transformer_blocks[0]
    block.proj_out.bias.fill_(60000)
    block.norm.linear.bias.fill_(100)
    given = (random(1, 4, 32).half(), random(1, 3, 32).half(), random(1, 32).half())
    stock = block(*given)
    with turnout.accelerated(block):
        fast = block(*given)
    for found, expected in zip(fast, stock, strict=True):
        assert found.isfinite().all()
        assert found.abs().max() == expected.abs().max() == 65504


def test_rotary_tables():
    model, ids = flux(1).pos_embed, torch.randint(64, (17, 3))
    stock = model(ids)
    with turnout.accelerated(model):
        for found, expected in zip(model(ids), stock, strict=True):
            assert found.stride() == expected.stride()
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize("cross_attn_norm", [True, False])
@pytest.mark.parametrize("each_token", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_wan_blocks(cross_attn_norm, each_token, dtype):
    from diffusers.models.transformers.transformer_wan import WanTransformerBlock

    block = WanTransformerBlock(24, 48, 2, cross_attn_norm=cross_attn_norm).eval()
    for norm in (block.norm1, block.norm2, block.norm3):
        for parameter in norm.parameters():
            parameter.normal_()
    temb = random(2, 9, 6, 24) if each_token else random(2, 6, 24)
    x, text, turns = (
        random(2, 9, 24).to(dtype),
        random(2, 4, 24).to(dtype),
        torch.rand(1, 9, 1, 6).repeat_interleave(2, -1),
    )
    block.to(dtype)
    stock = block(x, text, temb, (turns.cos(), turns.sin()))
    with turnout.accelerated(block), counted_calls() as count:
        fast = block(x, text, temb, (turns.cos(), turns.sin()))
    close(fast, stock, 2e-5 if dtype is torch.float32 else 2e-2)
    assert (count["layer_norm_modulate"], count["gated_add"]) == ((3, 1) if cross_attn_norm else (2, 2))


def wan(**other):
    from diffusers import WanTransformer3DModel

    sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "text_dim": 8, "freq_dim": 8, "ffn_dim": 16}
    return WanTransformer3DModel(**sizes, num_layers=1, in_channels=4, out_channels=4, **other).eval()


def clip_call(model, each_token=False, size=(1, 4, 2, 6, 4), **rest):
    """2 x 3 x 2 tokens, a time step for each or one for all."""
    steps = torch.full((size[0], 12), 3) if each_token else torch.full((size[0],), 3)
    video, text = random(*size).to(model.dtype), random(size[0], 5, 8).to(model.dtype)
    return model(video, steps, text, **rest)


@pytest.mark.parametrize("each_token", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@torch.no_grad()
def test_wan_transformers(each_token, dtype):
    model = wan().to(dtype)
    share = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float64: 2e-5}[dtype]
    count = agrees(model, lambda model: clip_call(model, each_token).sample, share)
    assert count["layer_norm_modulate"] == 4  # three of the block, and the last
    assert count["conv3d"] == 0


@torch.no_grad()
def test_wan_transformers_with_other_calls():
    model = wan()
    agrees(model, lambda model: clip_call(model, return_dict=False)[0])
    agrees(model, lambda model: clip_call(model, size=(2, 4, 3, 6, 4)).sample)
    count = agrees(model, lambda model: clip_call(model, attention_kwargs={"scale": 0.5}).sample)
    assert count["layer_norm_modulate"] == 3, "the stock method has the decorator that scales LoRA layers"
    assert count["conv3d"] == 1
    agrees(wan(patch_size=(2, 3, 1)), lambda model: clip_call(model).sample)
    agrees(wan(patch_size=(1, 4, 3)), lambda model: clip_call(model, size=(1, 4, 2, 4, 6)).sample)


@torch.no_grad()
def test_hooks_on_parts_of_a_wan_transformer_run():
    model = wan()
    seen = []
    turnout.accelerate(model)
    clip_call(model)
    for part in (model.patch_embedding, model.norm_out, model.proj_out):
        hook = part.register_forward_hook(lambda part, *_: seen.append(type(part).__name__))
        clip_call(model)
        hook.remove()
    assert seen == ["Conv3d", "FP32LayerNorm", "Linear"]


@pytest.mark.parametrize(
    "other", [{}, {"padding": (0, 2, 0)}, {"stride": (1, 1, 2)}, {"groups": 2}, {"dilation": (1, 2, 1)}]
)
def test_tokens_of_patches_are_those_of_the_convolution(other):
    conv = nn.Conv3d(4, 6, (1, 2, 2), **{"stride": (1, 2, 2), **other})
    for size in ((4, 6), (5, 7)):  # the last row and column are left out
        x = torch.randn(2, 4, 3, *size)
        expected = conv(x).flatten(2).transpose(1, 2)
        found = blocks._tokens_of_patches(conv, x, [3, size[0] // 2, size[1] // 2])
        assert found.is_contiguous()
        close(found, expected)


def test_wan_transformers_have_gradients():
    model = wan()
    model.enable_gradient_checkpointing()
    found = []
    for checkpoints in (True, False):
        model.train(checkpoints)
        model.gradient_checkpointing = checkpoints
        for fast in (False, True):
            torch.manual_seed(1)
            model.zero_grad()
            with turnout.accelerated(model) if fast else torch.enable_grad():
                clip_call(model).sample.square().sum().backward()
            found.append([parameter.grad.clone() for parameter in model.parameters()])
    for each in found[1:]:
        for actual, expected in zip(each, found[0], strict=True):
            close(actual, expected, 1e-4)


def test_a_wan_transformer_with_another_norm_is_not_touched():
    model = wan()
    model.norm_out = nn.LayerNorm(24)
    report = turnout.accelerate(model)
    reasons = {entry.name: entry.reasons for entry in report.refused}
    assert reasons["WanTransformer3DModel"] == (
        "norm LayerNorm, this adapter needs a layer norm without weights",
    )


def test_parts_of_one_tensor_are_that_tensor():
    whole = torch.randn(2, 7, 4)
    for found in (blocks.joined(whole[:, :3], whole[:, 3:]), blocks.joined(whole[:1, :3], whole[:1, 3:])):
        assert found.data_ptr() == whole.data_ptr()
        assert torch.equal(found, whole[: len(found)])
    apart = [
        (whole[:, 4:], whole[:, :4]),
        (whole[:, :3], whole[:, 4:]),
        (whole[:, :3], whole[:, 3:6]),
        (whole[:, :3], whole[:, 3:].clone()),
        (whole[:, :3], whole[:, 3:].requires_grad_()),
    ]
    for first, second in apart:
        assert torch.equal(blocks.joined(first, second), torch.cat([first, second], 1))


@torch.no_grad()
def test_flux_compiles_into_one_graph():
    model = flux(1)
    block, (x, text, temb) = model.transformer_blocks[0], (random(1, 12, 32), random(1, 5, 32), random(1, 32))
    turns = torch.rand(17, 16)
    single = model.single_transformer_blocks[0]

    def both(x, text):
        text, x = block(x, text, temb, (turns.cos(), turns.sin()))
        return single(x, text, temb, (turns.cos(), turns.sin()))

    stock = both(x, text)
    turnout.accelerate(model)
    torch.compiler.reset()
    for found, expected in zip(
        torch.compile(both, fullgraph=True, backend="aot_eager")(x, text), stock, strict=True
    ):
        close(found, expected)


def test_another_gelu_is_not_touched():
    from diffusers.models.activations import GELU

    report = turnout.accelerate(nn.Sequential(GELU(4, 8), nn.Conv2d(1, 1, 1)))
    assert [entry.reasons for entry in report.refused] == [("approximate 'none', this adapter needs 'tanh'",)]

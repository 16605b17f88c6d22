"""Transformer blocks of U-Nets: what the walk over all models does not reach. Tiny, on the CPU."""

import contextlib
import itertools

import pytest
import torch
from torch import nn

import turnout
from tests.models.zoo import call_unet, made, random
from turnout.models import unet
from turnout.models.patch import patched

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def block(**how):
    from diffusers.models.attention import BasicTransformerBlock

    settings = {
        "dim": 16,
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "cross_attention_dim": 12,
        **how,
    }
    made = BasicTransformerBlock(**settings).eval()
    for parameter in made.parameters():
        if parameter.dim() == 1:
            parameter.data.normal_()
    return made


def given(dtype=torch.float32):
    return {
        "hidden_states": random(2, 9, 16).to(dtype),
        "encoder_hidden_states": random(2, 5, 12).to(dtype),
    }


@contextlib.contextmanager
def counted_calls():
    """How many modules are called inside this block."""
    calls = []
    stock = nn.Module.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            nn.Module,
            "__call__",
            lambda self, *args, **named: calls.append(self) or stock(self, *args, **named),
        )
        yield calls


def agrees(model, run, calls=None):
    """The same bits as stock; `calls`: how many modules are called, accelerated."""
    torch.manual_seed(1)
    stock = run(model)
    for numerics in (None, "exact"):
        with turnout.accelerated(model, numerics=numerics) as report, counted_calls() as called:
            for _ in range(2):  # what was remembered too
                called.clear()
                torch.manual_seed(1)
                fast = run(model)
                assert fast.dtype is stock.dtype
                assert torch.equal(fast, stock)
        assert calls is None or len(called) == calls, report.details()
    return report


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"attention_bias": True},
        {"only_cross_attention": True},
        {"double_self_attention": True, "cross_attention_dim": None},
        {"cross_attention_dim": None},
        {"norm_elementwise_affine": False},
        {"final_dropout": True},
        {"dropout": 0.5},
        {"ff_bias": False, "attention_out_bias": False},
        {"upcast_attention": True},
        {"norm_eps": 0.1},
    ],
    ids=str,
)
@torch.no_grad()
def test_one_module_is_called_with_the_bits_of_stock(how, dtype):
    words = given(dtype)
    if how.get("cross_attention_dim", 12) is None:
        words.pop("encoder_hidden_states")
    agrees(block(**how).to(dtype), lambda model: model(**words), calls=1)


@torch.no_grad()
def test_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        agrees(block(), lambda model: model(**given()), calls=1)


@torch.no_grad()
def test_a_block_given_masks_or_scales_runs_the_stock_code():
    masks = {"attention_mask": random(2, 1, 9), "encoder_attention_mask": random(2, 1, 5)}
    for name, mask in masks.items():
        agrees(block(), lambda model, name=name, mask=mask: model(**given(), **{name: mask}))
    agrees(block(), lambda model: model(**given(), cross_attention_kwargs={}), calls=1)
    agrees(block(), lambda model: model(**given(), cross_attention_kwargs={"scale": 0.3}))
    chunked = block()
    chunked.set_chunk_feed_forward(3, 1)
    agrees(chunked, lambda model: model(**given()))


@torch.no_grad()
def test_an_image_of_an_ip_adapter():
    """Text and image as the U-Net hands them on: the processor takes both, the rest of the block is ours."""
    from diffusers.models.attention_processor import IPAdapterAttnProcessor2_0

    model = block()
    processor = IPAdapterAttnProcessor2_0(16, cross_attention_dim=12, num_tokens=(3,), scale=0.7)
    model.attn2.set_processor(processor)
    words = given()
    words["encoder_hidden_states"] = (words["encoder_hidden_states"], [random(2, 1, 3, 12)])
    mask = {"ip_adapter_masks": [torch.rand(1, 1, 3, 3)]}
    agrees(model, lambda model: model(**words))
    agrees(model, lambda model: model(**words, cross_attention_kwargs=mask))
    with_image = model(**words)
    processor.scale = [0.0]
    assert not torch.equal(model(**words), with_image)
    with turnout.accelerated(model), counted_calls() as calls:
        model(**words)
    kinds = {type(module).__name__ for module in calls}
    assert "Attention" in kinds
    assert "FeedForward" not in kinds


@torch.no_grad()
def test_processors_that_users_set():
    from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0, SlicedAttnProcessor

    seen = []

    class Own(AttnProcessor2_0):
        def __call__(self, attn, hidden_states, *args, **kwargs):
            seen.append(attn)
            return 2 * super().__call__(attn, hidden_states, *args, **kwargs)

    for processor in (AttnProcessor(), SlicedAttnProcessor(1), Own()):
        first = block()
        first.attn1.set_processor(processor)
        agrees(first, lambda model: model(**given()))
        later = block()
        turnout.accelerate(later)
        later(**given())  # what it looked like is remembered
        later.attn1.set_processor(processor)
        fast = later(**given())
        turnout.restore(later)
        assert torch.equal(later(**given()), fast)
    assert seen
    model = block()
    turnout.accelerate(model)
    model.attn1.set_processor(AttnProcessor2_0())  # the stock one is known too
    with counted_calls() as calls:
        model(**given())
    assert len(calls) == 1
    assert not unet._is_plain(Own)


@torch.no_grad()
def test_slicing_fused_products_and_default_processors_of_a_model():
    for change in (
        lambda model: model.set_attention_slice("max"),
        lambda model: model.fuse_qkv_projections(),
        lambda model: model.set_default_attn_processor(),
        lambda model: model.set_attn_processor(dict(model.attn_processors)),
    ):
        model, twin = made("unet"), made("unet")
        turnout.accelerate(model)
        call_unet(model)
        change(model)
        change(twin)
        torch.testing.assert_close(call_unet(model), call_unet(twin), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_what_changes_after_a_call_is_seen():
    def weight(model):
        model.attn1.to_q.weight = nn.Parameter(torch.randn(16, 16))

    def layer(model):
        model.attn2.to_out[0] = nn.Linear(16, 16)

    def loaded(model):
        model.load_state_dict({name: x + 0.1 for name, x in model.state_dict().items()}, assign=True)

    def cast(model):
        model.to(torch.bfloat16)

    def eps(model):
        model.norm2.eps = 0.5

    def heads(model):
        model.attn1.heads = 4

    def rescaled(model):
        model.attn2.rescale_output_factor = 2.0

    def residual(model):
        model.attn2.residual_connection = True

    def normed(model):
        model.attn1.norm_q = nn.LayerNorm(8)

    def fewer(model):
        model.ff.net = model.ff.net[:2].append(nn.Linear(64, 16))

    def without_dropout(model):
        model.attn1.to_out = model.attn1.to_out[:1].append(nn.Identity())

    changes = (weight, layer, loaded, cast, eps, heads, rescaled, residual, normed, fewer, without_dropout)
    for change in changes:
        model = block()
        turnout.accelerate(model)
        before = model(**given())
        torch.manual_seed(2)
        change(model)
        words = given(model.norm1.weight.dtype)
        fast = model(**words)
        turnout.restore(model)
        assert torch.equal(fast, model(**words)), change.__name__
        assert change in (without_dropout,) or fast.dtype is not before.dtype or not torch.equal(fast, before)


def test_gradients_and_checkpointing():
    model = made("unet").train()
    model.enable_gradient_checkpointing()

    def gradients():
        model.zero_grad()
        call_unet(model).square().mean().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    stock = gradients()
    with turnout.accelerated(model):
        fast = gradients()
    for actual, expected in zip(fast, stock, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_dropout_in_training_drops_the_same():
    model = block(dropout=0.5, final_dropout=True).train()
    stock = agrees(model, lambda model: model(**given()).detach())
    assert stock.fused
    model.eval()
    model.attn1.to_out[1].train()
    agrees(model, lambda model: model(**given()).detach())


@torch.no_grad()
def test_cross_attention_kwargs_give_the_stock_output():
    model = made("unet")
    for words in ({"scale": 0.5}, {}, None):

        def run(model, words=words):
            inputs = (random(2, 4, 8, 8), torch.tensor([5]), random(2, 3, 8))
            return model(*inputs, cross_attention_kwargs=words).sample

        stock = run(model)
        with turnout.accelerated(model):
            torch.testing.assert_close(run(model), stock, rtol=1e-5, atol=1e-5)


def test_transforms_of_torch_func():
    model = block().requires_grad_(False)
    words = given()
    x, context = words["hidden_states"], words["encoder_hidden_states"]

    weights = {name: torch.randn_like(x) for name, x in model.named_parameters()}

    def each(model):
        return torch.func.vmap(lambda x: model(x[None], encoder_hidden_states=context[:1]))(x)

    def others(model):
        return torch.func.functional_call(model, weights, (x,), {"encoder_hidden_states": context})

    def gradient(model):
        return torch.func.grad(lambda x: model(x, encoder_hidden_states=context).square().sum())(x)

    for run in (each, others, gradient):
        stock = run(model)
        with turnout.accelerated(model):
            torch.testing.assert_close(run(model), stock, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"norm_type": "ada_norm_single", "norm_elementwise_affine": False}, "norm type 'ada_norm_single'"),
        ({"norm_type": "ada_norm_zero", "num_embeds_ada_norm": 10}, "AdaLayerNormZero inside"),
        ({"norm_type": "ada_norm", "num_embeds_ada_norm": 10}, "AdaLayerNorm inside"),
        ({"norm_type": "layer_norm_i2vgen"}, "norm type 'layer_norm_i2vgen'"),
        ({"activation_fn": "gelu"}, "activations.GELU inside"),
        ({"activation_fn": "geglu-approximate"}, "ApproximateGELU inside"),
        ({"attention_type": "gated"}, "GatedSelfAttentionDense inside"),
        (
            {"positional_embeddings": "sinusoidal", "num_positional_embeddings": 16},
            "SinusoidalPositionalEmbedding inside",
        ),
    ],
)
def test_blocks_of_other_kinds_are_left_alone(how, reason):
    """As PixArt, DiT, Latte, GLIGEN and AnimateDiff have them."""
    model = block(**how)
    report = turnout.accelerate(nn.ModuleList([model]))
    message = [entry.reasons for entry in report.refused if entry.path == "0"]
    assert len(message) == 1
    assert any(reason in each for each in message[0]), message
    assert patched(model) is None


@torch.no_grad()
def test_models_of_other_blocks():
    from diffusers import DiTTransformer2DModel, PixArtTransformer2DModel

    sizes = {
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "in_channels": 4,
        "num_layers": 1,
        "sample_size": 8,
    }
    dit = DiTTransformer2DModel(**sizes).eval()
    pixart = PixArtTransformer2DModel(**sizes, cross_attention_dim=16, caption_channels=8).eval()
    sizes = {"resolution": None, "aspect_ratio": None}
    calls = {
        dit: {"timestep": torch.tensor([3]), "class_labels": torch.tensor([1])},
        pixart: {
            "encoder_hidden_states": random(1, 5, 8),
            "timestep": torch.tensor([3]),
            "added_cond_kwargs": sizes,
        },
    }
    for model, words in calls.items():
        stock = model(random(1, 4, 8, 8), **words).sample
        with turnout.accelerated(model) as report:
            torch.testing.assert_close(model(random(1, 4, 8, 8), **words).sample, stock, rtol=1e-5, atol=1e-5)
        reasons = itertools.chain(*(e.reasons for e in report.refused if e.name == "BasicTransformerBlock"))
        assert list(reasons)

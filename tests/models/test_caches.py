"""diffusers' caches find the blocks and the processors of an accelerated transformer, and give what they give
on a stock one.
"""

import pytest
import torch

import turnout
from tests.models.zoo import ZOO, made

pytestmark = pytest.mark.filterwarnings("ignore")
TRANSFORMERS = ("flux", "wan-transformer", "qwen-image")


def first_block(model):
    from diffusers.hooks import FirstBlockCacheConfig

    model.enable_cache(FirstBlockCacheConfig(threshold=0.2))


def mag(model):
    from diffusers.hooks import MagCacheConfig

    model.enable_cache(MagCacheConfig(num_inference_steps=4, mag_ratios=[1.0, 0.99, 0.98, 0.97]))


def taylor(model):
    from diffusers.hooks import TaylorSeerCacheConfig

    model.enable_cache(TaylorSeerCacheConfig(cache_interval=2, disable_cache_before_step=1))


def broadcast(model):
    from diffusers import PyramidAttentionBroadcastConfig

    model.enable_cache(PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2, current_timestep_callback=lambda: 500,
        spatial_attention_block_identifiers=("blocks", "transformer_blocks"),
    ))  # fmt: skip


def faster(model):
    from diffusers import FasterCacheConfig

    model.enable_cache(
        FasterCacheConfig(
            spatial_attention_block_skip_range=2,
            current_timestep_callback=lambda: 500,
            is_guidance_distilled=True,
            spatial_attention_block_identifiers=("^blocks.*attn", "^transformer_blocks.*attn"),
            tensor_format="BCHW",
        )
    )


def skipped_layers(model):
    from diffusers.hooks import LayerSkipConfig, apply_layer_skip

    apply_layer_skip(
        model,
        LayerSkipConfig(indices=[0], fqn="blocks" if hasattr(model, "blocks") else "transformer_blocks"),
    )


def skipped_attention(model):
    from diffusers.hooks import LayerSkipConfig, apply_layer_skip

    fqn = "blocks" if hasattr(model, "blocks") else "transformer_blocks"
    apply_layer_skip(
        model,
        LayerSkipConfig(
            indices=[0], fqn=fqn, skip_attention=True, skip_ff=False, skip_attention_scores=False
        ),
    )


def sea(model):
    from diffusers.hooks import SeaCacheConfig

    model.enable_cache(SeaCacheConfig())


# What stock itself cannot do: these blocks have not what FasterCache and the skipping of layers look for.
CANNOT = {(name, cache) for name in TRANSFORMERS for cache in ("faster", "skipped_attention")} | {
    ("qwen-image", "skipped_layers")
}

CACHES = (first_block, mag, taylor, broadcast, faster, skipped_layers, skipped_attention, sea)


@torch.no_grad()
def steps(name, cache, order):
    """Two steps of a transformer with a cache, or why that cannot be had."""
    model = made(name)
    try:
        if order == "accelerate first":
            turnout.accelerate(model)
        cache(model)
        if order == "accelerate last":
            turnout.accelerate(model)
        actual = []
        for step in range(3):
            with model.cache_context("cond", step_index=step, sigma=1.0 - step / 4, num_inference_steps=4):
                actual.append(ZOO[name][1](model))
        return actual
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("cache", CACHES, ids=lambda cache: cache.__name__)
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_caches_work_as_on_stock(name, cache):
    expected = steps(name, cache, "stock")
    assert isinstance(expected, str) == ((name, cache.__name__) in CANNOT), expected
    for order in ("accelerate first", "accelerate last"):
        actual = steps(name, cache, order)
        if isinstance(expected, str):
            assert isinstance(actual, str)
            continue
        assert not isinstance(actual, str), f"{order}: {actual}"
        for one, other in zip(actual, expected, strict=True):
            assert (one - other).abs().max() <= 3e-5 * other.abs().max(), order

"""Are models that are not known never slower than stock? python benchmarks/unknown.py [NAME ...]

Small ones of each kind, built from configurations, stock and accelerated in turns, in one thread. Time is the
thread's own, so that others on the machine count little; the speed-up is the median of those of neighbours.
"""

import statistics
import sys
import time
import warnings

import torch
from torch import nn

import turnout

BLOCKS = {
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "cross_attention_dim": 32,
    "norm_num_groups": 8,
}


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def unet():
    from diffusers import UNet2DConditionModel

    blocks = {
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }
    model = UNet2DConditionModel(**BLOCKS, **blocks, attention_head_dim=8)
    return model, lambda m: m(random(2, 4, 32, 32), 500, random(2, 77, 32)).sample


def unet_of_ddpm():
    from diffusers import UNet2DModel

    kinds = {
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    }
    model = UNet2DModel(block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8, **kinds)
    return model, lambda m: m(random(1, 3, 32, 32), 500).sample


def controlnet():
    from diffusers import ControlNetModel

    kinds = ("CrossAttnDownBlock2D", "DownBlock2D")
    model = ControlNetModel(
        **BLOCKS, down_block_types=kinds, attention_head_dim=8, conditioning_embedding_out_channels=(8, 16)
    )
    return model, lambda m: m(
        random(1, 4, 32, 32), 500, random(1, 77, 32), random(1, 3, 64, 64), return_dict=False
    )[1]


def dit():
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=32, num_layers=4, sample_size=16, in_channels=4
    )
    return model, lambda m: m(random(2, 4, 16, 16), torch.tensor([1, 2]), torch.tensor([3, 4])).sample


def pixart():
    from diffusers import PixArtTransformer2DModel

    model = PixArtTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=32,
        num_layers=4,
        sample_size=16,
        cross_attention_dim=128,
        caption_channels=64,
        out_channels=4,
        norm_num_groups=8,
        use_additional_conditions=False,
    )
    return model, lambda m: m(random(1, 4, 16, 16), random(1, 20, 64), torch.tensor([3]), {}).sample


def sd3():
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=16,
        in_channels=4,
        num_layers=4,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=64,
        caption_projection_dim=128,
        pooled_projection_dim=64,
        out_channels=4,
    )
    return (
        model,
        lambda m: m(random(1, 4, 16, 16), random(1, 20, 64), random(1, 64), torch.tensor([3])).sample,
    )


def hunyuan_dit():
    from diffusers import HunyuanDiT2DModel

    model = HunyuanDiT2DModel(
        num_attention_heads=4,
        attention_head_dim=32,
        num_layers=4,
        sample_size=16,
        hidden_size=128,
        patch_size=2,
        in_channels=4,
        cross_attention_dim=64,
        cross_attention_dim_t5=64,
        pooled_projection_dim=64,
        text_len=10,
        text_len_t5=10,
        use_style_cond_and_image_meta_size=False,
    )
    table = (random(64, 32), random(64, 32))
    return model, lambda m: m(
        random(1, 4, 16, 16),
        torch.tensor([3.0]),
        random(1, 10, 64),
        torch.ones(1, 10),
        random(1, 10, 64),
        torch.ones(1, 10),
        image_rotary_emb=table,
        return_dict=False,
    )[0]


def autoencoder_dc():
    from diffusers import AutoencoderDC

    model = AutoencoderDC(
        latent_channels=8,
        encoder_block_out_channels=(32, 64),
        decoder_block_out_channels=(32, 64),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        downsample_block_type="Conv",
    )
    return model, lambda m: m.decode(random(1, 8, 16, 16)).sample


def mochi():
    from diffusers import AutoencoderKLMochi

    model = AutoencoderKLMochi(
        latent_channels=4,
        out_channels=3,
        encoder_block_out_channels=(32, 32, 32, 32),
        decoder_block_out_channels=(32, 32, 32, 32),
        layers_per_block=(1, 1, 1, 1, 1),
        latents_mean=None,
        latents_std=None,
    )
    return model, lambda m: m.decode(random(1, 4, 2, 8, 8)).sample


def cosmos():
    from diffusers import AutoencoderKLCosmos

    model = AutoencoderKLCosmos(
        encoder_block_out_channels=(32, 32, 32, 32),
        decode_block_out_channels=(32, 32, 32, 32),
        num_layers=1,
        resolution=64,
        attention_resolutions=(8,),
    )
    return model, lambda m: m.decode(random(1, 16, 2, 8, 8)).sample


def resnet():
    class Block(nn.Module):
        def __init__(self, channels):
            super().__init__()
            self.inner = nn.Sequential(
                nn.Conv2d(channels, channels, 3, padding=1, bias=False),
                nn.BatchNorm2d(channels),
                nn.ReLU(),
                nn.Conv2d(channels, channels, 3, padding=1, bias=False),
                nn.BatchNorm2d(channels),
            )

        def forward(self, x):
            return torch.relu(x + self.inner(x))

    model = nn.Sequential(
        nn.Conv2d(3, 32, 7, 2, 3),
        *[Block(32) for _ in range(8)],
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )
    return model, lambda m: m(random(1, 3, 64, 64))


def tiny_convolutions():
    """As much of a host's time, and as little work, as there can be."""
    layers = [
        layer for _ in range(20) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU())
    ]
    return nn.Sequential(*layers), lambda m: m(random(1, 8, 4, 4))


def vit():
    from transformers import ViTConfig, ViTModel

    model = ViTModel(
        ViTConfig(
            hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=128, image_size=64
        )
    )
    return model, lambda m: m(random(1, 3, 64, 64)).last_hidden_state


def bert():
    from transformers import BertConfig, BertModel

    model = BertModel(
        BertConfig(
            hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=128, vocab_size=100
        )
    )
    return model, lambda m: m(torch.arange(32)[None]).last_hidden_state


def wav2vec():
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    model = Wav2Vec2Model(
        Wav2Vec2Config(
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            conv_dim=(32,) * 7,
        )
    )
    return model, lambda m: m(random(1, 4000)).last_hidden_state


MODELS = {
    make.__name__: make
    for make in (
        unet,
        unet_of_ddpm,
        controlnet,
        dit,
        pixart,
        sd3,
        hunyuan_dit,
        autoencoder_dc,
        mochi,
        cosmos,
        resnet,
        tiny_convolutions,
        vit,
        bert,
        wav2vec,
    )
}


def compare(make, seconds=4.0):
    """The time of stock, ms, how many times faster the accelerated model is, the difference of their results,
    and how many parts were patched."""
    torch.manual_seed(0)
    model, call = make()
    torch.manual_seed(0)
    other = make()[0].eval()
    other.load_state_dict(model.eval().state_dict())
    report = turnout.accelerate(other)
    pair, times = (model, other), ([], [])
    with torch.no_grad():
        worst = (call(model) - call(other)).abs().max().item()
        for each in pair * 3:
            call(each)
        end = time.perf_counter() + seconds
        order = [0, 1]
        while time.perf_counter() < end:
            for i in order:
                start = time.thread_time()
                call(pair[i])
                times[i].append(time.thread_time() - start)
            order.reverse()
    ratio = statistics.median(stock / accelerated for stock, accelerated in zip(*times, strict=True))
    return 1e3 * statistics.median(times[0]), ratio, worst, len(report.patched)


def main():
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(f"{'model':20s} {'stock ms':>9s} {'speed-up':>9s} {'difference':>11s} {'parts':>6s}")
    for name in sys.argv[1:] or MODELS:
        stock, ratio, worst, parts = compare(MODELS[name])
        print(f"{name:20s} {stock:9.3f} {ratio:9.3f} {worst:11.1e} {parts:6d}", flush=True)


if __name__ == "__main__":
    main()

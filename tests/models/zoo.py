"""Every model that is known, as small as it can be, and one call to make of each."""

import functools

import torch

KL = {
    "down_block_types": ["DownEncoderBlock2D"] * 2,
    "up_block_types": ["UpDecoderBlock2D"] * 2,
    "block_out_channels": [16, 32],
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "latent_channels": 4,
}


def wan():
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan(
        base_dim=8, z_dim=4, num_res_blocks=1, latents_mean=[0.0] * 4, latents_std=[1.0] * 4
    )


def wan22():
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan(
        base_dim=8,
        decoder_base_dim=8,
        z_dim=6,
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        num_res_blocks=1,
        scale_factor_spatial=16,
        latents_mean=[0.0] * 6,
        latents_std=[1.0] * 6,
    )


def qwen_image_vae():
    from diffusers import AutoencoderKLQwenImage

    return AutoencoderKLQwenImage(
        base_dim=8, z_dim=4, num_res_blocks=1, latents_mean=[0.0] * 4, latents_std=[1.0] * 4
    )


def flux_vae():
    from diffusers import AutoencoderKL

    return AutoencoderKL(**KL, use_quant_conv=False, use_post_quant_conv=False)


def sdxl_vae():
    from diffusers import AutoencoderKL

    return AutoencoderKL(**KL)


def flux2_vae():
    from diffusers import AutoencoderKLFlux2

    return AutoencoderKLFlux2(**KL)


def ltx():
    from diffusers import AutoencoderKLLTXVideo

    blocks = (8, 16, 16)
    return AutoencoderKLLTXVideo(
        latent_channels=4,
        block_out_channels=blocks,
        decoder_block_out_channels=blocks,
        layers_per_block=(1,) * 4,
        decoder_layers_per_block=(1,) * 4,
        spatio_temporal_scaling=(True, True, False),
        decoder_spatio_temporal_scaling=(True, True, False),
        decoder_inject_noise=(False,) * 4,
        upsample_residual=(False,) * 3,
        upsample_factor=(1,) * 3,
        down_block_types=("LTXVideoDownBlock3D",) * 3,
        downsample_type=("conv",) * 3,
    )


def ltx_timestep():
    """0.9.5 and later: a time step scales the norms, upsampling has a residual."""
    from diffusers import AutoencoderKLLTXVideo

    return AutoencoderKLLTXVideo(
        latent_channels=4,
        block_out_channels=(8, 8, 16),
        decoder_block_out_channels=(8, 16),
        layers_per_block=(1,) * 3,
        decoder_layers_per_block=(1,) * 3,
        spatio_temporal_scaling=(True,) * 2,
        decoder_spatio_temporal_scaling=(True,) * 2,
        decoder_inject_noise=(False,) * 3,
        upsample_residual=(True,) * 2,
        upsample_factor=(2,) * 2,
        timestep_conditioning=True,
        down_block_types=("LTXVideo095DownBlock3D",) * 2,
        downsample_type=("spatial", "spatiotemporal"),
    )


def ltx2():
    from diffusers import AutoencoderKLLTX2Video

    return AutoencoderKLLTX2Video(
        latent_channels=4,
        block_out_channels=(8, 8, 16, 32),
        decoder_block_out_channels=(8, 16, 32),
        layers_per_block=(1,) * 5,
        decoder_layers_per_block=(1,) * 4,
    )


def hunyuan():
    from diffusers import AutoencoderKLHunyuanVideo

    return AutoencoderKLHunyuanVideo(
        latent_channels=4, block_out_channels=(8, 8, 16, 16), layers_per_block=1, norm_num_groups=4
    )


def cogvideox():
    from diffusers import AutoencoderKLCogVideoX

    return AutoencoderKLCogVideoX(
        latent_channels=4,
        block_out_channels=(8, 8, 16, 16),
        layers_per_block=1,
        norm_num_groups=4,
        sample_height=32,
        sample_width=48,
    )


def flux():
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        num_layers=2,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=8,
        pooled_projection_dim=8,
        in_channels=4,
        guidance_embeds=True,
        axes_dims_rope=(4, 4, 8),
    )


def wan_transformer():
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=12,
        text_dim=8,
        freq_dim=8,
        ffn_dim=16,
        in_channels=4,
        out_channels=4,
    )


def qwen_image():
    from diffusers import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=8,
        axes_dims_rope=(4, 6, 6),
    )


UNET = {
    "sample_size": 8,
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "cross_attention_dim": 8,
    "attention_head_dim": 4,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
}


def unet():
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(**UNET, up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"))


def controlnet():
    from diffusers import ControlNetModel

    torch.manual_seed(0)
    model = ControlNetModel(
        **{key: value for key, value in UNET.items() if key != "sample_size"},
        conditioning_embedding_out_channels=(4, 8),
    )
    for conv in (*model.controlnet_down_blocks, model.controlnet_mid_block):
        torch.nn.init.normal_(conv.weight, std=0.1)  # zeros would hide all that comes before
    return model


def mamba():
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(MambaConfig(num_hidden_layers=2, hidden_size=16, vocab_size=64, state_size=4))


def mamba2():
    from transformers import Mamba2Config, Mamba2ForCausalLM

    sizes = {
        "hidden_size": 16,
        "state_size": 8,
        "num_heads": 4,
        "head_dim": 8,
        "n_groups": 2,
        "chunk_size": 4,
    }
    return Mamba2ForCausalLM(Mamba2Config(num_hidden_layers=2, vocab_size=64, expand=2, **sizes))


def bamba():
    """A hybrid: one layer of Mamba-2, one of attention."""
    from transformers import BambaConfig, BambaForCausalLM

    sizes = {
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
        "mamba_d_state": 8,
        "mamba_chunk_size": 4,
    }
    return BambaForCausalLM(
        BambaConfig(
            num_hidden_layers=2,
            hidden_size=32,
            vocab_size=64,
            intermediate_size=32,
            num_attention_heads=4,
            num_key_value_heads=2,
            attn_layer_indices=[1],
            **sizes,
        )
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
            intermediate_size=16,
            vocab_size=64,
            num_attention_heads=2,
            num_key_value_heads=1,
            attn_layer_period=2,
            attn_layer_offset=1,
            num_experts=2,
            num_experts_per_tok=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            mamba_d_state=4,
            use_mamba_kernels=False,
        )
    )


def falcon_h1():
    from transformers import FalconH1Config, FalconH1ForCausalLM

    return FalconH1ForCausalLM(
        FalconH1Config(
            num_hidden_layers=2,
            hidden_size=32,
            intermediate_size=32,
            vocab_size=64,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            mamba_d_ssm=32,
            mamba_n_heads=4,
            mamba_d_head=8,
            mamba_n_groups=1,
            mamba_d_state=8,
            mamba_chunk_size=4,
        )
    )


def zamba2():
    from transformers import Zamba2Config, Zamba2ForCausalLM

    return Zamba2ForCausalLM(
        Zamba2Config(
            num_hidden_layers=3,
            layers_block_type=["mamba", "mamba", "hybrid"],
            hidden_size=32,
            intermediate_size=32,
            vocab_size=64,
            num_attention_heads=4,
            num_key_value_heads=4,
            mamba_d_state=8,
            mamba_ngroups=1,
            n_mamba_heads=4,
            chunk_size=4,
            num_mem_blocks=1,
            use_shared_attention_adapter=False,
            adapter_rank=4,
        )
    )


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def decode(*shape):
    return lambda model: model.decode(random(*shape).to(model.dtype)).sample


def call_flux(model):
    places = torch.stack([torch.zeros(12), torch.arange(12) // 4, torch.arange(12) % 4], 1)
    half = torch.full((2,), 0.5, dtype=model.dtype)
    return model(
        hidden_states=random(2, 12, 4).to(model.dtype),
        encoder_hidden_states=random(2, 5, 8).to(model.dtype),
        pooled_projections=random(2, 8).to(model.dtype),
        timestep=half,
        guidance=half,
        img_ids=places,
        txt_ids=torch.zeros(5, 3),
    ).sample


def call_wan(model):
    text = random(1, 7, 8).to(model.dtype)
    return model(
        random(1, 4, 3, 4, 6).to(model.dtype), timestep=torch.tensor([500]), encoder_hidden_states=text
    ).sample


def call_qwen_image(model):
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], dtype=torch.bool)
    return model(
        hidden_states=random(2, 12, 4).to(model.dtype),
        encoder_hidden_states=random(2, 5, 8).to(model.dtype),
        encoder_hidden_states_mask=mask,
        timestep=torch.full((2,), 0.5, dtype=model.dtype),
        img_shapes=[[(1, 3, 4)]] * 2,
    ).sample


def call_unet(model):
    return model(
        random(2, 4, 8, 8).to(model.dtype), torch.tensor([5]), random(2, 3, 8).to(model.dtype)
    ).sample


def call_controlnet(model):
    sample, text, picture = (
        random(*shape).to(model.dtype) for shape in ((2, 4, 8, 8), (2, 3, 8), (2, 3, 16, 16))
    )
    down, middle = model(sample, torch.tensor([5]), text, picture, return_dict=False)
    return torch.cat([x.flatten() for x in (*down, middle)])


def tokens():
    return torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(0))


def logits(model):
    return model(tokens()).logits


# name: how to make it, what to call, the op that must have been called
ZOO = {
    "wan": (wan, decode(1, 4, 3, 4, 6), "causal_conv3d"),
    "wan22": (wan22, decode(2, 6, 3, 2, 4), "causal_conv3d"),
    "qwen-image-vae": (qwen_image_vae, decode(1, 4, 1, 4, 6), "causal_conv3d"),
    "flux-vae": (flux_vae, decode(2, 4, 8, 12), "group_norm_silu"),
    "sdxl-vae": (sdxl_vae, decode(1, 4, 8, 12), "upsample_conv2d"),
    "flux2-vae": (flux2_vae, decode(1, 4, 8, 12), "group_norm_silu"),
    "ltx": (ltx, decode(2, 4, 2, 3, 4), "rms_norm_silu_into"),
    "ltx-timestep": (
        ltx_timestep,
        lambda model: model.decode(
            random(1, 4, 2, 3, 4).to(model.dtype), torch.full((1,), 0.05, dtype=model.dtype)
        ).sample,
        "rms_norm_silu_into",
    ),
    "ltx2": (ltx2, decode(1, 4, 2, 3, 4), "rms_norm_silu_into"),
    "hunyuan": (hunyuan, decode(2, 4, 3, 4, 6), "group_norm_silu_pad"),
    "cogvideox": (cogvideox, decode(1, 4, 3, 4, 6), "causal_conv3d"),
    "flux": (flux, call_flux, "norm_rope"),
    "wan-transformer": (wan_transformer, call_wan, "norm_rope"),
    "qwen-image": (qwen_image, call_qwen_image, "norm_rope"),
    "unet": (unet, call_unet, "group_norm_silu"),
    "controlnet": (controlnet, call_controlnet, "group_norm_silu"),
    "mamba": (mamba, logits, "causal_conv1d"),
    "mamba2": (mamba2, logits, "causal_conv1d"),
    "bamba": (bamba, logits, "causal_conv1d"),
    "falcon-mamba": (falcon_mamba, logits, "causal_conv1d"),
    "jamba": (jamba, logits, "causal_conv1d"),
    "falcon-h1": (falcon_h1, logits, "causal_conv1d"),
    "zamba2": (zamba2, logits, "causal_conv1d"),
}  # fmt: skip

PARTLY_KNOWN = ("unet", "controlnet")  # their blocks are known, they themselves are not

# what encoders are called with: one frame and one chunk
CLIPS = {
    "wan": (1, 3, 5, 32, 32),
    "wan22": (1, 3, 5, 32, 32),
    "qwen-image-vae": (1, 3, 1, 32, 32),
    "flux-vae": (1, 3, 16, 24),
    "ltx": (1, 3, 5, 32, 32),
    "ltx-timestep": (1, 3, 5, 32, 32),
    "ltx2": (1, 3, 9, 64, 64),
    "hunyuan": (1, 3, 9, 32, 32),
    "cogvideox": (1, 3, 9, 32, 48),
}


@functools.cache
def _weights(name):
    torch.manual_seed(0)
    model = ZOO[name][0]().eval()
    with torch.no_grad():  # norms start as ones and zeros, which would hide a weight that is not used
        for parameter in model.parameters():
            if parameter.dim() == 1 or "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.state_dict()


def made(name, dtype=torch.float32):
    """A model in evaluation mode, always with the same weights."""
    model = ZOO[name][0]()
    model.load_state_dict(_weights(name))
    return torch.nn.Module.to(model, dtype).eval()

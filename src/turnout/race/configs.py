"""The configurations of the models that race: the published ones, and smaller ones for tests and for a CPU.

Numbers of `FULL` are those of each model's published config.json, which is named beside them. Where
diffusers' or transformers' own defaults are that file, nothing is repeated: "defaults" says so. Where a model
is too large to be built for a race, layers are left out, never made narrower, and the race says so.
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

# Every AutoencoderKL of Stable Diffusion, SDXL, Flux and Flux 2 has these blocks (stable-diffusion-v1-5,
# stable-diffusion-xl-base-1.0 and FLUX.1-dev, vae/config.json).
_KL: Config = {
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [128, 256, 512, 512],
    "layers_per_block": 2,
}
_TINY_KL: Config = {
    "down_block_types": ["DownEncoderBlock2D"] * 2,
    "up_block_types": ["UpDecoderBlock2D"] * 2,
    "block_out_channels": [16, 32],
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "latent_channels": 4,
}
_NO_QUANT: Config = {"use_quant_conv": False, "use_post_quant_conv": False}
_TINY_WAN: Config = {
    "base_dim": 8,
    "z_dim": 4,
    "num_res_blocks": 1,
    "latents_mean": [0.0] * 4,
    "latents_std": [1.0] * 4,
}
_TINY_3D: Config = {
    "latent_channels": 4,
    "block_out_channels": (8, 8, 16, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
}

_LTX2: Config = {"decoder_causal": False, "spatial_compression_ratio": 32, "temporal_compression_ratio": 8}

# stable-diffusion-v1-5 and stable-diffusion-xl-base-1.0, unet/config.json.
_SD15_UNET: Config = {"sample_size": 64, "cross_attention_dim": 768}
_SDXL_UNET: Config = {
    "sample_size": 128,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "block_out_channels": (320, 640, 1280),
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}

FULL: dict[str, Config] = {
    "wan-vae": {},  # Wan2.1-T2V-1.3B-Diffusers, vae: defaults
    "wan22-vae": {  # Wan2.2-TI2V-5B-Diffusers, vae; means and deviations are used outside of the model
        "base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, "is_residual": True, "in_channels": 12,
        "out_channels": 12, "patch_size": 2, "scale_factor_spatial": 16,
        "latents_mean": [0.0] * 48, "latents_std": [1.0] * 48,
    },
    "qwen-image-vae": {},  # Qwen-Image, vae: defaults
    "ltx-vae": {},  # LTX-Video 0.9.0, vae: defaults
    # LTX-2, vae: defaults, but for the decoder's causality and the two ratios (4 x 2 x 2 x 2 pixels, 2 x 2 x
    # 2 frames)
    "ltx2-vae": _LTX2,
    "hunyuan-vae": {},  # HunyuanVideo, vae: defaults
    "cogvideox-vae": {},  # CogVideoX-2b, vae: defaults
    "sd-vae": _KL,
    "sdxl-vae": _KL,
    "flux-vae": {**_KL, "latent_channels": 16, **_NO_QUANT},  # FLUX.1-dev, vae
    "flux2-vae": {},  # FLUX.2-dev, vae: defaults
    # FLUX.1-dev, transformer: 19 and 38 layers
    "flux": {"num_layers": 4, "num_single_layers": 8, "guidance_embeds": True},
    # Wan2.1-T2V-1.3B-Diffusers, transformer: 30 layers
    "wan": {"num_layers": 4, "num_attention_heads": 12, "ffn_dim": 8960},
    "qwen-image": {"num_layers": 4},  # Qwen-Image, transformer: defaults, of which 60 layers
    "sdxl-unet": _SDXL_UNET,
    "sd15-unet": _SD15_UNET,
    # state-spaces/mamba-790m-hf: hidden size 1536, 48 layers
    "mamba": {"hidden_size": 1536, "num_hidden_layers": 4},
    "mamba-decode": {"hidden_size": 1536, "num_hidden_layers": 24},
    # Mamba-Codestral-7B-v0.1: defaults of Mamba2Config, 64 layers
    "mamba2": {"num_hidden_layers": 4},
    "mamba2-decode": {"num_hidden_layers": 12},
    # tiiuae/falcon-mamba-7b: hidden size 4096, inner size 8192 (2 x), rank 256 ("auto"), 64 layers
    "falcon-mamba": {"hidden_size": 4096, "num_hidden_layers": 4},
    "falcon-mamba-decode": {"hidden_size": 4096, "num_hidden_layers": 12},
    # ai21labs/Jamba-v0.1: defaults, of which 32 layers and 16 experts. Both of two experts are always chosen,
    # so that rounding chooses no other expert.
    "jamba": {"num_hidden_layers": 5, "num_experts": 2, "num_experts_per_tok": 2},
    "jamba-decode": {"num_hidden_layers": 5, "num_experts": 2, "num_experts_per_tok": 2},
    # ibm-ai-platform/Bamba-9B-v1: 32 layers, of which 9, 18 and 27 are attention
    "bamba": {"num_hidden_layers": 4, "attn_layer_indices": [3], "mamba_d_state": 128},
    "bamba-decode": {"num_hidden_layers": 4, "attn_layer_indices": [3], "mamba_d_state": 128},
    # tiiuae/Falcon-H1-7B-Instruct: 44 layers
    "falcon-h1": {
        "hidden_size": 3072, "num_hidden_layers": 8, "num_attention_heads": 12, "num_key_value_heads": 2,
        "head_dim": 128, "intermediate_size": 12288, "mamba_d_ssm": 3072, "mamba_n_heads": 24,
        "mamba_d_head": 128,
        "mamba_d_state": 256, "mamba_chunk_size": 128,
    },
    # Zyphra/Zamba2-2.7B: defaults of Zamba2Config, of which 54 layers; heads of 64 as in the published files
    "zamba2": {"num_hidden_layers": 7, "layers_block_type": ["mamba"] * 6 + ["hybrid"], "n_mamba_heads": 80},
    "zamba2-decode": {
        "num_hidden_layers": 19, "layers_block_type": ["mamba", *(["mamba"] * 5 + ["hybrid"]) * 3],
        "n_mamba_heads": 80,
    },
}  # fmt: skip
FULL["falcon-h1-decode"] = FULL["falcon-h1"]

_TINY_LTX = (8, 16, 16)
# For tests: as small as each architecture can be.
TINY: dict[str, Config] = {
    "wan-vae": _TINY_WAN,
    "wan22-vae": {
        "base_dim": 8, "decoder_base_dim": 8, "z_dim": 6, "is_residual": True, "in_channels": 12,
        "out_channels": 12,
        "patch_size": 2, "num_res_blocks": 1, "scale_factor_spatial": 16,
        "latents_mean": [0.0] * 6, "latents_std": [1.0] * 6,
    },
    "qwen-image-vae": _TINY_WAN,
    "ltx-vae": {
        "latent_channels": 4, "block_out_channels": _TINY_LTX, "decoder_block_out_channels": _TINY_LTX,
        "layers_per_block": (1,) * 4, "decoder_layers_per_block": (1,) * 4,
        "spatio_temporal_scaling": (True, True, False),
        "decoder_spatio_temporal_scaling": (True, True, False),
        "decoder_inject_noise": (False,) * 4, "upsample_residual": (False,) * 3, "upsample_factor": (1,) * 3,
        "down_block_types": ("LTXVideoDownBlock3D",) * 3, "downsample_type": ("conv",) * 3,
    },
    "ltx2-vae": {
        "latent_channels": 4, "block_out_channels": (8, 8, 16, 32), "decoder_block_out_channels": (8, 16, 32),
        "layers_per_block": (1,) * 5, "decoder_layers_per_block": (1,) * 4, **_LTX2,
    },
    "hunyuan-vae": _TINY_3D,
    "cogvideox-vae": {**_TINY_3D, "sample_height": 32, "sample_width": 48},
    "sd-vae": _TINY_KL,
    "sdxl-vae": _TINY_KL,
    "flux-vae": {**_TINY_KL, **_NO_QUANT},
    "flux2-vae": _TINY_KL,
    "flux": {
        "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2,
        "joint_attention_dim": 8, "pooled_projection_dim": 8, "in_channels": 4, "guidance_embeds": True,
        "axes_dims_rope": (4, 4, 8),
    },
    "wan": {
        "num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 12, "text_dim": 8, "freq_dim": 8,
        "ffn_dim": 16, "in_channels": 4, "out_channels": 4,
    },
    "qwen-image": {
        "in_channels": 4, "out_channels": 4, "num_layers": 1, "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 8, "axes_dims_rope": (4, 6, 6),
    },
    "sdxl-unet": {
        **_SDXL_UNET, "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "block_out_channels": (32, 64),
        "layers_per_block": 1,
        "transformer_layers_per_block": (1, 2), "attention_head_dim": (2, 4), "cross_attention_dim": 32,
        "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 80,
    },
    "sd15-unet": {
        "block_out_channels": (32, 64), "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "layers_per_block": 1,
        "cross_attention_dim": 32,
    },
    "mamba": {"num_hidden_layers": 2, "hidden_size": 16, "state_size": 4},
    "mamba2": {
        "num_hidden_layers": 2, "hidden_size": 16, "state_size": 8, "num_heads": 4, "head_dim": 8,
        "n_groups": 2,
        "chunk_size": 4,
    },
    "falcon-mamba": {"num_hidden_layers": 2, "hidden_size": 16, "state_size": 4},
    "jamba": {
        "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_experts": 2, "num_experts_per_tok": 2, "attn_layer_period": 2,
        "attn_layer_offset": 1, "mamba_d_state": 4,
    },
    "bamba": {
        "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4,
        "num_key_value_heads": 2, "attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16,
        "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 4,
    },
    "falcon-h1": {
        "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16,
        "mamba_d_state": 8, "mamba_chunk_size": 4,
    },
    "zamba2": {
        "num_hidden_layers": 2, "layers_block_type": ["mamba", "hybrid"], "hidden_size": 32,
        "n_mamba_heads": 4,
        "mamba_d_state": 8, "num_attention_heads": 4, "chunk_size": 4, "adapter_rank": 4,
    },
}  # fmt: skip

# For a CPU: the published configuration where it is not named here, on a smaller input.
SMALL: dict[str, Config] = {
    "ltx2-vae": {  # a quarter of the channels
        "block_out_channels": (64, 128, 256, 512), "decoder_block_out_channels": (64, 128, 256),
        "latent_channels": 32,
        **_LTX2,
    },
    "flux": {"num_layers": 1, "num_single_layers": 1, "guidance_embeds": True},
    "wan": {"num_layers": 2, "num_attention_heads": 4, "ffn_dim": 2048},
    "qwen-image": {"num_layers": 1},
    "sdxl-unet": {  # a fifth of the channels
        **_SDXL_UNET, "block_out_channels": (64, 128, 256), "transformer_layers_per_block": (1, 2, 2),
        "attention_head_dim": (1, 2, 4), "cross_attention_dim": 512,
    },
    "sd15-unet": {**_SD15_UNET, "block_out_channels": (64, 128, 256, 256)},
    "mamba": {"num_hidden_layers": 2, "hidden_size": 256},
    "mamba2": {"num_hidden_layers": 2, "hidden_size": 256, "num_heads": 8, "n_groups": 1},
    "falcon-mamba": {"num_hidden_layers": 2, "hidden_size": 256},
    "jamba": {
        "num_hidden_layers": 5, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_experts": 2, "num_experts_per_tok": 2,
    },
    "bamba": {
        "num_hidden_layers": 3, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
        "num_key_value_heads": 2, "attn_layer_indices": [2], "mamba_n_heads": 8, "mamba_d_state": 64,
    },
    "falcon-h1": {
        "num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "mamba_d_ssm": 384, "mamba_n_heads": 6, "mamba_d_head": 64,
        "mamba_d_state": 64,
    },
    "zamba2": {
        "num_hidden_layers": 4, "layers_block_type": ["mamba"] * 3 + ["hybrid"], "hidden_size": 256,
        "n_mamba_heads": 8, "num_attention_heads": 8, "adapter_rank": 16,
    },
}  # fmt: skip

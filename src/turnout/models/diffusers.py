"""Which adapter overrides which class of diffusers.

Names only: diffusers is not imported here; whoever has a model of it has imported it.
"""

from __future__ import annotations

from turnout.models import blocks, cogvideox, dit, hunyuan, image, ltx, unet, wan, wan_decoder, wan_steps
from turnout.models.patch import Adapter

_AUTOENCODERS = "diffusers.models.autoencoders"


def _in(module: str, **adapters: type[Adapter]) -> dict[str, type[Adapter]]:
    return {f"{module}.{name}": adapter for name, adapter in adapters.items()}


ADAPTERS: dict[str, type[Adapter]] = {
    **_in(
        f"{_AUTOENCODERS}.autoencoder_kl_wan",
        AutoencoderKLWan=wan_steps.Autoencoder,
        WanDecoder3d=wan_decoder.Decoder,
        WanEncoder3d=wan.Encoder,
        WanResidualBlock=wan.ResidualBlock,
        WanResidualUpBlock=wan.ResidualUpBlock,
        WanResample=wan.Resample,
        WanAttentionBlock=wan.AttentionBlock,
        WanCausalConv3d=wan.CausalConv,
    ),
    **_in(
        f"{_AUTOENCODERS}.autoencoder_kl_qwenimage",
        AutoencoderKLQwenImage=wan_steps.Autoencoder,
        QwenImageDecoder3d=wan_decoder.Decoder,
        QwenImageEncoder3d=wan.Encoder,
        QwenImageResidualBlock=wan.ResidualBlock,
        QwenImageResample=wan.Resample,
        QwenImageAttentionBlock=wan.AttentionBlock,
        QwenImageCausalConv3d=wan.CausalConv,
    ),
    **_in(
        f"{_AUTOENCODERS}.autoencoder_kl_ltx",
        LTXVideoDecoder3d=ltx.Decoder,
        LTXVideoResnetBlock3d=ltx.ResnetBlock,
        LTXVideoUpsampler3d=ltx.Upsampler,
        LTXVideoCausalConv3d=ltx.CausalConv,
    ),
    **_in(
        f"{_AUTOENCODERS}.autoencoder_kl_ltx2",
        LTX2VideoDecoder3d=ltx.Decoder,
        LTX2VideoResnetBlock3d=ltx.ResnetBlock,
        LTX2VideoUpsampler3d=ltx.Upsampler,
        LTX2VideoCausalConv3d=ltx.CausalConv,
    ),
    **_in(
        f"{_AUTOENCODERS}.autoencoder_kl_hunyuan_video",
        HunyuanVideoDecoder3D=hunyuan.Decoder,
        HunyuanVideoEncoder3D=hunyuan.Encoder,
        HunyuanVideoMidBlock3D=hunyuan.MidBlock,
        HunyuanVideoResnetBlockCausal3D=hunyuan.ResnetBlock,
        HunyuanVideoUpsampleCausal3D=hunyuan.Upsample,
        HunyuanVideoCausalConv3d=hunyuan.CausalConv,
    ),
    **_in(
        f"{_AUTOENCODERS}.autoencoder_kl_cogvideox",
        CogVideoXResnetBlock3D=cogvideox.ResnetBlock,
        CogVideoXSpatialNorm3D=cogvideox.SpatialNorm,
        CogVideoXCausalConv3d=cogvideox.CausalConv,
    ),
    **_in(f"{_AUTOENCODERS}.vae", Decoder=image.Decoder, Encoder=image.Encoder),
    **_in(
        "diffusers.models",
        **{
            "resnet.ResnetBlock2D": image.ResnetBlock,
            "upsampling.Upsample2D": image.Upsample,
            "upsampling.CogVideoXUpsample3D": cogvideox.Upsample,
            "attention.BasicTransformerBlock": unet.TransformerBlock,
            "attention_processor.AttnProcessor2_0": image.AttentionProcessor,
            "transformers.transformer_flux.FluxAttnProcessor": dit.FluxProcessor,
            "transformers.transformer_wan.WanAttnProcessor": dit.WanProcessor,
            "transformers.transformer_qwenimage.QwenDoubleStreamAttnProcessor2_0": dit.QwenImageProcessor,
            "transformers.transformer_flux.FluxPosEmbed": blocks.FluxPosEmbed,
            "transformers.transformer_flux.FluxTransformerBlock": blocks.FluxBlock,
            "transformers.transformer_flux.FluxSingleTransformerBlock": blocks.FluxSingleBlock,
            "transformers.transformer_wan.WanTransformerBlock": blocks.WanBlock,
            "transformers.transformer_wan.WanTransformer3DModel": blocks.WanTransformer,
            "transformers.transformer_qwenimage.QwenImageTransformerBlock": blocks.QwenImageBlock,
            "activations.GELU": blocks.Gelu,
            "normalization.AdaLayerNormZero": blocks.AdaLayerNormZero,
            "normalization.AdaLayerNormZeroSingle": blocks.AdaLayerNormZeroSingle,
            "normalization.AdaLayerNormContinuous": blocks.AdaLayerNormContinuous,
        },
    ),
}

# The models whose parts are known well enough to be fused.
MODELS = {
    f"{_AUTOENCODERS}.autoencoder_kl_wan.AutoencoderKLWan",
    f"{_AUTOENCODERS}.autoencoder_kl_qwenimage.AutoencoderKLQwenImage",
    f"{_AUTOENCODERS}.autoencoder_kl_ltx.AutoencoderKLLTXVideo",
    f"{_AUTOENCODERS}.autoencoder_kl_ltx2.AutoencoderKLLTX2Video",
    f"{_AUTOENCODERS}.autoencoder_kl_hunyuan_video.AutoencoderKLHunyuanVideo",
    f"{_AUTOENCODERS}.autoencoder_kl_cogvideox.AutoencoderKLCogVideoX",
    f"{_AUTOENCODERS}.autoencoder_kl.AutoencoderKL",
    f"{_AUTOENCODERS}.autoencoder_kl_flux2.AutoencoderKLFlux2",
    "diffusers.models.transformers.transformer_flux.FluxTransformer2DModel",
    "diffusers.models.transformers.transformer_wan.WanTransformer3DModel",
    "diffusers.models.transformers.transformer_qwenimage.QwenImageTransformer2DModel",
}

# Models that are not known so, and whose calls are seen as a whole all the same (`calls`).
WHOLE = {"diffusers.models.unets.unet_2d_condition.UNet2DConditionModel"}

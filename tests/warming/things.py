"""Models as small as they can be with calls that launch kernels of an H200, for planning and for a stand-in
card.
"""

import torch
from torch import nn

import turnout
from turnout.race.models import RACERS


def race_of(name):
    """A model of the races with its call, and the dtype it is raced in."""

    def make(device):
        racer = RACERS[name]
        model, call = racer.make("tiny", getattr(torch, racer.dtypes[0]), device)
        turnout.accelerate(model)
        return lambda: call(model)

    return make


def image_vae(device):
    from diffusers import AutoencoderKL

    with torch.device(device):
        model = AutoencoderKL(
            block_out_channels=[32, 64],
            down_block_types=["DownEncoderBlock2D"] * 2,
            up_block_types=["UpDecoderBlock2D"] * 2,
            layers_per_block=1,
            norm_num_groups=4,
            latent_channels=4,
        )
    model.eval().requires_grad_(False)
    nn.Module.to(model, torch.bfloat16)
    turnout.accelerate(model)
    latents = torch.randn(1, 4, 64, 64, device=device).to(torch.bfloat16)
    return lambda: model.decode(latents).sample


def hopper_convolution(device):
    with torch.device(device):
        model = nn.Sequential(nn.Conv2d(128, 128, 3, padding=1)).to(torch.bfloat16).requires_grad_(False)
    turnout.accelerate(model)
    x = (
        torch.randn(1, 128, 32, 32, device=device)
        .to(torch.bfloat16)
        .contiguous(memory_format=torch.channels_last)
    )

    def call():
        with turnout.pin(conv2d="implicit-gemm-hopper"):
            return model(x)

    return call


# Names and makers: each gives the call of an accelerated model on a device.
CALLS = {
    name: race_of(name)
    for name in ("wan-vae", "wan-vae-encode", "flux", "wan", "qwen-image", "mamba", "mamba-decode")
}
CALLS |= {"image-vae": image_vae, "hopper-convolution": hopper_convolution}

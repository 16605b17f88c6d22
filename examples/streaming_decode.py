"""Frames while the latents still arrive: the decoder keeps what the next chunk needs, and the video is that
of the whole clip.

python examples/streaming_decode.py [--graph]    # --graph: on a GPU, one CUDA graph is replayed for each
latent once the caches are full
"""

import sys

import torch
from diffusers import AutoencoderKLWan

import turnout
from turnout.models import DecodeStream

device = "cuda" if torch.cuda.is_available() else "cpu"
vae = (
    AutoencoderKLWan(base_dim=32, num_res_blocks=1).to(device).eval()
)  # or AutoencoderKLWan.from_pretrained(folder, subfolder="vae")
turnout.accelerate(vae)

latents = torch.randn(1, 16, 6, 8, 8, device=device)
stream, parts = DecodeStream(vae, graph="--graph" in sys.argv), []
with torch.no_grad():
    for i in range(latents.shape[2]):  # as they come out of a model that makes video step by step
        frames = stream.decode(latents[:, :, i : i + 1])
        parts.append(frames)
        print(f"latent {i}: {frames.shape[2]} frames of {frames.shape[3]} x {frames.shape[4]}")
    whole = vae.decode(latents).sample
print("the same as the whole clip:", torch.equal(torch.cat(parts, 2), whole))

"""Decode a video on several GPUs, bit for bit as on one: each rank has a part of the rows or columns.

    torchrun --nproc-per-node 8 examples/multi_gpu_decode.py --weights Wan-AI/Wan2.1-T2V-1.3B-Diffusers
    torchrun --nproc-per-node 2 examples/multi_gpu_decode.py --small  # on a CPU, random weights

Needs diffusers. `--check` decodes on one rank as well, and compares.
"""

import argparse
import time

import torch
import torch.distributed as dist
from diffusers import AutoencoderKLWan
from torch.distributed.device_mesh import init_device_mesh

import turnout


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--weights", help="a model of the Hugging Face hub, or a folder, with a `vae` inside")
    parser.add_argument("--small", action="store_true", help="a small VAE with random weights")
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--width", type=int, default=832)
    parser.add_argument("--frames", type=int, default=81)
    parser.add_argument(
        "--check", action="store_true", help="decode on this rank alone too, and compare all bits"
    )
    given = parser.parse_args()

    kind = "cuda" if torch.cuda.is_available() and not given.small else "cpu"
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    rank = mesh.get_local_rank()
    device = (
        torch.device(kind, rank % max(1, torch.cuda.device_count()))
        if kind == "cuda"
        else torch.device("cpu")
    )
    if kind == "cuda":
        torch.cuda.set_device(device)

    torch.manual_seed(0)  # ranks need the same weights and latents
    if given.small:
        sizes = {"base_dim": 8, "z_dim": 4, "num_res_blocks": 1}
        vae = AutoencoderKLWan(**sizes, latents_mean=[0.0] * 4, latents_std=[1.0] * 4)
        latents = torch.randn(1, 4, 3, 8, 12)
    else:
        vae = AutoencoderKLWan.from_pretrained(given.weights, subfolder="vae")
        latents = torch.randn(
            1, vae.config.z_dim, (given.frames + 3) // 4, given.height // 8, given.width // 8
        )
    vae, latents = vae.to(device, torch.bfloat16).eval(), latents.to(device, torch.bfloat16)

    turnout.accelerate(vae)
    with torch.no_grad():
        alone = vae.decode(latents).sample if given.check else None
        report = turnout.distribute(vae, mesh)
        vae.decode(latents)  # compiles, and compares what is not known to be the same on a part
        started = time.perf_counter()
        video = vae.decode(latents).sample
        if kind == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    if rank == 0:
        print(report)
        print(f"{list(video.shape)} in {seconds:.3f} s")
    if alone is not None:
        print(f"rank {rank}: {'the same bits' if torch.equal(video, alone) else 'OTHER BITS'} as alone")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

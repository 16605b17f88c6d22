"""Decode a video on several GPUs with Ray, bit for bit as on one: each actor is a rank.

    python examples/multi_gpu_decode_ray.py --ranks 8 --weights Wan-AI/Wan2.1-T2V-1.3B-Diffusers
    python examples/multi_gpu_decode_ray.py --ranks 2 --small  # on CPUs, random weights

Needs diffusers and ray. `--check` decodes on one rank as well, and compares. Where a cluster is running, set
RAY_ADDRESS to use it.
"""

import argparse
import socket
import time

import ray
import torch
import torch.distributed as dist
from diffusers import AutoencoderKLWan
from torch.distributed.device_mesh import init_device_mesh

import turnout


class Decoder:
    """One rank. Ray gives each actor a GPU, which is device 0 there."""

    def address(self) -> str:
        """Where the ranks can meet, if this is the first one."""
        with socket.socket() as free:
            free.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    def start(self, address: str, rank: int, ranks: int, weights: str | None) -> str:
        """Meet the others, load the VAE and split it."""
        self.kind = "cuda" if torch.cuda.is_available() and weights else "cpu"
        backend = "nccl" if self.kind == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=address, rank=rank, world_size=ranks)
        torch.manual_seed(0)  # ranks need the same weights
        if weights:
            self.vae = AutoencoderKLWan.from_pretrained(weights, subfolder="vae")
        else:
            sizes = {"base_dim": 8, "z_dim": 4, "num_res_blocks": 1}
            self.vae = AutoencoderKLWan(**sizes, latents_mean=[0.0] * 4, latents_std=[1.0] * 4)
        self.vae = self.vae.to(self.kind, torch.bfloat16).eval()
        turnout.accelerate(self.vae)
        self.mesh = init_device_mesh(self.kind, (ranks,))
        return str(turnout.distribute(self.vae, self.mesh, gather="first"))

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> torch.Tensor | None:
        """The frames on the first rank, None on others. latents: [B, C, T, H, W], the same on every rank."""
        (video,) = self.vae.decode(latents.to(self.kind, torch.bfloat16), return_dict=False)
        return None if video is None else video.cpu()

    @torch.no_grad()
    def decode_alone(self, latents: torch.Tensor) -> torch.Tensor:
        """The same frames by this rank, whose model is split no more."""
        turnout.restore(self.vae)
        turnout.accelerate(self.vae)
        return self.vae.decode(latents.to(self.kind, torch.bfloat16)).sample.cpu()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--weights", help="a model of the Hugging Face hub, or a folder, with a `vae` inside")
    parser.add_argument("--small", action="store_true", help="a small VAE with random weights, on CPUs")
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--width", type=int, default=832)
    parser.add_argument("--frames", type=int, default=81)
    parser.add_argument("--check", action="store_true", help="decode on one rank too, and compare all bits")
    given = parser.parse_args()
    if given.small == bool(given.weights):
        parser.error("give either --weights or --small")

    ray.init()
    actor = ray.remote(Decoder).options(num_gpus=0 if given.small else 1)
    actors = [actor.remote() for _ in range(given.ranks)]
    address = ray.get(actors[0].address.remote())
    weights = None if given.small else given.weights
    reports = ray.get(
        [each.start.remote(address, rank, given.ranks, weights) for rank, each in enumerate(actors)]
    )
    print(reports[0])

    channels, *size = (4, 3, 8, 12) if given.small else (
        16, (given.frames + 3) // 4, given.height // 8, given.width // 8
    )  # fmt: skip
    latents = torch.randn(1, channels, *size, generator=torch.Generator().manual_seed(0))
    shared = ray.put(latents)  # one copy for all actors of a machine
    ray.get([each.decode.remote(shared) for each in actors])  # compiles, and compares parts with the whole
    started = time.perf_counter()
    video = ray.get([each.decode.remote(shared) for each in actors])[0]
    print(f"{list(video.shape)} in {time.perf_counter() - started:.3f} s")
    if given.check:
        alone = ray.get(actors[0].decode_alone.remote(shared))
        print("the same bits" if torch.equal(video, alone) else "OTHER BITS", "as alone")
    ray.shutdown()


if __name__ == "__main__":
    main()

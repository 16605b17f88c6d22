"""Ranks as threads on one card: the frames of one rank, bit for bit."""

import pytest
import torch

import turnout
from tests.parallel.matrix import model, random
from turnout.models import DecodeStream
from turnout.parallel import Lockstep

pytestmark = pytest.mark.gpu

LATENTS = {
    "wan": (1, 4, 4, 60, 104),
    "wan22": (1, 6, 3, 22, 40),
    "qwen-image-vae": (1, 4, 1, 60, 104),
    "flux-vae": (1, 4, 64, 64),
}


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("name", LATENTS)
@torch.no_grad()
def test_decode_gives_the_bits_of_one_rank(name, fast, ranks):
    vae = model(name, torch.bfloat16, fast=False).to("cuda")
    if fast:
        turnout.accelerate(vae)
    z = random(*LATENTS[name], dtype=torch.bfloat16).to("cuda")
    turnout.distribute(vae, Lockstep(1))
    alone = vae.decode(z).sample
    turnout.distribute(vae, Lockstep(ranks))
    for _ in range(2):
        assert torch.equal(vae.decode(z).sample, alone)


@pytest.mark.parametrize("name", LATENTS)
@torch.no_grad()
def test_routes_that_it_takes_alone_give_the_bits_of_the_model_without_a_mesh(name):
    vae = model(name, torch.bfloat16, fast=False).to("cuda")
    turnout.accelerate(vae)
    z = random(*LATENTS[name], dtype=torch.bfloat16).to("cuda")
    alone = vae.decode(z).sample
    turnout.distribute(vae, Lockstep(2), routes="alone")
    for _ in range(2):
        assert torch.equal(vae.decode(z).sample, alone)


@pytest.mark.parametrize("split", ["height", "width"])
@torch.no_grad()
def test_stream_gives_the_bits_of_one_rank(split):
    vae = model("wan", torch.bfloat16, fast=False).to("cuda")
    turnout.accelerate(vae)
    parts = random(*LATENTS["wan"], dtype=torch.bfloat16).to("cuda").split(1, 2)
    turnout.distribute(vae, Lockstep(1))
    stream = DecodeStream(vae)
    alone = [stream.decode(part) for part in parts]
    turnout.distribute(vae, Lockstep(4), split=split)
    stream = DecodeStream(vae)
    assert all(torch.equal(stream.decode(part), frames) for part, frames in zip(parts, alone, strict=True))

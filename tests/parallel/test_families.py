"""The VAEs with group norms, and LTX's: decode and encode have the bits of one process, in parts as far as
they go.
"""

import contextlib

import pytest
import torch
from diffusers import AutoencoderKLLTXVideo

import turnout
from tests.models.zoo import made
from tests.parallel.matrix import ALL, cases, model, random, said
from tests.parallel.test_norms import pinned
from turnout.ops.group_norm_silu.block_routes import NAME
from turnout.parallel import Lockstep
from turnout.parallel.exchange import Exchange

LATENTS = {
    "flux-vae": [(1, 4, 8, 9), (1, 4, 11, 8)],
    "sdxl-vae": [(1, 4, 9, 8)],
    "flux2-vae": [(1, 4, 8, 9)],
    "hunyuan": [(1, 4, 3, 8, 9), (1, 4, 2, 5, 8)],
    "cogvideox": [(1, 4, 3, 8, 9)],
    "ltx": [(1, 4, 2, 8, 9)],
    "ltx2": [(1, 4, 2, 9, 8)],
}
FRAMES = {"hunyuan": (5,), "cogvideox": (5,), "ltx": (5,), "ltx2": (9,)}


def pixels(name):
    vae = made(name)
    return getattr(vae, "spatial_compression_ratio", None) or 2 ** (len(vae.config.block_out_channels) - 1)


def plan(vae):
    return next(iter(type(vae)._turnout_distribution.splits.values()))


def with_norms(cases):
    """Norms as they are chosen for small pictures, and as they are for large ones: with every case, or in
    turns.
    """
    for i, case in enumerate(cases):
        for in_blocks in (False, True) if ALL else (i // 2 % 2 == 1,):
            name = f"{said(case)}-{'in blocks' if in_blocks else 'chosen'}"
            yield pytest.param(case, "in blocks" if in_blocks else "chosen", id=name)


@pytest.fixture
def norms(kind):
    if kind == "chosen":
        return contextlib.nullcontext
    pytest.importorskip("numba")
    return lambda: pinned(NAME)


@pytest.mark.parametrize(("case", "kind"), list(with_norms(cases(LATENTS))))
@torch.no_grad()
def test_decode_gives_the_bits_of_one_process(case, norms):
    name, shape, ranks, split, dtype, fast = case
    vae, z = model(name, dtype, fast), random(*shape, dtype=dtype)
    with norms():
        alone = vae.decode(z).sample
        turnout.distribute(vae, Lockstep(ranks), split=split)
        for _ in range(2):
            assert torch.equal(vae.decode(z).sample, alone)


@pytest.mark.parametrize(("case", "kind"), list(with_norms(cases(LATENTS)))[:: 1 if ALL else 3])
@torch.no_grad()
def test_encode_gives_the_bits_of_one_process(case, norms):
    name, (*_, height, width), ranks, split, dtype, fast = case
    vae, each = model(name, dtype, fast), pixels(name)
    x = random(1, 3, *FRAMES.get(name, ()), height * each, width * each, dtype=dtype)
    with norms():
        alone = vae.encode(x).latent_dist.parameters
        turnout.distribute(vae, Lockstep(ranks), split=split)
        for _ in range(2):
            assert torch.equal(vae.encode(x).latent_dist.parameters, alone)


@pytest.mark.parametrize("name", ["flux-vae", "hunyuan", "cogvideox"])
@torch.no_grad()
def test_one_step_alone_is_computed_whole(name):
    """The attention, or torch's own SiLU behind CogVideoX's last norm. Of 70 rows of latents, which are 35
    blocks, parts begin at even ones."""
    pytest.importorskip("numba")
    vae = model(name, torch.bfloat16, fast=True)
    z = random(1, 4, *((3,) if name in FRAMES else ()), 70, 4, dtype=torch.bfloat16)
    with pinned(NAME):
        alone = vae.decode(z).sample
        turnout.distribute(vae, Lockstep(3), split="height")
        vae.decode(z)
        counts = plan(vae).counts
        counts.clear()
        assert torch.equal(vae.decode(z).sample, alone)
    assert plan(vae).exchange.parts == [(0, 24), (24, 48), (48, 70)]
    assert counts["part"] > 10
    assert counts["whole"] == 1


@pytest.mark.filterwarnings("ignore:.*have other bits than together")
@pytest.mark.parametrize("name", ["flux-vae", "hunyuan", "cogvideox"])
@torch.no_grad()
def test_routes_of_parts_give_the_same_bits_on_any_number_of_ranks(name):
    """Split, dealt out by samples and by clips, and on one rank: those of norms that sum blocks."""
    pytest.importorskip("numba")
    vae = model(name, torch.bfloat16, fast=True)
    z = random(3, 4, *((2,) if name in FRAMES else ()), 9, 8, dtype=torch.bfloat16)
    with pinned(NAME):
        expected = vae.decode(z).sample
        each = torch.cat([vae.decode(clip).sample for clip in z.split(1)])
    for ranks, split in ((1, "auto"), (2, "auto"), (3, "batch"), (4, "auto"), (2, "width")):
        turnout.distribute(vae, Lockstep(ranks), split=split, routes="parts")
        for _ in range(2 if ALL else 1):
            assert torch.equal(vae.decode(z).sample, expected), (ranks, split)
    frames = [clip.sample for clip in vae.decode(list(z.split(1)))]
    assert torch.equal(torch.cat(frames), each)


@torch.no_grad()
def test_a_norm_writes_where_the_convolution_reads(monkeypatch):
    """Rows of a picture: only the latents, and what is upsampled, are copied to have a halo."""
    pytest.importorskip("numba")
    vae = model("flux-vae", torch.bfloat16, fast=True)
    turnout.distribute(vae, Lockstep(2), split="height", routes="parts")
    z = random(1, 4, 8, 9, dtype=torch.bfloat16)
    vae.decode(z)
    copied, halo = [], Exchange.halo
    monkeypatch.setattr(
        Exchange, "halo", lambda self, x, *args, **kwargs: copied.append(x) or halo(self, x, *args, **kwargs)
    )
    vae.decode(z)
    upsamplers = sum(len(block.upsamplers or ()) for block in vae.decoder.up_blocks)
    assert len(copied) == 2 * (1 + upsamplers)


@torch.no_grad()
def test_decoding_with_a_time_step():
    vae, z = model("ltx-timestep", torch.float32, fast=True), random(1, 4, 2, 6, 7)
    temb = torch.full((1,), 0.05)
    alone = vae.decode(z, temb=temb).sample
    turnout.distribute(vae, Lockstep(3), split="width")
    for _ in range(2):
        assert torch.equal(vae.decode(z, temb=temb).sample, alone)


@torch.no_grad()
def test_a_middle_block_that_is_not_bare_is_computed_whole():
    vae, z = model("hunyuan", torch.bfloat16, fast=True), random(1, 4, 2, 6, 4, dtype=torch.bfloat16)
    seen = []
    attention = vae.decoder.mid_block.attentions[0]
    attention.register_forward_hook(lambda module, args, y: seen.append(y.shape))
    alone = vae.decode(z).sample
    turnout.distribute(vae, Lockstep(2), split="height")
    seen.clear()
    assert torch.equal(vae.decode(z).sample, alone)
    assert {shape[1] for shape in seen} == {2 * 6 * 4}


def test_noise_inside_a_decoder_is_refused():
    vae = AutoencoderKLLTXVideo(
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1,) * 5,
        decoder_layers_per_block=(1,) * 5,
        decoder_inject_noise=(True,) * 5,
    )
    with pytest.raises(ValueError, match="adds noise, which ranks would draw for themselves"):
        turnout.distribute(vae, Lockstep(2))


def test_more_ranks_than_blocks_take_rows_one_by_one():
    vae = model("flux-vae", torch.float32, fast=True)
    turnout.distribute(vae, Lockstep(40), split="height")
    assert type(vae)._turnout_distribution.cuts.grain(70) == 1
    turnout.distribute(vae, Lockstep(35), split="height")
    assert type(vae)._turnout_distribution.cuts.grain(70) == 2

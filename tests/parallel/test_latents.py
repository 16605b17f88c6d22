"""Several latents in one call of Wan's decoder: the frames are those of one after the other, bit for bit."""

import dataclasses
import itertools

import pytest
import torch

import turnout
from tests.parallel.matrix import ALL, AXES, DTYPES, model, random
from turnout.models import DecodeStream, wan_steps
from turnout.parallel import Lockstep, convolution, latents
from turnout.parallel.exchange import empty_resized
from turnout.parallel.lockstep import Rank
from turnout.parallel.mode import SplitMode
from turnout.parallel.part_calls import choose_for_whole
from turnout.routing.op import Op, forget_choices
from turnout.routing.route import ANYWHERE

SHAPES = {"wan": (1, 4, 7, 4, 5), "wan22": (1, 6, 7, 4, 5)}
MATRIX = [
    (name, ranks, split, dtype)
    for name, ranks, split, dtype in itertools.product(SHAPES, (1, 2, 3, 4), AXES, DTYPES)
    if SHAPES[name][AXES[split]] >= ranks
]


@pytest.fixture
def steps(monkeypatch):
    """How many latents went through a decoder at a time, in order."""
    seen = []
    decode = wan_steps.decode_latent

    def watched(vae, latent, cache, *, first):
        seen.append(latent.shape[2])
        return decode(vae, latent, cache, first=first)

    monkeypatch.setattr(wan_steps, "decode_latent", watched)
    return seen


def plan(vae):
    return next(iter(type(vae)._turnout_distribution.splits.values()))


@pytest.mark.parametrize("case", MATRIX if ALL else MATRIX[:: len(MATRIX) // 6 | 1], ids=str)
@torch.no_grad()
def test_frames_are_those_of_one_latent_after_the_other(case, steps):
    name, ranks, split, dtype = case
    vae, z = model(name, dtype, fast=True), random(*SHAPES[name], dtype=dtype)
    alone = vae.decode(z).sample
    steps.clear()
    turnout.distribute(vae, Lockstep(ranks), split=split)
    assert torch.equal(vae.decode(z).sample, alone)  # calls are compared when they are first seen
    assert sorted(steps) == sorted(ranks * [1, 4, 2])  # the first latent by itself, then four at a time
    assert torch.equal(vae.decode(z).sample, alone)


@pytest.mark.parametrize("most", [1, 2, 3, 5])
@torch.no_grad()
def test_a_number_limits_them(most, steps):
    vae, z = model("wan", torch.bfloat16, fast=True), random(*SHAPES["wan"], dtype=torch.bfloat16)
    alone = vae.decode(z).sample
    steps.clear()
    turnout.distribute(vae, Lockstep(1), split="auto" if most > 1 else "height", latents=most)
    assert torch.equal(vae.decode(z).sample, alone)
    whole, rest = divmod(z.shape[2] - 1, most)
    assert steps == [1] + [most] * whole + [rest] * (rest > 0)


@torch.no_grad()
def test_calls_go_together(steps):
    """Not one by one inside: at sizes that torch leaves to oneDNN every convolution takes all frames."""
    vae, z = model("wan", torch.bfloat16, fast=True), random(*SHAPES["wan"], dtype=torch.bfloat16)
    turnout.distribute(vae, Lockstep(2), split="width")
    vae.decode(z)
    whole = {kind for kind, runs_whole in plan(vae).runs_whole.items() if runs_whole}
    together = {kind for kind in plan(vae).runs_whole if kind[0] == "together"}
    assert len(together) > 10
    assert not whole & together


@torch.no_grad()
def test_a_decoder_of_adapters_runs_without_the_mode_for_stock_code(monkeypatch):
    """It sees 2000 accesses to a tensor for each latent, which took as long as two thirds of all else."""
    seen, watch = [], SplitMode.__torch_function__
    monkeypatch.setattr(
        SplitMode,
        "__torch_function__",
        lambda self, func, *args: seen.append(func) or watch(self, func, *args),
    )
    vae, z = model("wan", torch.bfloat16, fast=True), random(*SHAPES["wan"], dtype=torch.bfloat16)
    turnout.distribute(vae, Lockstep(2), split="width")
    vae.decode(z)
    seen.clear()
    vae.decode(z)
    assert len(seen) < 600
    vae.decoder.mid_block.register_forward_hook(lambda *args: None)
    vae.decode(z)
    assert len(seen) > 6000


@torch.no_grad()
def test_routes_that_declare_cuts_between_frames_are_never_run_apart(monkeypatch):
    """As those of a GPU do: what one call returns is then known from the reference, without running it."""
    vae, z = model("wan", torch.bfloat16, fast=True), random(*SHAPES["wan"], dtype=torch.bfloat16)
    alone = vae.decode(z).sample

    def declaring(op, *rest):
        route = choose_for_whole(op, *rest)
        return route._replace(grain=ANYWHERE) if op.name == "causal_conv3d" else route

    monkeypatch.setattr(convolution, "choose_for_whole", declaring)
    monkeypatch.setattr(Rank, "compares_all", False)
    turnout.distribute(vae, Lockstep(2), split="width")
    for _ in range(2):
        assert torch.equal(vae.decode(z).sample, alone)
    together = {kind[2] for kind in plan(vae).runs_whole if kind[0] == "together"}
    known = [kind for each in plan(vae).of_several.values() for kind in getattr(each, "returned", {})]
    assert {kind[2][0] for kind in known} >= {"causal_conv3d"}
    assert together


@pytest.mark.parametrize("name", list(SHAPES))
@pytest.mark.parametrize("split", list(AXES))
@torch.no_grad()
def test_what_is_chosen_is_chosen_for_calls_that_one_process_makes(name, split, monkeypatch):
    """Also where strides of an axis of one tell nothing: rows of a table are found by them."""
    vae, z = model(name, torch.bfloat16, fast=True), random(*SHAPES[name], dtype=torch.bfloat16)
    verdict, asked = Op.verdict, set()

    def watched(self, key, *rest):
        asked.add((self.name, key.problem))
        return verdict(self, key, *rest)

    monkeypatch.setattr(Op, "verdict", watched)
    forget_choices()
    vae.decode(z)
    of_one_process = set(asked)
    asked.clear()
    turnout.distribute(vae, Lockstep(2), split=split)
    vae.decode(z)
    vae.decode(z)
    assert asked
    assert not asked - of_one_process


@torch.no_grad()
def test_a_stream_takes_several_of_a_chunk(steps):
    vae = model("wan", torch.bfloat16, fast=True)
    z = random(1, 4, 9, 4, 5, dtype=torch.bfloat16)
    parts = z.split([3, 1, 5], 2)
    stream = DecodeStream(vae)
    alone = [stream.decode(part) for part in parts]
    steps.clear()
    turnout.distribute(vae, Lockstep(2), split="width")
    stream = DecodeStream(vae)
    for part, frames in zip(parts, alone, strict=True):
        assert torch.equal(stream.decode(part), frames)
    assert sorted(steps) == sorted(2 * [1, 2, 1, 4, 1])


@torch.no_grad()
def test_a_stream_that_failed_goes_on_with_the_same_frames(monkeypatch):
    vae = model("wan", torch.bfloat16, fast=True)
    z = random(1, 4, 7, 4, 5, dtype=torch.bfloat16)
    alone = vae.decode(z).sample
    turnout.distribute(vae, Lockstep(2), split="width")
    stream = DecodeStream(vae)
    before = stream.decode(z[:, :, :4])
    decode, calls = wan_steps.decode_latent, []

    def fails_once(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise OSError("out of luck")
        return decode(*args, **kwargs)

    monkeypatch.setattr(wan_steps, "decode_latent", fails_once)
    with pytest.raises(OSError, match="out of luck"):
        stream.decode(z[:, :, 4:])
    after = stream.decode(z[:, :, 4:])
    assert torch.equal(torch.cat([before, after], 2), alone)


@torch.no_grad()
def test_other_code_in_a_decoder_sees_one_latent_at_a_time(steps):
    z = random(*SHAPES["wan"], dtype=torch.bfloat16)
    for change in (
        lambda vae: vae.decoder.up_blocks[1].resnets[0].conv1.register_forward_hook(lambda *args: None),
        lambda vae: vae.decoder.mid_block.register_forward_hook(lambda *args: None),
        lambda vae: turnout.restore(vae.decoder.up_blocks[0].resnets[0]),
    ):
        vae = model("wan", torch.bfloat16, fast=True)
        change(vae)
        alone = vae.decode(z).sample
        turnout.distribute(vae, Lockstep(2), split="width")
        steps.clear()
        assert torch.equal(vae.decode(z).sample, alone)
        assert set(steps) == {1}


@torch.no_grad()
def test_batches_go_one_latent_at_a_time(steps):
    vae, z = model("wan", torch.bfloat16, fast=True), random(2, 4, 5, 4, 5, dtype=torch.bfloat16)
    alone = vae.decode(z).sample
    steps.clear()
    turnout.distribute(vae, Lockstep(2), split="width")
    assert torch.equal(vae.decode(z).sample, alone)
    assert set(steps) == {1}


@pytest.mark.parametrize("name", list(SHAPES))
@torch.no_grad()
def test_no_stage_has_more_elements_than_two_frames_of_the_last_one(name, monkeypatch):
    vae = model(name, torch.bfloat16, fast=True)
    z = random(*SHAPES[name], dtype=torch.bfloat16)
    pieces, seen = latents.Together.pieces, []

    def watched(self, x, calls, most, elements, room):
        found = pieces(self, x, calls, most, elements, room)
        seen.extend((elements * piece.shape[2], count, room) for piece, count in found)
        return found

    monkeypatch.setattr(latents.Together, "pieces", watched)
    turnout.distribute(vae, Lockstep(1))
    frames = vae.decode(z).sample
    room = 2 * frames.shape[3] * frames.shape[4] * vae.decoder.norm_out.gamma.numel()
    if name == "wan22":
        room //= vae.config.patch_size**2
    assert {each for *_, each in seen} == {room}
    assert all(count == 1 or elements <= room for elements, count, _ in seen)
    assert max(count for _, count, _ in seen) == 4


@torch.no_grad()
def test_routes_that_differ_between_latents_keep_calls_apart(monkeypatch):
    """The first ones behind the very first one have fewer cached frames, which another route might take."""
    vae, z = model("wan", torch.bfloat16, fast=True), random(*SHAPES["wan"], dtype=torch.bfloat16)
    verdict = Op.verdict

    def fussy(self, key, *rest):
        found = verdict(self, key, *rest)
        cache = getattr(key.problem, "cache", None)
        full = cache is not None and cache.shape[2] == 2
        if full or self.name != "causal_conv3d":
            return found
        return dataclasses.replace(found, chosen="depth-taps", config={})

    monkeypatch.setattr(Op, "verdict", fussy)
    forget_choices()
    alone = vae.decode(z).sample
    turnout.distribute(vae, Lockstep(2), split="width")
    for _ in range(2):
        assert torch.equal(vae.decode(z).sample, alone)
    kinds = plan(vae).runs_whole
    assert any(whole for kind, whole in kinds.items() if kind[0] == "together")
    forget_choices()


def test_wrong_numbers_are_refused():
    vae = model("wan", torch.bfloat16, fast=True)
    for wrong in (0, -1, 1.5, "many", True):
        with pytest.raises(ValueError, match="it needs 'auto' or a number of at least 1"):
            turnout.distribute(vae, Lockstep(2), latents=wrong)
    with pytest.raises(ValueError, match="AutoencoderKL, which decodes all latents at once"):
        turnout.distribute(model("flux-vae", torch.bfloat16, fast=True), Lockstep(2), latents=2)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
def test_gathered_latents_lie_as_each_by_itself(layout):
    z = torch.randn(1, 4, 6, 3, 5).to(memory_format=layout)
    alone = z[:, :, 2:3].clone()
    several = empty_resized(alone, 2, 4)
    assert empty_resized(several, 2, 1).stride() == alone.stride()


def test_rooms():
    assert latents.frames_at_once(4, 100.0, 1000.0) == 4
    assert latents.frames_at_once(4, 100.0, 350.0) == 3
    assert latents.frames_at_once(4, 100.0, 0.0) == 1


def test_rooms_of_wan_at_480_x_832():
    """Four latents up to 120 x 208, four frames (of two pieces) at 240 x 416, two at the full size."""
    pixels = 60 * 104
    room = 2 * 64 * pixels * 96
    per_latent = {"60 x 104": pixels * 384, "120 x 208": 2 * 4 * pixels * 384}
    per_piece = {"240 x 416": 2 * 16 * pixels * 192, "480 x 832": 2 * 64 * pixels * 96}
    assert [latents.frames_at_once(4, size, room) for size in per_latent.values()] == [4, 4]
    assert [latents.frames_at_once(4, size, room) for size in per_piece.values()] == [2, 1]

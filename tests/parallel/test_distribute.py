"""Frames of a model that is split over ranks are those of one process, bit for bit."""

import copy
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F

import turnout
from tests.parallel.matrix import ALL, CLIPS, LATENTS, cases, model, random, said
from turnout.models import DecodeStream, frames
from turnout.parallel import Fake, Lockstep, distribute
from turnout.parallel.exchange import Exchange
from turnout.parallel.split import Split
from turnout.routing.op import TurnoutWarning


def counts(vae):
    return next(iter(type(vae)._turnout_distribution.splits.values())).counts


@pytest.mark.parametrize("case", list(cases(LATENTS)), ids=said)
@torch.no_grad()
def test_decode_gives_the_bits_of_one_process(case):
    name, shape, ranks, split, dtype, fast = case
    vae, z = model(name, dtype, fast), random(*shape, dtype=dtype)
    alone = vae.decode(z).sample
    turnout.distribute(vae, Lockstep(ranks), split=split)
    assert torch.equal(vae.decode(z).sample, alone)  # calls are compared when they are first seen
    assert torch.equal(vae.decode(z).sample, alone)  # and from then on each rank computes its part


@pytest.mark.parametrize(
    "case", list(cases({name: [shape] for name, shape in CLIPS.items()}, pixels=16)), ids=said
)
@torch.no_grad()
def test_encode_gives_the_bits_of_one_process(case):
    name, shape, ranks, split, dtype, fast = case
    vae, x = model(name, dtype, fast), random(*shape, dtype=dtype)
    alone = vae.encode(x).latent_dist.parameters
    turnout.distribute(vae, Lockstep(ranks), split=split)
    for _ in range(2):
        assert torch.equal(vae.encode(x).latent_dist.parameters, alone)


@pytest.mark.parametrize(("name", "fast"), [("wan", False), ("wan", True), ("wan22", True)])
@torch.no_grad()
def test_stream_gives_the_bits_of_one_process(name, fast):
    vae = model(name, torch.bfloat16, fast)
    z = random(1, vae.config.z_dim, 6, 4, 5, dtype=torch.bfloat16)
    parts = z.split([1, 2, 1, 2], 2)
    stream = DecodeStream(vae)
    alone = [stream.decode(part) for part in parts]
    turnout.distribute(vae, Lockstep(3), split="width")
    stream = DecodeStream(vae)
    for _ in range(2):
        assert all(
            torch.equal(stream.decode(part), frames) for part, frames in zip(parts, alone, strict=True)
        )
        stream.reset()


@torch.no_grad()
def test_parts_are_computed_by_themselves():
    """Not gathered: whole is what attention sees, and nothing else at sizes that torch leaves to oneDNN."""
    vae = model("wan", torch.bfloat16, fast=True)
    turnout.distribute(vae, Lockstep(2))
    z = random(1, 4, 3, 4, 6, dtype=torch.bfloat16)
    vae.decode(z)
    before = dict(counts(vae))
    vae.decode(z)
    after = counts(vae)
    assert after["first seen"] == before["first seen"]
    assert after["part"] - before["part"] > 100
    attentions = sum(type(module).__name__ == "WanAttentionBlock" for module in vae.decoder.modules())
    assert after["whole"] - before["whole"] == attentions * z.shape[2]


@torch.no_grad()
def test_rows_that_a_cache_holds_are_not_sent_again(monkeypatch):
    z = random(1, 4, 4, 3, 6, dtype=torch.bfloat16)

    def messages_of_a_late_step():
        vae, fake = model("wan", torch.bfloat16, fast=True), Fake(rank=1, ranks=3)
        turnout.distribute(vae, fake, split="width", gather="none")
        stream = DecodeStream(vae)
        for _ in range(2):  # the first round is compared
            stream.reset()
            for part in z.split(1, 2):
                fake.messages.clear()
                stream.decode(part)
        return len(fake.messages), sum(fake.messages)

    count, sent = messages_of_a_late_step()
    monkeypatch.setattr(Split, "keep_halo", lambda *args: None)
    count_without, sent_without = messages_of_a_late_step()
    assert count_without > 1.5 * count
    assert sent_without > 1.5 * sent


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_batches_are_dealt_out_first(fast, dtype):
    vae, z = model("wan", dtype, fast), random(5, 4, 2, 3, 4, dtype=dtype)
    alone = vae.decode(z).sample
    turnout.distribute(vae, Lockstep(3))
    assert torch.equal(vae.decode(z).sample, alone)
    distribution = type(vae)._turnout_distribution
    if all(distribution.alike.values()):
        assert not distribution.splits  # nothing was exchanged
    assert torch.equal(vae.decode(z).sample, alone)


def clips_of(dtype=torch.bfloat16):
    return [
        random(1, 4, frames, *size, dtype=dtype) for frames, size in ((1, (3, 4)), (3, (4, 5)), (2, (4, 4)))
    ]


def refuse_exchange(self, *args, **kwargs):
    raise AssertionError("a dealt out clip was exchanged")


@pytest.mark.parametrize("fast", [False, True])
@torch.no_grad()
def test_a_list_of_clips_is_dealt_out_without_an_exchange(fast, monkeypatch):
    vae, clips = model("wan", torch.bfloat16, fast), clips_of()
    computed = []
    vae.decoder.conv_in.register_forward_pre_hook(lambda module, args: computed.append(args[0].shape))
    alone = [vae.decode(clip).sample for clip in clips]
    steps = len(computed)
    turnout.distribute(vae, Lockstep(2))
    for name in ("halo", "all_gather"):
        monkeypatch.setattr(Exchange, name, refuse_exchange)
    computed.clear()
    found = vae.decode(clips)
    assert [torch.equal(a.sample, b) for a, b in zip(found, alone, strict=True)] == [True] * 3
    assert len(computed) == steps  # each clip by one rank
    tuples = vae.decode(tuple(clips), return_dict=False)
    assert all(torch.equal(frames, b) for (frames,), b in zip(tuples, alone, strict=True))


@torch.no_grad()
def test_a_list_is_encoded_too():
    vae = model("wan", torch.bfloat16, fast=True)
    clips = [random(1, 3, frames, 16, 24, dtype=torch.bfloat16) for frames in (1, 5)]
    alone = [vae.encode(clip).latent_dist.parameters for clip in clips]
    turnout.distribute(vae, Lockstep(2))
    found = vae.encode(clips)
    assert all(torch.equal(a.latent_dist.parameters, b) for a, b in zip(found, alone, strict=True))


@pytest.mark.parametrize("split", ["auto", "width"])
@torch.no_grad()
def test_each_clip_of_a_short_list_is_split(split):
    """Fewer clips than ranks, or rows or columns asked for."""
    vae, clips = model("wan", torch.bfloat16, fast=True), clips_of()[1:]
    alone = [vae.decode(clip).sample for clip in clips]
    turnout.distribute(vae, Lockstep(3 if split == "auto" else 2), split=split)
    assert all(torch.equal(a.sample, b) for a, b in zip(vae.decode(clips), alone, strict=True))
    assert counts(vae)["part"] > 0


@pytest.mark.parametrize("gather", ["first", "none"])
@torch.no_grad()
def test_results_of_a_list_go_where_they_are_asked_for(gather):
    vae, clips = model("wan", torch.bfloat16, fast=True), clips_of()
    alone = [vae.decode(clip).sample for clip in clips]
    turnout.distribute(vae, Lockstep(2), gather=gather)
    found = vae.decode(clips)
    if gather == "first":
        assert all(torch.equal(a.sample, b) for a, b in zip(found, alone, strict=True))
    else:  # the largest on the first rank, the others on the second
        assert [[result is not None for result in of_rank] for of_rank in found] == [
            [False, True, False],
            [True, False, True],
        ]
        assert torch.equal(found[0][1].sample, alone[1])
        assert torch.equal(found[1][2].sample, alone[2])


@torch.no_grad()
def test_lists_of_other_things_and_too_few_clips_are_refused():
    vae = model("wan", torch.bfloat16, fast=True)
    turnout.distribute(vae, Lockstep(2), split="batch")
    clip = clips_of()[0]
    assert vae.decode([]) == []
    with pytest.raises(TypeError, match=r"item 1 of the list is str; it needs tensors \[B, C, T, H, W\]"):
        vae.decode([clip, "clip"])
    with pytest.raises(TypeError, match=r"item 0 of the list is \[4, 3, 4\]"):
        vae.decode([clip[0, :, 0], clip])
    with pytest.raises(ValueError, match="1 samples, which cannot be dealt out to 2 ranks"):
        vae.decode([clip])


def test_a_list_that_wants_gradients_is_computed_whole():
    vae = model("wan", torch.float32, fast=True)
    clips = [clip.requires_grad_() for clip in clips_of(torch.float32)[::2]]
    turnout.distribute(vae, Lockstep(2), gather="none")
    with pytest.warns(TurnoutWarning, match="gradients are wanted"):
        found = vae.decode(clips)
    assert all(result.sample.requires_grad for result in found)


@pytest.mark.parametrize("accelerated_first", [False, True])
@torch.no_grad()
def test_composes_with_accelerate_in_both_orders_and_restores(accelerated_first):
    vae, z = model("wan", torch.bfloat16, fast=False), random(1, 4, 2, 4, 4, dtype=torch.bfloat16)
    classes, stock = [type(module) for module in vae.modules()], vae.decode(z).sample
    with turnout.accelerated(vae):
        fast = vae.decode(z).sample
    steps = [turnout.accelerate, lambda vae: turnout.distribute(vae, Lockstep(2))]
    for step in steps if accelerated_first else reversed(steps):
        step(vae)
    assert torch.equal(vae.decode(z).sample, fast)
    assert turnout.restore(vae) > 0
    assert [type(module) for module in vae.modules()] == classes
    assert torch.equal(vae.decode(z).sample, stock)
    assert turnout.restore(vae) == 0


@torch.no_grad()
def test_numerics_and_pins_hold_on_every_rank():
    vae, z = model("wan", torch.float32, fast=True), random(1, 4, 2, 4, 5)
    with turnout.pin(causal_conv3d="reference"), turnout.numerics("exact"):
        alone = vae.decode(z).sample
        turnout.distribute(vae, Lockstep(2))
        assert torch.equal(vae.decode(z).sample, alone)


@torch.no_grad()
def test_hooks_and_layers_put_there_later_see_their_parts():
    vae, z = model("wan", torch.bfloat16, fast=True), random(1, 4, 2, 4, 6, dtype=torch.bfloat16)
    block = vae.decoder.up_blocks[0].resnets[0]
    block.conv1.register_forward_hook(lambda module, args, y: y * 0.5)
    alone = vae.decode(z).sample
    turnout.distribute(vae, Lockstep(2))
    for _ in range(2):
        assert torch.equal(vae.decode(z).sample, alone)

    class Doubled(torch.nn.Module):
        def __init__(self, conv):
            super().__init__()
            self.conv, self.beside = conv, copy.deepcopy(conv)

        def forward(self, *args):
            return self.conv(*args) + self.beside(*args)

    resample = vae.decoder.up_blocks[0].upsamplers[0].resample
    resample[1] = Doubled(resample[1])
    split = vae.decode(z).sample
    turnout.restore(vae)
    turnout.accelerate(vae)
    assert torch.equal(split, vae.decode(z).sample)


POINTWISE = {
    "sigmoid": torch.sigmoid,
    "softmax of channels": lambda y: y.softmax(1),
    "norm of channels": lambda y: y / (1 + y.norm(dim=1, keepdim=True)),
    "linear": lambda y: F.linear(y.movedim(1, -1), torch.eye(y.shape[1]) + 0.1).movedim(-1, 1),
    "group norm": lambda y: F.group_norm(y, 2),
}
MIXING = {
    "mean of frames": lambda y: y - y.mean((-1, -2), keepdim=True),
    "mean of all": lambda y: y - y.mean(),
    "largest": lambda y: y / y.abs().max(),
    "flip": lambda y: y.flip(-1),
    "roll": lambda y: torch.roll(y, 1, -1),
    "any": lambda y: y * 2 if (y > 3).any() else y,
    "product": lambda y: y @ torch.ones(y.shape[-1], y.shape[-1]),
    "noise": lambda y: y + torch.randn_like(y),
    "dropout": lambda y: F.dropout(y, 0.1),
}


@pytest.mark.parametrize("name", ["wan", "flux-vae"] if ALL else ["flux-vae"])
@pytest.mark.parametrize("hook", [*POINTWISE, *MIXING])
@torch.no_grad()
def test_a_hook_has_the_bits_of_one_process_or_is_refused(hook, name):
    vae = model(name, torch.float32, fast=True)
    z = random(1, 4, *((1,) if name == "wan" else ()), 3, 4)
    run = {**POINTWISE, **MIXING}[hook]
    vae.decoder.up_blocks[0].resnets[0].conv1.register_forward_hook(lambda module, args, y: run(y))
    alone = vae.decode(z).sample
    turnout.distribute(vae, Lockstep(2), split="width")
    if hook in MIXING:
        with pytest.raises(NotImplementedError, match=r"not known to a distributed model|draws numbers"):
            vae.decode(z)
    else:
        assert all(torch.equal(vae.decode(z).sample, alone) for _ in range(2))


@torch.no_grad()
def test_a_stream_goes_on_in_the_same_distribution_only():
    vae, z = model("wan", torch.bfloat16, fast=True), random(1, 4, 2, 4, 4, dtype=torch.bfloat16)
    alone = vae.decode(z).sample
    ways = {
        "plain": lambda: (turnout.restore(vae), turnout.accelerate(vae)),
        "two": lambda: turnout.distribute(vae, Lockstep(2), split="width"),
        "height": lambda: turnout.distribute(vae, Lockstep(2), split="height"),
    }
    for before, after in itertools.permutations(ways, 2):
        ways[before]()
        stream = DecodeStream(vae)
        stream.decode(z[:, :, :1])
        ways[after]()
        with pytest.raises(RuntimeError, match=r"since this clip began, .* call reset\(\)"):
            stream.decode(z[:, :, 1:])
        stream.reset()
        assert torch.equal(stream.decode(z), alone)
    with pytest.raises(RuntimeError, match="cannot be copied in the middle of a clip"):
        copy.copy(stream)


@torch.no_grad()
def test_compiled_parts_and_weights_that_come_and_go_are_refused():
    z = random(1, 4, 1, 2, 2, dtype=torch.bfloat16)
    vae = model("wan", torch.bfloat16, fast=True)
    turnout.distribute(vae, Lockstep(2))
    vae.decoder.mid_block.compile(backend="eager")
    with pytest.raises(ValueError, match="cannot have compiled parts, and WanMidBlock is compiled"):
        vae.decode(z)
    vae = model("wan", torch.bfloat16, fast=True)
    vae.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)
    turnout.distribute(vae, Lockstep(2))
    with pytest.raises(ValueError, match="come and go around its calls"):
        vae.decode(z)


@torch.no_grad()
def test_a_call_while_another_one_runs_is_refused():
    vae, z = model("wan", torch.bfloat16, fast=True), random(1, 4, 1, 2, 2, dtype=torch.bfloat16)
    turnout.distribute(vae, Lockstep(2))
    handle = vae.decoder.conv_in.register_forward_pre_hook(lambda module, args: vae.decode(z))
    with pytest.raises(RuntimeError, match="another call of this distributed model is running"):
        vae.decode(z)
    handle.remove()
    assert vae.decode(z).sample.shape == (1, 3, 1, 16, 16)


@pytest.mark.parametrize("split", ["height", "width"])
@torch.no_grad()
def test_large_frames_in_rings_give_the_bits_of_one_process(monkeypatch, split):
    """A part is smaller than what counts as large; the whole decides."""
    monkeypatch.setitem(frames.LARGE, "cpu", 40 * 48)
    vae, z = model("wan", torch.bfloat16, fast=True), random(1, 4, 5, 5, 6, dtype=torch.bfloat16)
    used = []
    convolve = frames.FrameRing.convolve
    monkeypatch.setattr(
        frames.FrameRing, "convolve", lambda self, *args: used.append(self.margins) or convolve(self, *args)
    )
    alone = vae.decode(z).sample
    turnout.distribute(vae, Lockstep(3), split=split)
    for _ in range(2):
        assert torch.equal(vae.decode(z).sample, alone)
    assert set(used) == {(0, 0), (1, 0) if split == "height" else (0, 1)}


@pytest.mark.parametrize("gather", ["all", "first", "none"])
@torch.no_grad()
def test_results_go_where_they_are_asked_for(gather):
    vae, z = model("wan", torch.bfloat16, fast=True), random(1, 4, 2, 5, 4, dtype=torch.bfloat16)
    alone = vae.decode(z).sample
    turnout.distribute(vae, Lockstep(2), split="height", gather=gather)
    actual = vae.decode(z)
    if gather == "none":
        assert [part.sample.shape[3] for part in actual] == [24, 16]
        actual = torch.cat([part.sample for part in actual], 3)
        assert torch.equal(actual, alone)
    else:
        assert torch.equal(actual.sample, alone)
        assert torch.equal(vae.decode(z, return_dict=False)[0], alone)


def test_gradients_are_those_of_one_process():
    vae, z = model("wan", torch.float32, fast=True), random(1, 4, 2, 4, 4).requires_grad_()
    vae.decode(z).sample.square().sum().backward()
    expected, of_weight = z.grad, vae.decoder.conv_in.weight.grad.clone()
    z.grad = None
    vae.zero_grad()
    turnout.distribute(vae, Lockstep(2))
    with pytest.warns(TurnoutWarning, match="gradients are wanted"):
        vae.decode(z).sample.square().sum().backward()
    assert torch.equal(z.grad, expected)
    assert torch.equal(vae.decoder.conv_in.weight.grad, of_weight)


@torch.no_grad()
def test_copies_are_not_distributed():
    vae, z = model("wan", torch.bfloat16, fast=True), random(1, 4, 1, 2, 2, dtype=torch.bfloat16)
    alone = vae.decode(z).sample
    turnout.distribute(vae, Lockstep(2))
    for other in (copy.deepcopy(vae), pickle.loads(pickle.dumps(vae))):
        assert not hasattr(type(other), "_turnout_distribution")
        assert torch.equal(other.decode(z).sample, alone)


def test_too_many_ranks_are_refused():
    vae = model("wan", torch.bfloat16, fast=False)
    distribute(vae, Lockstep(4))
    with torch.no_grad(), pytest.raises(ValueError, match="height 3 and width 2 for 4 ranks"):
        vae.decode(random(1, 4, 1, 3, 2, dtype=torch.bfloat16))
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match=r"width 28 for 4 ranks; each needs at least 8 rows or columns"),
    ):
        vae.encode(random(1, 3, 1, 28, 28, dtype=torch.bfloat16))


def test_unknown_models_meshes_and_tiling_are_refused():
    with pytest.raises(ValueError, match="Linear is not known; one of: AutoencoderKL"):
        distribute(torch.nn.Linear(2, 2), Lockstep(2))
    vae = model("wan", torch.bfloat16, fast=False)
    with pytest.raises(TypeError, match="a mesh of type int"):
        distribute(vae, 4)
    for wrong in (0, -1.0, "1", None, True):
        with pytest.raises(ValueError, match="it needs a number of seconds above 0"):
            distribute(vae, Lockstep(2), timeout=wrong)
    for mesh, numbers in ((Lockstep, (2.5,)), (Lockstep, (True,)), (Fake, (0.5, 2)), (Fake, (2, 2))):
        with pytest.raises(ValueError, match="it needs "):
            mesh(*numbers)
    for wrong in ({"split": "depth"}, {"gather": "some"}, {"routes": "fast"}):
        with pytest.raises(ValueError, match="one of: "):
            distribute(vae, Lockstep(2), **wrong)
    vae.enable_tiling()
    with pytest.raises(ValueError, match="disable_tiling"):
        distribute(vae, Lockstep(2))
    vae.disable_tiling()
    distribute(vae, Lockstep(2))
    vae.enable_tiling()
    with torch.no_grad(), pytest.raises(ValueError, match="disable_tiling"):
        vae.decode(random(1, 4, 1, 2, 2, dtype=torch.bfloat16))


def test_graphs_are_refused():
    vae = model("wan", torch.bfloat16, fast=False)
    turnout.accelerate(vae, graph=True)
    distribute(vae, Lockstep(2))
    z = random(1, 4, 1, 2, 2, dtype=torch.bfloat16)
    with torch.no_grad(), pytest.raises(ValueError, match="without graph=True"):
        vae.decode(z)
    turnout.accelerate(vae)
    with torch.no_grad():
        assert vae.decode(z).sample.shape == (1, 3, 1, 16, 16)


@torch.no_grad()
def test_exception_of_one_rank_ends_all_and_the_next_call_works():
    vae, z = model("wan", torch.bfloat16, fast=True), random(1, 4, 2, 4, 4, dtype=torch.bfloat16)
    alone = vae.decode(z).sample
    turnout.distribute(vae, Lockstep(2, timeout=30))
    calls = []

    def raises_once(module, args):
        calls.append(args)
        if len(calls) == 3:
            raise OSError("of a hook")

    handle = vae.decoder.mid_block.register_forward_pre_hook(raises_once)
    with pytest.raises(OSError, match="of a hook"):
        vae.decode(z)
    handle.remove()
    assert torch.equal(vae.decode(z).sample, alone)

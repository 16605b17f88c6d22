"""A video decoded while its latents arrive is the video decoded at once."""

import copy
import pickle

import pytest
import torch

import turnout
from tests.models.played import play_graphs
from tests.models.zoo import made, random
from turnout.models import DecodeStream
from turnout.models.frames import latents_needed


def entered_exactly(name):
    """A model whose convolution before the decoder, which sees all latents at once, changes nothing: what it
    makes of one and of many differs by a rounding on some CPUs (an AMD Zen 4, torch 2.13)."""
    model = made(name)
    entry = model.post_quant_conv
    torch.nn.init.dirac_(entry.weight)
    torch.nn.init.zeros_(entry.bias)
    return model


@pytest.mark.parametrize("name", ["wan", "wan22"])
@pytest.mark.parametrize("fast", [False, True])
@torch.no_grad()
def test_chunks_give_the_whole_clip(name, fast):
    model = entered_exactly(name)
    z = random(1, 4 if name == "wan" else 6, 5, 2, 4)
    if fast:
        turnout.accelerate(model)
    whole = model.decode(z).sample
    stream = DecodeStream(model)
    parts = [stream.decode(part) for part in z.split([1, 1, 2, 1], 2)]
    assert [part.shape[2] for part in parts] == [1, 4, 8, 4]
    assert torch.equal(torch.cat(parts, 2), whole)


@torch.no_grad()
def test_two_streams_of_one_model():
    model = entered_exactly("wan")
    turnout.accelerate(model)
    clips = random(1, 4, 3, 2, 4), random(1, 4, 3, 3, 4)
    streams = [DecodeStream(model) for _ in clips]
    parts = [
        [stream.decode(clip[:, :, i : i + 1]) for stream, clip in zip(streams, clips, strict=True)]
        for i in range(3)
    ]
    for i, clip in enumerate(clips):
        assert torch.equal(torch.cat([part[i] for part in parts], 2), model.decode(clip).sample)


def test_other_models_say_no():
    with pytest.raises(TypeError, match="does not decode in chunks"):
        DecodeStream(made("flux-vae"))


@pytest.fixture
def played(monkeypatch):
    return play_graphs(monkeypatch)


@pytest.mark.parametrize(
    ("name", "fast", "before"), [("wan", False, 3), ("wan", True, 4), ("wan22", True, 4)]
)
@torch.no_grad()
def test_graph_takes_over_once_the_caches_are_full(played, name, fast, before):
    model = made(name)
    z = random(1, 4 if name == "wan" else 6, 8, 2, 4)
    if fast:
        turnout.accelerate(model)
    plain, graph = DecodeStream(model), DecodeStream(model, graph=True)
    for part in z.split([1, 3, 1, 3], 2):
        assert torch.equal(graph.decode(part), plain.decode(part))
    assert (played.captures, played.replays) == (1, 8 - before)
    with pytest.raises(ValueError, match=r"\[1, \d, 1, 2, 6\] with width 6; this clip began with width 4"):
        graph.decode(random(1, z.shape[1], 1, 2, 6))


def test_graph_needs_a_gpu_and_no_gradients(monkeypatch):
    model = made("wan")
    with pytest.raises(ValueError, match="this one is on cpu"):
        DecodeStream(model, graph=True)
    monkeypatch.setattr("diffusers.ModelMixin.device", torch.device("cuda"))
    with pytest.raises(RuntimeError, match=r"torch\.no_grad"):
        DecodeStream(model, graph=True).decode(random(1, 4, 1, 2, 4))


@torch.no_grad()
def test_reset_begins_another_clip():
    model = entered_exactly("wan")
    turnout.accelerate(model)
    stream = DecodeStream(model)
    for size in ((1, 4, 3, 2, 4), (2, 4, 2, 3, 2), (1, 4, 2, 2, 4)):
        z = random(*size)
        parts = [stream.decode(part) for part in z.split(1, 2)]
        assert torch.equal(torch.cat(parts, 2), model.decode(z).sample)
        stream.reset()
        assert stream.cache is None


@torch.no_grad()
def test_reset_keeps_the_graph_for_latents_like_those_before(played):
    model = made("wan")
    stream, z = DecodeStream(model, graph=True), random(1, 4, 5, 1, 2)
    first = stream.decode(z)
    captured = stream.captured
    stream.reset()
    assert torch.equal(stream.decode(z), first)
    assert stream.captured is captured
    assert (played.captures, played.replays) == (1, 4)
    stream.reset()
    other = random(1, 4, 5, 1, 3)
    assert torch.equal(stream.decode(other), DecodeStream(model).decode(other))
    assert played.captures == 2


@pytest.mark.parametrize("name", ["wan", "wan22"])
@torch.no_grad()
def test_latents_that_are_kept_determine_all_caches(name):
    """A NaN in one latent reaches every frame that depends on it, however little."""
    model = made(name)
    needed = latents_needed(model._cached_conv_counts["decoder"])
    z = random(1, model.config.z_dim, needed + 2, 1, 1)
    z[:, :, 0] = torch.nan
    stream = DecodeStream(model)
    last = max(i for i in range(needed + 2) if stream.decode(z[:, :, i : i + 1]).isnan().any())
    assert needed / 3 < last < needed - 1


@torch.no_grad()
def test_long_streams_keep_a_bounded_number_of_latents():
    model = made("wan")
    needed = latents_needed(model._cached_conv_counts["decoder"])
    stream, z = DecodeStream(model), random(1, 4, needed + 5, 1, 1)
    stream.decode(z[:, :, :3])
    stream.decode(z[:, :, 3:])
    kept = stream._clip.latents
    assert len(kept) == needed
    assert sum(x.untyped_storage().nbytes() for x in kept) == z[:, :, :needed].numel() * 4


@pytest.mark.parametrize("fast", [False, True])
@torch.no_grad()
def test_copies_go_on_by_themselves(fast):
    model = made("wan")
    if fast:
        turnout.accelerate(model)
    stream, z = DecodeStream(model), random(1, 4, 4, 1, 2)
    stream.decode(z[:, :, :2])
    copies = [copy.copy(stream), copy.deepcopy(stream), pickle.loads(pickle.dumps(stream))]
    rest = stream.decode(z[:, :, 2:])
    for other in copies:
        assert torch.equal(other.decode(z[:, :, 2:]), rest)


@torch.no_grad()
def test_stream_may_be_compiled():
    model = made("wan")
    turnout.accelerate(model)
    stream, z = DecodeStream(model), random(1, 4, 3, 1, 2)
    torch.compiler.reset()
    compiled = torch.compile(stream.decode, fullgraph=True, backend="aot_eager")
    parts = [compiled(z[:, :, :1]), compiled(z[:, :, 1:2]), stream.decode(z[:, :, 2:])]
    torch.testing.assert_close(torch.cat(parts, 2), DecodeStream(model).decode(z))
    torch.compiler.reset()

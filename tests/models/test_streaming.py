"""A video decoded while its latents arrive is the video decoded at once."""

import contextlib
import types

import pytest
import torch

import turnout
from tests.models.zoo import made, random
from turnout.models import DecodeStream
from turnout.models.graphs import CapturedStep


def entered_exactly(name):
    """A model whose convolution before the decoder, which sees all latents at once, changes nothing: what it makes of one and of many
    differs by a rounding on some CPUs (an AMD Zen 4, torch 2.13)."""
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
    parts = [[stream.decode(clip[:, :, i : i + 1]) for stream, clip in zip(streams, clips, strict=True)] for i in range(3)]
    for i, clip in enumerate(clips):
        assert torch.equal(torch.cat([part[i] for part in parts], 2), model.decode(clip).sample)


def test_other_models_say_no():
    with pytest.raises(TypeError, match="does not decode in chunks"):
        DecodeStream(made("flux-vae"))


@pytest.fixture
def played(monkeypatch):
    """Graphs without a GPU: a replay runs the step again, on the same buffers as a graph would. Counts captures and replays."""
    count = types.SimpleNamespace(captures=0, replays=0)

    def capture(self, step, stream):
        frames = step(self.latent, list(self.cache))
        count.captures += 1

        def replay():
            after = list(self.cache)
            frames.copy_(step(self.latent, after))
            for held, new in zip(self.cache, after, strict=True):
                if held is not new:
                    held.copy_(new)
            count.replays += 1

        self.graph.replay = replay
        return frames

    monkeypatch.setattr(CapturedStep, "_capture", capture)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", types.SimpleNamespace)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, contextlib.nullcontext)
    stream = types.SimpleNamespace(wait_stream=lambda other: None)
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *given: stream)
    monkeypatch.setattr("diffusers.ModelMixin.device", torch.device("cuda"))
    return count


@pytest.mark.parametrize(("name", "fast", "before"), [("wan", False, 3), ("wan", True, 4), ("wan22", True, 4)])
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
    with pytest.raises(ValueError, match=r"\[1, \d, 1, 2, 6\].* captured with \[1, \d, 1, 2, 4\]"):
        graph.decode(random(1, z.shape[1], 1, 2, 6))


def test_graph_needs_a_gpu_and_no_gradients(monkeypatch):
    model = made("wan")
    with pytest.raises(ValueError, match="this one is on cpu"):
        DecodeStream(model, graph=True)
    monkeypatch.setattr("diffusers.ModelMixin.device", torch.device("cuda"))
    with pytest.raises(RuntimeError, match=r"torch\.no_grad"):
        DecodeStream(model, graph=True).decode(random(1, 4, 1, 2, 4))

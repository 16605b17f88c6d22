"""A video decoded while its latents arrive is the video decoded at once."""

import pytest
import torch

import turnout
from tests.models.zoo import made, random
from turnout.models import DecodeStream


@pytest.mark.parametrize("name", ["wan", "wan22"])
@pytest.mark.parametrize("fast", [False, True])
@torch.no_grad()
def test_chunks_give_the_whole_clip(name, fast):
    model = made(name)
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
    model = made("wan")
    turnout.accelerate(model)
    clips = random(1, 4, 3, 2, 4), random(1, 4, 3, 3, 4)
    streams = [DecodeStream(model) for _ in clips]
    parts = [[stream.decode(clip[:, :, i : i + 1]) for stream, clip in zip(streams, clips, strict=True)] for i in range(3)]
    for i, clip in enumerate(clips):
        assert torch.equal(torch.cat([part[i] for part in parts], 2), model.decode(clip).sample)


def test_other_models_say_no():
    with pytest.raises(TypeError, match="does not decode in chunks"):
        DecodeStream(made("flux-vae"))

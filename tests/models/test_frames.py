"""Large frames go one by one through a decoder, in less memory, and are the same frames."""

import pytest
import torch

import turnout
from tests.models.memory import Peak
from tests.models.zoo import made, random
from turnout.models import DecodeStream, frames
from turnout.models.frames import FrameRing, convolve_ahead


@pytest.fixture
def all_large(monkeypatch):
    """Frames of 2^6 pixels are large, on a CPU too."""
    monkeypatch.setitem(frames.LARGE, "cpu", 2**6)


@pytest.mark.parametrize("convolutions", [1, 2, 6])
@torch.no_grad()
def test_ring_is_a_causal_convolution(convolutions, monkeypatch):
    monkeypatch.setattr(frames, "SLACK", 7)
    torch.manual_seed(0)
    convs = [torch.nn.Conv3d(4, 4, 3).double() for _ in range(convolutions)]
    clips = torch.randn(convolutions, 1, 4, 20, 5, 6, dtype=torch.double)
    ring = FrameRing(convolutions, clips[0, :, :, :1], {})
    actual = torch.empty_like(clips)
    for t in range(20):
        for k, conv in enumerate(convs):
            ring.place().copy_(clips[k, :, :, t : t + 1])
            actual[k, :, :, t : t + 1] = ring.convolve(conv, (1, 1), clips[k, :, :, t : t + 1])
    for conv, clip, y in zip(convs, clips, actual, strict=True):
        torch.testing.assert_close(y, turnout.causal_conv3d(clip, conv.weight, conv.bias, padding=1) + clip)


@torch.no_grad()
def test_sums_ahead_are_a_causal_convolution():
    torch.manual_seed(0)
    conv = torch.nn.Conv3d(96, 3, 3).bfloat16()
    clip = torch.nn.functional.silu(torch.randn(1, 96, 6, 5, 6)).bfloat16()
    whole = turnout.causal_conv3d(clip.double(), conv.weight.double(), conv.bias.double(), padding=1)
    ahead, packed_weights, actual = None, {}, []
    for t in range(6):
        y, ahead = convolve_ahead(clip[:, :, t : t + 1], conv, (1, 1), ahead, packed_weights)
        actual.append(y)
    assert (torch.cat(actual, 2) - whole).square().mean() < 1.1 * (whole.bfloat16() - whole).square().mean()


@pytest.mark.parametrize("name", ["wan", "qwen-image-vae"])
@torch.no_grad()
def test_one_by_one_gives_the_same_frames(name, all_large, monkeypatch):
    model = made(name, torch.bfloat16)
    turnout.accelerate(model)
    z = random(1, 4, 6, 3, 4).bfloat16()
    ring = DecodeStream(model)
    parts = torch.cat([ring.decode(part) for part in z.split([1, 1, 3, 1], 2)], 2)
    assert ring.cache.rings
    whole = model.decode(z).sample
    assert torch.equal(parts, whole)
    monkeypatch.setitem(frames.LARGE, "cpu", 2**40)
    two_by_two = model.decode(z).sample
    turnout.restore(model)
    stock = model.decode(z).sample
    truth = model.float().decode(z.float()).sample
    of_rings, of_pieces, of_stock = (
        (x.float() - truth).square().mean().sqrt() for x in (whole, two_by_two, stock)
    )
    assert of_rings < 1.1 * min(of_pieces, of_stock)


@pytest.mark.gpu
@torch.no_grad()
def test_one_by_one_on_a_gpu(monkeypatch):
    """By the kernels that read three frames of a ring where they lie."""
    model = made("wan", torch.bfloat16).cuda()
    turnout.accelerate(model)
    z = random(1, 4, 4, 6, 10).bfloat16().cuda()
    two_by_two = model.decode(z).sample.float()
    monkeypatch.setitem(frames.LARGE, "cuda", 2**6)
    stream = DecodeStream(model)
    one_by_one = stream.decode(z).float()
    assert stream.cache.rings
    assert (one_by_one - two_by_two).norm() < 2e-2 * two_by_two.norm()


@pytest.mark.parametrize("case", ["batch", "gradients", "float32"])
def test_where_rings_do_not_apply(case, all_large):
    model = made("wan", torch.float32 if case == "float32" else torch.bfloat16)
    turnout.accelerate(model)
    z = random(2 if case == "batch" else 1, 4, 2, 3, 4).to(model.dtype)
    with torch.set_grad_enabled(case == "gradients"):
        stream = DecodeStream(model)
        actual = stream.decode(z)
        assert not stream.cache.rings
        torch.testing.assert_close(actual, model.decode(z).sample)


def test_a_stream_refuses_to_change_gradients(all_large):
    model = made("wan", torch.bfloat16)
    turnout.accelerate(model)
    stream, z = DecodeStream(model), random(1, 4, 1, 3, 4).bfloat16()
    with torch.no_grad():
        stream.decode(z)
    with pytest.raises(ValueError, match=r"gradients True; .* gradients False, .* same for all"):
        stream.decode(z)


@torch.no_grad()
def test_hook_that_changes_how_a_block_keeps_frames_is_refused(all_large):
    model = made("wan", torch.bfloat16)
    turnout.accelerate(model)
    stream, z = DecodeStream(model), random(1, 4, 3, 3, 4).bfloat16()
    expected = DecodeStream(model).decode(z)
    parts = [stream.decode(z[:, :, :1])]
    hook = model.decoder.up_blocks[-1].register_forward_hook(lambda *given: None)
    with pytest.raises(RuntimeError, match=r"a hook was added to, or removed from, a block .* reset\(\)"):
        stream.decode(z[:, :, 1:])
    hook.remove()
    assert torch.equal(torch.cat([*parts, stream.decode(z[:, :, 1:])], 2), expected)


def test_ring_may_leave_inference_mode(all_large):
    model = made("wan", torch.bfloat16)
    turnout.accelerate(model)
    stream, z = DecodeStream(model), random(1, 4, 3, 3, 4).bfloat16()
    with torch.inference_mode():
        expected = DecodeStream(model).decode(z)
        parts = [stream.decode(z[:, :, :1])]
    assert stream.cache.rings
    with torch.no_grad():
        parts.append(stream.decode(z[:, :, 1:2]))
    with torch.inference_mode():
        parts.append(stream.decode(z[:, :, 2:]))
        assert torch.equal(torch.cat(parts, 2), expected)


def is_frames(x):
    """Weights in another order are small beside frames, but not beside such small ones."""
    return 3 not in x.shape[-2:]


@torch.no_grad()
def test_memory(monkeypatch):
    from diffusers import AutoencoderKLWan

    torch.manual_seed(0)
    model = (
        AutoencoderKLWan(base_dim=32, z_dim=4, latents_mean=[0.0] * 4, latents_std=[1.0] * 4)
        .bfloat16()
        .eval()
    )
    z, frame = random(1, 4, 4, 4, 6).bfloat16(), 32 * 48
    monkeypatch.setattr(frames, "SLACK", 4)  # as little beside a frame as it is beside a large one
    peaks = {}
    for way, large in (("stock", frame), ("two by two", 2**40), ("one by one", frame)):
        if way != "stock":
            turnout.accelerate(model)
        with monkeypatch.context() as patch, Peak(model, patch, is_frames) as peak:
            patch.setitem(frames.LARGE, "cpu", large)  # the last size only
            model.decode(z)
        peaks[way] = peak.most / (frame * 32 * 2)  # in frames of that size
    # two frames of the convolution to colours become its sums; of what is being computed there is one instead
    # of two
    assert peaks["one by one"] < min(0.55 * peaks["stock"], peaks["two by two"] - 3)


@pytest.mark.parametrize("way", ["stock", "two by two", "one by one"])
@torch.no_grad()
def test_memory_of_a_stream(way, monkeypatch):
    """What a step that may fail has replaced is not held until it has succeeded."""
    from diffusers import AutoencoderKLWan

    torch.manual_seed(0)
    zeros, ones = [0.0] * 4, [1.0] * 4
    model = AutoencoderKLWan(base_dim=16, z_dim=4, num_res_blocks=1, latents_mean=zeros, latents_std=ones)
    model = model.bfloat16().eval()
    if way != "stock":
        turnout.accelerate(model)
    z = random(1, 4, 4, 4, 6).bfloat16()
    monkeypatch.setattr(frames, "SLACK", 4)
    monkeypatch.setitem(frames.LARGE, "cpu", 2**40 if way == "two by two" else 32 * 48)
    peaks = {}
    for latents in (1, 4):
        with monkeypatch.context() as patch, Peak(model, patch, is_frames) as peak:
            stream = DecodeStream(model)
            for part in z.split(latents, 2):
                stream.decode(part)
        peaks[latents] = peak.most
    assert peaks[1] < peaks[4]

"""CUDA graphs of accelerated decoders: a step of a stream, and an image decoder as a whole."""

import pytest
import torch

import turnout
from tests.models.zoo import KL, made
from turnout.models import DecodeStream

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
BATCH_OF = {"wan": (1, 16, 9, 6, 10), "wan22": (2, 6, 7, 4, 6)}  # latents


def video_decoder(name, fast):
    from diffusers import AutoencoderKLWan

    torch.manual_seed(0)
    model = AutoencoderKLWan(base_dim=32, num_res_blocks=1) if name == "wan" else made(name)
    model = torch.nn.Module.to(model, GPU, torch.bfloat16).eval()
    if fast:
        turnout.accelerate(model)
    return model, torch.randn(BATCH_OF[name], device=GPU, dtype=torch.bfloat16)


@pytest.mark.parametrize(("name", "fast"), [("wan", False), ("wan", True), ("wan22", True)])
@torch.no_grad()
def test_replayed_steps_give_the_frames_of_eager_ones(name, fast):
    model, z = video_decoder(name, fast)
    plain, graph = DecodeStream(model), DecodeStream(model, graph=True)
    expected, found = ([stream.decode(part) for part in z.split([1, 3, 1, z.shape[2] - 5], 2)] for stream in (plain, graph))
    assert graph.captured is not None
    for i, (theirs, ours) in enumerate(zip(expected, found, strict=True)):  # all at the end: a later replay must not touch earlier frames
        assert torch.equal(ours, theirs), f"chunk {i}: {(ours - theirs).abs().max()}"


@torch.no_grad()
def test_two_captured_streams_take_turns():
    model, z = video_decoder("wan", True)
    clips = z, z.flip(2).contiguous()
    plain, graph = ([DecodeStream(model, graph=graph) for _ in clips] for graph in (False, True))
    for i in range(z.shape[2]):
        for clip, theirs, ours in zip(clips, plain, graph, strict=True):
            latent = clip[:, :, i : i + 1]
            assert torch.equal(ours.decode(latent), theirs.decode(latent)), i


def test_a_stream_may_leave_inference_mode():
    model, z = video_decoder("wan", True)
    plain, graph = DecodeStream(model), DecodeStream(model, graph=True)
    with torch.inference_mode():
        assert torch.equal(graph.decode(z[:, :, :6]), plain.decode(z[:, :, :6]))
    assert graph.captured is not None
    with torch.no_grad():
        assert torch.equal(graph.decode(z[:, :, 6:]), plain.decode(z[:, :, 6:]))


@torch.no_grad()
def test_image_decoder_as_one_graph():
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    wider = {**KL, "block_out_channels": [64, 128], "norm_num_groups": 32, "latent_channels": 16}
    model = AutoencoderKL(**wider, use_quant_conv=False, use_post_quant_conv=False)
    model = torch.nn.Module.to(model, GPU, torch.bfloat16).eval()
    turnout.accelerate(model)
    clips = torch.randn(3, 2, 16, 16, 24, device=GPU, dtype=torch.bfloat16)
    latent, stream = clips[0].clone(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        model.decode(latent)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = model.decode(latent).sample
    for clip in clips:
        latent.copy_(clip)
        graph.replay()
        assert torch.equal(found, model.decode(clip).sample)


@torch.no_grad()
def test_a_step_that_waits_for_the_card_cannot_be_captured():
    model, z = video_decoder("wan", True)
    waits = model.decoder.register_forward_hook(lambda module, args, frames: frames * (frames.sum().item() * 0 + 1))
    with pytest.raises(RuntimeError, match="could not be captured"):
        DecodeStream(model, graph=True).decode(z)
    waits.remove()
    assert torch.equal(DecodeStream(model, graph=True).decode(z), DecodeStream(model).decode(z)), "the next capture is as good as any"

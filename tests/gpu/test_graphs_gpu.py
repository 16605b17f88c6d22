"""CUDA graphs of accelerated decoders: a step of a stream, and an image decoder as a whole."""

import pytest
import torch

import turnout
from tests.models.zoo import KL, made
from turnout.models import DecodeStream, frames
from turnout.models.graphs import CapturedStep, CudaEngine

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
    expected, actual = (
        [stream.decode(part) for part in z.split([1, 3, 1, z.shape[2] - 5], 2)] for stream in (plain, graph)
    )
    assert graph.captured is not None
    for i, (theirs, ours) in enumerate(
        zip(expected, actual, strict=True)
    ):  # all at the end: a later replay must not touch earlier frames
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
        actual = model.decode(latent).sample
    for clip in clips:
        latent.copy_(clip)
        graph.replay()
        assert torch.equal(actual, model.decode(clip).sample)


@torch.no_grad()
def test_a_step_that_waits_for_the_card_cannot_be_captured():
    model, z = video_decoder("wan", True)
    waits = model.decoder.register_forward_hook(
        lambda module, args, frames: frames * (frames.sum().item() * 0 + 1)
    )
    with pytest.raises(RuntimeError, match="could not be captured"):
        DecodeStream(model, graph=True).decode(z)
    waits.remove()
    assert torch.equal(DecodeStream(model, graph=True).decode(z), DecodeStream(model).decode(z)), (
        "the next capture is as good as any"
    )


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("moment", ["copied latent", "replayed"])
@torch.no_grad()
def test_repeat_after_a_failed_replay(moment, error, monkeypatch):
    model, z = video_decoder("wan", True)
    parts = z.split([5, 2, 1, 1], 2)
    plain, graph = DecodeStream(model), DecodeStream(model, graph=True)
    expected = [plain.decode(part) for part in parts]
    replay, failures = CapturedStep.__call__, []

    def failing(self, latent):
        if moment == "replayed":
            replay(self, latent)
        else:
            self.latent.copy_(latent)
        failures.append(1)
        raise error("planted")

    for part, theirs in zip(parts, expected, strict=True):
        with monkeypatch.context() as patch:
            patch.setattr(CapturedStep, "__call__", failing)
            with pytest.raises(error, match="planted"):
                graph.decode(part)
        captured = graph.captured
        assert torch.equal(graph.decode(part), theirs)
        assert graph.captured is captured, "the caches were loaded into the buffers of the graph there was"
    assert len(failures) == len(parts)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@torch.no_grad()
def test_repeat_after_a_failed_capture(error, monkeypatch):
    model, z = video_decoder("wan", True)
    expected, stream = DecodeStream(model).decode(z), torch.cuda.current_stream()
    graph, norm, failures = DecodeStream(model, graph=True), turnout.rms_norm_silu, []

    def failing(*args, **kwargs):
        if torch.cuda.is_current_stream_capturing():
            failures.append(1)
            raise error("planted")
        return norm(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(turnout.ops, "rms_norm_silu", failing)
        with pytest.raises(error, match="planted"):
            graph.decode(z)
    assert failures
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.cuda.current_stream() == stream
    assert graph.captured is None
    assert torch.equal(graph.decode(z), expected)
    assert graph.captured is not None


@torch.no_grad()
def test_interrupt_as_a_capture_begins_leaves_none_open(monkeypatch):
    model, z = video_decoder("wan", True)
    expected, stream = DecodeStream(model).decode(z), torch.cuda.current_stream()
    graph, enter = DecodeStream(model, graph=True), torch.cuda.graph.__enter__

    def interrupted(self):
        enter(self)
        raise KeyboardInterrupt("planted")

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda.graph, "__enter__", interrupted)
        with pytest.raises(KeyboardInterrupt, match="planted"):
            graph.decode(z)
    assert torch.cuda.current_stream() == stream
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.equal(graph.decode(z), expected)


@torch.no_grad()
def test_reset_keeps_the_graph():
    model, z = video_decoder("wan", True)
    plain, graph = DecodeStream(model), DecodeStream(model, graph=True)
    captured = None
    for clip in (z, z.flip(2), z):
        assert torch.equal(graph.decode(clip), plain.decode(clip))
        assert captured in (None, graph.captured)
        captured = graph.captured
        plain.reset()
        graph.reset()
    smaller = z[..., :-2].contiguous()
    assert torch.equal(graph.decode(smaller), plain.decode(smaller))
    assert graph.captured is not captured


@torch.no_grad()
def test_graph_notices_weights_that_were_moved():
    model, z = video_decoder("wan", True)
    plain, graph = DecodeStream(model), DecodeStream(model, graph=True)
    expected = plain.decode(z[:, :, :6]), plain.decode(z[:, :, 6:])
    assert torch.equal(graph.decode(z[:, :, :6]), expected[0])
    torch.nn.Module.to(model, "cpu")
    with pytest.raises(ValueError, match="latents on cuda:0, the model is on cpu"):
        graph.decode(z[:, :, 6:])
    torch.nn.Module.to(model, GPU)
    with pytest.raises(RuntimeError, match=r"reads where it lay, was moved since this clip .* reset\(\)"):
        graph.decode(z[:, :, 6:])
    plain.reset()
    graph.reset()
    assert graph.captured is None
    assert torch.equal(graph.decode(z), plain.decode(z))


@pytest.mark.parametrize("rings", [False, True])
@torch.no_grad()
def test_repeat_after_failure_in_any_op(rings, monkeypatch):
    if rings:
        monkeypatch.setitem(frames.LARGE, "cuda", 2**6)
    model, z = video_decoder("wan", True)
    parts = z[:, :, :2], z[:, :, 2:4]
    plain, stream = DecodeStream(model), DecodeStream(model)
    expected = [plain.decode(part) for part in parts]
    calls, fails_at = 0, None

    def failing(op):
        def run(*args, **kwargs):
            nonlocal calls
            calls += 1
            result = op(*args, **kwargs)
            if calls == fails_at:
                raise KeyboardInterrupt("planted")
            return result

        return run

    for name in ("conv3d", "causal_conv3d", "upsample_conv2d", "rms_norm_silu", "attention"):
        monkeypatch.setattr(turnout.ops, name, failing(getattr(turnout, name)))
    stream.decode(parts[0])
    assert bool(stream.cache.rings) == rings
    calls = 0
    stream.decode(parts[1])
    for at in range(1, calls + 1, 7):
        stream.reset()
        stream.decode(parts[0])
        calls, fails_at = 0, at
        with pytest.raises(KeyboardInterrupt, match="planted"):
            stream.decode(parts[1])
        fails_at = None
        assert torch.equal(stream.decode(parts[1]), expected[1]), at


@torch.no_grad()
def test_undisturbed_streams_need_no_more_memory_for_what_could_fail(monkeypatch):
    """Beside the latents: the caches of a step that may fail are not held twice."""
    model, z = video_decoder("wan", True)
    model.decode(z)  # chooses routes, and makes their workspaces
    peaks = {}
    for kept in (1, 68):
        monkeypatch.setattr("turnout.models.decode_stream.latents_needed", lambda entries, kept=kept: kept)
        stream, before = DecodeStream(model), torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for latent in z.split(1, 2):
            stream.decode(latent)
        peaks[kept] = torch.cuda.max_memory_allocated() - before
        del stream
    assert peaks[68] < 1.03 * peaks[1]


# The engine by itself: what torch's own allocators and generator make of it


@pytest.fixture
def engine():
    return CudaEngine(torch.device("cuda", 0))


def product(engine):
    """A run that was made once beside, and what it gives."""
    x = torch.randn(64, 4096, device=GPU)

    def run():
        return x @ x.T  # of which cuBLAS makes parts, and adds them up in its workspace

    return run, engine.run_beside(run).clone()


def test_engine_captures_after_captures_that_failed(engine):
    run, expected = product(engine)
    kept = engine.capture(run)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="captur"):
            engine.capture(lambda: run().sum().item())
        torch.rand(8, device=GPU)
    again = engine.capture(run)
    for captured in (kept, again, kept):
        captured.outputs.zero_()
        captured.replay()
        torch.testing.assert_close(captured.outputs, expected)


def test_engine_captures_while_memory_of_graphs_that_are_gone_is_in_use(engine):
    run, expected = product(engine)
    first = engine.capture(run)
    first.replay()
    outputs = first.outputs
    del first
    second = engine.capture(run)
    second.replay()
    torch.testing.assert_close(second.outputs, expected)
    torch.testing.assert_close(outputs, expected)


def test_workspaces_that_others_free_are_not_read_by_graphs(engine):
    run, expected = product(engine)
    captured = engine.capture(run)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    poison = [torch.full((2**24,), float("nan"), device=GPU) for _ in range(8)]
    captured.replay()
    torch.testing.assert_close(captured.outputs, expected)
    assert all(bool(each.isnan().all()) for each in poison), "no memory of others is written"

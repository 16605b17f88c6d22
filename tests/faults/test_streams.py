"""A call of a stream that fails changes nothing: repeated, it gives the frames of an undisturbed run."""

import functools
import signal
import threading

import pytest
import torch

import turnout
from tests.faults.public_calls import EVERY_CALL
from tests.models.played import play_graphs
from tests.models.pretended_cuda import pretend_cuda
from tests.models.zoo import made, random
from turnout.models import DecodeStream, frames
from turnout.models.frames import latents_needed
from turnout.models.graphs import CapturedStep

NAMES = ["wan", "wan22", "qwen-image-vae"]
OPS = ["conv2d", "conv3d", "causal_conv3d", "upsample_conv2d", "rms_norm_silu", "attention"]
ERRORS = [RuntimeError, KeyboardInterrupt, torch.OutOfMemoryError, MemoryError]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tensors are tiny here: a second thread only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def played(monkeypatch):
    return play_graphs(monkeypatch)


@pytest.fixture
def all_large(monkeypatch):
    """Frames of 2^4 pixels are large: rings are used, on a CPU too."""
    monkeypatch.setitem(frames.LARGE, "cpu", 2**4)
    monkeypatch.setattr(frames, "SLACK", 7)


def video_decoder(name, fast, dtype=torch.float32):
    model = made(name, dtype)
    if fast:
        turnout.accelerate(model)
    return model


def latents(model, count=3):
    return random(1, model.config.z_dim, count, 1, 2).to(model.dtype)


def undisturbed(model, *parts):
    stream = DecodeStream(model)
    return [stream.decode(part) for part in parts]


class Failure:
    """Counts calls, and fails once, in the call with a given number."""

    def __init__(self):
        self.calls, self.at, self.error = 0, None, RuntimeError

    def arm(self, at, error=RuntimeError):
        self.calls, self.at, self.error = 0, at, error

    def __call__(self, *unused):
        self.calls += 1
        if self.calls == self.at:
            self.at = None
            raise self.error("planted")


@pytest.fixture
def failing_ops(monkeypatch):
    """Failures of routed ops: before they run, and once they have run and perhaps written into a ring."""
    before, after = Failure(), Failure()

    def failing(op):
        def run(*args, **kwargs):
            before()
            result = op(*args, **kwargs)
            after()
            return result

        return run

    for name in OPS:
        monkeypatch.setattr(turnout.ops, name, failing(getattr(turnout, name)))
    return before, after


# Failures in every layer and op


@pytest.mark.parametrize("name", NAMES)
def test_repeat_after_failure_in_any_layer_of_a_stock_model(name):
    model = video_decoder(name, False)
    parts = latents(model, 2).split(1, 2)
    expected = undisturbed(model, *parts)
    ran, stream = [], DecodeStream(model)
    record = lambda module, *unused: ran.append(module)  # noqa: E731
    recorders = [module.register_forward_hook(record) for module in model.decoder.modules()]
    undisturbed(model, *parts)
    for recorder in recorders:
        recorder.remove()
    layers = dict.fromkeys(ran)  # each once
    assert len(layers) > 95
    third = NAMES.index(name)  # the three models are built alike: each layer fails in one of them
    for i, layer in list(enumerate(layers))[third :: 1 if EVERY_CALL else 3]:
        failure, error = Failure(), ERRORS[i % len(ERRORS)]
        hook = (layer.register_forward_pre_hook if i % 2 else layer.register_forward_hook)(failure)
        stream.reset()
        assert torch.equal(stream.decode(parts[0]), expected[0])
        failure.arm(1, error)
        with pytest.raises(error, match="planted"):
            stream.decode(parts[1])
        assert torch.equal(stream.decode(parts[1]), expected[1]), f"layer {i}: {type(layer).__name__}"
        hook.remove()


@pytest.mark.parametrize(("name", "rings"), [(name, False) for name in NAMES] + [("wan", True)])
def test_repeat_after_failure_in_any_op_of_an_accelerated_model(name, rings, failing_ops, request):
    if rings:
        request.getfixturevalue("all_large")
    model = video_decoder(name, True, torch.bfloat16 if rings else torch.float32)
    parts = latents(model, 2).split(1, 2)
    expected = undisturbed(model, *parts)
    stream = DecodeStream(model)
    stream.decode(parts[0])
    failing_ops[0].arm(None)
    stream.decode(parts[1])
    assert bool(stream.cache.rings) == rings
    calls = failing_ops[0].calls
    assert calls > 50
    for at in range(1, calls + 1):
        for failure in failing_ops[: 2 - at % 2]:
            error = ERRORS[at // 2 % len(ERRORS)]
            stream.reset()
            stream.decode(parts[0])
            failure.arm(at, error)
            with pytest.raises(error, match="planted"):
                stream.decode(parts[1])
            assert torch.equal(stream.decode(parts[1]), expected[1]), f"op {at} of {calls}"


@pytest.mark.parametrize("fast", [False, True])
def test_call_of_several_latents_is_undone_as_a_whole(fast):
    model = video_decoder("wan", fast)
    z = latents(model, 7)
    expected = torch.cat(undisturbed(model, *z.split([2, 4, 1], 2)), 2)
    failure, stream = Failure(), DecodeStream(model)
    parts = [stream.decode(z[:, :, :2])]
    hook = model.decoder.register_forward_hook(failure)
    failure.arm(3)
    with pytest.raises(RuntimeError, match="planted"):
        stream.decode(z[:, :, 2:6])
    failure.arm(1)  # and once more, while the caches are computed again
    with pytest.raises(RuntimeError, match="planted"):
        stream.decode(z[:, :, 2:6])
    hook.remove()
    parts += [stream.decode(z[:, :, 2:6]), stream.decode(z[:, :, 6:])]
    assert torch.equal(torch.cat(parts, 2), expected)


def test_failure_in_the_first_call():
    model = video_decoder("wan", True)
    z, stream, failure = latents(model), DecodeStream(model), Failure()
    hook = model.decoder.conv_out.register_forward_hook(failure)
    turnout.restore(model)  # on a stock model the hook runs
    failure.arm(2)
    with pytest.raises(RuntimeError, match="planted"):
        stream.decode(z)
    hook.remove()
    assert torch.equal(stream.decode(z), undisturbed(model, z)[0])


def test_failure_long_after_the_clip_began():
    """Not all latents are kept: the caches are computed from the last ones."""
    model = video_decoder("wan", False)
    needed = latents_needed(model._cached_conv_counts["decoder"])
    z = random(1, 4, needed + 8, 1, 1)
    *_, expected = undisturbed(model, z[:, :, :-4], z[:, :, -4:])
    stream, failure = DecodeStream(model), Failure()
    stream.decode(z[:, :, :-4])
    hook = model.decoder.conv_out.register_forward_pre_hook(failure)
    failure.arm(2)
    with pytest.raises(RuntimeError, match="planted"):
        stream.decode(z[:, :, -4:])
    hook.remove()
    assert torch.equal(stream.decode(z[:, :, -4:]), expected)


def test_failed_call_gives_its_caches_back():
    """Those of a call that had no memory are free, even while its traceback is looked at."""
    model = video_decoder("wan", False)
    z, stream = latents(model), DecodeStream(model)
    stream.decode(z[:, :, :2])
    cache = stream.cache
    assert cache
    hook = model.decoder.conv_out.register_forward_hook(failure := Failure())
    failure.arm(1, torch.OutOfMemoryError)
    with pytest.raises(torch.OutOfMemoryError):
        stream.decode(z[:, :, 2:])
    hook.remove()
    assert not cache
    assert stream.cache is None


@pytest.mark.parametrize("fast", [False, True])
def test_repeat_with_gradients(fast):
    model = video_decoder("wan", fast)
    with torch.enable_grad():

        def gradients(disturb):
            z = latents(model).requires_grad_()
            stream = DecodeStream(model)
            first = stream.decode(z[:, :, :1])
            if disturb:
                hook = model.decoder.register_forward_hook(failure := Failure())
                failure.arm(2)
                with pytest.raises(RuntimeError, match="planted"):
                    stream.decode(z[:, :, 1:])
                hook.remove()
            video = torch.cat([first, stream.decode(z[:, :, 1:])], 2)
            weight = model.decoder.conv_in.weight
            return video.detach(), *torch.autograd.grad(video.square().sum(), [z, weight])

        for ours, theirs in zip(gradients(True), gradients(False), strict=True):
            assert torch.equal(ours, theirs)


# Signals


class Alarm(BaseException):
    """Not an Exception: the router takes those for arguments that only torch understands."""


class Alarms:
    """Interrupt a call after a while by a real signal whose handler raises, if it is still running."""

    def __init__(self):
        self.raised = 0

    def __enter__(self):
        self.before = signal.signal(signal.SIGALRM, self.handle)
        return self

    def __exit__(self, *unused):
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self.before)

    def handle(self, number, frame):
        while frame is not None:  # only inside of `decode`: once it has returned, it has succeeded
            if frame.f_code is DecodeStream.decode.__code__:
                self.raised += 1
                raise Alarm
            frame = frame.f_back

    def until_done(self, call, seconds):
        """Repeat a call until it is not interrupted; the time until the signal grows."""
        while True:
            try:
                signal.setitimer(signal.ITIMER_REAL, seconds)
                return call()
            except Alarm:
                seconds *= 1.5


@pytest.mark.parametrize("case", ["stock", "accelerated", "rings", "graph"])
def test_repeat_after_signals(case, request):
    if case == "rings":
        request.getfixturevalue("all_large")
    if case == "graph":
        request.getfixturevalue("played")
    model = video_decoder("wan", case != "stock", torch.bfloat16 if case == "rings" else torch.float32)
    z = latents(model, 8)
    parts = z.split([1, 2, 1, 2, 1, 1], 2)
    expected = undisturbed(model, *parts)
    stream = DecodeStream(model, graph=case == "graph")
    with Alarms() as alarms:
        for i in range(3):
            stream.reset()
            for k, (part, wanted) in enumerate(zip(parts, expected, strict=True)):
                wait = 1e-4 * (1 + (37 * i + 11 * k) % 101)  # 0.1 to 10 ms; a step takes about 10
                actual = alarms.until_done(functools.partial(stream.decode, part), wait)
                assert torch.equal(actual, wanted)
    assert alarms.raised > 18


# CUDA graphs


@pytest.mark.parametrize("moment", ["first run", "capture", "copied latent", "replay", "after the replay"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_repeat_after_failure_of_a_graph(moment, error, played, monkeypatch):
    model = video_decoder("wan", True)
    z = latents(model, 8)
    parts = z.split([3, 2, 2, 1], 2)
    expected = undisturbed(model, *parts)
    failure = Failure()

    class Failing(CapturedStep):
        def __init__(self, step, *rest):
            def watched(latent, cache):
                frames = step(latent, cache)
                if moment in ("first run", "replay"):
                    failure()
                return frames

            super().__init__(watched, *rest)

        def _capture(self, *args):
            if moment == "capture":
                failure()
            return super()._capture(*args)

        def __call__(self, latent):
            if moment == "copied latent":
                self.latent.copy_(latent)
                failure()
            frames = super().__call__(latent)
            if moment == "after the replay":
                failure()
            return frames

    monkeypatch.setattr("turnout.models.decode_stream.CapturedStep", Failing)
    stream, failed = DecodeStream(model, graph=True), 0
    for at in (1, 2, 3):
        stream.reset()
        for part, wanted in zip(parts, expected, strict=True):
            failure.arm(at, error)
            for _ in range(2):
                try:
                    actual = stream.decode(part)
                    break
                except error:
                    failed += 1
            assert torch.equal(actual, wanted)
    assert failed >= (1 if moment == "capture" else 2)
    assert stream.captured is not None
    assert played.replays


@pytest.mark.parametrize("interrupted", [False, True])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_failed_capture_says_why_and_leaves_nothing_behind(error, interrupted, monkeypatch):
    cuda = pretend_cuda(monkeypatch)
    begin = torch.cuda.graph.__enter__

    def begun(self):
        begin(self)
        if interrupted:
            raise KeyboardInterrupt("planted")

    monkeypatch.setattr(torch.cuda.graph, "__enter__", begun)
    calls = Failure()
    calls.arm(2, error)  # the first one is not captured

    def step(latent, cache):
        try:
            calls()
        except BaseException:
            cuda.current.is_broken = True  # the end of such a capture raises once more
            raise
        return latent

    expected = KeyboardInterrupt if interrupted or error is KeyboardInterrupt else RuntimeError
    message = "planted" if expected is KeyboardInterrupt else r"as a CUDA graph \(ValueError: planted\)"
    before = torch.cuda.current_stream()
    try:
        raise KeyboardInterrupt("of before")  # as where a call is repeated in the handler of an interrupt
    except KeyboardInterrupt:
        with pytest.raises(expected, match=message):
            CapturedStep(step, torch.zeros(1), [])
    assert torch.cuda.current_stream() is before
    assert not any(stream.is_capturing for stream in cuda.captured_on)
    assert not cuda.memory.open, "the allocator knows that nothing is captured any more"


def test_hook_that_raises_in_a_replay_by_graph_is_not_run_but_refused(played):
    model = video_decoder("wan", False)
    z = latents(model, 6)
    stream = DecodeStream(model, graph=True)
    stream.decode(z[:, :, :5])
    hook = model.decoder.conv_in.register_forward_hook(Failure())
    with pytest.raises(RuntimeError, match=r"a hook .* given to or taken from a module .* call reset\(\)"):
        stream.decode(z[:, :, 5:])
    hook.remove()
    assert torch.equal(stream.decode(z[:, :, 5:]), undisturbed(model, z[:, :, :5], z[:, :, 5:])[1])


# Arguments that are refused


BAD_LATENTS = {
    "a list": (lambda z: [z], TypeError, r"z is of type list, it needs a tensor \[B, 4, T, h, w\]"),
    "None": (lambda z: None, TypeError, "z is of type NoneType"),
    "no batch": (lambda z: z[0], ValueError, r"latents \[4, 1, 1, 2\], it needs .*z\.unsqueeze\(0\)"),
    "channels": (lambda z: z[:, :3], ValueError, r"latents \[1, 3, 1, 1, 2\], it needs a tensor \[B, 4, T"),
    "no latent": (lambda z: z[:, :, :0], ValueError, r"latents \[1, 4, 0, 1, 2\].*none of the sizes 0"),
    "no column": (lambda z: z[..., :0], ValueError, "none of the sizes 0"),
    "integers": (lambda z: z.long(), ValueError, r"latents of torch\.int64 .* needs dense floating-point"),
    "sparse": (lambda z: z.to_sparse(), ValueError, "needs dense"),
    "float64": (lambda z: z.double(), ValueError, r"of torch\.float64, the model is of torch\.float32"),
    "bfloat16": (lambda z: z.bfloat16(), ValueError, r"z\.to\(torch\.float32\)"),
    "meta": (lambda z: z.to("meta"), ValueError, r"latents on meta, the model is on cpu; .* z\.to\('cpu'\)"),
    "batch": (lambda z: z.repeat(2, 1, 1, 1, 1), ValueError, "with batch 2; this clip began with batch 1"),
    "height": (lambda z: z.repeat(1, 1, 1, 2, 1), ValueError, "with height 2; this clip began with height 1"),
    "both": (lambda z: z.mT, ValueError, "with height 2, width 1; this clip began with height 1, width 2"),
}


@pytest.mark.parametrize("bad", BAD_LATENTS)
def test_latents_that_do_not_fit_are_refused_before_anything_is_touched(bad):
    change, error, message = BAD_LATENTS[bad]
    model = video_decoder("wan", True)
    z, stream = latents(model), DecodeStream(model)
    expected = undisturbed(model, z[:, :, :2], z[:, :, 2:])
    assert torch.equal(stream.decode(z[:, :, :2]), expected[0])
    clip, entries = stream._clip, list(stream.cache)
    with pytest.raises(error, match=message):
        stream.decode(change(z[:, :, 2:]))
    assert stream._clip is clip
    assert all(a is b for a, b in zip(stream.cache, entries, strict=True))
    assert torch.equal(stream.decode(z[:, :, 2:]), expected[1])


def test_a_clip_refuses_to_change_gradients_and_autocast():
    model = video_decoder("wan", False)
    z, stream = latents(model), DecodeStream(model)
    expected = undisturbed(model, z[:, :, :1], z[:, :, 1:])
    stream.decode(z[:, :, :1])
    with torch.enable_grad(), pytest.raises(ValueError, match=r"gradients True; .* gradients False"):
        stream.decode(z[:, :, 1:])
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=r"16; .* autocast None"):
        stream.decode(z[:, :, 1:])
    with torch.inference_mode():  # is like no_grad
        assert torch.equal(stream.decode(z[:, :, 1:]), expected[1])


def test_autocast_from_the_beginning():
    model = video_decoder("wan", True)
    z = latents(model)
    with torch.autocast("cpu", torch.bfloat16):
        expected = undisturbed(model, z[:, :, :1], z[:, :, 1:])
        stream, failure = DecodeStream(model), Failure()
        stream.decode(z[:, :, :1])
        hook = model.decoder.register_forward_hook(failure)
        failure.arm(1, KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            stream.decode(z[:, :, 1:])
        hook.remove()
        assert torch.equal(stream.decode(z[:, :, 1:]), expected[1])


# Models that are changed within a clip


def replace_conv_in(model):
    model.decoder.conv_in = made("wan").decoder.conv_in


def replace_decoder(model):
    model.decoder = made("wan").decoder


def replace_weight(model):
    model.decoder.conv_in.weight = torch.nn.Parameter(model.decoder.conv_in.weight.clone())


CHANGES = {
    "accelerated": (turnout.accelerate, ".* was accelerated, restored or given another class"),
    "trained": (lambda model: model.train(), "post_quant_conv was switched to training mode"),
    "partly trained": (
        lambda model: model.decoder.mid_block.attentions.train(),
        r"decoder\.mid_block\.attentions was switched to training mode",
    ),
    "module replaced": (replace_conv_in, "a module, a parameter or a buffer was added, removed or replaced"),
    "decoder replaced": (replace_decoder, "decoder was replaced by another module"),
    "weight replaced": (replace_weight, r"decoder\.conv_in\.weight was replaced by another tensor"),
    "weights loaded": (
        lambda model: model.load_state_dict(model.state_dict()),
        r"post_quant_conv\.weight was changed in place",
    ),
    "weight written": (
        lambda model: model.decoder.conv_out.bias.mul_(2),
        r"decoder\.conv_out\.bias was changed in place",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_model_is_noticed(change):
    make, message = CHANGES[change]
    model = video_decoder("wan", False)
    z, stream = latents(model), DecodeStream(model)
    stream.decode(z[:, :, :2])
    clip = stream._clip
    make(model)
    with pytest.raises(RuntimeError, match=rf"DecodeStream: {message} since this clip .* call reset\(\)"):
        stream.decode(z[:, :, 2:])
    assert stream._clip is clip
    stream.reset()
    assert torch.equal(stream.decode(z), undisturbed(model, z)[0])


def test_restored_model_is_noticed_and_a_change_that_is_undone_forgotten():
    model = video_decoder("wan", True)
    z, stream = latents(model), DecodeStream(model)
    expected = undisturbed(model, z[:, :, :1], z[:, :, 1:])
    stream.decode(z[:, :, :1])
    turnout.restore(model)
    with pytest.raises(RuntimeError, match="was accelerated, restored"):
        stream.decode(z[:, :, 1:])
    turnout.accelerate(model)
    model.decoder.train()
    with pytest.raises(RuntimeError, match="training mode"):
        stream.decode(z[:, :, 1:])
    model.eval()
    assert torch.equal(stream.decode(z[:, :, 1:]), expected[1])


def test_changes_that_do_not_matter_are_allowed():
    model = video_decoder("wan", False)
    z, stream = latents(model), DecodeStream(model)
    expected = undisturbed(model, z[:, :, :1], z[:, :, 1:2], z[:, :, 2:])
    stream.decode(z[:, :, :1])
    seen = []
    hook = model.decoder.conv_in.register_forward_hook(lambda *args: seen.append(1))
    model.encoder.train()
    with torch.no_grad():
        next(model.encoder.parameters()).zero_()
    for parameter in model.parameters():  # as offloading moves a model away and back
        parameter.data = parameter.data.clone()
    assert torch.equal(stream.decode(z[:, :, 1:2]), expected[1])
    assert seen
    hook.remove()
    assert torch.equal(stream.decode(z[:, :, 2:]), expected[2])


def test_weights_may_be_on_the_meta_device_between_calls():
    """As offloading does it, layer by layer: each call puts other tensors in their place for a while."""
    model = video_decoder("wan", False)
    z, stream = latents(model), DecodeStream(model)
    expected = undisturbed(model, z[:, :, :1], z[:, :, 1:])
    for layer in (model.post_quant_conv, model.decoder.conv_in, model.decoder.conv_out):
        weight = layer.weight.detach()

        def bring(layer, *unused, weight=weight):
            layer.weight = torch.nn.Parameter(weight, requires_grad=False)

        def take_away(layer, *unused, weight=weight):
            layer.weight = torch.nn.Parameter(weight.to("meta"), requires_grad=False)

        take_away(layer)
        layer.register_forward_pre_hook(bring)
        layer.register_forward_hook(take_away)
    assert torch.equal(stream.decode(z[:, :, :1]), expected[0])
    assert torch.equal(stream.decode(z[:, :, 1:]), expected[1])


def test_converted_model_does_not_take_the_latents_of_before():
    model = video_decoder("wan", False)
    z, stream = latents(model), DecodeStream(model)
    expected = undisturbed(model, z[:, :, :1], z[:, :, 1:])
    stream.decode(z[:, :, :1])
    weights = {name: x.clone() for name, x in model.state_dict().items()}
    torch.nn.Module.to(model, torch.bfloat16)
    with pytest.raises(ValueError, match=r"latents of torch\.float32, the model is of torch\.bfloat16"):
        stream.decode(z[:, :, 1:])
    with pytest.raises(ValueError, match=r"dtype torch\.bfloat16; this clip began with dtype torch\.float32"):
        stream.decode(z[:, :, 1:].bfloat16())
    torch.nn.Module.to(model, torch.float32)
    for name, parameter in model.named_parameters():
        parameter.data = weights[name]
    assert torch.equal(stream.decode(z[:, :, 1:]), expected[1])


@pytest.mark.parametrize("change", ["moved", "written"])
def test_graph_notices_weights_that_moved(change, played):
    model = video_decoder("wan", True)
    z, stream = latents(model, 6), DecodeStream(model, graph=True)
    expected = stream.decode(z)
    assert stream.captured is not None
    if change == "moved":  # away and back, which may well give the old address to other weights
        torch.nn.Module.to(model, torch.float64)
        torch.nn.Module.to(model, torch.float32)
    else:
        model.decoder.conv_in.bias.add_(0)
    with pytest.raises(RuntimeError, match="was moved" if change == "moved" else "changed in place"):
        stream.decode(z)
    stream.reset()
    assert stream.captured is None
    assert torch.equal(stream.decode(z), expected)
    assert played.captures == 2


def test_weights_of_inference_mode():
    with torch.inference_mode():
        model = video_decoder("wan", True)
        model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()}, assign=True)
        assert model.decoder.conv_in.weight.is_inference()
        z, stream = latents(model), DecodeStream(model)
        expected = undisturbed(model, z[:, :, :1], z[:, :, 1:])
        stream.decode(z[:, :, :1])
        assert torch.equal(stream.decode(z[:, :, 1:]), expected[1])


# Calls within calls


def test_second_call_while_one_runs_is_refused():
    model = video_decoder("wan", False)
    z, stream = latents(model), DecodeStream(model)
    expected = undisturbed(model, z[:, :, :1], z[:, :, 1:])
    stream.decode(z[:, :, :1])
    inside, go_on, results = threading.Event(), threading.Event(), []

    def wait(*unused):
        inside.set()
        go_on.wait(30)

    hook = model.decoder.mid_block.register_forward_hook(wait)
    with torch.no_grad():
        thread = threading.Thread(target=torch.no_grad()(lambda: results.append(stream.decode(z[:, :, 1:]))))
    thread.start()
    assert inside.wait(30)
    hook.remove()
    for call in (lambda: stream.decode(z[:, :, 1:]), stream.reset):
        with pytest.raises(RuntimeError, match="another call of this stream is running"):
            call()
    go_on.set()
    thread.join(30)
    assert torch.equal(results[0], expected[1])


@pytest.mark.parametrize("call", ["decode", "reset"])
def test_hook_cannot_use_the_stream_it_is_called_by(call):
    model = video_decoder("wan", False)
    z, stream = latents(model), DecodeStream(model)
    expected = undisturbed(model, z[:, :, :1], z[:, :, 1:])
    stream.decode(z[:, :, :1])
    call_again = stream.reset if call == "reset" else functools.partial(stream.decode, z[:, :, :1])
    hook = model.decoder.mid_block.register_forward_hook(lambda *args: call_again() and None)
    with pytest.raises(RuntimeError, match="another call of this stream is running"):
        stream.decode(z[:, :, 1:])
    hook.remove()
    assert torch.equal(stream.decode(z[:, :, 1:]), expected[1])

"""causal_conv3d on a CPU: against conv3d over frames put together by hand, in chunks of all kinds, gradients
through the cache.
"""

import random

import pytest
import torch
import torch.nn.functional as F

import turnout
from tests.ops.test_conv2d_conv3d import keeps_promises, routes_on_cpu
from turnout.ops.causal_conv3d import CAUSAL_CONV3D, causal_conv3d

MODES = ("zeros", "replicate")
modes = pytest.mark.parametrize("mode", MODES)
pinned = pytest.mark.parametrize(
    "name", ["reference", "channels-last", "depth-taps"]
)  # exact on small integers


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def integers(*shape):
    """Values whose sums are exact."""
    return torch.randint(-3, 4, shape).float()


def by_hand(x, weight, bias=None, cache=None, dilation=1, mode="zeros", **arguments):
    """One frame at a time: the frames before it are looked up, never padded."""
    before = (weight.shape[2] - 1) * dilation
    frames = ([] if cache is None else list(cache.unbind(2))) + list(x.unbind(2))
    start = len(frames) - x.shape[2]
    first = frames[0] if mode == "replicate" else torch.zeros_like(frames[0])
    window = [first if i < 0 else frames[i] for i in range(start - before, len(frames))]
    arguments = {"padding": 0, "groups": 1, **arguments}
    result = [
        sum(
            F.conv2d(window[o + k * dilation], weight[:, :, k], None, **arguments)
            for k in range(weight.shape[2])
        )
        for o in range(x.shape[2])
    ]
    y = torch.stack(result, 2)
    return y if bias is None else y + bias.view(-1, 1, 1, 1)


@modes
@pinned
@pytest.mark.parametrize("depth", [2, 3, 5])
@pytest.mark.parametrize("dilation", [1, 2])
def test_equals_a_loop_over_frames(mode, name, depth, dilation):
    before = (depth - 1) * dilation
    x, weight, bias = integers(2, 4, 3, 5, 6), integers(6, 2, depth, 3, 3), integers(6)
    for held in (None, 0, 1, before - 1, before, before + 2):
        cache = None if held is None else integers(2, 4, held, 5, 6)
        with turnout.pin(causal_conv3d=name):
            y = causal_conv3d(
                x, weight, bias, cache=cache, dilation=(dilation, 1, 1), padding=1, groups=2, pad_mode=mode
            )
        assert torch.equal(y, by_hand(x, weight, bias, cache, dilation, mode, padding=1, groups=2)), held


@modes
@pinned
@pytest.mark.parametrize("layout", ["first", "last"])
def test_any_split_into_chunks_gives_the_whole_clip(mode, name, layout):
    draw = random.Random(0)
    for depth, dilation in ((2, 1), (3, 1), (3, 2), (5, 1)):
        clip, weight, bias = integers(1, 2, 9, 5, 4), integers(5, 2, depth, 3, 3), integers(5)
        if layout == "last":
            clip, weight = (t.contiguous(memory_format=torch.channels_last_3d) for t in (clip, weight))
        arguments = {"padding": 1, "dilation": (dilation, 1, 1), "pad_mode": mode}
        with turnout.pin(causal_conv3d=name):
            whole = causal_conv3d(clip, weight, bias, **arguments)
            for sizes in (
                [1] * 9,
                [9],
                [1, 8],
                [4, 4, 1],
                *([draw.randint(1, 3) for _ in range(9)] for _ in range(4)),
            ):
                cache, parts, at = None, [], 0
                while at < 9:
                    chunk = clip[:, :, at : at + sizes[len(parts)]]
                    y, cache = causal_conv3d(chunk, weight, bias, cache=cache, return_cache=True, **arguments)
                    parts.append(y)
                    at += chunk.shape[2]
                assert torch.equal(torch.cat(parts, 2), whole), sizes


def test_chunks_of_a_multiple_of_the_stride():
    clip, weight = integers(1, 3, 8, 4, 4), integers(4, 3, 3, 3, 3)
    whole = causal_conv3d(clip, weight, stride=(2, 1, 1))
    assert whole.shape[2] == 4
    cache, parts = None, []
    for chunk in clip.split([2, 4, 2], 2):
        y, cache = causal_conv3d(chunk, weight, cache=cache, stride=(2, 1, 1), return_cache=True)
        parts.append(y)
    assert torch.equal(torch.cat(parts, 2), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["first", "last"])
@modes
def test_every_route_is_within_its_numerics(dtype, layout, mode):
    def made(*shape):
        t = torch.randn(shape).to(dtype)
        return t.contiguous(memory_format=torch.channels_last_3d) if layout == "last" else t

    x, weight, bias = made(2, 8, 3, 6, 7), made(5, 8, 3, 3, 3) / 8, torch.randn(5).to(dtype)
    least = {torch.float32: ["depth-taps"]}.get(dtype, ["upcast"])
    for cache in (None, made(2, 8, 2, 6, 7), made(2, 8, 1, 6, 7), torch.randn(2, 8, 2, 6, 7).to(dtype)):
        keeps_promises(CAUSAL_CONV3D, x, weight, bias, cache, 1, 1, 1, 1, mode, least=least)
    residual = torch.randn(2, 5, 3, 6, 7).to(dtype)
    keeps_promises(
        CAUSAL_CONV3D, x, weight, bias, made(2, 8, 2, 6, 7), 1, 1, 1, 1, mode, False, residual, least=least
    )


def test_the_next_cache_is_a_view_where_it_can_be():
    x, weight, cache = torch.randn(1, 2, 4, 3, 3), torch.randn(2, 2, 3, 3, 3), torch.randn(1, 2, 2, 3, 3)
    _, after = causal_conv3d(x, weight, cache=cache, return_cache=True)
    assert after._base is x
    assert torch.equal(after, x[:, :, -2:])
    _, after = causal_conv3d(x[:, :, :1], weight, cache=cache, return_cache=True)
    assert torch.equal(after, torch.cat([cache[:, :, -1:], x[:, :, :1]], 2))
    _, after = causal_conv3d(x[:, :, :1], weight, return_cache=True)
    assert after.data_ptr() == x.data_ptr()
    assert after.shape[2] == 1
    _, after = causal_conv3d(x, weight[:, :, :1], return_cache=True)
    assert after.shape[2] == 0


def test_unbatched_inputs_and_invalid_arguments():
    x, weight, cache = torch.randn(2, 4, 3, 3), torch.randn(2, 2, 3, 3, 3), torch.randn(2, 2, 3, 3)
    y, after = causal_conv3d(x, weight, cache=cache, padding=1, return_cache=True)
    torch.testing.assert_close(y, causal_conv3d(x[None], weight, cache=cache[None], padding=1)[0])
    assert after.shape == (2, 2, 3, 3)
    with pytest.raises(ValueError, match="pad_mode 'reflect'; one of: zeros, replicate"):
        causal_conv3d(x, weight, pad_mode="reflect")
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        causal_conv3d(x[None], weight, cache=torch.randn(1, 2, 2, 4, 4))
    with pytest.raises(RuntimeError):
        causal_conv3d(x[None, :1], weight)


@modes
@pinned
@pytest.mark.parametrize("held", [0, 1, 2, 3])
def test_gradients_through_cache_and_padding(mode, name, held):
    tensors = [
        torch.randn(1, 3, 3, 4, 4),
        torch.randn(2, 3, 3, 3, 3),
        torch.randn(2),
        torch.randn(1, 2, 3, 4, 4),
    ]
    tensors += [torch.randn(1, 3, held, 4, 4)] if held else []
    ours, theirs = ([t.clone().requires_grad_() for t in tensors] for _ in range(2))
    scale = torch.randn(1, 2, 3, 4, 4)

    def loss(run, x, weight, bias, residual, cache=None):
        return (run(x, weight, bias, cache, residual) * scale).sum()

    def routed(x, weight, bias, cache, residual):
        return causal_conv3d(x, weight, bias, cache=cache, padding=1, pad_mode=mode, residual=residual)

    with turnout.pin(causal_conv3d=name):
        loss(routed, *ours).backward()
    loss(
        lambda x, weight, bias, cache, residual: (
            by_hand(x, weight, bias, cache, 1, mode, padding=1) + residual
        ),
        *theirs,
    ).backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)


def test_second_gradients_pass_gradgradcheck():
    x, weight, cache = (
        torch.randn(*s, dtype=torch.float64, requires_grad=True)
        for s in ((1, 1, 2, 3, 3), (1, 1, 3, 2, 2), (1, 1, 1, 3, 3))
    )

    def opaque(x, weight, cache):
        return CAUSAL_CONV3D.opaque(
            x, weight, None, cache, [1, 1, 1], [1, 1], [1, 1, 1], 1, "replicate", None
        )

    assert torch.autograd.gradcheck(opaque, (x, weight, cache))
    assert torch.autograd.gradgradcheck(opaque, (x, weight, cache))


def test_nan_in_the_cache_affects_only_outputs_that_read_it():
    x, weight = integers(1, 2, 4, 4, 4), integers(3, 2, 3, 3, 3) + 0.5
    cache = integers(1, 2, 2, 4, 4)
    cache[:, :, 1, 0, 0] = float("nan")
    args = CAUSAL_CONV3D.arguments(x, weight, None, cache, 1, 1)
    expected = CAUSAL_CONV3D.reference(*args)
    assert expected[:, :, 2:].isfinite().all()
    for name, _, run in routes_on_cpu(CAUSAL_CONV3D, args):
        assert torch.equal(run(*args).isnan(), expected.isnan()), name

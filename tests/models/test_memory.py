"""No known model needs more memory than stock; upsampling writes at once what stock makes in steps."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import turnout
from tests.models.memory import peaks
from tests.models.zoo import made, random
from turnout.models.video import Border, bordered, repeat_frames
from turnout.race.models import RACERS

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.mark.parametrize("name", [name for name, racer in RACERS.items() if racer.package == "diffusers"])
def test_accelerated_model_needs_no_more_memory_than_stock(name, monkeypatch):
    """At full size.

    The count is that of an H200 to the MiB: 7687 for Qwen-Image at 1328^2 as it was, 2211 for Wan.
    """
    stock, accelerated = peaks(name, monkeypatch)
    most = [
        f"{size / 2**20:.0f} MiB {what}"
        for size, what in sorted(accelerated.then, key=lambda held: -held[0])[:9]
    ]
    assert accelerated.most <= 1.0005 * stock.most, most  # a norm's weights in float32


# The largest share of stock's peak: what upsampling in place, caches beside inputs and frames one by one
# save.
SHARES = {
    "qwen-image-vae": 0.2,
    "wan-vae": 0.6,
    "hunyuan-vae": 0.7,
    "cogvideox-vae": 0.65,
    "ltx-vae": 0.7,
    "flux": 0.8,
}


@pytest.mark.parametrize(("name", "share"), SHARES.items())
def test_accelerated_model_needs_much_less_memory(name, share, monkeypatch):
    stock, accelerated = peaks(name, monkeypatch)
    assert accelerated.most <= share * stock.most


def stock_upsampled(x, times, first_apart):
    """As HunyuanVideo's VAE does it."""
    if not first_apart:
        return F.interpolate(x, scale_factor=times, mode="nearest")
    first = F.interpolate(x[:, :, 0], scale_factor=times[1:], mode="nearest")[:, :, None]
    rest = x[:, :, 1:]
    return (
        torch.cat([first, F.interpolate(rest, scale_factor=times, mode="nearest")], 2)
        if rest.shape[2]
        else first
    )


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
@pytest.mark.parametrize("first_apart", [True, False])
@pytest.mark.parametrize("times", [(2, 2, 2), (1, 2, 2), (2, 1, 1), (3, 2, 1)])
@pytest.mark.parametrize("frames", [1, 2, 3])
def test_frames_are_repeated_as_stock_repeats_them(frames, times, first_apart, layout):
    x = random(2, 4, frames, 3, 5).contiguous(memory_format=layout)
    expected = stock_upsampled(x.contiguous(), times, first_apart)
    actual = repeat_frames(x, times, first_apart=first_apart)
    assert torch.equal(actual, expected)
    assert actual.stride(1) == 1
    wanting = x.clone().requires_grad_()
    recorded = repeat_frames(wanting, times, first_apart=first_apart)
    assert torch.equal(recorded, expected)
    (actual,) = torch.autograd.grad(recorded.square().sum(), wanting)
    other = x.contiguous().requires_grad_()
    (expected,) = torch.autograd.grad(stock_upsampled(other, times, first_apart).square().sum(), other)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("frames", [1, 3])
def test_border_of_another_size_is_padding_of_what_is_written(frames):
    x, border = random(2, 4, frames, 3, 5), Border(2, 0, (1, 1))
    size = (2 * frames - 1, 6, 10)

    def fill(out):
        return repeat_frames(x, (2, 2, 2), first_apart=True, out=out)

    expected = F.pad(stock_upsampled(x, (2, 2, 2), True), (1, 1, 1, 1, 2, 0), mode="replicate")
    assert torch.equal(bordered(x, border, fill, size), expected)
    x.requires_grad_()
    assert torch.equal(bordered(x, border, fill, size), expected)


def upsamplers(name):
    return [m for m in made(name).modules() if "Upsample" in type(m).__name__ and hasattr(m, "conv")]


@pytest.mark.parametrize("frames", [1, 2, 3])
@pytest.mark.parametrize("situation", ["eager", "gradients", "autocast", "compiled", "fake"])
@pytest.mark.parametrize("name", ["hunyuan", "cogvideox"])
def test_upsampling_is_that_of_stock(name, situation, frames):
    for block in upsamplers(name):
        torch._dynamo.reset()
        x = random(
            2, block.conv.conv.in_channels if name == "hunyuan" else block.conv.in_channels, frames, 3, 5
        )
        results = []
        for accelerated in (False, True):
            if accelerated:
                assert turnout.accelerate(block).fused
            given = x.clone().requires_grad_(situation == "gradients")
            with torch.set_grad_enabled(situation == "gradients"):
                if situation == "autocast":
                    with torch.autocast("cpu", torch.bfloat16):
                        y = block(given)
                elif situation == "compiled":
                    y = torch.compile(block, backend="eager", fullgraph=True)(given)
                elif situation == "fake":
                    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                        y = block(mode.from_tensor(given))
                    results.append((y.shape, y.dtype))
                    continue
                else:
                    y = block(given)
            if situation == "gradients":
                y.square().sum().backward()
                results.append((y.detach(), given.grad, *(p.grad.clone() for p in block.parameters())))
                block.zero_grad()
            else:
                results.append((y,))
        if situation == "fake":
            assert results[0] == results[1]
            continue
        for actual, expected in zip(results[1], results[0], strict=True):
            assert actual.dtype == expected.dtype
            tolerance = 1e-2 if situation == "autocast" else 2e-5
            assert (actual - expected).abs().max() <= tolerance * expected.abs().max()

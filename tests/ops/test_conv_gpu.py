"""Convolutions on a real GPU: what no other layer shows.

Tensors of more than 2^31 elements, memory, chunks through our own kernels.
"""

import pytest
import torch
import torch.nn.functional as F

import turnout
from turnout.measure.tune import peak_mib
from turnout.ops.conv3d import CONV3D
from turnout.routing.device import Device

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
OURS = ("implicit-gemm", "implicit-gemm-hopper", "narrow-out", "narrow-out-hopper")


def integers(*shape, dtype=torch.bfloat16):
    """Values whose sums are exact in bfloat16, channels last: of 27 x 96 products of them, six standard
    deviations are 208.
    """
    return torch.randint(-1, 2, (shape[0], *shape[2:], shape[1]), device=GPU).to(dtype).movedim(-1, 1)


@pytest.mark.parametrize("name", OURS)
def test_tensors_of_more_than_2_31_elements(name):
    """81 frames of 480x832 with 96 channels: 3.1e9 elements.

    The last frames lie beyond what 32 bits can count.
    """
    out = 3 if name.startswith("narrow") else 16
    x = torch.zeros(1, 81, 480, 832, 96, dtype=torch.bfloat16, device=GPU).movedim(-1, 1)
    for frame in (0, 1, 79, 80):
        x[:, :, frame] = integers(1, 96, 480, 832)
    weight, bias = integers(out, 96, 3, 3, 3), integers(out, 1, 1)[:, 0, 0]
    route = CONV3D.routes[name]
    if any(route.refuses(CONV3D.problem(*CONV3D.arguments(x, weight, bias, 1, 1)), Device.of(GPU))):
        assert Device.of(GPU).capability != (9, 0)
        return
    with turnout.pin(conv3d=name):
        y = turnout.conv3d(x, weight, bias, padding=1)
    for actual, frames in ((y[:, :, :2], x[:, :, :3]), (y[:, :, -2:], x[:, :, -3:])):
        expected = F.conv3d(frames, weight, bias, padding=1)
        assert torch.equal(
            actual, expected[:, :, :2] if frames.data_ptr() == x.data_ptr() else expected[:, :, -2:]
        )
    assert torch.equal(y[:, :, 40], bias.view(1, -1, 1, 1).expand(1, out, 480, 832))


@pytest.mark.parametrize("mode", ["zeros", "replicate"])
@pytest.mark.parametrize("name", ["implicit-gemm", "implicit-gemm-hopper"])
def test_chunks_give_the_whole_clip(name, mode):
    clip, weight, bias = integers(1, 16, 7, 20, 36), integers(24, 16, 3, 3, 3), integers(24, 1, 1)[:, 0, 0]
    with turnout.pin(causal_conv3d=name if Device.of(GPU).capability == (9, 0) else "implicit-gemm"):
        whole = turnout.causal_conv3d(clip, weight, bias, padding=1, pad_mode=mode)
        for sizes in ([1] * 7, [1, 2, 4], [4, 3]):
            cache, parts = None, []
            for chunk in clip.split(sizes, 2):
                y, cache = turnout.causal_conv3d(
                    chunk, weight, bias, cache=cache, padding=1, pad_mode=mode, return_cache=True
                )
                parts.append(y)
            assert torch.equal(torch.cat(parts, 2), whole)


@pytest.mark.parametrize("filters", [3, 24])
def test_calls_that_look_alike_at_other_addresses(filters):
    """What was worked out for a call serves others of its shapes, but TMA cannot begin anywhere."""
    weight, bias = integers(filters, 16, 3, 3), integers(filters, 1, 1)[:, 0, 0]
    even, odd = (
        torch.randint(-1, 2, (2 * 20 * 36 * 16 + 1,), device=GPU).to(torch.bfloat16) for _ in range(2)
    )
    name = "narrow-out-hopper" if filters == 3 else "implicit-gemm-hopper"
    with turnout.pin(conv2d=name if Device.of(GPU).capability == (9, 0) else "implicit-gemm"):
        for held in (even[:-1], odd[1:], odd[:-1], even[1:]):
            x = held.view(2, 20, 36, 16).movedim(-1, 1)
            assert torch.equal(
                turnout.conv2d(x, weight, bias, padding=1), F.conv2d(x, weight, bias, padding=1)
            )


def test_upsampled_at_other_addresses():
    weight, bias = integers(24, 16, 3, 3), integers(24, 1, 1)[:, 0, 0]
    memory = torch.randint(-1, 2, (2 * 20 * 36 * 16 + 1,), device=GPU).to(torch.bfloat16)
    with turnout.pin(
        upsample_conv2d="implicit-gemm-hopper" if Device.of(GPU).capability == (9, 0) else "implicit-gemm"
    ):
        for held in (memory[:-1], memory[1:]):
            x = held.view(2, 20, 36, 16).movedim(-1, 1)
            expected = F.conv2d(F.interpolate(x, scale_factor=2), weight, bias, padding=1)
            assert torch.equal(turnout.upsample_conv2d(x, weight, bias, padding=1), expected)


def test_peak_memory_is_at_most_that_of_torch():
    x, weight, bias = integers(1, 96, 4, 240, 416), integers(96, 96, 3, 3, 3), integers(96, 1, 1)[:, 0, 0]
    theirs = peak_mib(lambda: F.conv3d(x, weight, bias, padding=1), ())
    name = "implicit-gemm-hopper" if Device.of(GPU).capability == (9, 0) else "implicit-gemm"
    with turnout.pin(conv3d=name):
        turnout.conv3d(x, weight, bias, padding=1)
        assert peak_mib(lambda: turnout.conv3d(x, weight, bias, padding=1), ()) <= theirs

"""upsample_conv2d on a CPU: phases against the convolution of the upsampled image, at every scale."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import turnout
from tests.ops.test_conv2d_conv3d import keeps_promises, routes_on_cpu
from turnout.ops.convolution.phases import Axis, phase_weights
from turnout.ops.upsample_conv2d import UPSAMPLE_CONV2D, upsample_conv2d, upsampled
from turnout.ops.upsample_conv2d.routes import MOST
from turnout.routing.device import Device


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("scale", "kernel", "padding"), list(itertools.product((1, 2, 3, 4), (1, 2, 3, 5), (0, 1, 2)))
)
def test_every_scale_kernel_and_padding(scale, kernel, padding):
    x, weight, bias = torch.randn(2, 3, 5, 6), torch.randn(4, 3, kernel, kernel) / kernel, torch.randn(4)
    keeps_promises(UPSAMPLE_CONV2D, x, weight, bias, scale, padding)
    expected = F.conv2d(
        x.repeat_interleave(scale, 2).repeat_interleave(scale, 3), weight, bias, padding=padding
    )
    torch.testing.assert_close(upsample_conv2d(x, weight, bias, scale=scale, padding=padding), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_phases_are_close_though_their_weights_are_rounded(dtype, layout):
    x, weight = torch.randn(1, 64, 12, 10), torch.randn(32, 64, 3, 3) / 24
    x, weight = (t.to(dtype).contiguous(memory_format=layout) for t in (x, weight))
    keeps_promises(
        UPSAMPLE_CONV2D,
        x,
        weight,
        torch.randn(32).to(dtype),
        least=["phases"] if dtype in Device.of("cpu").one_dnn else ["upcast"],
    )


def test_an_axis_lists_the_window_of_each_phase():
    assert Axis.of(2, 3, 1) == Axis((-1, 0), 2, (((0,), (1, 2)), ((0, 1), (2,))))
    assert Axis.of(2, 3, 1).even
    assert not Axis.of(3, 3, 1).even
    assert Axis.of(1, 3, 1) == Axis((-1,), 3, (((0,), (1,), (2,)),))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_are_added_up_before_they_are_rounded(dtype):
    weight = torch.randn(3, 5, 3, 3).to(dtype)
    actual = phase_weights(weight, [Axis.of(2, 3, 1)] * 2)
    wide = weight.double()
    expected = wide[:, :, 1:, :2].sum(
        (2, 3)
    )  # phase (0, 1), second row, first column: rows 1 and 2, columns 0 and 1
    assert torch.equal(actual[0, 1, :, :, 1, 0], expected.to(dtype))
    assert torch.equal(actual[1, 0, :, :, 1, 0], weight[:, :, 2, 0])


def test_torch_picks_the_pixel_that_whole_numbers_pick():
    """`phases` divides whole numbers, torch multiplies by 1 / scale in float32."""
    line = torch.arange(1000.0)[None, None, None]
    for scale in range(1, MOST + 1):
        assert torch.equal(upsampled(line, scale)[0, 0, 0], line[0, 0, 0].repeat_interleave(scale))


def test_nan_and_inf_stay_where_they_are():
    x, weight = torch.randint(-2, 3, (1, 4, 6, 6)).float(), torch.randint(1, 3, (2, 4, 3, 3)).float()
    x[0, 0, 2, 3], x[0, 1, 5, 0] = float("inf"), float("nan")
    args = UPSAMPLE_CONV2D.arguments(x, weight)
    expected = UPSAMPLE_CONV2D.reference(*args)
    names = []
    for name, _, run in routes_on_cpu(UPSAMPLE_CONV2D, args):
        assert torch.equal(run(*args).nan_to_num(123.0), expected.nan_to_num(123.0)), name
        names.append(name)
    assert "phases" in names


def test_unbatched_positions_and_mistakes():
    x, weight = torch.randn(3, 4, 4), torch.randn(2, 3, 3, 3)
    torch.testing.assert_close(upsample_conv2d(x, weight), upsample_conv2d(x[None], weight)[0])
    torch.testing.assert_close(
        upsample_conv2d(x, weight, padding=(1, 0)), upsample_conv2d(x[None], weight, padding=[1, 0])[0]
    )
    for scale in (0, 1.5, -2):
        with pytest.raises(ValueError, match="it must be a whole number from 1 to"):
            upsample_conv2d(x, weight, scale=scale)
    with pytest.raises(RuntimeError, match="expected input"):
        upsample_conv2d(x[:2], weight)


@pytest.mark.parametrize("name", ["reference", "phases", "channels-last"])
def test_gradients_match_interpolate_and_conv2d(name):
    tensors = torch.randn(1, 4, 5, 5), torch.randn(3, 4, 3, 3), torch.randn(3)
    ours, theirs = ([t.clone().requires_grad_() for t in tensors] for _ in range(2))
    scale = torch.randn(1, 3, 10, 10)
    with turnout.pin(upsample_conv2d=name):
        (upsample_conv2d(*ours) * scale).sum().backward()
    (F.conv2d(F.interpolate(theirs[0], scale_factor=2.0), *theirs[1:], padding=1) * scale).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)


def test_second_gradients():
    x, weight = (
        torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((1, 1, 2, 3), (1, 1, 3, 3))
    )
    assert torch.autograd.gradcheck(lambda x, w: UPSAMPLE_CONV2D.opaque(x, w, None, 2, [1, 1]), (x, weight))
    assert torch.autograd.gradgradcheck(
        lambda x, w: UPSAMPLE_CONV2D.opaque(x, w, None, 2, [1, 1]), (x, weight)
    )


def test_choice_for_an_absent_card():
    x, weight = (
        torch.empty(shape, dtype=torch.bfloat16, device="meta").contiguous(memory_format=torch.channels_last)
        for shape in ((1, 256, 512, 512), (256, 256, 3, 3))
    )
    assert turnout.explain("upsample_conv2d", x, weight, device="h200").chosen in (
        "implicit-gemm-hopper",
        "phases",
    )

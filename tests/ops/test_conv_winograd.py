"""Winograd kernels on a CPU: sizes, layouts, dtypes, positive inputs, threads, NaN and Inf."""

import itertools

import pytest
import torch

from tests.ops.test_conv2d_conv3d import made, views
from turnout.measure.verify import Verifier
from turnout.ops.conv2d import CONV2D
from turnout.ops.conv3d import CONV3D
from turnout.routing.device import Device


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


# shape, weight, padding: tiles cut off at the right and below, tails of vectors, single pixels, several
# blocks across, down and in depth
WINOGRAD = [
    (CONV2D, (1, 16, 1, 1), (16, 16, 3, 3), (1, 1)),
    (CONV2D, (1, 3, 3, 3), (3, 3, 3, 3), (0, 0)),
    (CONV2D, (1, 1, 2, 5), (2, 1, 3, 3), (4, 3)),  # outputs that see nothing but padding
    (CONV2D, (3, 17, 13, 37), (33, 17, 3, 3), (2, 0)),
    (CONV2D, (1, 40, 5, 470), (16, 40, 3, 3), (1, 1)),
    (CONV2D, (2, 65, 31, 66), (19, 65, 3, 3), (1, 2)),
    (CONV2D, (1, 130, 4, 4), (160, 130, 3, 3), (1, 1)),
    (CONV3D, (1, 5, 1, 7, 9), (8, 5, 3, 3, 3), (1, 1, 1)),
    (CONV3D, (2, 16, 11, 6, 35), (48, 16, 2, 3, 3), (0, 1, 0)),
    (CONV3D, (1, 7, 3, 33, 12), (64, 7, 5, 3, 3), (4, 1, 1)),
    (CONV3D, (1, 96, 2, 15, 21), (100, 96, 3, 3, 3), (1, 1, 1)),
]


@pytest.mark.parametrize(
    ("op", "shape", "weight", "padding"),
    WINOGRAD,
    ids=[f"{s}-{w}".replace(" ", "") for _, s, w, _ in WINOGRAD],
)
@pytest.mark.parametrize("layout", ["first", "last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_winograd_is_close_for_any_size(op, shape, weight, padding, layout, dtype):
    x, w, bias = made(shape, weight, dtype, layout)
    args = op.arguments(x, w, bias, padding=padding)
    assert not list(op.routes["winograd"].refuses(op.problem(*args), Device.of("cpu")))
    assert Verifier(op, args).mismatch("close", op.routes["winograd"].run) is None


@pytest.mark.parametrize("layout", ["first", "last"])
@pytest.mark.parametrize(
    "shape", [(1, 96, 4, 21, 30), (1, 3, 4, 40, 40), (1, 384, 2, 9, 12)], ids=["96", "3", "384"]
)
def test_winograd_is_close_for_positive_numbers(shape, layout):
    """Sums without signs lose digits in another way: torch adds up to five times as exactly."""
    x, w, bias = made(shape, (32, shape[1], 3, 3, 3), layout=layout)
    for argument in ((x.abs(), w, bias), (x.abs(), w.abs(), bias.abs()), (x + 10, w, None)):
        args = CONV3D.arguments(*argument, padding=1)
        assert Verifier(CONV3D, args).mismatch("close", CONV3D.routes["winograd"].run) is None


@pytest.mark.parametrize("layout", ["first", "last"])
def test_winograd_with_more_filters_than_fit(layout, monkeypatch):
    monkeypatch.setattr(
        "turnout.ops.convolution.cpu.winograd.MOST_FILTERS", 4 * 16 * 16 * 3 * 20 * 2
    )  # 32 of them
    args = CONV3D.arguments(*made((2, 20, 3, 9, 10), (70, 20, 3, 3, 3), layout=layout), padding=1)
    assert Verifier(CONV3D, args).mismatch("close", CONV3D.routes["winograd"].run) is None


def test_winograd_reads_any_strides():
    for (name, x), last in itertools.product(views((2, 6, 3, 5, 6)), (False, True)):
        weight = torch.randn(5, 6, 3, 3, 3) / 8
        weight = (
            weight.contiguous(memory_format=torch.channels_last_3d)
            if last
            else weight.transpose(3, 4).contiguous().transpose(3, 4)
        )
        args = CONV3D.arguments(x, weight, torch.randn(10)[::2], padding=1)
        assert Verifier(CONV3D, args).mismatch("close", CONV3D.routes["winograd"].run) is None, name


def test_winograd_ignores_default_dtype_and_device():
    args = CONV2D.arguments(*made((1, 20, 9, 8), (24, 20, 3, 3)), padding=1)
    trial, before = Verifier(CONV2D, args), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            assert trial.mismatch("close", CONV2D.routes["winograd"].run) is None
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("layout", ["first", "last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf"), 2e38])
def test_winograd_spreads_nan_and_inf_no_further_than_the_kernel(odd, dtype, layout):
    """Also numbers that overflow only in a transform."""
    x, w, bias = made((2, 20, 3, 9, 11), (24, 20, 3, 3, 3), dtype, layout)
    x[1, 3, 1, 4, 4:6] = odd
    args = CONV3D.arguments(x, w / 8, bias, padding=1)
    y, true = CONV3D.routes["winograd"].run(*args), CONV3D.reference(*args)
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(kind(y), kind(true))
    finite = true.isfinite()
    assert y.stride() == true.stride()
    torch.testing.assert_close(
        y[finite], true[finite], rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-2
    )


def test_winograd_on_one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        args = CONV2D.arguments(*made((1, 20, 30, 50), (24, 20, 3, 3)), padding=1)
        assert Verifier(CONV2D, args).mismatch("close", CONV2D.routes["winograd"].run) is None
    finally:
        torch.set_num_threads(before)

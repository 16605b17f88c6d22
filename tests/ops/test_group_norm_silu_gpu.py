"""group_norm_silu on a GPU: what the interpreter cannot show.

Every route x every case is walked elsewhere.
"""

import pytest
import torch

import turnout
from turnout.measure.verify import Verifier, relative_error, truth
from turnout.ops.group_norm_silu import GROUP_NORM_SILU
from turnout.ops.group_norm_silu.cases import inside_border
from turnout.routing.op import OPS

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
FORMATS = {"rows": torch.channels_last, "planes": torch.contiguous_format}
formats = pytest.mark.parametrize("route", FORMATS)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_groups_of_every_kind(route, dtype):
    for channels, groups in ((32, 32), (96, 32), (128, 32), (320, 32), (2560, 32), (30, 3), (64, 1), (6, 6)):
        x = torch.randn(2, channels, 19, 23, device=CUDA).to(dtype).contiguous(memory_format=FORMATS[route])
        weight, bias = (torch.randn(channels, device=CUDA, dtype=dtype) for _ in range(2))
        args = (x, groups, weight, bias, 1e-6, True)
        run = GROUP_NORM_SILU.routes[route].run
        assert Verifier(GROUP_NORM_SILU, args).mismatch("close", run) is None, (channels, groups)
        assert torch.equal(run(*args), run(*args))


@formats
@pytest.mark.parametrize("mean", [0.0, 1e3, -1e5])
def test_large_mean_keeps_variance_accurate(route, mean):
    """In float32, with a region that is not like the rest: a black border, an outlier first."""
    x = mean + torch.randn(1, 64, 200, 160, device=CUDA)
    x[:, :, :7] = 0
    x[:, :, 0, 0] = 30
    x = x.contiguous(memory_format=FORMATS[route])
    args = (x, 32, torch.randn(64, device=CUDA), torch.randn(64, device=CUDA), 1e-6, True)
    assert relative_error(GROUP_NORM_SILU.routes[route].run(*args), truth(GROUP_NORM_SILU, args)[0]) < 2e-6


@formats
def test_tensors_of_more_than_2_31_elements(route):
    x = torch.zeros(1, 128, 4100, 4100, device=CUDA, dtype=torch.bfloat16).contiguous(
        memory_format=FORMATS[route]
    )
    x[..., -1:, :] = 4
    with turnout.pin(group_norm_silu=route):
        actual = turnout.group_norm_silu(x, 32, eps=1e-6, silu=False)
    share = 1 / 4100
    low, high = (
        -(4 * share) / (16 * share * (1 - share)) ** 0.5,
        (4 - 4 * share) / (16 * share * (1 - share)) ** 0.5,
    )
    for place, value in (((0, 0), low), ((-2, -1), low), ((-1, -1), high), ((-1, 0), high)):
        torch.testing.assert_close(
            actual[0, :, place[0], place[1]].float(),
            torch.full((128,), value, device=CUDA),
            rtol=1e-2,
            atol=1e-3,
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("gapped", [False, True], ids=["dense", "gapped"])
def test_groups_of_every_kind_inside_a_border(gapped, dtype):
    """The border stays as it was, also where addresses are off a multiple of 16 bytes."""
    op = OPS["group_norm_silu_into"]
    for channels, groups in ((32, 32), (96, 32), (128, 32), (320, 32), (2560, 32), (30, 3), (64, 1), (7, 7)):
        x = torch.randn(2, 3, 9, 11, channels, device=CUDA).to(dtype).movedim(-1, 1)
        x = inside_border(x).copy_(x) if gapped else x
        weight, bias = (torch.randn(channels, device=CUDA, dtype=dtype) for _ in range(2))
        out = inside_border(x)
        args, run = (x, groups, weight, bias, out, 1e-6, True), op.routes["gapped-rows"].run
        assert Verifier(op, args).mismatch("close", run) is None, (channels, groups)
        out._base.fill_(77)
        run(*args)
        assert not (out == 77).all()
        out.fill_(77)
        assert (out._base == 77).all()


@pytest.mark.parametrize("name", ["group_norm_silu_into", "group_norm_silu_pad", "spatial_norm_silu"])
def test_more_than_2_31_elements_with_gaps(name):
    """The last frame is another one than all before: 4 in zeros."""
    frames, height, width = 17, 1000, 1000
    x = torch.zeros(1, frames, height, width, 128, device=CUDA, dtype=torch.bfloat16).movedim(-1, 1)
    x[:, :, -1] = 4
    share = 1 / frames
    low, high = (
        -(4 * share) / (16 * share * (1 - share)) ** 0.5,
        (4 - 4 * share) / (16 * share * (1 - share)) ** 0.5,
    )
    with turnout.pin(**{name: "gapped-rows"}):
        if name == "group_norm_silu_into":
            actual = turnout.group_norm_silu(x, 32, eps=1e-6, silu=False, out=inside_border(x))
        elif name == "group_norm_silu_pad":
            actual = turnout.group_norm_silu_pad(x, 32, padding=(1, 1, 1, 1, 2, 0), eps=1e-6, silu=False)
        else:
            ones = torch.ones(1, 128, 2, 10, 10, device=CUDA, dtype=torch.bfloat16)
            actual = turnout.spatial_norm_silu(
                x, 32, None, None, ones, 0 * ones, eps=1e-6, silu=False, first_apart=True
            )
    for place, value in (((0, 0, 0), low), ((-2, -1, -1), low), ((-1, 0, 0), high), ((-1, -1, -1), high)):
        there = actual[0, :, place[0], place[1], place[2]].float()
        torch.testing.assert_close(there, torch.full((128,), value, device=CUDA), rtol=1e-2, atol=1e-3)

"""rms_norm_silu on a GPU: what the interpreter cannot show. Every route x every case is walked elsewhere."""

import pytest
import torch

import turnout
from turnout.measure.verify import Verifier
from turnout.ops.rms_norm_silu import RMS_NORM_SILU, RMS_NORM_SILU_INTO
from turnout.ops.rms_norm_silu.cases_into import behind_cache

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
FORMATS = {"rows": torch.channels_last_3d, "planes": torch.contiguous_format}
formats = pytest.mark.parametrize("route", FORMATS)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("style", ["normalize", "rms_norm"])
def test_channels_of_every_kind(route, dtype, style):
    """Half of the numbers of channels in one style, half in the other: each is compiled anew."""
    first = (style == "rms_norm") ^ (dtype is torch.float16)
    for channels in (3, 16, 48, 96, 160, 192, 384, 640, 1000, 1024)[first::2]:
        x = torch.randn(2, channels, 2, 9, 13, device=CUDA).to(dtype).contiguous(memory_format=FORMATS[route])
        weight = torch.randn(channels, device=CUDA, dtype=dtype)
        args = (x, weight, None, 1e-6, 1, style, True)
        run = RMS_NORM_SILU.routes[route].run
        assert Verifier(RMS_NORM_SILU, args).mismatch("close", run) is None, channels


@formats
def test_behind_a_cache_and_captured(route):
    x = torch.randn(1, 96, 2, 30, 52, device=CUDA, dtype=torch.bfloat16).contiguous(
        memory_format=FORMATS[route]
    )
    weight, out = torch.randn(96, device=CUDA, dtype=torch.bfloat16), behind_cache(x)
    with turnout.pin(rms_norm_silu_into=route, rms_norm_silu=route):
        expected = turnout.rms_norm_silu(x, weight, eps=1e-12, style="normalize")
        turnout.rms_norm_silu(x, weight, eps=1e-12, style="normalize", out=out)
        assert torch.equal(out, expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            turnout.rms_norm_silu(x, weight, eps=1e-12, style="normalize", out=out)
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)
    assert not out._base.select(2 if route == "planes" else 1, 0).any()


def test_unaligned_rows():
    for shift in (0, 1, 2, 4, 8):
        x = torch.randn(8 + 30 * 96, device=CUDA, dtype=torch.bfloat16)[shift : shift + 30 * 96].view(30, 96)
        out = torch.empty(8 + 30 * 96, device=CUDA, dtype=torch.bfloat16)[shift : shift + 30 * 96].view(
            30, 96
        )
        args = (x, None, None, out, 1e-6, 1, "rms_norm", True)
        assert (
            Verifier(RMS_NORM_SILU_INTO, args).mismatch("close", RMS_NORM_SILU_INTO.routes["rows"].run)
            is None
        )


@formats
def test_tensors_of_more_than_2_31_elements(route):
    """A decode of 96 x 81 x 720 x 1280 has 7.2e9 elements; the last positions must be the right ones."""
    x = torch.zeros(1, 96, 27, 720, 1280, device=CUDA, dtype=torch.bfloat16).contiguous(
        memory_format=FORMATS[route]
    )
    x[..., -3:] = torch.randn(1, 96, 27, 720, 3, device=CUDA, dtype=torch.bfloat16)
    with turnout.pin(rms_norm_silu=route):
        actual = turnout.rms_norm_silu(x, eps=1e-6)
    tail = x[:, :, -1:, -1:, -8:].float()
    torch.testing.assert_close(
        actual[:, :, -1:, -1:, -8:].float(), turnout.rms_norm_silu(tail, eps=1e-6), rtol=1e-2, atol=1e-2
    )
    assert not actual[:, :, 0, 0, :8].any()

"""rms_norm_silu: against diffusers' own norms and PyTorch's, layouts, writing into a buffer, gradients, what
must raise.
"""

import importlib

import pytest
import torch
import torch.nn.functional as F

import turnout
from turnout.measure.verify import Verifier
from turnout.ops.rms_norm_silu import RMS_NORM_SILU, RMS_NORM_SILU_INTO
from turnout.ops.rms_norm_silu.cases_into import behind_cache

CL3 = torch.channels_last_3d
halves = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"]
)
FORMATS = {"cpu-rows": CL3, "cpu-planes": torch.contiguous_format}
formats = pytest.mark.parametrize("route", FORMATS)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def clip(route, shape=(2, 24, 3, 5, 7), dtype=torch.float32):
    return torch.randn(shape).to(dtype).contiguous(memory_format=FORMATS[route])


@formats
@halves
def test_equals_wan_norm_of_diffusers(route, dtype):
    pytest.importorskip("diffusers")
    wan = importlib.import_module("diffusers.models.autoencoders.autoencoder_kl_wan")
    x, norm = clip(route, dtype=dtype), wan.WanRMS_norm(24, images=False).to(dtype)
    with torch.no_grad():
        norm.gamma.normal_()
        expected = F.silu(norm(x))
        with turnout.pin(rms_norm_silu="reference"):
            assert torch.equal(turnout.rms_norm_silu(x, norm.gamma, eps=1e-12, style="normalize"), expected)
        assert (
            Verifier(RMS_NORM_SILU, (x, norm.gamma.reshape(-1), None, 1e-12, 1, "normalize", True)).mismatch(
                "close", RMS_NORM_SILU.routes[route].run
            )
            is None
        )
        plain = turnout.rms_norm_silu(x, norm.gamma, eps=1e-12, style="normalize", silu=False)
        torch.testing.assert_close(
            plain,
            norm(x),
            rtol=1e-2 if dtype is not torch.float32 else 2e-6,
            atol=1e-2 if dtype is not torch.float32 else 2e-6,
        )


@formats
def test_equals_ltx_norm_of_diffusers(route):
    pytest.importorskip("diffusers")
    normalization = importlib.import_module("diffusers.models.normalization")
    x, norm = clip(route), normalization.RMSNorm(24, eps=1e-8, elementwise_affine=False)
    expected = F.silu(norm(x.movedim(1, -1)).movedim(-1, 1))
    torch.testing.assert_close(turnout.rms_norm_silu(x, eps=1e-8), expected)


@halves
def test_last_dimension_equals_torch_rms_norm(dtype):
    x, weight = torch.randn(3, 5, 40).to(dtype), torch.randn(40).to(dtype)
    with turnout.pin(rms_norm_silu="reference"):
        assert torch.equal(
            turnout.rms_norm_silu(x, weight, eps=1e-6, dim=-1, silu=False), F.rms_norm(x, (40,), weight, 1e-6)
        )


@formats
@halves
@pytest.mark.parametrize("style", ["normalize", "rms_norm"])
def test_cpu_routes_are_close_in_every_shape(route, dtype, style):
    """Odd channels, one position, a tile and a bit, batch, bias, a float32 weight on half x."""
    for shape, bias in (
        ((1, 96, 2, 9, 11), False),
        ((2, 5, 1, 1, 1), True),
        ((1, 3, 1, 33, 41), True),
        ((3, 40, 2, 3, 5), False),
    ):
        x = clip(route, shape, dtype)
        scale = torch.randn(shape[1]).to(dtype if bias else torch.float32)
        args = (x, scale, torch.randn(shape[1]).to(dtype) if bias else None, 1e-6, 1, style, True)
        if not any(
            RMS_NORM_SILU.routes[route].refuses(RMS_NORM_SILU.problem(*args), turnout.routing.device.cpu())
        ):
            assert Verifier(RMS_NORM_SILU, args).mismatch("close", RMS_NORM_SILU.routes[route].run) is None, (
                shape
            )


@formats
def test_out_may_be_frames_behind_a_cache(route):
    """Only the frames that are x's change, and the layer after it sees one tensor."""
    x, weight = clip(route), torch.randn(24)
    out = behind_cache(x)
    buffer = out._base
    buffer.fill_(7)
    before = buffer.clone()
    with turnout.pin(rms_norm_silu_into=route):
        arguments = turnout.rms_norm_silu(x, weight, eps=1e-6, out=out)
    assert arguments is out
    torch.testing.assert_close(out, turnout.rms_norm_silu(x, weight, eps=1e-6))
    out.fill_(7)
    assert torch.equal(buffer, before)


def test_out_may_be_the_inside_of_a_padded_frame():
    x = torch.randn(1, 16, 2, 5, 7).contiguous(memory_format=CL3)
    buffer = torch.zeros(1, 16, 4, 7, 9).contiguous(memory_format=CL3)
    turnout.rms_norm_silu(x, eps=1e-6, out=buffer[:, :, 2:, 1:6, 1:8])
    torch.testing.assert_close(buffer, F.pad(turnout.rms_norm_silu(x, eps=1e-6), (1, 1, 1, 1, 2, 0)))


@pytest.mark.parametrize("silu", [True, False])
def test_gradients_pass_gradcheck(silu):
    x, weight, bias = (
        torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 4, 3), (4,), (4,))
    )
    for style, eps in (("rms_norm", 1e-6), ("normalize", 1e-12)):
        assert torch.autograd.gradcheck(
            lambda *a, e=eps, s=style: RMS_NORM_SILU.opaque(*a, e, 1, s, silu), (x, weight, bias)
        )


def test_a_call_with_out_under_fullgraph():
    x, weight = torch.randn(1, 8, 2, 3, 4), torch.randn(8)

    def step(x, buffer):
        turnout.rms_norm_silu(x, weight, eps=1e-6, out=buffer[:, :, 2:])
        return buffer * 2

    buffers = [torch.zeros(1, 8, 4, 3, 4) for _ in range(2)]
    actual = torch.compile(step, fullgraph=True, backend="aot_eager")(x, buffers[0])
    torch.testing.assert_close(actual, step(x, buffers[1]))
    torch.testing.assert_close(buffers[0], buffers[1])


def test_zero_rows_stay_zero():
    x = torch.zeros(1, 6, 4)
    assert torch.equal(turnout.rms_norm_silu(x, eps=1e-12, style="normalize"), x)


X = torch.zeros(2, 4, 5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: turnout.rms_norm_silu(X.int(), eps=1e-6), "floating-point"),
        (lambda: turnout.rms_norm_silu(X, eps=1e-6, dim=3), "dimension 3"),
        (lambda: turnout.rms_norm_silu(X, torch.ones(5), eps=1e-6), r"it needs to be \[4\]"),
        (lambda: turnout.rms_norm_silu(X, bias=torch.ones(3), eps=1e-6), "bias is"),
        (lambda: turnout.rms_norm_silu(X, eps=1e-6, style="layer_norm"), "style 'layer_norm'"),
        (lambda: turnout.rms_norm_silu(X, eps=1e-6, out=torch.zeros(2, 4, 6)), "out is"),
        (lambda: turnout.rms_norm_silu(X, eps=1e-6, out=X.half()), "out is torch.float16"),
    ],
)
def test_mismatched_arguments_raise(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_cost_model_chooses_a_route_where_it_is_faster():
    x = torch.randn(1, 96, 2, 30, 52)
    args = (x, torch.ones(96), None, 1e-12, 1, "normalize", True)
    assert turnout.explain(RMS_NORM_SILU, *args).chosen == "cpu-planes"
    assert turnout.explain("rms_norm_silu_into", *args[:3], behind_cache(x), *args[3:]).chosen == "cpu-planes"
    assert RMS_NORM_SILU_INTO.problem(*args[:3], behind_cache(x), *args[3:]).out_strides != x.stride()


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cpu_routes_take_channel_counts_around_vector_width(dtype, silu):
    for channels in (1, 15, 16, 17, 40, 96, 100):
        x, weight, bias = (
            torch.randn(shape).to(dtype) for shape in ((37, channels), (channels,), (channels,))
        )
        with turnout.pin(rms_norm_silu="cpu-rows"):
            actual = turnout.rms_norm_silu(x, weight, bias=bias, eps=1e-6, silu=silu)
        with turnout.pin(rms_norm_silu="reference"):
            expected = turnout.rms_norm_silu(
                x.double(), weight.double(), bias=bias.double(), eps=1e-6, silu=silu
            )
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(actual.double(), expected, rtol=4 * eps, atol=4 * eps)

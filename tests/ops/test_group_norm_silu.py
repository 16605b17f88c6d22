"""group_norm_silu on a CPU, where PyTorch's own kernels run: the promise, layouts, writing into a buffer, gradients, what must raise."""

import pytest
import torch
import torch.nn.functional as F

import turnout
from turnout.ops.group_norm_silu import GROUP_NORM_SILU, GroupNormSilu, layout
from turnout.ops.group_norm_silu.launches import block_of, parts_of
from turnout.ops.rms_norm_silu.cases_into import behind_cache
from turnout.routing.device import Device

H200 = Device.named("h200")
FORMATS = {"rows": torch.channels_last, "planes": torch.contiguous_format}
formats = pytest.mark.parametrize("kind", FORMATS)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_torchs_group_norm_in_the_format_of_x(kind, dtype):
    x = torch.randn(2, 12, 5, 7).to(dtype).contiguous(memory_format=FORMATS[kind])
    weight, bias = torch.randn(12).to(dtype), torch.randn(12).to(dtype)
    found = turnout.group_norm_silu(x, 4, weight, bias, eps=1e-6)
    assert torch.equal(found, F.silu(F.group_norm(x, 4, weight, bias, 1e-6)))
    assert found.stride() == x.stride()
    plain = turnout.group_norm_silu(x, 4, weight.float(), bias.float(), eps=1e-6, silu=False)
    assert plain.dtype is dtype


@pytest.mark.parametrize("shape", [(2, 6, 0), (2, 6, 3, 0), (0, 6, 4), (0, 6), (2, 0, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_elements_gradients_are_zero(shape, dtype):
    """torch 2.13 has NaN for the weight's gradient, torch 2.15 raises."""
    x = torch.zeros(shape, dtype=dtype, requires_grad=True)
    weight, bias = (torch.ones(shape[1], requires_grad=True) for _ in range(2))
    y = turnout.group_norm_silu(x, 3, weight, bias)
    assert (y.shape, y.dtype, y.stride()) == (x.shape, dtype, x.stride())
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(weight.grad, torch.zeros(shape[1]))
    assert torch.equal(bias.grad, torch.zeros(shape[1]))
    out = torch.empty(shape, dtype=dtype)
    assert turnout.group_norm_silu(x.detach(), 3, out=out) is out


@formats
def test_routes_on_a_gpu_take_both_formats(kind):
    x = torch.randn(1, 64, 8, 8).bfloat16().contiguous(memory_format=FORMATS[kind])
    problem = GROUP_NORM_SILU.problem(x, 32, None, None, 1e-6, True)
    assert layout(problem) == kind
    verdict = GROUP_NORM_SILU.verdict(GROUP_NORM_SILU.key((x, 32, None, None, 1e-6, True)), H200)
    assert not verdict.refused.get(kind)
    assert verdict.refused.get({"rows": "planes", "planes": "rows"}[kind])


def test_layouts():
    def kind(x, out=None):
        return layout(GroupNormSilu.of(x, 2, None, None, 1e-6, True, out))

    x = torch.randn(2, 4, 3, 5, 6)
    last = x.contiguous(memory_format=torch.channels_last_3d)
    assert kind(x) == "planes"
    assert kind(last) == "rows"
    assert kind(x, last) == "strided"
    assert kind(x, behind_cache(x)) == "planes"
    assert kind(last, behind_cache(last)) == "rows"
    assert kind(last[:, :, :, 1:]) == "strided"  # rows of positions with gaps
    assert kind(x[..., :1, :1, :1]) == "planes"


def test_blocks_and_parts():
    assert block_of(128, 32, 64) == (16, 4, 2)
    assert block_of(96, 32, 64) == (16, 4, 2)  # groups of 3 in columns of 4
    assert block_of(6, 1, 64) == (1, 8, 1)
    assert parts_of(1000, 132) == 128
    assert parts_of(3, 132) == 2
    assert parts_of(5, 0) == 1


def test_into_a_buffer():
    x, weight = torch.randn(1, 8, 2, 3, 4), torch.randn(8)
    out = behind_cache(x)
    assert turnout.group_norm_silu(x, 2, weight, out=out) is out
    torch.testing.assert_close(out, turnout.group_norm_silu(x, 2, weight))
    assert torch.equal(out._base[:, :, :2], torch.zeros(1, 8, 2, 3, 4))


def test_gradients():
    x, weight, bias = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 4, 3), (4,), (4,)))
    assert torch.autograd.gradcheck(lambda x, w, b: GROUP_NORM_SILU.opaque(x, 2, w, b, 1e-5, True), (x, weight, bias))


def test_a_call_with_out_under_fullgraph():
    x, weight = torch.randn(1, 8, 2, 3, 4), torch.randn(8)

    def step(x, buffer):
        turnout.group_norm_silu(x, 2, weight, out=buffer[:, :, 2:])
        return buffer * 2

    buffers = [torch.zeros(1, 8, 4, 3, 4) for _ in range(2)]
    found = torch.compile(step, fullgraph=True, backend="aot_eager")(x, buffers[0])
    torch.testing.assert_close(found, step(x, buffers[1]))


X = torch.zeros(2, 4, 5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: turnout.group_norm_silu(X.int(), 2), "floating-point"),
        (lambda: turnout.group_norm_silu(X[0, 0], 2), "floating-point"),
        (lambda: turnout.group_norm_silu(X, 3), "4 channels in 3 groups"),
        (lambda: turnout.group_norm_silu(X, 2, torch.ones(5)), r"it needs to be \[4\]"),
        (lambda: turnout.group_norm_silu(X, 2, out=torch.zeros(2, 4, 6)), "out is"),
    ],
)
def test_what_does_not_fit_together_raises(call, message):
    with pytest.raises(ValueError, match=message):
        call()

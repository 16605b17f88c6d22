"""What the walkers do not ask of layer_norm_modulate's kernel: real row sizes, a mean far from zero,
modulations with gaps. In Triton's interpreter, on CPU tensors, collected by tests/interpret. float32 and
float16 only: it is silently wrong for bfloat16."""

import pytest
import torch

import turnout  # noqa: F401
from turnout.measure.verify import Verifier
from turnout.routing.op import OPS

pytestmark = pytest.mark.usefixtures("poison")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def mismatch(name, args, **config):
    op = OPS[name]
    return Verifier(op, args).mismatch(
        "close", lambda *arguments: op.routes["rows"].run(*arguments, **config)
    )


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("wide", [torch.float16, torch.float32])
def test_tokens_of_3072_channels(tokens, wide):
    """Several tokens of a program share modulations of x's own type, and read wider ones themselves."""
    x, residual = torch.randn(2, 2, 3, 3072).half()
    shift, scale, gate = torch.randn(2, 1, 3, 3072, dtype=wide).unbind(2)
    tile = {"tokens": tokens, "channels": 1024, "warps": 4}
    assert (
        mismatch("layer_norm_modulate", (x, residual, gate, None, None, scale, shift, 1e-6), **tile) is None
    )
    assert mismatch("gated_add", (x, residual, gate), **tile) is None


def test_channels_that_fill_no_tile():
    x, (weight, bias) = torch.randn(1, 5, 999), torch.randn(2, 999)
    gates = torch.randn(1, 5, 2, 999).unbind(2)
    args = (x, x.flip(1), gates[0], weight, bias, gates[1], None, 1e-6)
    assert mismatch("layer_norm_modulate", args, tokens=2, channels=1024, warps=4) is None


def test_large_mean_keeps_variance_accurate():
    """x = 1000 + noise in float32: sums of squares would leave nothing of the variance."""
    x = 1000 + torch.randn(1, 4, 160)
    assert (
        mismatch("layer_norm_modulate", (x, None, None, None, None, None, None, 1e-6), tokens=4, channels=32)
        is None
    )

"""layer_norm_modulate and gated_add: the bits of the blocks of diffusers, shapes, gradients, errors."""

import importlib

import pytest
import torch
import torch.nn.functional as F

import turnout
from turnout.ops.layer_norm_modulate import GATED_ADD, LAYER_NORM_MODULATE

B, S, C = 2, 7, 24
halves = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"]
)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def streams(dtype):
    return (torch.randn(B, S, C, dtype=dtype) for _ in range(2))


def modulations(dtype, tokens=1):
    """shift, scale and gate, as models cut them from one product: rows with gaps."""
    return torch.randn(B, tokens, 3, C, dtype=dtype).unbind(2)


@halves
def test_flux_norm_matches_diffusers(dtype):
    normalization = _diffusers("normalization")
    norm, x, temb = (
        normalization.AdaLayerNormZeroSingle(C).to(dtype),
        next(streams(dtype)),
        torch.randn(B, C, dtype=dtype),
    )
    with torch.no_grad():
        expected, _ = norm(x, emb=temb)
        shift, scale, _ = norm.linear(norm.silu(temb)).chunk(3, 1)
        assert torch.equal(turnout.layer_norm_modulate(x, scale, shift, eps=norm.norm.eps), expected)


def _diffusers(module):
    pytest.importorskip("diffusers")
    return importlib.import_module(f"diffusers.models.{module}")


@halves
def test_gated_add_equals_flux(dtype):
    (x, residual), (shift, scale, gate) = streams(dtype), modulations(dtype)
    h = residual + gate * x
    expected = F.layer_norm(h, (C,), None, None, 1e-6) * (1 + scale) + shift
    normed, kept = turnout.layer_norm_modulate(x, scale, shift, residual=residual, gate=gate)
    assert torch.equal(kept, h)
    assert torch.equal(normed, expected)
    assert torch.equal(turnout.gated_add(residual, gate, x), h)


@pytest.mark.parametrize("tokens", [1, S])
@halves
def test_gated_add_equals_wan(dtype, tokens):
    """Modulations in float32, the norm's own weights, one rounding at the end of each step."""
    (x, residual), (shift, scale, gate) = streams(dtype), modulations(torch.float32, tokens)
    weight, bias = torch.randn(2, C)
    h = (residual.float() + x * gate).type_as(x)
    normed, kept = turnout.layer_norm_modulate(x, weight=weight, bias=bias, residual=residual, gate=gate)
    assert torch.equal(kept, h)
    assert torch.equal(normed, F.layer_norm(h.float(), (C,), weight, bias, 1e-6).type_as(x))
    expected = (F.layer_norm(x.float(), (C,), None, None, 1e-6) * (1 + scale) + shift).type_as(x)
    assert torch.equal(turnout.layer_norm_modulate(x, scale, shift), expected)


def test_scale_shift_and_gate_are_optional():
    (x, residual), (shift, scale, _) = streams(torch.float32), modulations(torch.float32)
    plain = F.layer_norm(x, (C,), None, None, 1e-6)
    torch.testing.assert_close(turnout.layer_norm_modulate(x), plain)
    torch.testing.assert_close(turnout.layer_norm_modulate(x, scale[:, 0]), plain * (1 + scale))
    torch.testing.assert_close(turnout.layer_norm_modulate(x, shift=shift[:, 0]), plain + shift)
    torch.testing.assert_close(turnout.gated_add(residual, None, x), residual + x)
    assert turnout.layer_norm_modulate(x[:, :0], scale, shift).shape == (B, 0, C)
    assert turnout.gated_add(residual[:, :0], None, x[:, :0]).shape == (B, 0, C)


def test_results_are_dense_and_new():
    x = torch.randn(C, S, B).permute(2, 1, 0)
    normed, kept = turnout.layer_norm_modulate(x, residual=x)
    for result in (normed, kept, turnout.layer_norm_modulate(x), turnout.gated_add(x, None, x)):
        assert result.is_contiguous()
        assert result.data_ptr() != x.data_ptr()


def test_gradients_are_those_of_the_reference():
    """In float64 against differences."""
    x, residual = (torch.randn(1, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    gate, scale, shift = (torch.randn(1, 1, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    weight = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda *args: LAYER_NORM_MODULATE.opaque(*args[:4], None, *args[4:], 1e-6),
        (x, residual, gate, weight, scale, shift),
    )
    assert torch.autograd.gradcheck(GATED_ADD.opaque, (x, residual, gate))


def test_fullgraph_with_dynamic_tokens():
    shift, scale, gate = modulations(torch.float32)

    def half(x, residual):
        normed, kept = turnout.layer_norm_modulate(x, scale, shift, residual=residual, gate=gate)
        return turnout.gated_add(kept, gate, normed + 1)

    compiled = torch.compile(half, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (4, 9):
        x, residual = torch.randn(2, B, tokens, C)
        torch.testing.assert_close(compiled(x, residual), half(x, residual))


def test_autocast_is_left_to_torch():
    x, scale = torch.randn(B, S, C).bfloat16(), torch.randn(B, C).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        actual = turnout.layer_norm_modulate(x, scale)
    torch.testing.assert_close(actual, turnout.layer_norm_modulate(x, scale), rtol=2e-2, atol=2e-2)


X = torch.zeros(B, S, C)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: turnout.layer_norm_modulate(X[0]), "it needs to be floating-point"),
        (lambda: turnout.layer_norm_modulate(X.int()), "it needs to be floating-point"),
        (lambda: turnout.layer_norm_modulate(X, residual=X[:, :3]), "residual is"),
        (lambda: turnout.layer_norm_modulate(X, residual=X.half()), "residual is torch.float16"),
        (lambda: turnout.layer_norm_modulate(X, gate=X), "a gate without a residual"),
        (lambda: turnout.layer_norm_modulate(X, X[:, :2]), "scale is"),
        (lambda: turnout.layer_norm_modulate(X, shift=torch.zeros(3, C)), "shift is"),
        (lambda: turnout.layer_norm_modulate(X, weight=torch.zeros(C + 1)), f"it needs to be [{C}]"),
        (lambda: turnout.gated_add(X, torch.zeros(C), X), "gate is"),
        (lambda: turnout.gated_add(X[:, :2], None, X), "residual is"),
    ],
)
def test_mismatched_arguments_raise(call, message):
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        call()

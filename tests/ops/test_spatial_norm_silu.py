"""spatial_norm_silu on a CPU, where the reference runs: what it means, gradients, which calls a route takes
on a card.
"""

import pytest
import torch
import torch.nn.functional as F

import turnout
from turnout.ops.group_norm_silu.cases_spatial import eager
from turnout.ops.group_norm_silu.launches import Modulation, Norm, RowTile, spatial_plan
from turnout.ops.group_norm_silu.spatial import SPATIAL_NORM_SILU

LAST = torch.channels_last_3d
# Sizes of x and of scale and shift, and whether the first is apart.
BLOCKS = [
    ((5, 4, 6), (3, 2, 3), True),
    ((1, 4, 6), (1, 4, 6), True),
    ((4, 4, 6), (2, 1, 6), False),
    ((6, 8), (2, 4), False),
    ((9,), (3,), False),
]
blocks = pytest.mark.parametrize(("sizes", "small", "first_apart"), BLOCKS)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@blocks
def test_equals_spatial_norm_of_diffusers(sizes, small, first_apart):
    x, scale, shift = (torch.randn(2, 6, *size, dtype=torch.float64) for size in (sizes, small, small))
    weight, bias = torch.randn(6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    for silu in (True, False):
        y = turnout.spatial_norm_silu(
            x, 3, weight, bias, scale, shift, eps=1e-6, silu=silu, first_apart=first_apart
        )
        expected = eager(x, 3, weight, bias, scale, shift, 1e-6, silu, first_apart)
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_result_has_the_dtype_and_format_of_x(dtype):
    x = torch.randn(1, 8, 3, 4, 6).to(dtype).contiguous(memory_format=LAST)
    scale, shift = torch.randn(1, 8, 3, 2, 3), torch.randn(1, 8, 3, 2, 3)
    y = turnout.spatial_norm_silu(x, 4, None, None, scale, shift)
    assert (y.dtype, y.stride()) == (dtype, x.stride())
    wide = turnout.spatial_norm_silu(x.double(), 4, None, None, scale.double(), shift.double())
    torch.testing.assert_close(y.double(), wide, rtol=2e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-2)


def test_gradients_pass_gradcheck():
    x, scale, shift = (
        torch.randn(1, 4, *s, dtype=torch.float64, requires_grad=True)
        for s in ((3, 2, 2), (2, 1, 2), (2, 1, 2))
    )
    weight = torch.randn(4, dtype=torch.float64, requires_grad=True)

    def norm(x, weight, scale, shift):
        return SPATIAL_NORM_SILU.opaque(x, 2, weight, None, scale, shift, 1e-5, True, True)

    assert torch.autograd.gradcheck(norm, (x, weight, scale, shift))


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 4, 0), (2, 0, 3)])
def test_without_elements_gradients_are_zero(shape):
    x, scale, shift = (torch.zeros(shape, requires_grad=True) for _ in range(3))
    y = turnout.spatial_norm_silu(x, 2, None, None, scale, shift)
    assert y.shape == x.shape
    y.sum().backward()
    for argument in (x, scale, shift):
        assert torch.equal(argument.grad, torch.zeros(shape))


def test_under_fullgraph():
    x, scale, shift = torch.randn(1, 8, 3, 4, 6), torch.randn(1, 8, 2, 2, 3), torch.randn(1, 8, 2, 2, 3)

    def step(x):
        return turnout.spatial_norm_silu(x, 2, None, None, scale, shift, first_apart=True) * 2

    torch.testing.assert_close(torch.compile(step, fullgraph=True, backend="aot_eager")(x), step(x))


def test_cogvideox_takes_the_route_on_a_card():
    """Also where scale and shift have their channels first, which are then copied; not where x has."""
    bf16 = {"dtype": torch.bfloat16, "device": "meta"}
    x = torch.empty(1, 128, 9, 480, 720, **bf16).contiguous(memory_format=LAST)
    small, weight = torch.empty(1, 128, 3, 60, 90, **bf16), torch.empty(128, **bf16)
    for argument in (small, small.contiguous(memory_format=LAST)):
        verdict = turnout.explain(
            turnout.spatial_norm_silu,
            x,
            32,
            weight,
            weight,
            argument,
            argument,
            first_apart=True,
            device="h200",
        )
        assert verdict.chosen == "gapped-rows"
    verdict = turnout.explain(
        turnout.spatial_norm_silu,
        x.contiguous(),
        32,
        weight,
        weight,
        small,
        small,
        first_apart=True,
        device="h200",
    )
    assert "side by side" in verdict.refused["gapped-rows"][0]


def test_the_plan_divides_by_how_often_values_are_repeated():
    strides = (128 * 9 * 32, 1, 128 * 32, 128 * 8, 128)
    small = (128 * 3 * 4, 1, 128 * 4, 128 * 2, 128)
    norm = Norm((1, 128, 9, 4, 8), strides, strides, groups=32, itemsize=2, off=0, units=132)
    modulation = Modulation((1, 128, 3, 2, 2), small, small, first_apart=True)
    plan = spatial_plan(norm, modulation, RowTile(unroll=2, walks=6))
    *_, apart, d_magic, d_shift, h_magic, h_shift, w_magic, w_shift = plan.apply[2]
    assert (apart, d_magic, d_shift, h_magic, h_shift, w_magic, w_shift) == (1, 2**31, 2, 2**31, 1, 2**31, 2)
    assert (plan.moments[3]["U"], plan.apply[3]["U"]) == (4, 2)


X, SMALL = torch.zeros(2, 4, 6), torch.zeros(2, 4, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: turnout.spatial_norm_silu(X[..., 0], 2, None, None, SMALL, SMALL),
            r"it needs to be \[B, C, W\]",
        ),
        (lambda: turnout.spatial_norm_silu(X, 2, None, None, SMALL, SMALL[:1]), "shift is"),
        (
            lambda: turnout.spatial_norm_silu(X, 2, None, None, SMALL.int(), SMALL),
            "scale is .* floating-point",
        ),
        (
            lambda: turnout.spatial_norm_silu(X, 2, None, None, SMALL[:1], SMALL[:1]),
            "or smaller behind the channels",
        ),
        (
            lambda: turnout.spatial_norm_silu(X[..., :5], 2, None, None, SMALL, SMALL),
            "scale has 3 positions along dimension 2 and x has 5",
        ),
        (
            lambda: turnout.spatial_norm_silu(X, 2, None, None, SMALL, SMALL, first_apart=True),
            "after the first",
        ),
        (lambda: turnout.spatial_norm_silu(SMALL, 2, None, None, X, X), "scale has 6 positions"),
    ],
)
def test_mismatched_arguments_raise(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_values_are_repeated_as_nearest_neighbours_are():
    scale = torch.arange(6.0).view(1, 1, 2, 3)
    y = turnout.spatial_norm_silu(
        torch.zeros(1, 1, 4, 9), 1, None, None, torch.ones_like(scale), scale, silu=False
    )
    assert torch.equal(y, F.interpolate(scale, size=(4, 9)))

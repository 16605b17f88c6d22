"""Group norms by sums of blocks on a CPU: the same bits however a picture is cut, as the whole has, and in
any layout.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F

import turnout
from tests.walk import lets_pass
from turnout.measure.verify import Verifier
from turnout.ops.group_norm_silu import GROUP_NORM_SILU, GROUP_NORM_SILU_INTO
from turnout.ops.group_norm_silu.block_routes import NAME, moments
from turnout.ops.group_norm_silu.blocks import (
    Where,
    block_sums,
    grain,
    moments_of,
    normalise,
    normalise_scaled,
)
from turnout.ops.group_norm_silu.cases import inside_border
from turnout.ops.group_norm_silu.padded import GROUP_NORM_SILU_PAD
from turnout.ops.group_norm_silu.spatial import SPATIAL_NORM_SILU

pytest.importorskip("numba")
halves = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"]
)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def last(x):
    """The same values with channels side by side."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


LAYOUTS = {
    "last": last,
    "first": torch.Tensor.contiguous,
    "gapped": lambda x: inside_border(last(x)).copy_(x),
    "columns first": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def cuts(size, parts):
    """Where so many uneven parts of an axis begin, at multiples of its grain, and where the last one ends."""
    step = grain(size)
    blocks = -(-size // step)
    inner = sorted({max(1, blocks * i * i // parts**2) for i in range(1, parts)})
    return [0, *[step * i for i in inner], size]


@layouts
@halves
@pytest.mark.parametrize("axis", [-2, -1], ids=["height", "width"])
@pytest.mark.parametrize("shape", [(2, 12, 37, 133), (1, 10, 3, 70, 45)], ids=["picture", "clip"])
def test_parts_have_the_bits_of_the_whole(layout, dtype, axis, shape):
    whole, groups = (3 + torch.randn(shape)).to(dtype), shape[1] // 2
    weight, bias = torch.randn(shape[1]).to(dtype), torch.randn(shape[1]).to(dtype)
    args = (LAYOUTS[layout](whole), groups, weight, bias, 1e-6, True)
    assert Verifier(GROUP_NORM_SILU, args).mismatch("close", GROUP_NORM_SILU.routes[NAME].run) is None
    with turnout.pin(group_norm_silu=NAME):
        expected = GROUP_NORM_SILU(*args)
    for parts in (2, 3, 4, 8):
        begins = cuts(shape[axis], parts)
        pieces = [
            LAYOUTS[layout](whole.narrow(axis, first, end - first))
            for first, end in itertools.pairwise(begins)
        ]
        height, width = shape[-2:]
        where = [Where(height, width, *((first, 0) if axis == -2 else (0, first))) for first in begins[:-1]]
        sums = torch.cat(
            [block_sums(x, groups, place) for x, place in zip(pieces, where, strict=True)],
            1 if axis == -2 else 2,
        )
        actual = moments_of(sums, whole[0].numel() // groups, 1e-6)
        y = torch.cat([normalise(x, actual, weight, bias) for x in pieces], axis)
        assert torch.equal(y, expected), parts


@halves
def test_bits_are_equal_in_every_layout(dtype):
    x = torch.randn(2, 15, 2, 66, 35).to(dtype)
    created = [make(x) for make in LAYOUTS.values()]
    sums = [block_sums(y, 3) for y in created]
    assert all(torch.equal(sums[0], other) for other in sums)
    actual = [normalise(y, moments_of(sums[0], x[0].numel() // 3, 1e-5), None, None) for y in created]
    assert all(torch.equal(actual[0], other) for other in actual)


def test_bits_are_equal_for_any_number_of_threads():
    x, before = last(torch.randn(1, 32, 70, 65)), torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            with turnout.pin(group_norm_silu=NAME):
                results.append(turnout.group_norm_silu(x, 8))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@halves
def test_inputs_of_two_to_six_dimensions_are_close(dtype):
    for shape in ((2, 6), (2, 6, 33), (1, 5, 7, 9), (1, 6, 2, 3, 4, 5), (3, 6, 1, 1)):
        args = (torch.randn(shape).to(dtype), shape[1] // (1 if shape[1] % 2 else 2), None, None, 1e-5, False)
        assert Verifier(GROUP_NORM_SILU, args).mismatch("close", GROUP_NORM_SILU.routes[NAME].run) is None, (
            shape
        )


def test_large_mean_keeps_variance_accurate():
    x = 1000 + torch.randn(1, 8, 40, 40)
    y = GROUP_NORM_SILU.routes[NAME].run(x, 2, None, None, 1e-6, False)
    torch.testing.assert_close(y.double(), F.group_norm(x.double(), 2, eps=1e-6), rtol=0, atol=1e-6)


@layouts
def test_nan_and_inf_affect_only_their_group(layout):
    x = LAYOUTS[layout](torch.randn(2, 6, 5, 40))
    args = (x, 3, torch.randn(6), torch.randn(6), 1e-5, True)
    assert lets_pass(GROUP_NORM_SILU, GROUP_NORM_SILU.routes[NAME].run, args) is None


@layouts
def test_in_place_and_into_a_buffer(layout):
    x = LAYOUTS[layout](torch.randn(1, 8, 6, 34))
    expected = GROUP_NORM_SILU.routes[NAME].run(x, 4, None, None, 1e-5, True)
    out = inside_border(x)
    whole = out._base
    assert whole is not None
    with turnout.pin(group_norm_silu_into=NAME):
        GROUP_NORM_SILU_INTO(x, 4, None, None, out, 1e-5, True)
        assert torch.equal(out, expected)
        out.zero_()
        assert not whole.any()
        GROUP_NORM_SILU_INTO(x, 4, None, None, x, 1e-5, True)
    assert torch.equal(x, expected)


@halves
@layouts
@pytest.mark.parametrize("mode", ["replicate", "reflect", "constant"])
def test_outputs_with_a_border_are_close(layout, dtype, mode):
    x = LAYOUTS[layout](torch.randn(1, 6, 3, 5, 7).to(dtype))
    for padding in ([1, 1, 1, 1, 2, 0], [2, 3, 0, 1, 0, 0], [0] * 6):
        args = (x, 2, torch.randn(6).to(dtype), None, 1e-5, True, padding, mode)
        assert (
            Verifier(GROUP_NORM_SILU_PAD, args).mismatch("close", GROUP_NORM_SILU_PAD.routes[NAME].run)
            is None
        )
        inside = GROUP_NORM_SILU.routes[NAME].run(*args[:6])
        assert torch.equal(GROUP_NORM_SILU_PAD.routes[NAME].run(*args), F.pad(inside, padding, mode))


@halves
@layouts
def test_scale_and_shift_of_blocks_in_parts(layout, dtype):
    """A part of x with the part of scale and shift that is its own has the bits of the whole."""
    x = LAYOUTS[layout](torch.randn(1, 12, 5, 16, 72).to(dtype))
    scale, shift = (torch.randn(1, 12, 3, 8, 9).to(dtype) for _ in range(2))
    weight, bias = torch.randn(12).to(dtype), torch.randn(12).to(dtype)
    args = (x, 4, weight, bias, last(scale), shift, 1e-6, True, True)
    run = SPATIAL_NORM_SILU.routes[NAME].run
    assert Verifier(SPATIAL_NORM_SILU, args).mismatch("close", run) is None
    actual, parts = moments(x, 4, 1e-6), []
    for first, end in ((0, 2), (2, 9)):
        own = (last(scale[..., first:end]), last(shift[..., first:end]))
        parts.append(
            normalise_scaled(x[..., 8 * first : 8 * end], actual, weight, bias, *own, first_apart=True)
        )
    assert torch.equal(torch.cat(parts, -1), run(*args))


def test_cuts_at_the_grain_of_latents_are_at_that_of_every_size():
    for latents in range(1, 600):
        for k in (2, 4, 8, 16):
            for size in (k * latents, k * latents + k - 1):
                assert grain(latents) * k % grain(size) == 0, (latents, size)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        (Where(64, 8, top=1), "rows 1 to 33 of 64, a part needs to begin and to end at multiples of 2"),
        (Where(66, 8, top=33), "rows 33 to 65 of 66"),
        (Where(16, 8), "rows 0 to 32 of 16"),
        (Where(32, 8, left=-1), "columns -1 to 7 of 8"),
    ],
)
def test_parts_between_blocks_are_refused(where, message):
    with pytest.raises(ValueError, match=message):
        block_sums(torch.zeros(1, 4, 32, 8), 2, where)


@pytest.mark.parametrize(
    ("shape", "dtype", "chosen"),
    [
        ((1, 128, 256, 256), torch.float32, NAME),  # 32 MiB
        ((1, 256, 256, 256), torch.bfloat16, NAME),
        ((1, 192, 256, 256), torch.bfloat16, "reference"),  # 24 MiB
        ((1, 128, 256, 256), torch.bfloat16, "reference"),
        ((1, 128, 208, 208), torch.float32, "reference"),
        ((1, 128, 16, 16), torch.float32, "reference"),
        ((1, 128, 256, 256), torch.float64, "reference"),
    ],
)
def test_block_sums_are_chosen_where_they_were_measured_faster(shape, dtype, chosen):
    x = torch.empty(shape, dtype=dtype, device="meta")
    for layout in (x, x.to(memory_format=torch.channels_last)):
        assert turnout.explain(turnout.group_norm_silu, layout, 32, device="cpu").chosen == chosen

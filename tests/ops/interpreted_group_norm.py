"""What the walkers do not ask of group norms at positions with gaps: a border that stays as it was, several
parts and programs, means far from zero, groups of every kind. In Triton's interpreter, on CPU tensors,
collected by tests/interpret. float32 and float16 only: it is silently wrong for bfloat16."""

import itertools

import pytest
import torch

import turnout  # noqa: F401
from turnout.measure.verify import Verifier, relative_error, truth
from turnout.ops.group_norm_silu.block_launches import launch_moments, launch_norm, launch_sums
from turnout.ops.group_norm_silu.blocks import Where, blocks_of, grain
from turnout.ops.group_norm_silu.cases import inside_border
from turnout.routing.op import OPS

pytestmark = pytest.mark.usefixtures("poison")
SMALL = {"columns": 4, "rows": 4, "unroll": 2, "waves": 1, "walks": 1}


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def last(*shape):
    """Random values [B, C, ...] with channels side by side."""
    return torch.randn(shape[0], *shape[2:], shape[1]).movedim(-1, 1)


def mismatch(name, route, args, **config):
    op = OPS[name]
    return Verifier(op, args).mismatch(
        op.routes[route].numerics, lambda *a: op.routes[route].run(*a, **config)
    )


@pytest.mark.parametrize(
    ("sizes", "channels", "groups", "gapped", "dtype"),
    [
        ((2, 3, 5), 8, 4, False, torch.float32),
        ((1, 4, 3), 12, 4, True, torch.float16),
        ((3, 1, 2), 7, 7, False, torch.float16),
        ((5, 6), 10, 1, True, torch.float32),
    ],
)
def test_inside_a_border(sizes, channels, groups, gapped, dtype):
    """With weights and activation in float32, without in float16; the border stays as it was."""
    op, x = OPS["group_norm_silu_into"], last(2, channels, *sizes).to(dtype)
    x, plain = inside_border(x).copy_(x) if gapped else x, dtype is torch.float16
    weight, bias = (None if plain else torch.randn(channels, dtype=dtype) for _ in range(2))
    out = inside_border(x)
    args = (x, groups, weight, bias, out, 1e-6, not plain)
    assert mismatch(op.name, "gapped-rows", args, **SMALL) is None
    out._base.fill_(77)
    op.routes["gapped-rows"].run(*args, **SMALL)
    assert (out != 77).all()
    out.fill_(77)
    assert (out._base == 77).all()


@pytest.mark.parametrize("gapped", [False, True], ids=["dense", "gapped"])
def test_large_mean_keeps_variance_accurate(gapped):
    """x = 1000 + noise in float32: sums of squares would leave nothing of the variance."""
    x = 1000 + last(1, 8, 2, 5, 7)
    x = inside_border(x).copy_(x) if gapped else x
    op, out = OPS["group_norm_silu_into"], inside_border(x)
    args = (x, 4, torch.randn(8), torch.randn(8), out, 1e-6, True)
    op.routes["gapped-rows"].run(*args, **SMALL)
    assert relative_error(out, truth(op, args)[0]) < 3e-7


def test_expanded_and_permuted_inputs():
    picture = last(1, 8, 1, 4, 5)
    for x in (picture.expand(2, 8, 3, 4, 5), last(1, 8, 3, 4, 5)[:, :, ::2, :, 1:].transpose(2, 4)):
        assert (
            mismatch("group_norm_silu", "gapped-rows", (x, 2, None, torch.randn(8), 1e-6, True), **SMALL)
            is None
        )


@pytest.mark.parametrize("mode", ["replicate", "reflect", "constant"])
@pytest.mark.parametrize(
    ("sizes", "padding"),
    [
        ((2, 4, 3), (1, 1, 1, 1, 1, 0)),
        ((4, 5), (2, 0, 3, 1)),
        ((2, 3, 4), (0, 0, 0, 0, 1, 1)),
        ((7,), (3, 2)),
    ],
)
def test_with_a_border(sizes, padding, mode):
    x = last(2, 6, *sizes)
    args = (x, 2, torch.randn(6), torch.randn(6), 1e-6, True, list(padding), mode)
    assert mismatch("group_norm_silu_pad", "gapped-rows", args, **SMALL) is None


@pytest.mark.parametrize(
    ("sizes", "small", "first_apart"),
    [
        ((3, 4, 6), (2, 2, 3), True),
        ((1, 4, 2), (1, 1, 2), True),
        ((4, 2, 5), (2, 2, 5), False),
        ((5, 4), (3, 2), True),
        ((6,), (2,), False),
    ],
)
def test_scale_and_shift_of_blocks(sizes, small, first_apart):
    """Channels of the shift come first: they are copied. The scale is in another dtype."""
    x, scale, shift = last(2, 6, *sizes).half(), last(2, 6, *small), last(2, 6, *small).half().contiguous()
    args = (x, 2, torch.randn(6).half(), None, scale, shift, 1e-6, True, first_apart)
    assert mismatch("spatial_norm_silu", "gapped-rows", args, **SMALL) is None


@pytest.mark.parametrize("axis", [-2, -1], ids=["height", "width"])
@pytest.mark.parametrize(("sizes", "channels", "groups"), [((66, 35), 8, 4), ((2, 9, 65), 6, 2)])
def test_sums_of_blocks_of_parts_are_those_of_the_whole(sizes, channels, groups, axis):
    """Also where a part is the inside of a buffer."""
    whole, weight, bias = last(1, channels, *sizes), torch.randn(channels), torch.randn(channels)
    expected = OPS["group_norm_silu"].routes["block-sums"].run(whole, groups, weight, bias, 1e-6, True)
    height, width = sizes[-2:]
    step = grain(whole.shape[axis])
    begins = [0, step, 3 * step, whole.shape[axis]]
    parts = [whole.narrow(axis, first, end - first) for first, end in itertools.pairwise(begins)]
    parts = [parts[0].clone(), inside_border(parts[1]).copy_(parts[1]), parts[2]]
    sums = []
    for first, part in zip(begins, parts, strict=False):
        where = Where(height, width, *((first, 0) if axis == -2 else (0, first)))
        sums.append(launch_sums(part, groups, (grain(height), grain(width)), blocks_of(part.shape, where)))
    moments = launch_moments(torch.cat(sums, 1 if axis == -2 else 2), whole[0].numel() // groups, 1e-6)
    actual = [launch_norm(part, moments, weight, bias, True, torch.empty_like(part)) for part in parts]
    assert torch.equal(torch.cat(actual, axis), expected)

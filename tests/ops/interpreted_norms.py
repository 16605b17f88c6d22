"""What the walkers do not ask of the norms' GPU routes: real row sizes, a mean far from zero, several parts
and blocks, buffers with gaps. In Triton's interpreter, on CPU tensors, collected by tests/interpret. float32
and float16 only: it is silently wrong for bfloat16."""

import pytest
import torch

import turnout  # noqa: F401
from turnout.measure.verify import Verifier, relative_error, truth
from turnout.ops.rms_norm_silu.cases_into import behind_cache
from turnout.routing.op import OPS

pytestmark = pytest.mark.usefixtures("poison")
LAST = torch.channels_last_3d


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def mismatch(name, route, args, **config):
    op = OPS[name]
    return Verifier(op, args).mismatch(
        op.routes[route].numerics, lambda *a: op.routes[route].run(*a, **config)
    )


@pytest.mark.parametrize("pairing", ["interleaved", "half"])
@pytest.mark.parametrize("norm", ["none", "head", "all"])
def test_norm_rope_heads_of_128(norm, pairing):
    q, k = torch.randn(1, 5, 6, 128).half(), torch.randn(1, 5, 3, 128).half()
    turns = torch.randn(5, 64)
    weights = [
        None if norm == "none" else torch.randn(x.shape[2] * 128 if norm == "all" else 128).half()
        for x in (q, k)
    ]
    rest = (turns.cos(), turns.sin(), 1e-6, norm, 128, pairing, "bhsd", False)
    tile = {"tokens": 2, "heads": 2, "chunks": 3, "warps": 4}
    assert (
        mismatch(
            "norm_rope", "one-pass", (q, None, k, None, weights[0], None, weights[1], None, *rest), **tile
        )
        is None
    )


def test_rotation_alone_is_exact():
    q, turns = torch.randn(2, 5, 4, 12), torch.randn(5, 4)
    args = (
        q,
        None,
        None,
        None,
        None,
        None,
        None,
        None,
        turns.cos(),
        turns.sin(),
        0.0,
        "none",
        8,
        "interleaved",
        "bhsd",
        False,
    )
    assert mismatch("norm_rope", "rotate", args, tokens=4, heads=1, chunks=2) is None


@pytest.mark.parametrize("channels", [96, 40])
def test_rows_of_several_tiles(channels):
    x = torch.randn(1, channels, 2, 3, 3).half().contiguous(memory_format=LAST)
    args = (x, torch.randn(channels).half(), None, 1e-12, 1, "normalize", True)
    assert mismatch("rms_norm_silu", "rows", args, rows=4, channels=8) is None
    into = (*args[:3], behind_cache(x), *args[3:])
    assert mismatch("rms_norm_silu_into", "rows", into, rows=4, channels=32) is None


@pytest.mark.parametrize("route", ["rows", "planes"])
def test_group_norm_of_large_mean_keeps_variance_accurate(route):
    """x = 1000 + noise in float32: sums of squares would leave nothing of the variance."""
    x = (1000 + torch.randn(1, 8, 2, 5, 7)).contiguous(
        memory_format=LAST if route == "rows" else torch.contiguous_format
    )
    args = (x, 4, torch.randn(8), torch.randn(8), 1e-6, True)
    tile = (
        {"columns": 4, "rows": 4, "unroll": 2, "waves": 1}
        if route == "rows"
        else {"lanes": 16, "unroll": 2, "waves": 1}
    )
    op = OPS["group_norm_silu"]
    result = op.routes[route].run(*args, **tile)
    assert relative_error(result, truth(op, args)[0]) < 3e-7


@pytest.mark.parametrize("route", ["rows", "planes"])
def test_group_norm_into_a_buffer_with_gaps(route):
    x = torch.randn(2, 6, 2, 3, 5).contiguous(
        memory_format=LAST if route == "rows" else torch.contiguous_format
    )
    args = (x, 2, torch.randn(6), None, behind_cache(x), 1e-6, True)
    tile = {"columns": 4, "rows": 2, "unroll": 2} if route == "rows" else {"lanes": 8, "unroll": 2}
    assert mismatch("group_norm_silu_into", route, args, **tile) is None

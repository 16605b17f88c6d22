"""What the walkers do not ask of add_repeated's kernel: rows of real widths, tiles that stick out, every way
to pick channels. In Triton's interpreter, on CPU tensors, collected by tests/interpret. float32 and float16
only: it is silently wrong for bfloat16."""

import pytest
import torch

import turnout  # noqa: F401
from turnout.measure.verify import Verifier
from turnout.routing.op import OPS

pytestmark = pytest.mark.usefixtures("poison")


@pytest.mark.parametrize("tile", [(2, 32), (4, 64)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("channels", "before", "times", "kept"),
    [
        (48, 48, [2, 2, 2], 2),
        (48, 48, [2, 2, 2], 1),
        (40, 80, [1, 2, 2], 1),
        (40, 80, [2, 2, 2], 2),
        (40, 80, [2, 2, 2], 1),
        (33, 66, [1, 1, 2], 1),
        (5, 5, [3, 1, 2], 2),
    ],
)
def test_tiles_that_stick_out(tile, dtype, channels, before, times, kept):
    torch.manual_seed(0)
    x = torch.randn(2, 2, 1, 5, before, dtype=dtype).permute(0, 4, 1, 2, 3)
    y = torch.randn(2, 2 * kept, times[1], 5 * times[2], channels, dtype=dtype).permute(0, 4, 1, 2, 3)
    op, (pixels, block) = OPS["add_repeated"], tile
    run = op.routes["pixels"].run
    assert (
        Verifier(op, (y, x, times)).mismatch(
            "exact", lambda *args: run(*args, pixels=pixels, channels=block, warps=4)
        )
        is None
    )

"""The Hopper kernels of convolutions launched directly: every way through them, on tiles with ragged ends.

Bit for bit.
"""

import pytest
import torch

from tests.ops.convolution_calls import Call
from turnout.ops.convolution.gpu import implicit_gemm, narrow_out
from turnout.ops.convolution.gpu.launching import run
from turnout.ops.convolution.gpu.operands import Geometry, Operands
from turnout.ops.convolution.gpu.tiles import NarrowTile, Tile
from turnout.ops.convolution.layout import FIRST, LAST, dense_strides, moved

pytestmark = pytest.mark.gpu

B, H, S, NAN = torch.bfloat16, torch.float16, torch.float32, float("nan")
SHARED = Tile("depth", 4, 4, 32, 32, 96, 3, True)
FROM_MEMORY = SHARED._replace(from_registers=False)
ROWS = Tile("height", 4, 2, 64, 32, 96, 3, True)
BY_FRAME = ROWS._replace(rows=1)
WIDE = Tile("depth", 2, 8, 16, 32, 192, 2, True)
ALONE = Tile("depth", 1, 8, 16, 64, 128, 4, False)
WIDEST = Tile("depth", 1, 16, 8, 64, 256, 3, False)
BOXES = Tile("depth", 1, 4, 8, 64, 256, 3, False)
FLAT = Tile("height", 2, 1, 128, 32, 128, 3, True)
SINGLE = Tile("depth", 4, 4, 32, 16, 96, 2, True)
SINGLE_ALONE = Tile("depth", 1, 8, 16, 32, 64, 3, True)
RAGGED = Call(96, 96, size=(5, 19, 37), dtype=B)
CAUSAL = RAGGED._replace(padding=(2, 1, 1), ends=(0, 1, 1))
IMAGE = Call(128, 128, size=(1, 21, 300), kernel=(1, 3, 3), padding=(0, 1, 1), ends=(0, 1, 1), dtype=B)

GEMMS = {
    "shared": (RAGGED, SHARED),
    "shared, residual": (RAGGED._replace(residual=True, dtype=H), SHARED),
    "shared, no bias": (RAGGED._replace(bias=False), SHARED),
    "shared, cache": (CAUSAL._replace(cache=2), SHARED),
    "shared, short cache, replicated": (CAUSAL._replace(cache=1, pad_mode="replicate"), SHARED),
    "shared, replicated": (CAUSAL._replace(pad_mode="replicate"), SHARED),
    "several blocks of filters": (RAGGED._replace(channels=64, filters=200), SHARED),
    "from memory": (RAGGED, FROM_MEMORY),
    "rows": (RAGGED, ROWS),
    "rows, cache": (CAUSAL._replace(cache=2), BY_FRAME),
    "rows, cache, two images": (CAUSAL._replace(batch=2, cache=2, size=(2, 19, 70), residual=True), BY_FRAME),
    "rows, short cache, one frame": (
        CAUSAL._replace(cache=1, size=(1, 19, 70)),
        BY_FRAME._replace(slots=2, from_registers=False),
    ),
    "rows, cache, dilated": (CAUSAL._replace(cache=4, dilation=(2, 1, 1), padding=(4, 1, 1)), BY_FRAME),
    "wide": (RAGGED._replace(channels=192, filters=192), WIDE),
    "alone, dilated": (
        RAGGED._replace(channels=64, dilation=(2, 1, 2), padding=(2, 1, 2), ends=(2, 1, 2)),
        ALONE,
    ),
    "alone, 3 x 1 x 1": (
        RAGGED._replace(kernel=(3, 1, 1), channels=40, filters=136, padding=(1, 0, 0), ends=(1, 0, 0)),
        ALONE,
    ),
    "alone, 1 x 1 x 1 and padding": (RAGGED._replace(kernel=(1, 1, 1), channels=40, filters=24), ALONE),
    "alone, cache": (CAUSAL._replace(channels=64, cache=2), ALONE),
    "alone, short cache": (CAUSAL._replace(channels=64, cache=1), ALONE),
    "alone, replicated": (CAUSAL._replace(channels=64, pad_mode="replicate"), ALONE),
    "alone, more padding than frames": (
        RAGGED._replace(channels=64, size=(2, 19, 37), padding=(5, 1, 1), ends=(4, 1, 1)),
        ALONE,
    ),
    "widest": (RAGGED._replace(channels=128, filters=512), WIDEST),
    "boxes": (RAGGED._replace(channels=128, filters=512), BOXES),
    "boxes, one to spare": (
        RAGGED._replace(channels=128, filters=256, size=(3, 60, 104), residual=True),
        BOXES,
    ),
    "boxes, cache, 96 filters": (CAUSAL._replace(cache=1, residual=True), BOXES._replace(filters=96)),
    "boxes, shared": (RAGGED, SHARED._replace(rows=4, columns=8)),
    "boxes, shared rows": (IMAGE._replace(residual=True), FLAT._replace(rows=4, columns=8)),
    "boxes, dilated": (
        RAGGED._replace(channels=64, dilation=(2, 1, 2), padding=(2, 1, 2), ends=(2, 1, 2)),
        BOXES,
    ),
    "image": (IMAGE, FLAT),
    "uneven padding": (RAGGED._replace(padding=(0, 2, 0), ends=(2, 0, 1)), SHARED),
    "TF32": (RAGGED._replace(dtype=S, residual=True), SINGLE),
    "shared, NaN": (RAGGED._replace(odd=NAN), SHARED),
    "rows, NaN": (RAGGED._replace(odd=NAN), ROWS),
    "rows, cache, NaN": (CAUSAL._replace(cache=2, odd=NAN), BY_FRAME),
    "alone, Inf": (RAGGED._replace(channels=64, odd=float("inf")), ALONE),
    "boxes, NaN": (RAGGED._replace(channels=128, filters=512, odd=NAN), BOXES),
    "image, NaN": (IMAGE._replace(odd=NAN), FLAT),
    "TF32, NaN": (RAGGED._replace(dtype=S, odd=NAN), SINGLE),
    "TF32, alone": (RAGGED._replace(dtype=S, channels=36, filters=20), SINGLE_ALONE),
    "TF32, boxes": (
        RAGGED._replace(dtype=S, channels=36, residual=True),
        SINGLE_ALONE._replace(rows=4, columns=8, filters=96),
    ),
}
NARROW = NarrowTile("height", 4, 64, 1)
ROLLED = NarrowTile("rolled", 7, 64, 3)
THREE = RAGGED._replace(filters=3, size=(4, 21, 130))
NARROWS = {
    "image": (IMAGE._replace(filters=3), NARROW),
    "eight rows, residual": (
        IMAGE._replace(filters=3, size=(2, 21, 70), residual=True),
        NARROW._replace(slots=8),
    ),
    "odd number of windows": (IMAGE._replace(filters=3, size=(1, 21, 150)), NARROW),
    "film": (THREE, NarrowTile("height", 4, 32, 2)),
    "film, cache": (
        THREE._replace(padding=(2, 1, 1), ends=(0, 1, 1), cache=2),
        NarrowTile("depth", 4, 32, 2),
    ),
    "twelve filters": (THREE._replace(filters=12), NarrowTile("height", 4, 32, 2)),
    "TF32": (THREE._replace(dtype=S), NarrowTile("height", 4, 32, 1)),
    "rolled image": (IMAGE._replace(filters=3), ROLLED),
    "rolled image, residual": (
        IMAGE._replace(filters=3, size=(2, 20, 130), residual=True, dtype=H),
        ROLLED._replace(slots=22),
    ),
    "rolled image, all multiprocessors busy": (
        IMAGE._replace(filters=3, size=(1, 700, 1030)),
        ROLLED._replace(slots=25, stages=5),
    ),
    "rolled film": (THREE, ROLLED),
    "rolled film, all multiprocessors busy": (
        THREE._replace(size=(3, 400, 600)),
        ROLLED._replace(slots=25, channels=32, stages=8),
    ),
    "rolled film, cache": (THREE._replace(padding=(2, 1, 1), ends=(0, 1, 1), cache=2), ROLLED),
    "rolled film, replicated": (
        THREE._replace(padding=(2, 1, 1), ends=(0, 1, 1), pad_mode="replicate"),
        ROLLED,
    ),
    "rolled, two rows of the kernel": (
        THREE._replace(kernel=(1, 2, 2), padding=(0, 1, 0), ends=(0, 0, 1)),
        ROLLED._replace(slots=5),
    ),
    "image, NaN": (IMAGE._replace(filters=3, odd=NAN), NARROW),
    "film, Inf": (THREE._replace(odd=float("inf")), NarrowTile("height", 4, 32, 2)),
    "twelve filters, NaN": (THREE._replace(filters=12, odd=NAN), NarrowTile("height", 4, 32, 2)),
    "rolled image, NaN": (IMAGE._replace(filters=3, odd=NAN), ROLLED),
    "rolled film, Inf": (THREE._replace(odd=float("inf")), ROLLED),
    "one filter": (THREE._replace(filters=1), NarrowTile("height", 4, 32, 2)),
}


@pytest.mark.parametrize("name", GEMMS)
def test_implicit_gemm(name):
    call, tile = GEMMS[name]
    assert call.run(implicit_gemm.HOPPER, "cuda", tile)


@pytest.mark.parametrize("name", NARROWS)
def test_narrow_out(name):
    call, tile = NARROWS[name]
    assert call.run(narrow_out.HOPPER, "cuda", tile)


def test_tf32_inputs_are_rounded_not_truncated():
    """The error of both operands rounded to the nearest TF32; with bits cut off it is 2.6 times that."""
    torch.manual_seed(0)
    x = torch.randn(1, 2, 20, 40, 96, device="cuda").permute(0, 4, 1, 2, 3)
    weight = torch.randn(96, 3, 3, 3, 96, device="cuda").permute(0, 4, 1, 2, 3)
    out = torch.empty(1, 2, 20, 40, 96, device="cuda").permute(0, 4, 1, 2, 3)
    geometry = Geometry(stride=(1, 1, 1), padding=(1, 1, 1), dilation=(1, 1, 1))
    run(implicit_gemm.HOPPER, Operands(x, weight, None, out), geometry, SINGLE)
    exact = torch.nn.functional.conv3d(x.double().cpu(), weight.double().cpu(), padding=1)
    assert (out.double().cpu() - exact).norm() / exact.norm() < 3.5e-4


@pytest.mark.parametrize("dtype", [B, S])
@pytest.mark.parametrize(
    "shape", [(2, 96, 3, 40, 33), (1, 512, 129, 65), (3, 3, 1, 1, 200), (1, 130, 4, 8, 8)]
)
def test_moved_changes_the_memory_format_and_keeps_values(shape, dtype):
    x = torch.randn(shape, device="cuda").to(dtype)
    last = moved(x, LAST[x.dim()])
    assert last.is_contiguous(memory_format=LAST[x.dim()])
    assert last.stride() == dense_strides(x.shape, LAST[x.dim()])
    back = moved(last, FIRST)
    assert back.is_contiguous()
    assert torch.equal(x, last)
    assert torch.equal(x, back)
    assert torch.equal(moved(x[..., ::2], LAST[x.dim()]), x[..., ::2])

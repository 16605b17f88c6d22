"""The portable kernels of convolutions launched directly, with all that the ops ask of them at some time:
paddings that differ at the two ends, caches longer and shorter than the padding, odd channels, several tiles
with ragged ends. In Triton's interpreter, on CPU tensors, collected by tests/interpret. float32 and float16
only: it is silently wrong for bfloat16."""

import pytest
import torch

from tests.ops.convolution_calls import Call
from turnout.ops.convolution.gpu import implicit_gemm, narrow_out
from turnout.ops.convolution.gpu.packing import transpose
from turnout.ops.convolution.gpu.tiles import GemmTile, StripTile

SMALL = GemmTile(pixels=16, filters=16, channels=16)
CALLS = {
    "plain": Call(17, 20, size=(2, 3, 5)),
    "few channels": Call(3, 8, size=(2, 3, 5), residual=True, batch=1),
    "many channels": Call(40, 5, size=(2, 2, 5), bias=False, dtype=torch.float16, batch=1),
    "stride and dilation": Call(
        5, 4, (4, 5, 8), stride=(2, 2, 1), dilation=(1, 2, 2), padding=(0, 2, 1), ends=(1, 0, 2), batch=1
    ),
    "one pixel": Call(16, 16, kernel=(1, 1, 1), padding=(0, 1, 0), ends=(0, 0, 1), stride=(1, 2, 1), batch=1),
    "frames before": Call(6, 4, size=(2, 2, 5), padding=(2, 1, 1), ends=(0, 1, 1), cache=2),
    "short cache, zeros": Call(6, 4, kernel=(5, 1, 1), padding=(4, 0, 0), ends=(0, 0, 0), cache=2, batch=1),
    "short cache, replicated": Call(
        6, 4, kernel=(5, 1, 1), padding=(4, 0, 0), ends=(0, 0, 0), cache=1, pad_mode="replicate", batch=1
    ),
    "long cache": Call(4, 3, size=(2, 2, 5), ends=(0, 1, 1), cache=3, batch=1),
    "replicated": Call(
        4,
        3,
        size=(2, 2, 5),
        padding=(2, 1, 1),
        ends=(0, 1, 1),
        pad_mode="replicate",
        precision="ieee",
        batch=1,
    ),
    "a pixel that is NaN": Call(17, 8, size=(3, 3, 9), batch=1, odd=float("nan")),
    "NCDHW": Call(7, 9, size=(2, 2, 5), dense=True, residual=True, batch=1),
}
FEW = {
    "two strips, two tiles": Call(
        17, 3, size=(1, 3, 16), kernel=(1, 3, 3), padding=(0, 1, 1), ends=(0, 1, 1), residual=True, batch=1
    ),
    "frames before": Call(
        6, 3, size=(1, 2, 5), padding=(2, 1, 1), ends=(0, 1, 1), cache=1, pad_mode="replicate", batch=2
    ),
    "a pixel that is NaN": Call(
        17, 3, size=(1, 3, 16), kernel=(1, 3, 3), padding=(0, 1, 1), ends=(0, 1, 1), odd=float("nan"), batch=1
    ),
    "a pixel that is Inf": Call(
        3, 3, size=(1, 3, 16), kernel=(1, 1, 5), padding=(0, 0, 2), ends=(0, 0, 2), odd=float("inf"), batch=1
    ),
    "wide kernel, many filters": Call(
        130, 12, size=(1, 2, 9), kernel=(2, 1, 4), padding=(1, 0, 3), ends=(0, 0, 1), dtype=torch.float16
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_implicit_gemm(name):
    assert CALLS[name].run(implicit_gemm.PORTABLE, "cpu", SMALL)


@pytest.mark.parametrize("name", FEW)
def test_narrow_out(name):
    assert FEW[name].run(narrow_out.PORTABLE, "cpu", StripTile(rows=2, columns=16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(2, 5, 3, 40), (1, 70, 2, 3, 5), (1, 3, 1, 1, 200)])
def test_transpose(shape, dtype):
    x, last = torch.randn(shape).to(dtype), torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    there = torch.empty_like(x, memory_format=last)
    back = torch.empty_like(x)
    assert transpose(x, there)
    assert transpose(there, back)
    assert torch.equal(x, there)
    assert torch.equal(x, back)
    assert not transpose(x[..., ::2], there[..., ::2])

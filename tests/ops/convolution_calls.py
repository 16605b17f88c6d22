"""Calls of the convolution kernels in small integers, whose sums are exact, and what comes out of them."""

import itertools
from typing import NamedTuple

import torch
import torch.nn.functional as F

from turnout.ops.convolution.gpu.launching import run
from turnout.ops.convolution.gpu.operands import Geometry, Operands


class Call(NamedTuple):
    """Shapes and settings of one launch. `ends` is the padding behind the last frame, row and column."""

    channels: int
    filters: int
    size: tuple = (3, 5, 7)
    kernel: tuple = (3, 3, 3)
    padding: tuple = (1, 1, 1)
    ends: tuple = (1, 1, 1)
    stride: tuple = (1, 1, 1)
    dilation: tuple = (1, 1, 1)
    batch: int = 2
    cache: int = 0
    pad_mode: str = "zeros"
    bias: bool = True
    residual: bool = False
    dtype: torch.dtype = torch.float32
    precision: str = "tf32"
    dense: bool = False  # NCDHW; else channels last
    odd: float = 0.0  # what one pixel of the input is made: NaN or Inf

    def output(self):
        sizes = zip(self.size, self.padding, self.ends, self.kernel, self.stride, self.dilation, strict=True)
        return tuple((n + p + e - d * (k - 1) - 1) // s + 1 for n, p, e, k, s, d in sizes)

    def run(self, lowering, device, tile):
        """Whether a kernel writes exactly the rounded sums, and all of them."""
        generator = torch.Generator().manual_seed(0)

        def integers(*shape, most=3):
            t = torch.randint(-most, most + 1, shape, generator=generator).to(self.dtype).to(device)
            return t if self.dense or t.dim() < 5 else channels_last(t)

        size, out_size = self.size, self.output()
        x = integers(self.batch, self.channels, *size)
        if self.odd:
            x[:, :, size[0] // 2, size[1] // 2, size[2] // 2] = self.odd
        weight = integers(self.filters, self.channels, *self.kernel, most=1)
        bias = integers(self.filters) if self.bias else None
        cache = integers(self.batch, self.channels, self.cache, *size[1:]) if self.cache else None
        residual = integers(self.batch, self.filters, *out_size) if self.residual else None
        out = torch.full((self.batch, self.filters, *out_size), float("nan"), dtype=self.dtype, device=device)
        out = out if self.dense else channels_last(out)
        geometry = Geometry(self.stride, self.padding, self.dilation, self.pad_mode, self.precision)
        run(lowering, Operands(x, weight, bias, out, residual, cache), geometry, tile)
        expected = self.expected(
            *(None if t is None else t.double() for t in (x, weight, bias, residual, cache))
        )
        return out.shape == expected.shape and torch.allclose(
            out, expected, rtol=0.0, atol=0.0, equal_nan=bool(self.odd)
        )

    def expected(self, x, weight, bias, residual, cache):
        seen = x if cache is None else torch.cat([cache, x], 2)
        missing = self.padding[0] - self.cache
        if missing > 0:
            first = seen[:, :, :1].expand(-1, -1, missing, -1, -1)
            seen = torch.cat([first if self.pad_mode == "replicate" else torch.zeros_like(first), seen], 2)
        seen = seen[:, :, max(-missing, 0) :]
        seen = F.pad(seen, (self.padding[2], self.ends[2], self.padding[1], self.ends[1], 0, self.ends[0]))
        y = convolved(seen, weight, self.stride, self.dilation)
        y = y if bias is None else y + bias.view(-1, 1, 1, 1)
        return (y if residual is None else y + residual).to(self.dtype)


def convolved(x, weight, stride, dilation):
    """A convolution as a product of matrices for each tap of the kernel.

    On a CPU `conv3d` takes half a minute for large calls; on a GPU it may transform what it is given.
    """
    kernel = weight.shape[2:]
    sizes = [
        (n - d * (k - 1) - 1) // s + 1
        for n, k, s, d in zip(x.shape[2:], kernel, stride, dilation, strict=True)
    ]
    y = x.new_zeros(x.shape[0], weight.shape[0], *sizes)
    for tap in itertools.product(*map(range, kernel)):
        places = (
            slice(i * d, i * d + s * (n - 1) + 1, s)
            for i, n, s, d in zip(tap, sizes, stride, dilation, strict=True)
        )
        y += torch.einsum("bcdhw,fc->bfdhw", x[(slice(None), slice(None), *places)], weight[(..., *tap)])
    return y


def channels_last(t):
    return t.permute(0, 2, 3, 4, 1).contiguous().permute(0, 4, 1, 2, 3)

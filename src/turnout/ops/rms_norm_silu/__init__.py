"""rms_norm_silu: the RMS norm and the activation that stand between the convolutions of video decoders, in
one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from turnout.ops.layouts import folded, fresh_strides, in_format_of
from turnout.routing.device import Device
from turnout.routing.mistakes import UNCLEAR, raise_clearer
from turnout.routing.op import Op
from turnout.routing.public import public
from turnout.routing.route import Work

STYLES = ("rms_norm", "normalize")


class RmsNormSilu(NamedTuple):
    """Everything that may change the answer or the speed of one call."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    out_strides: tuple[int, ...]
    dim: int
    dtype: torch.dtype
    weight_dtype: torch.dtype | None
    bias_dtype: torch.dtype | None
    style: str
    silu: bool

    @staticmethod
    def of(
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        dim: int,
        style: str,
        silu: bool,
        out: Tensor | None = None,
    ) -> RmsNormSilu:
        check(x, weight, bias, dim, style, out)
        return RmsNormSilu(
            tuple(x.shape),
            x.stride(),
            fresh_strides(x) if out is None else out.stride(),
            dim,
            x.dtype,
            None if weight is None else weight.dtype,
            None if bias is None else bias.dtype,
            style,
            silu,
        )

    @property
    def channels(self) -> int:
        return self.shape[self.dim]

    @property
    def elements(self) -> int:
        return torch.Size(self.shape).numel()


class RmsNormSiluInto(RmsNormSilu):
    """The same, written into a tensor that is there already."""

    @staticmethod
    def of(  # pyright: ignore[reportIncompatibleMethodOverride]
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        out: Tensor,
        eps: float,
        dim: int,
        style: str,
        silu: bool,
    ) -> RmsNormSilu:
        return RmsNormSilu.of(x, weight, bias, eps, dim, style, silu, out)


def check(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, dim: int, style: str, out: Tensor | None
) -> None:
    """Raise where shapes, dtypes or devices do not fit together. Looks at no values."""
    if not x.is_floating_point() or not 0 <= dim < x.dim():
        raise ValueError(
            f"x is {x.dtype} {list(x.shape)} with its channels in dimension {dim}, "
            "it needs floating-point ones"
        )
    if style not in STYLES:
        raise ValueError(f"style {style!r}, it needs to be one of {', '.join(STYLES)}")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        if (
            tensor.dim() != 1
            or tensor.shape[0] != x.shape[dim]
            or not tensor.is_floating_point()
            or tensor.device != x.device
        ):
            raise ValueError(
                f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}, "
                f"it needs to be [{x.shape[dim]}] on {x.device}"
            )
    if out is not None and (out.shape != x.shape or out.dtype != x.dtype or out.device != x.device):
        raise ValueError(
            f"out is {out.dtype} {list(out.shape)} on {out.device}, "
            f"it needs to be like x: {x.dtype} {list(x.shape)} on {x.device}"
        )


def normalised(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dim: int, style: str, silu: bool
) -> Tensor:
    """The chain of PyTorch and of diffusers, with a rounding to x's dtype after each step."""
    across = [1] * x.dim()
    across[dim] = x.shape[dim]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if style == "normalize":
        y = F.normalize(wide, dim=dim, eps=eps).to(x.dtype) * x.shape[dim] ** 0.5
        y = y if weight is None else y * weight.view(across)
    elif weight is None or weight.dtype == x.dtype:
        y = F.rms_norm(x.movedim(dim, -1), (x.shape[dim],), weight, eps).movedim(-1, dim)
    else:
        y = (wide * torch.rsqrt(wide.pow(2).mean(dim, keepdim=True) + eps) * weight.view(across)).to(x.dtype)
    y = y if bias is None else y + bias.view(across)
    return (F.silu(y) if silu else y).to(x.dtype)


def reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dim: int, style: str, silu: bool
) -> Tensor:
    check(x, weight, bias, dim, style, None)
    return in_format_of(normalised(x, weight, bias, eps, dim, style, silu), x)


def reference_into(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    eps: float,
    dim: int,
    style: str,
    silu: bool,
) -> None:
    check(x, weight, bias, dim, style, out)
    out.copy_(normalised(x, weight, bias, eps, dim, style, silu))


def work(problem: RmsNormSilu) -> Work:
    """x read once, the output written once; about eight operations an element."""
    size = problem.elements * problem.dtype.itemsize
    return Work(2 * size, 8 * problem.elements, size)


class Positions(NamedTuple):
    """All dimensions but the channels', as few as there can be: sizes, and strides in x and in the output."""

    sizes: tuple[int, ...]
    x: tuple[int, ...]
    out: tuple[int, ...]

    @staticmethod
    def of(shape: Sequence[int], dim: int, strides: Sequence[int], out_strides: Sequence[int]) -> Positions:
        others = [axis for axis in range(len(shape)) if axis != dim]
        sizes, (x, out) = folded(
            [shape[a] for a in others], [strides[a] for a in others], [out_strides[a] for a in others]
        )
        return Positions(tuple(sizes), tuple(x), tuple(out)) if sizes else Positions((1,), (1,), (1,))


def layout(problem: RmsNormSilu) -> Literal["rows", "planes", "strided"]:
    """Which elements are side by side in x and in the output: channels, positions, or neither in both."""
    if problem.channels == 1 or problem.strides[problem.dim] == problem.out_strides[problem.dim] == 1:
        return "rows"
    positions = Positions.of(problem.shape, problem.dim, problem.strides, problem.out_strides)
    return "planes" if positions.x[-1] == positions.out[-1] == 1 else "strided"


def family(problem: RmsNormSilu) -> tuple[tuple, int]:
    """Problems that differ in the number of positions only, and that number."""
    c, kind = problem.channels, layout(problem)
    dense = problem.strides == problem.out_strides
    layout_key = (kind, dense) if kind != "strided" else (kind, problem.strides, problem.out_strides)
    return (layout_key, c, *problem[4:]), problem.elements // max(c, 1)


def reference_cost(problem: RmsNormSilu, device: Device) -> float | None:
    """Eight passes, half of them in float32: measured on an H200 (192 x 4 x 240 x 416) and on two cores (96 x
    4 x 60 x 104).
    """
    fitted = device.fitted("rms_norm_silu.reference")
    if device.type == "cuda":
        moved = device.seconds(problem.elements * (40 + 12 * problem.dtype.itemsize))
        return None if moved is None else max(fitted.host, moved)
    if device.type == "cpu":
        each = fitted.element_rows if layout(problem) == "rows" else fitted.element_planes
        return fitted.start + problem.elements * each
    return None


RMS_NORM_SILU = Op(
    "rms_norm_silu",
    reference,
    problem_type=RmsNormSilu,
    cost=reference_cost,
    work=work,
    cases="turnout.ops.rms_norm_silu.cases",
    family=family,
    autocast="ignore",
)

RMS_NORM_SILU_INTO = Op(
    "rms_norm_silu_into",
    reference_into,
    problem_type=RmsNormSiluInto,
    cost=reference_cost,
    work=work,
    cases="turnout.ops.rms_norm_silu.cases_into",
    family=family,
    autocast="ignore",
    mutates=("out",),
)


@public(RMS_NORM_SILU, RMS_NORM_SILU_INTO)
def rms_norm_silu(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    eps: float,
    dim: int = 1,
    silu: bool = True,
    style: str = "rms_norm",
    out: Tensor | None = None,
) -> Tensor:
    """RMS norm over one dimension and SiLU in one pass, in any memory format: `silu(x / rms(x) * weight +
    bias)`.

    x: any shape, its channels in dimension `dim`; weight, bias: as many values as there are channels, or
    None. Returns a tensor in x's memory format. `silu=False` leaves the activation out.

    style `"rms_norm"` divides by `sqrt(mean(x**2) + eps)`, as `torch.nn.functional.rms_norm` (LTX).
    `"normalize"` divides by `max(norm(x), eps)` and multiplies with the square root of the number of
    channels, as the VAEs of Wan, Qwen-Image and HunyuanVideo 1.5 do with `torch.nn.functional.normalize`.

    out: where to write, a tensor like x with any strides, such as the frames behind the cache in the input of
    a causal convolution; it is returned, and gradients pass as they do through `Tensor.copy_`. It may overlap
    x: all of x is read first.

    >>> import torch, turnout
    >>> x = torch.tensor([[3.0, 4.0]])
    >>> turnout.rms_norm_silu(x, eps=0.0, silu=False).square().mean()
    tensor(1.)
    >>> buffer = torch.zeros(3, 2)
    >>> _ = turnout.rms_norm_silu(x, torch.ones(2), eps=1e-12, style="normalize", out=buffer[2:])
    >>> buffer[2] / turnout.rms_norm_silu(x, eps=1e-12)[0]
    tensor([1., 1.])
    """
    try:
        dim = dim % x.dim() if -x.dim() <= dim < x.dim() else dim
        weight, bias = (
            tensor if tensor is None or tensor.dim() == 1 else tensor.reshape(-1) for tensor in (weight, bias)
        )
    except UNCLEAR as failure:
        raise_clearer("rms_norm_silu", rms_norm_silu, locals().items(), failure)
        raise
    if out is None:
        return RMS_NORM_SILU(x, weight, bias, eps, dim, style, silu)
    RMS_NORM_SILU_INTO(x, weight, bias, out, eps, dim, style, silu)
    return out

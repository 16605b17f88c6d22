"""group_norm_silu: the group norm and the activation between the convolutions of image decoders; two reads
and one write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from turnout.ops.layouts import folded, fresh_strides, in_format_of
from turnout.routing.device import Device
from turnout.routing.op import Op
from turnout.routing.public import public
from turnout.routing.route import Work
from turnout.routing.torch_private import in_forward_ad


class GroupNormSilu(NamedTuple):
    """Everything that may change the answer or the speed of one call."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    out_strides: tuple[int, ...]
    groups: int
    dtype: torch.dtype
    weight_dtype: torch.dtype | None
    bias_dtype: torch.dtype | None
    silu: bool

    @staticmethod
    def of(
        x: Tensor,
        groups: int,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        silu: bool,
        out: Tensor | None = None,
    ) -> GroupNormSilu:
        check(x, groups, weight, bias, out)
        return GroupNormSilu(
            tuple(x.shape),
            x.stride(),
            fresh_strides(x) if out is None else out.stride(),
            groups,
            x.dtype,
            None if weight is None else weight.dtype,
            None if bias is None else bias.dtype,
            silu,
        )

    @property
    def elements(self) -> int:
        return torch.Size(self.shape).numel()


class GroupNormSiluInto(GroupNormSilu):
    """A call that writes into an existing tensor."""

    @staticmethod
    def of(  # pyright: ignore[reportIncompatibleMethodOverride]
        x: Tensor,
        groups: int,
        weight: Tensor | None,
        bias: Tensor | None,
        out: Tensor,
        eps: float,
        silu: bool,
    ) -> GroupNormSilu:
        return GroupNormSilu.of(x, groups, weight, bias, eps, silu, out)


def check(x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, out: Tensor | None) -> None:
    """Raise where shapes, dtypes or devices do not fit together. Looks at no values."""
    if x.dim() < 2 or not x.is_floating_point():
        raise ValueError(
            f"x is {x.dtype} {list(x.shape)}, it needs to be floating-point [batch, channels, ...]"
        )
    channels = x.shape[1]
    if groups < 1 or channels % groups:
        raise ValueError(f"{channels} channels in {groups} groups, they need to be groups of one size")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        if tuple(tensor.shape) != (channels,) or not tensor.is_floating_point() or tensor.device != x.device:
            raise ValueError(
                f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}, "
                f"it needs to be [{channels}] on {x.device}"
            )
    if out is not None and (out.shape != x.shape or out.dtype != x.dtype or out.device != x.device):
        raise ValueError(
            f"out is {out.dtype} {list(out.shape)} on {out.device}, "
            f"it needs to be like x: {x.dtype} {list(x.shape)} on {x.device}"
        )


def normalised(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, silu: bool
) -> Tensor:
    """PyTorch's own norm, then its activation.

    An x without elements has a norm without elements. This is handled here because versions of torch differ:
    2.13 returns it with NaN for the weight's gradient, 2.15 raises.
    """
    elements = x.numel()
    if isinstance(elements, int) and not elements:  # where the size is symbolic, it is not zero
        return _empty_norm(x, weight, bias)
    if weight is None and bias is not None:
        weight = torch.ones_like(bias)  # its backward on a GPU fails on a bias alone (torch 2.11)
    if in_forward_ad():
        x = x.contiguous()  # torch's forward derivative takes no other (2.13)
    if all(tensor is None or tensor.dtype == x.dtype for tensor in (weight, bias)):
        y = torch.group_norm(x, groups, weight, bias, eps)
    else:
        wide = torch.promote_types(x.dtype, torch.float32)
        scale, shift = (None if tensor is None else tensor.to(wide) for tensor in (weight, bias))
        y = torch.group_norm(x.to(wide), groups, scale, shift, eps).to(x.dtype)
    return F.silu(y) if silu else y


def _empty_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """The norm of an x without elements, of which gradients reach x, weight and bias: zeros."""
    per_channel = (-1,) + (1,) * (x.dim() - 2)  # [C] to [C, 1, ...]
    y = x.clone()
    y = y if weight is None else y * weight.view(per_channel)
    y = y if bias is None else y + bias.view(per_channel)
    return y.to(x.dtype)


def reference(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, silu: bool
) -> Tensor:
    check(x, groups, weight, bias, None)
    return in_format_of(normalised(x, groups, weight, bias, eps, silu), x)


def reference_into(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, out: Tensor, eps: float, silu: bool
) -> None:
    check(x, groups, weight, bias, out)
    out.copy_(normalised(x, groups, weight, bias, eps, silu))


def work(problem: GroupNormSilu) -> Work:
    """x read for its moments and again for the norm, the output written once; about ten operations an
    element.
    """
    size = problem.elements * problem.dtype.itemsize
    return Work(3 * size, 10 * problem.elements, size)


class Positions(NamedTuple):
    """The positions a kernel loops over: `size` of them, `x_step` and `out_step` elements apart."""

    size: int
    x_step: int
    out_step: int


def positions(shape: Sequence[int], strides: Sequence[int], out_strides: Sequence[int]) -> Positions | None:
    """All dimensions but batch and channels folded into one; None where they cannot be."""
    sizes, (x, out) = folded(shape[2:], strides[2:], out_strides[2:])
    return None if len(sizes) > 1 else Positions(sizes[0], x[0], out[0]) if sizes else Positions(1, 1, 1)


class Axis(NamedTuple):
    """One dimension of the positions of a padded x: sizes of the output and of x, how many positions of the
    output come before the first of x, and the steps from one to the next."""

    size: int
    x_size: int
    before: int
    x_step: int
    out_step: int


# Bytes of x from which its output on a CPU is memory that was not used before: glibc keeps less than that for
# the next tensor, and gives this much back to the system (its largest mmap threshold).
LARGE_ON_CPU = 2**25
MOST_AXES = 3  # of positions that have gaps between them
ONE = Axis(1, 1, 0, 0, 0)


def axes(
    shape: Sequence[int], strides: Sequence[int], out_strides: Sequence[int], padding: Sequence[int] = ()
) -> list[Axis] | None:
    """All dimensions but batch and channels as three, the widest step of the output first; None where that
    are too few.

    shape and strides are x's; padding is as in `torch.nn.functional.pad`, the last dimension first.

    >>> x = (1, 4, 2, 3, 5), (120, 1, 60, 20, 4)  # shape and strides
    >>> axes(*x, (420, 1, 140, 28, 4))  # into the inside of a picture with one more pixel on each side
    [Axis(size=2, x_size=2, before=0, x_step=60, out_step=140), \
Axis(size=3, x_size=3, before=0, x_step=20, out_step=28), \
Axis(size=5, x_size=5, before=0, x_step=4, out_step=4)]
    >>> axes(*x, (180, 1, 60, 20, 4), (0, 0, 0, 0, 1, 0))[1:]  # one more frame
    [Axis(size=3, x_size=2, before=1, x_step=60, out_step=60), \
Axis(size=15, x_size=15, before=0, x_step=4, out_step=4)]
    """
    befores, afters = list(reversed(padding[::2])), list(reversed(padding[1::2]))
    missing = len(shape) - 2 - len(befores)
    walked = [
        Axis(size + before + after, size, before, x_step, out_step)
        for size, before, after, x_step, out_step in zip(
            shape[2:],
            [0] * missing + befores,
            [0] * missing + afters,
            strides[2:],
            out_strides[2:],
            strict=True,
        )
        if size + before + after != 1
    ]
    walked.sort(key=lambda axis: -axis.out_step)
    kept: list[Axis] = []
    for axis in walked:
        outer = kept[-1] if kept else ONE
        padded = outer.size != outer.x_size or axis.size != axis.x_size
        steps = (axis.size * axis.x_step, axis.size * axis.out_step)
        if kept and not padded and (outer.x_step, outer.out_step) == steps:
            size = outer.size * axis.size
            kept[-1] = Axis(size, size, 0, axis.x_step, axis.out_step)
        else:
            kept.append(axis)
    return [ONE] * (MOST_AXES - len(kept)) + kept if len(kept) <= MOST_AXES else None


def layout(problem: GroupNormSilu) -> Literal["rows", "gapped-rows", "planes", "strided"]:
    """Which elements are side by side in x and in the output: channels, at positions that are one walk (rows)
    or have gaps (gapped-rows); positions; or neither in both."""
    all_positions = positions(problem.shape, problem.strides, problem.out_strides)
    rows = problem.strides[1] == problem.out_strides[1] == 1 and problem.shape[1] > 1
    if all_positions is None:
        few = rows and axes(problem.shape, problem.strides, problem.out_strides) is not None
        return "gapped-rows" if few else "strided"
    if rows:
        return "rows"
    return "planes" if all_positions.x_step == all_positions.out_step == 1 else "strided"


def family(problem: GroupNormSilu) -> tuple[tuple, int]:
    """Problems that differ in the number of positions only share a family; the size is that number."""
    batch, channels, *_ = problem.shape
    kind, dense = layout(problem), problem.strides == problem.out_strides
    if kind == "gapped-rows":  # x may have gaps too, which is another kernel
        dense = positions(problem.shape, problem.strides, problem.strides) is not None
    layout_key = (kind, dense) if kind != "strided" else (kind, problem.strides, problem.out_strides)
    return (layout_key, batch, channels, *problem[3:]), problem.elements // max(batch * channels, 1)


def reference_cost(problem: GroupNormSilu, device: Device) -> float | None:
    """On a GPU one block takes the moments of one group, 1.1e9 values a second on an H200, and channels-last
    is copied there and back. On a CPU as measured with torch 2.13 on one core, see NOTES.md: two passes, and
    where x is large two fresh tensors."""
    fitted = device.fitted("group_norm_silu.reference")
    if device.type == "cuda":
        groups = max(1, problem.shape[0] * problem.groups)
        moments = problem.elements / groups / fitted.moments * -(-groups // (2 * device.units))
        copied = layout(problem) in ("rows", "gapped-rows")
        passes = device.seconds(problem.elements * problem.dtype.itemsize * (10 if copied else 6))
        return None if passes is None else max(fitted.host, moments + passes)
    if device.type == "cpu":
        large = problem.elements * problem.dtype.itemsize >= LARGE_ON_CPU
        each = fitted.element + (fitted.byte_of_large * problem.dtype.itemsize if large else 0)
        return fitted.start + problem.elements * each / device.cores
    return None


GROUP_NORM_SILU = Op(
    "group_norm_silu",
    reference,
    problem_type=GroupNormSilu,
    cost=reference_cost,
    work=work,
    cases="turnout.ops.group_norm_silu.cases",
    family=family,
    autocast="ignore",
)

GROUP_NORM_SILU_INTO = Op(
    "group_norm_silu_into",
    reference_into,
    problem_type=GroupNormSiluInto,
    cost=reference_cost,
    work=work,
    cases="turnout.ops.group_norm_silu.cases_into",
    family=family,
    autocast="ignore",
    mutates=("out",),
)


@public(GROUP_NORM_SILU, GROUP_NORM_SILU_INTO)
def group_norm_silu(
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    silu: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """`silu(group_norm(x))` in two launches, in any memory format; `silu=False` leaves the activation out.

    x: `[B, C, ...]`; weight, bias: `[C]` or None. Moments are taken in float32 and hold where the mean is far
    from zero. Returns a tensor in x's memory format.

    out: where to write, a tensor like x with any strides, such as the frames behind the cache in the input of
    a causal convolution; it is returned, and gradients pass as they do through `Tensor.copy_`. It may overlap
    x: all of x is read first.

    >>> import torch, turnout
    >>> x = torch.randn(2, 6, 8, 8) + 1000
    >>> y = turnout.group_norm_silu(x, 3, torch.ones(6), torch.zeros(6), eps=1e-6, silu=False)
    >>> y.view(2, 3, -1).std(-1, correction=0).allclose(torch.ones(2, 3), atol=1e-4)
    True
    """
    if out is None:
        return GROUP_NORM_SILU(x, groups, weight, bias, eps, silu)
    GROUP_NORM_SILU_INTO(x, groups, weight, bias, out, eps, silu)
    return out

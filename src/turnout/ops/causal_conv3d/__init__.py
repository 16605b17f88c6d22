"""causal_conv3d: the convolution of video VAEs. Outputs use no later frame, and a clip may come in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Literal, NamedTuple, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from turnout.ops.convolution import costs
from turnout.ops.convolution.gradients import convolution_backward, residual_gradient
from turnout.ops.convolution.layout import FIRST, LAST, dense_strides, in_format, plain_format, with_residual
from turnout.ops.convolution.problem import Beside, Conv3d, channels_last, spread, torch_settings
from turnout.routing.device import Device
from turnout.routing.mistakes import UNCLEAR, raise_clearer
from turnout.routing.op import Op, Simpler
from turnout.routing.public import public
from turnout.routing.route import Work

PAD_MODES = ("zeros", "replicate")


class CausalConv3d(NamedTuple):
    """Everything that may change the answer or the speed of one causal convolution.

    `convolution` is that of the input alone, without the frames before it.
    """

    convolution: Conv3d
    cache: Beside | None
    pad_mode: str

    @staticmethod
    def of(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        cache: Tensor | None,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        groups: int,
        pad_mode: str,
        residual: Tensor | None,
    ) -> CausalConv3d:
        for name, x in (("input", input), ("weight", weight), ("cache", cache)):
            if x is not None and x.dim() != 5:
                raise ValueError(f"{name} is {list(x.shape)}, it needs five dimensions")
        for name, numbers, count in (
            ("stride", stride, 3),
            ("padding", padding, 2),
            ("dilation", dilation, 3),
        ):
            if len(numbers) != count:
                raise ValueError(f"{name} is {list(numbers)}, it needs one number or {count}")
        convolution = Conv3d.of(input, weight, bias, stride, [0, *padding], dilation, groups, residual)
        return CausalConv3d(convolution, Beside.of(cache), pad_mode)  # pyright: ignore[reportArgumentType]

    @property
    def before(self) -> int:
        """The number of frames before the input that the first output uses."""
        return (self.convolution.weight[2] - 1) * self.convolution.dilation[0]

    @property
    def padded(self) -> Conv3d:
        """The convolution over cache, padding and input in one tensor."""
        shape = self.convolution.input
        if len(shape) != 5 or len(self.convolution.weight) != 5 or not self.convolution.dilation:
            return self.convolution
        whole = (*shape[:2], shape[2] + self.before, *shape[3:])
        strides = dense_strides(whole, LAST[5] if self.convolution.channels_last else FIRST)
        return self.convolution._replace(input=whole, input_strides=strides)

    def invalid(self) -> str | None:
        """Why no route can take this call: it is empty or unbatched, or wrong, and torch raises the error."""
        shape = self.convolution.input
        if self.cache is not None and (
            len(self.cache.shape) != 5
            or (*self.cache.shape[:2], *self.cache.shape[3:]) != (*shape[:2], *shape[3:])
            or self.cache.dtype != self.convolution.dtype
        ):
            return (
                f"a cache {list(self.cache.shape)}, "
                f"this route needs frames like those of the input, {list(shape)}"
            )
        if len(shape) == 5 and shape[2] < 1:
            return "no frames, this route needs at least one"
        return self.padded.invalid()


def with_frames_before(input: Tensor, cache: Tensor | None, before: int, pad_mode: str) -> Tensor:
    """Join `before` frames and the input to one tensor `[N, C, before + D, H, W]`, in the input's layout."""
    if cache is None or cache.shape[2] == 0:
        frames = [input]
    else:
        frames = [cache[:, :, max(0, cache.shape[2] - before) :], input] if before else [input]
    missing = before + input.shape[2] - sum(x.shape[2] for x in frames)
    if missing and pad_mode == "replicate":
        frames = [frames[0][:, :, :1]] * missing + frames
    whole = frames[0] if len(frames) == 1 else torch.cat(frames, 2)
    if missing and pad_mode == "zeros":
        whole = F.pad(whole, (0, 0, 0, 0, missing, 0))
    last = channels_last(tuple(input.shape), input.stride())
    return whole.contiguous(memory_format=torch.channels_last_3d if last else torch.contiguous_format)


def reference(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cache: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    pad_mode: str,
    residual: Tensor | None,
) -> Tensor:
    whole = with_frames_before(input, cache, (weight.shape[2] - 1) * dilation[0], pad_mode)
    y = in_format(
        F.conv3d(whole, weight, bias, stride, [0, *padding], dilation, groups), plain_format(input, weight)
    )
    return with_residual(y, residual)


def vjp(inputs: tuple, grads: tuple) -> tuple:
    """The gradient of each input: that of all frames at once, split into those of cache and input."""
    input, weight, bias, cache, stride, padding, dilation, groups, pad_mode, residual = inputs
    (grad,) = grads
    before, frames = (weight.shape[2] - 1) * dilation[0], input.shape[2]
    cached = 0 if cache is None else min(cache.shape[2], before)
    whole = with_frames_before(input, cache, before, pad_mode)
    wants = input.requires_grad or (cache is not None and cache.requires_grad)
    dwhole, dweight, dbias = convolution_backward(
        grad, whole, weight, bias, stride, [0, *padding], dilation, groups, wants
    )
    dinput = dcache = None
    if dwhole is not None:
        dmissing, dcached, dinput = dwhole.split([before - cached, cached, frames], 2)
        if pad_mode == "replicate" and before > cached:
            into, rest = (dcached, dinput) if cached else (dinput, None)
            into = torch.cat([into[:, :, :1] + dmissing.sum(2, keepdim=True), into[:, :, 1:]], 2)
            dcached, dinput = (into, rest) if cached else (dcached, into)
        if cache is not None:
            dcache = F.pad(dcached, (0, 0, 0, 0, cache.shape[2] - cached, 0))
    return dinput, dweight, dbias, dcache, None, None, None, None, None, residual_gradient(grad, residual)


def work(problem: CausalConv3d) -> Work:
    """The work of the convolution, with the cache read once; frames of padding cost nothing."""
    padded_work = costs.work(problem.padded)
    cached = 0 if problem.cache is None else min(problem.cache.shape[2], problem.before)
    frame = (
        prod((*problem.convolution.input[:2], *problem.convolution.input[3:]))
        * problem.convolution.dtype.itemsize
    )
    return padded_work._replace(bytes=padded_work.bytes - (problem.before - cached) * frame)


def family(problem: CausalConv3d) -> tuple:
    """Problems that differ in frames, rows and columns only share a family; the size: the output's pixels."""
    if problem.invalid() is not None:
        return problem, 0
    without_sizes, pixels = costs.family(problem.padded)
    cache = (
        None
        if problem.cache is None
        else (problem.cache.shape[2], costs.layout_of(problem.cache.shape, problem.cache.strides))
    )
    return (without_sizes, cache, problem.pad_mode), pixels


def simpler(problem: CausalConv3d) -> Simpler | None:
    """Without the residual, as any convolution."""
    found = costs.simpler(problem.convolution)
    return found and found._replace(problem=problem._replace(convolution=found.problem))


def reference_cost(problem: CausalConv3d, device: Device) -> float | None:
    """The seconds of the convolution and of joining cache, padding and input."""
    if problem.invalid() is not None:
        return None
    seconds = costs.reference_cost(problem.padded, device)
    joining = (
        costs.copying(2 * prod(problem.padded.input), problem.convolution, device) if problem.before else 0.0
    )
    return None if seconds is None else seconds + joining


CAUSAL_CONV3D = Op(
    "causal_conv3d",
    reference,
    problem_type=CausalConv3d,
    cost=reference_cost,
    work=work,
    cases="turnout.ops.causal_conv3d.cases",
    family=family,
    simpler=simpler,
    autocast="cast",
    vjp=vjp,
    ambient=torch_settings,
)


@overload
def causal_conv3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = ...,
    *,
    cache: Tensor | None = ...,
    stride: int | Sequence[int] = ...,
    padding: int | Sequence[int] = ...,
    dilation: int | Sequence[int] = ...,
    groups: int = ...,
    pad_mode: str = ...,
    residual: Tensor | None = ...,
    return_cache: Literal[False] = ...,
) -> Tensor: ...
@overload
def causal_conv3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = ...,
    *,
    cache: Tensor | None = ...,
    stride: int | Sequence[int] = ...,
    padding: int | Sequence[int] = ...,
    dilation: int | Sequence[int] = ...,
    groups: int = ...,
    pad_mode: str = ...,
    residual: Tensor | None = ...,
    return_cache: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@public(CAUSAL_CONV3D, of_cases=True)
def causal_conv3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    cache: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    pad_mode: str = "zeros",
    return_cache: bool = False,
    residual: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """3-D convolution in which no frame sees a later one: `(KD - 1) * dilation` frames stand before the
    input.

    input: `[N, Cin, D, H, W]` or without N, weight: `[Cout, Cin / groups, KD, KH, KW]`, bias: `[Cout]`.
    `padding` is that of H and W. The frames before are the last ones of `cache` `[N, Cin, frames, H, W]`;
    where it has too few, or there is none, they are zeros or (`pad_mode="replicate"`) the first frame.
    Returns y, with D frames where the stride is 1.

    A clip in chunks: with `return_cache` the frames that the next chunk needs are returned too, a view of the
    input where it has enough of them. A view keeps all of the input alive, and what is written into it is
    written into the input; clone it if that matters. The frames give what the whole clip gives, if every
    chunk but the last has a multiple of the depth stride.

    `residual`, shaped like y, is added to it: the reference rounds before it adds, a route may round once.

    >>> import torch, turnout
    >>> clip, weight = torch.arange(1.0, 6.0).view(1, 1, 5, 1, 1), torch.ones(1, 1, 3, 1, 1)
    >>> turnout.causal_conv3d(clip, weight).flatten()
    tensor([ 1.,  3.,  6.,  9., 12.])
    >>> first, cache = turnout.causal_conv3d(clip[:, :, :2], weight, return_cache=True)
    >>> turnout.causal_conv3d(clip[:, :, 2:], weight, cache=cache).flatten()
    tensor([ 6.,  9., 12.])
    """
    if pad_mode not in PAD_MODES:
        raise ValueError(f"pad_mode {pad_mode!r}; one of: {', '.join(PAD_MODES)}")
    clips, before, beside = input, cache, residual
    try:
        if input.dim() == 4:
            clips = input.unsqueeze(0)
            before, beside = (None if x is None else x.unsqueeze(0) for x in (cache, residual))
        numbers = (spread(stride, 3), spread(padding, 2), spread(dilation, 3))
    except UNCLEAR as failure:
        raise_clearer("causal_conv3d", causal_conv3d, locals().items(), failure)
        raise
    y = CAUSAL_CONV3D(clips, weight, bias, before, *numbers, groups, pad_mode, beside)
    y = y.squeeze(0) if input.dim() == 4 else y
    if not return_cache:
        return y
    return y, next_cache(input, cache, (weight.shape[2] - 1) * spread(dilation, 3)[0])


def next_cache(input: Tensor, cache: Tensor | None, before: int) -> Tensor:
    """The last `before` frames of cache and input, fewer where there are no more: a view of the input unless
    frames of both are needed.
    """
    frames = input.shape[-3]
    if frames >= before:
        return input.narrow(-3, frames - before, before)
    if cache is None or cache.shape[-3] == 0:
        return input.narrow(-3, 0, frames)
    cached = min(cache.shape[-3], before - frames)
    return torch.cat([cache.narrow(-3, cache.shape[-3] - cached, cached), input], -3)

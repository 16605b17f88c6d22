"""causal_conv1d_update: a step of decoding, the state of each sequence moved on in place."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from turnout.ops.causal_conv1d import channel_last, dense
from turnout.ops.causal_conv1d.checks import check_filter
from turnout.routing.choose import plain
from turnout.routing.device import Device
from turnout.routing.op import Op
from turnout.routing.public import public
from turnout.routing.route import Work


class CausalConv1dUpdate(NamedTuple):
    """Everything that may change the answer or the speed of one step."""

    batch: int
    dim: int
    length: int  # 0 where x is [batch, channels], one position without an axis
    width: int
    state_length: int
    slots: int
    strides: tuple[int, ...]
    state_strides: tuple[int, ...]
    dtype: torch.dtype
    weight_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    state_dtype: torch.dtype
    activation: str | None
    ring: bool
    chosen_slots: bool

    @staticmethod
    def of(
        x: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str | None,
        cache_seqlens: Tensor | None,
        conv_state_indices: Tensor | None,
    ) -> CausalConv1dUpdate:
        check(x, conv_state, weight, bias, activation, cache_seqlens, conv_state_indices)
        length = x.shape[2] if x.dim() == 3 else 0
        return CausalConv1dUpdate(
            x.shape[0],
            x.shape[1],
            length,
            weight.shape[1],
            conv_state.shape[2],
            conv_state.shape[0],
            x.stride(),
            conv_state.stride(),
            x.dtype,
            weight.dtype,
            None if bias is None else bias.dtype,
            conv_state.dtype,
            activation,
            cache_seqlens is not None,
            conv_state_indices is not None,
        )

    @property
    def elements(self) -> int:
        return self.batch * self.dim * max(self.length, 1 if len(self.strides) == 2 else 0)


def check(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    cache_seqlens: Tensor | None,
    conv_state_indices: Tensor | None,
) -> None:
    """Raise where shapes, dtypes or devices do not fit together. Looks at no values."""
    if x.dim() not in (2, 3):
        raise ValueError(
            f"x is {list(x.shape)}, it needs to be [batch, channels] or [batch, channels, length]"
        )
    batch, dim = x.shape[:2]
    check_filter(x, dim, weight, bias, activation)
    shortest = weight.shape[1] - 1
    if conv_state.dim() != 3 or conv_state.shape[1] != dim or conv_state.shape[2] < shortest:
        raise ValueError(
            f"conv_state is {list(conv_state.shape)}, "
            f"it needs to be [slots, channels, state length] with {dim} channels "
            f"and a state length of at least width - 1 = {shortest}"
        )
    if not conv_state.is_floating_point():
        raise ValueError(f"conv_state is {plain(conv_state.dtype)}, it needs a floating-point dtype")
    if conv_state_indices is None and conv_state.shape[0] != batch:
        raise ValueError(
            f"conv_state has {conv_state.shape[0]} slots for a batch of {batch}, "
            "without conv_state_indices it needs one for each"
        )
    if conv_state_indices is not None and batch > 0 and conv_state.shape[0] == 0:
        raise ValueError("conv_state has no slots, it needs at least one")
    for name, tensor in (("cache_seqlens", cache_seqlens), ("conv_state_indices", conv_state_indices)):
        if tensor is not None and (
            tuple(tensor.shape) != (batch,) or tensor.dtype not in (torch.int32, torch.int64)
        ):
            raise ValueError(
                f"{name} is {plain(tensor.dtype)} {list(tensor.shape)}, "
                f"it needs to be int32 or int64 [batch]: [{batch}]"
            )
    for name, tensor in (
        ("conv_state", conv_state),
        ("cache_seqlens", cache_seqlens),
        ("conv_state_indices", conv_state_indices),
    ):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device}, it needs x's device {x.device}")


def reference(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    cache_seqlens: Tensor | None,
    conv_state_indices: Tensor | None,
) -> Tensor:
    """Multiply the window of each output by the taps, add up in float32 (float64 for float64), round once."""
    check(x, conv_state, weight, bias, activation, cache_seqlens, conv_state_indices)
    flat = x.dim() == 2
    new = x[..., None] if flat else x
    (batch, dim, length), width, size = new.shape, weight.shape[1], conv_state.shape[2]
    wide = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    live = None if conv_state_indices is None else conv_state_indices >= 0
    slots = None if conv_state_indices is None else conv_state_indices.clamp(min=0)
    states = conv_state if slots is None else conv_state[slots]

    before = states[..., size - (width - 1) :]
    if cache_seqlens is not None and width > 1:
        before = states.gather(
            2, _ring(cache_seqlens, torch.arange(1 - width, 0, device=x.device), dim, size)
        )
    line = torch.cat([before.to(wide), new.to(wide)], 2)
    acc = x.new_zeros(dim, 1, dtype=wide) if bias is None else bias.to(wide)[:, None]
    for k in range(width):
        acc = acc + line[..., k : k + length] * weight.to(wide)[:, k, None]
    if activation == "silu":
        acc = F.silu(acc)
    if live is not None:
        acc = torch.where(live[:, None, None], acc, 0.0)
    y = acc.to(x.dtype)
    y = y.new_empty(batch, dim).copy_(y[..., 0]) if flat else dense(y, channel_last(x))

    if cache_seqlens is None:
        moved = torch.cat([states, new.to(states.dtype)], 2)[..., length:]
    elif size:
        written = min(length, size)  # of positions that fall on one place the last one stays
        at = _ring(cache_seqlens, torch.arange(length - written, length, device=x.device), dim, size)
        moved = states.scatter(2, at, new[..., length - written :].to(states.dtype))
    else:
        moved = states
    if slots is None or live is None:
        conv_state.copy_(moved)  # last: what is read may overlap the state
    elif batch:
        # Padding must leave every state alone, so it repeats what the first live sequence writes, or what
        # stands there if none is live.
        place = torch.arange(batch, device=x.device)
        own = torch.where(live, place, live.to(torch.uint8).argmax())
        conv_state.index_put_((slots[own],), torch.where(live[own][:, None, None], moved[own], states[own]))
    return y


def _ring(cache_seqlens: Tensor, offsets: Tensor, dim: int, size: int) -> Tensor:
    """Places in the ring at the given offsets from each sequence's length: [batch, dim, offsets]."""
    return ((cache_seqlens[:, None] + offsets) % size)[:, None].expand(-1, dim, -1).long()


def work(problem: CausalConv1dUpdate) -> Work:
    """x and the state read, y and the state written, the filter read once.

    A ring is written at the new positions only.
    """
    step = problem.elements * problem.dtype.itemsize
    rows = problem.batch * problem.dim * problem.state_dtype.itemsize
    read = rows * (problem.width - 1 if problem.ring else problem.state_length)
    written = rows * (
        min(max(problem.length, 1), problem.state_length) if problem.ring else problem.state_length
    )
    filters = problem.dim * problem.width * problem.weight_dtype.itemsize
    return Work(2 * step + read + written + filters, 2 * problem.elements * problem.width, step + written)


def reference_cost(problem: CausalConv1dUpdate, device: Device) -> float | None:
    """A dozen small ops and two a tap; measured."""
    fitted = device.fitted("causal_conv1d_update.reference")
    if device.type == "cuda":
        moved = device.seconds(6 * work(problem).bytes)
        return (
            None
            if moved is None
            else max(fitted.host * (2 * problem.width + 14 + 8 * problem.chosen_slots), moved / fitted.share)
        )
    if device.type == "cpu":
        per_element = fitted.element_state * problem.state_length + fitted.element_tap * problem.width * max(
            problem.length, 1
        )
        return fitted.start + problem.batch * problem.dim * per_element
    return None


CAUSAL_CONV1D_UPDATE = Op(
    "causal_conv1d_update",
    reference,
    problem_type=CausalConv1dUpdate,
    cost=reference_cost,
    work=work,
    cases="turnout.ops.causal_conv1d_update.cases",
    autocast="ignore",
    mutates=("conv_state",),
)


@public(CAUSAL_CONV1D_UPDATE, of_cases=True)
def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
) -> Tensor:
    """One or several more positions of each sequence: the outputs `causal_conv1d` would give there.
    `conv_state` is updated in place.

    x: `[B, D]` or `[B, D, L]`, any strides; conv_state: `[B, D, S]` with `S >= W-1`, the last S positions;
    weight: `[D, W]`; bias: `[D]`;
    activation: None or `"silu"`. Returns y like x.

    `cache_seqlens` `[B]`: the state is a ring, the next position is written at `cache_seqlens % S`.
    `conv_state_indices` `[B]`: sequence b keeps its state in slot `conv_state_indices[b]` of a larger
    conv_state; a negative one is padding, its output is 0 and no state changes. Slots of one call must
    differ. The state may overlap what is read: all of that is read first. Where gradients are wanted, the
    reference runs, and autograd's rules for in-place operations hold.

    >>> import torch, turnout
    >>> state = torch.tensor([[[3.0, 4.0]]])
    >>> turnout.causal_conv1d_update(torch.tensor([[5.0]]), state, torch.tensor([[10.0, 1.0]]))
    tensor([[45.]])
    >>> state
    tensor([[[4., 5.]]])
    """
    return CAUSAL_CONV1D_UPDATE(x, conv_state, weight, bias, activation, cache_seqlens, conv_state_indices)

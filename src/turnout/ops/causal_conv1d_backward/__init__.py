"""causal_conv1d_backward: every gradient of causal_conv1d, as an op with routes of its own."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from turnout.ops.causal_conv1d import CausalConv1d, Seen, channel_last, dense, fresh
from turnout.ops.causal_conv1d import family as forward_family
from turnout.ops.causal_conv1d import reference_cost as forward_cost
from turnout.ops.causal_conv1d.checks import check
from turnout.routing.device import Device
from turnout.routing.op import Op
from turnout.routing.route import Work


class CausalConv1dBackward(NamedTuple):
    """The forward problem, and how its gradient lies."""

    call: CausalConv1d
    grad_strides: tuple[int, ...]

    @staticmethod
    def of(
        grad: Tensor,
        grad_final: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str | None,
        seq_idx: Tensor | None,
        cu_seqlens: Tensor | None,
        initial_states: Tensor | None,
        return_final_states: bool,
    ) -> CausalConv1dBackward:
        call = CausalConv1d.of(
            x, weight, bias, activation, seq_idx, cu_seqlens, initial_states, return_final_states
        )
        return CausalConv1dBackward(call, grad.stride())


def reference(
    grad: Tensor,
    grad_final: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
    initial_states: Tensor | None,
    return_final_states: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The vector-Jacobian product of the forward reference: gradients of x, weight, bias and initial_states,
    empty where there is none.

    grad is y's gradient, grad_final that of the final states, empty where they were not asked for. Written
    out, because torch.func does not work inside the fake kernel of an op, and this is that kernel too.
    """
    check(x, weight, bias, activation, seq_idx, cu_seqlens, initial_states)
    seen = Seen.of(x, weight, seq_idx, cu_seqlens, initial_states)
    wide, width = seen.line.dtype, weight.shape[1]
    grad = grad.to(wide)
    if activation == "silu":
        total = seen.total(weight, bias)
        gate = torch.sigmoid(total)
        grad = grad * gate * (1 + total * (1 - gate))
    if seq_idx is not None:
        grad = torch.where(seq_idx[:, None] < 0, 0.0, grad)
    dweight = torch.stack([(grad * seen.tap(k)).sum((0, 2)) for k in range(width)], 1)
    dline, dstates = _through_taps(seen, grad, weight.to(wide))
    if return_final_states and seen.reach:
        dline, dstates = _through_finals(seen, grad_final.to(wide), dline, dstates)

    dbias, dinitial = (torch.empty(0, dtype=x.dtype, device=x.device) for _ in range(2))
    if bias is not None:
        dbias = grad.sum((0, 2)).to(bias.dtype)
    if initial_states is not None:
        dinitial = fresh((dline[..., : seen.reach] if dstates is None else dstates).to(x.dtype))
    return (
        dense(dline[..., seen.reach :].to(x.dtype), channel_last(x)),
        fresh(dweight.to(weight.dtype)),
        dbias,
        dinitial,
    )


def _through_taps(seen: Seen, grad: Tensor, taps: Tensor) -> tuple[Tensor, Tensor | None]:
    """Gradients of the line, and of the states where these are not part of it: each tap adds its share to the
    inputs it multiplied.
    """
    dline, dstates = torch.zeros_like(seen.line), None
    packed_states = seen.states if seen.cu_seqlens is not None else None
    if packed_states is not None:
        dstates = torch.zeros_like(packed_states)
    for k in range(seen.reach + 1):
        share, own = grad * taps[:, k, None], seen.own(k)
        kept = share if own is None else torch.where(own, share, 0.0)
        dline = dline + F.pad(kept, (k, seen.reach - k))
        if own is not None and dstates is not None and seen.reach:
            sequence, place = seen.place(k)
            rest = torch.where(own, 0.0, share)[0].t()  # [length, dim]
            flat = (
                torch.zeros_like(dstates)
                .transpose(1, 2)
                .reshape(-1, rest.shape[1])
                .index_add(0, sequence * seen.reach + place, rest)
            )
            dstates = dstates + flat.view(-1, seen.reach, rest.shape[1]).transpose(1, 2)
    return dline, dstates


def _through_finals(
    seen: Seen, grad: Tensor, dline: Tensor, dstates: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Add the gradients that reach the inputs through the final states."""
    if seen.cu_seqlens is None:
        own = grad if seen.marks is None else torch.where(seen.last(seen.marks), grad, 0.0)
        return dline + F.pad(own, (seen.length, 0)), dstates
    at, since = seen.ends()
    inside = (since >= 0)[:, None]
    # [1, dim, sequences * reach]
    own = torch.where(inside, grad, 0.0).transpose(0, 1).reshape(1, grad.shape[1], -1)
    dline = dline.index_add(2, (at + seen.reach).clamp(0, dline.shape[2] - 1).view(-1), own)
    if dstates is not None:
        place = (since + seen.reach).clamp(0, seen.reach - 1)[:, None].expand(grad.shape)
        dstates = dstates.scatter_add(2, place, torch.where(inside, 0.0, grad))
    return dline, dstates


def work(problem: CausalConv1dBackward) -> Work:
    """x and y's gradient read, x's gradient written; the forward again and two more products a tap."""
    size = problem.call.elements * problem.call.dtype.itemsize
    return Work(3 * size, 6 * problem.call.elements * problem.call.width, size)


def family(problem: CausalConv1dBackward) -> tuple[Any, int]:
    """Problems that differ in length only share a family; the size is the length."""
    without_sizes, size = forward_family(problem.call)
    return (without_sizes, problem.grad_strides == problem.call.strides), size


def reference_cost(problem: CausalConv1dBackward, device: Device) -> float | None:
    """About three times the forward reference, by count of its ops."""
    seconds = forward_cost(problem.call, device)
    return None if seconds is None else device.fitted("causal_conv1d_backward.reference").forwards * seconds


CAUSAL_CONV1D_BACKWARD = Op(
    "causal_conv1d_backward",
    reference,
    problem_type=CausalConv1dBackward,
    cost=reference_cost,
    work=work,
    cases="turnout.ops.causal_conv1d_backward.cases",
    family=family,
    autocast="ignore",
)

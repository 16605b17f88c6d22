"""selective_scan: the recurrence of Mamba, a state of a few numbers for every channel that decays as the
input says.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from turnout.ops.causal_conv1d import channel_last, dense
from turnout.routing.choose import plain
from turnout.routing.device import Device
from turnout.routing.op import Op
from turnout.routing.public import public
from turnout.routing.route import Work

CHUNK = 64  # positions whose states the reference holds at a time


class SelectiveScan(NamedTuple):
    """Everything that may change the answer or the speed of one scan."""

    batch: int
    dim: int
    length: int
    states: int
    strides: tuple[tuple[int, ...], ...]  # of x, dt, B, C, z
    dtypes: tuple[torch.dtype | None, ...]  # of x, dt, A, B, C, D, z, dt_bias, initial_state
    dt_softplus: bool
    return_final_state: bool

    @staticmethod
    def of(
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        z: Tensor | None,
        dt_bias: Tensor | None,
        dt_softplus: bool,
        initial_state: Tensor | None,
        return_final_state: bool,
    ) -> SelectiveScan:
        check(x, dt, A, B, C, D, z, dt_bias, initial_state)
        batch, dim, length = x.shape
        return SelectiveScan(
            batch,
            dim,
            length,
            A.shape[1],
            tuple(() if t is None else t.stride() for t in (x, dt, B, C, z)),
            tuple(None if t is None else t.dtype for t in (x, dt, A, B, C, D, z, dt_bias, initial_state)),
            dt_softplus,
            return_final_state,
        )

    @property
    def elements(self) -> int:
        return self.batch * self.dim * self.length


def check(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
) -> None:
    """Raise where shapes, dtypes or devices do not fit together. Looks at no values."""
    if x.dim() != 3:
        raise ValueError(f"x is {list(x.shape)}, it needs to be [batch, channels, length]")
    batch, dim, length = x.shape
    if A.dim() != 2 or A.shape[0] != dim:
        raise ValueError(f"A is {list(A.shape)}, it needs to be [channels, states] with {dim} channels")
    states = A.shape[1]
    check_tensors(
        x.device,
        x=(x, (batch, dim, length)),
        dt=(dt, (batch, dim, length)),
        A=(A, (dim, states)),
        B=(B, (batch, states, length)),
        C=(C, (batch, states, length)),
        D=(D, (dim,)),
        z=(z, (batch, dim, length)),
        dt_bias=(dt_bias, (dim,)),
        initial_state=(initial_state, (batch, dim, states)),
    )


def check_tensors(device: torch.device, **needed: tuple[Tensor | None, tuple[int, ...]]) -> None:
    """Raise unless each tensor has the shape that is given with it, x's device and a floating-point dtype."""
    for name, (tensor, shape) in needed.items():
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} is {list(tensor.shape)}, it needs to be {list(shape)}")
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, it needs x's device {device}")
        if not tensor.is_floating_point():
            raise ValueError(f"{name} is {plain(tensor.dtype)}, it needs a floating-point dtype")


def reference(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    initial_state: Tensor | None,
    return_final_state: bool,
) -> tuple[Tensor, Tensor]:
    """Chunk by chunk; inside a chunk the reach of every state doubles at each step.

    In float32 (float64 for float64), rounded once.
    """
    check(x, dt, A, B, C, D, z, dt_bias, initial_state)
    wide = torch.promote_types(x.dtype, torch.float32)
    (batch, dim, length), states = x.shape, A.shape[1]
    step = dt.to(wide) if dt_bias is None else dt.to(wide) + dt_bias.to(wide)[:, None]
    step = F.softplus(step) if dt_softplus else step
    wide_x = x.to(wide)
    into, out = (
        B.to(wide).transpose(1, 2)[:, None],
        C.to(wide).transpose(1, 2)[:, None],
    )  # [batch, 1, length, states]
    state = x.new_zeros((batch, dim, states), dtype=wide) if initial_state is None else initial_state.to(wide)
    parts = []
    for start in range(0, length, CHUNK):
        here = slice(start, start + CHUNK)
        decay = torch.exp(step[:, :, here, None] * A.to(wide)[:, None])  # [batch, dim, chunk, states]
        held = (step * wide_x)[:, :, here, None] * into[:, :, here]
        reach = 1
        while reach < held.shape[2]:
            held = torch.cat(
                [held[:, :, :reach], held[:, :, reach:] + decay[:, :, reach:] * held[:, :, :-reach]], 2
            )
            decay = torch.cat([decay[:, :, :reach], decay[:, :, reach:] * decay[:, :, :-reach]], 2)
            reach *= 2
        held = held + decay * state[:, :, None]
        state = held[:, :, -1]
        parts.append((held * out[:, :, here]).sum(-1))
    y = torch.cat(parts, 2) if parts else wide_x
    y = y if D is None else y + wide_x * D.to(wide)[:, None]
    y = y if z is None else y * F.silu(z.to(wide))
    final = (
        state.clone(memory_format=torch.contiguous_format)
        if return_final_state
        else torch.empty(0, dtype=wide, device=x.device)
    )
    return dense(y.to(x.dtype), channel_last(x)), final


def work(problem: SelectiveScan) -> Work:
    """x, dt and z read, y written; an exponential and five operations for every state of every position."""
    size = problem.dtypes[0].itemsize  # pyright: ignore[reportOptionalMemberAccess]
    moved = (
        sum(
            kind.itemsize
            for kind in (problem.dtypes[0], problem.dtypes[1], problem.dtypes[6])
            if kind is not None
        )
        + size
    )
    return Work(problem.elements * moved, 6 * problem.elements * problem.states, problem.elements * size)


def reference_cost(problem: SelectiveScan, device: Device) -> float | None:
    """A dozen passes over float32 states, and their launches. On a CPU: measured."""
    fitted = device.fitted("selective_scan.reference")
    if device.type == "cuda":
        moved = device.seconds(problem.elements * problem.states * 4 * 60)
        return (
            None
            if moved is None
            else max(fitted.host * 30 * -(-problem.length // CHUNK), moved / fitted.share)
        )
    if device.type == "cpu":
        return fitted.start + problem.elements * problem.states * fitted.element
    return None


def family(problem: SelectiveScan) -> tuple[tuple, int]:
    """Problems that differ in their length only, and that length."""
    sides = tuple(s and ("last" if s[1] == 1 else "first" if s[2] == 1 else s) for s in problem.strides)
    return (sides, *problem._replace(length=0, strides=())), problem.length


SELECTIVE_SCAN = Op(
    "selective_scan",
    reference,
    problem_type=SelectiveScan,
    cost=reference_cost,
    work=work,
    cases="turnout.ops.selective_scan.cases",
    family=family,
    autocast="ignore",
)


@overload
def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = ...,
    z: Tensor | None = ...,
    dt_bias: Tensor | None = ...,
    dt_softplus: bool = ...,
    initial_state: Tensor | None = ...,
    return_final_state: Literal[False] = ...,
) -> Tensor: ...
@overload
def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = ...,
    z: Tensor | None = ...,
    dt_bias: Tensor | None = ...,
    dt_softplus: bool = ...,
    initial_state: Tensor | None = ...,
    return_final_state: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@public(SELECTIVE_SCAN, of_cases=True)
def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The recurrence of Mamba: `h[l] = exp(dt[l] * A) * h[l-1] + dt[l] * x[l] * B[l]`, `y[l] = C[l] . h[l] +
    D * x[l]`, times `silu(z)`.

    x, dt, z: `[batch, channels, length]`, any strides; A: `[channels, states]`; B, C: `[batch, states,
    length]`; D, dt_bias: `[channels]`. `dt_bias` is added to dt, and `dt_softplus` takes the softplus of
    that. States are held in float32 (float64 for float64). Returns y like x; with `return_final_state` also
    the last h, `[batch, channels, states]`, the next call's `initial_state`.

    >>> import torch, turnout
    >>> x, one = torch.tensor([[[1.0, 2.0, 3.0]]]), torch.ones(1, 1, 3)
    >>> half = torch.full((1, 1), 0.5).log()  # each step halves the state
    >>> turnout.selective_scan(x, one, half, one, one)
    tensor([[[1.0000, 2.5000, 4.2500]]])
    """
    y, final = SELECTIVE_SCAN(x, dt, A, B, C, D, z, dt_bias, dt_softplus, initial_state, return_final_state)
    return (y, final) if return_final_state else y

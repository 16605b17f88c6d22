"""selective_scan_update: a step of decoding with Mamba, the states of each sequence moved on in place."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from turnout.ops.layouts import contiguous_strides, with_strides
from turnout.ops.selective_scan import check_tensors
from turnout.routing.device import Device
from turnout.routing.op import Op
from turnout.routing.public import public
from turnout.routing.route import Work


class SelectiveScanUpdate(NamedTuple):
    """Everything that may change the answer or the speed of one step."""

    batch: int
    dim: int
    states: int
    strides: tuple[tuple[int, ...], ...]  # of x, state, dt, A, B, C, z
    dtypes: tuple[torch.dtype | None, ...]  # of x, state, dt, A, B, C, D, z, dt_bias
    dt_softplus: bool
    log_rates: bool

    @staticmethod
    def of(
        x: Tensor,
        state: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        z: Tensor | None,
        dt_bias: Tensor | None,
        dt_softplus: bool,
        log_rates: bool,
    ) -> SelectiveScanUpdate:
        check(x, state, dt, A, B, C, D, z, dt_bias)
        batch, dim = x.shape
        return SelectiveScanUpdate(
            batch,
            dim,
            A.shape[1],
            tuple(() if t is None else t.stride() for t in (x, state, dt, A, B, C, z)),
            tuple(None if t is None else t.dtype for t in (x, state, dt, A, B, C, D, z, dt_bias)),
            dt_softplus,
            log_rates,
        )


def check(
    x: Tensor,
    state: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
) -> None:
    """Raise where shapes, dtypes or devices do not fit together. Looks at no values."""
    if x.dim() != 2:
        raise ValueError(f"x is {list(x.shape)}, it needs to be [batch, channels]")
    batch, dim = x.shape
    if A.dim() != 2 or A.shape[0] != dim:
        raise ValueError(f"A is {list(A.shape)}, it needs to be [channels, states] with {dim} channels")
    states = A.shape[1]
    check_tensors(
        x.device,
        x=(x, (batch, dim)),
        state=(state, (batch, dim, states)),
        dt=(dt, (batch, dim)),
        A=(A, (dim, states)),
        B=(B, (batch, states)),
        C=(C, (batch, states)),
        D=(D, (dim,)),
        z=(z, (batch, dim)),
        dt_bias=(dt_bias, (dim,)),
    )


def reference(
    x: Tensor,
    state: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    log_rates: bool,
) -> Tensor:
    """In float32 (float64 for float64), rounded once."""
    check(x, state, dt, A, B, C, D, z, dt_bias)
    wide = torch.promote_types(x.dtype, torch.float32)
    rates, inputs = A.to(wide), x.to(wide)
    if log_rates:
        rates = -torch.exp(rates)
    step = dt.to(wide) if dt_bias is None else dt.to(wide) + dt_bias.to(wide)
    if dt_softplus:
        step = F.softplus(step)
    decay = torch.exp(step[..., None] * rates)
    moved = torch.addcmul(state.to(wide) * decay, (step * inputs)[..., None], B.to(wide)[:, None])
    y = (moved * C.to(wide)[:, None]).sum(-1)
    y = y if D is None else torch.addcmul(y, inputs, D.to(wide))
    y = y if z is None else y * F.silu(z.to(wide))
    y = with_strides(y.to(x.dtype), contiguous_strides(x.shape))
    state.copy_(moved)  # last: what is read may overlap the state
    return y


def work(problem: SelectiveScanUpdate) -> Work:
    """The states read and written, and little else."""
    x, state, dt, rates, _, _, _, z, _ = (0 if kind is None else kind.itemsize for kind in problem.dtypes)
    channels = problem.batch * problem.dim
    written = channels * (x + problem.states * state)
    read = channels * (x + dt + z + problem.states * state) + problem.dim * problem.states * rates
    return Work(read + written, 6 * channels * problem.states, written)


def reference_cost(problem: SelectiveScanUpdate, device: Device) -> float | None:
    """Eighteen small ops, six of which pass over the states in float32; measured."""
    fitted = device.fitted("selective_scan_update.reference")
    if device.type == "cuda":
        moved = device.seconds(problem.batch * problem.dim * problem.states * 4 * 14)
        return None if moved is None else max(fitted.host * 18, moved / fitted.share)
    if device.type == "cpu":
        return fitted.start + problem.batch * problem.dim * problem.states * fitted.element
    return None


SELECTIVE_SCAN_UPDATE = Op(
    "selective_scan_update",
    reference,
    problem_type=SelectiveScanUpdate,
    cost=reference_cost,
    work=work,
    cases="turnout.ops.selective_scan_update.cases",
    autocast="ignore",
    mutates=("state",),
)


@public(SELECTIVE_SCAN_UPDATE, of_cases=True)
def selective_scan_update(
    x: Tensor,
    state: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    log_rates: bool = False,
) -> Tensor:
    """One more position of each sequence: what `selective_scan` would give there. `state` is updated in
    place.

    x, dt, z: `[batch, channels]`, any strides; state: `[batch, channels, states]`; A: `[channels, states]`;
    B, C: `[batch, states]`; D, dt_bias: `[channels]`. `dt_bias` is added to dt, and `dt_softplus` takes the
    softplus of that. With `log_rates` A is what models keep, the logarithm of `-A`. Sums are in float32
    (float64 for float64). Returns y like x, contiguous. The state may
    overlap what is read: all of that is read first. Where gradients are wanted, the reference runs, and
    autograd's rules for in-place operations hold.

    >>> import torch
    >>> from turnout.ops.selective_scan_update import selective_scan_update
    >>> one, state = torch.ones(1, 1), torch.full((1, 1, 1), 8.0)
    >>> half = torch.full((1, 1), 0.5).log()  # each step halves the state
    >>> selective_scan_update(3 * one, state, one, half, one, one)
    tensor([[7.]])
    >>> state
    tensor([[[7.]]])
    """
    return SELECTIVE_SCAN_UPDATE(x, state, dt, A, B, C, D, z, dt_bias, dt_softplus, log_rates)

"""causal_conv1d: the short depthwise convolution of Mamba, Mamba-2, Gated DeltaNet and their kin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from turnout.ops.causal_conv1d.checks import check, check_ends
from turnout.ops.causal_conv1d.launches import dense_strides
from turnout.routing.device import Device
from turnout.routing.op import Op
from turnout.routing.public import public
from turnout.routing.route import Work


class CausalConv1d(NamedTuple):
    """Everything that may change the answer or the speed of one causal convolution."""

    batch: int
    dim: int
    length: int
    width: int
    strides: tuple[int, ...]
    dtype: torch.dtype
    weight_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    activation: str | None
    seq_idx: bool
    sequences: int  # packed by cu_seqlens; 0 where there is none
    initial_states: bool
    return_final_states: bool

    @staticmethod
    def of(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str | None,
        seq_idx: Tensor | None,
        cu_seqlens: Tensor | None,
        initial_states: Tensor | None,
        return_final_states: bool,
    ) -> CausalConv1d:
        check(x, weight, bias, activation, seq_idx, cu_seqlens, initial_states)
        batch, dim, length = x.shape
        return CausalConv1d(
            batch,
            dim,
            length,
            weight.shape[1],
            x.stride(),
            x.dtype,
            weight.dtype,
            None if bias is None else bias.dtype,
            activation,
            seq_idx is not None,
            0 if cu_seqlens is None else cu_seqlens.shape[0] - 1,
            initial_states is not None,
            return_final_states,
        )

    @property
    def layout(self) -> Literal["channel-last", "channel-first", "strided"]:
        if self.strides[1] == 1 and self.dim > 1:
            return "channel-last"
        return "channel-first" if self.strides[2] == 1 or self.length == 1 else "strided"

    @property
    def elements(self) -> int:
        return self.batch * self.dim * self.length


def channel_last(x: Tensor) -> bool:
    """Whether the output keeps channels side by side: it has x's own layout, without gaps."""
    return x.stride(1) == 1 and x.shape[1] > 1


def fresh(t: Tensor) -> Tensor:
    """Copy a tensor unless it is contiguous with exactly the strides of a fresh one."""
    return t.clone(memory_format=torch.contiguous_format)


def dense(y: Tensor, last: bool) -> Tensor:
    """A copy without gaps, in one of two layouts."""
    return y.new_empty_strided(y.shape, dense_strides(y.shape, last)).copy_(y)


class Seen(NamedTuple):
    """The inputs of one call as its outputs use them: all positions in float32 (float64 for float64), and the
    sequence of each position.
    """

    line: Tensor  # [batch, dim, reach + length], x after `reach` positions of initial states or zeros
    marks: Tensor | None  # [batch, reach + length], the sequence of each; None where nothing is packed
    cu_seqlens: Tensor | None
    states: Tensor | None  # [sequences, dim, reach]
    reach: int  # width - 1
    length: int

    @staticmethod
    def of(
        x: Tensor,
        weight: Tensor,
        seq_idx: Tensor | None,
        cu_seqlens: Tensor | None,
        initial_states: Tensor | None,
    ) -> Seen:
        (batch, dim, length), reach = x.shape, weight.shape[1] - 1
        wide = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
        states = None if initial_states is None else initial_states.to(wide)
        before = (
            torch.zeros(batch, dim, reach, dtype=wide, device=x.device)
            if states is None or cu_seqlens is not None
            else states
        )
        marks = _marks(seq_idx, cu_seqlens, x, reach, states is not None)
        return Seen(torch.cat([before, x.to(wide)], 2), marks, cu_seqlens, states, reach, length)

    def own(self, k: int) -> Tensor | None:
        """Whether tap k falls on the output's own sequence, [batch, 1, length]; None if it always does."""
        return (
            None
            if self.marks is None
            else (self.marks[:, k : k + self.length] == self.marks[:, self.reach :])[:, None]
        )

    def tap(self, k: int) -> Tensor:
        """The values that tap k multiplies, [batch, dim, length].

        Values of other sequences are replaced, not multiplied by zero, so that their NaN does not spread.
        """
        tap, own = self.line[..., k : k + self.length], self.own(k)
        if own is None:
            return tap
        if self.cu_seqlens is None or self.states is None or self.reach == 0:
            return torch.where(own, tap, 0.0)
        sequence, place = self.place(k)
        return torch.where(own, tap, self.states[sequence, :, place].t())

    def place(self, k: int) -> tuple[Tensor, Tensor]:
        """Where tap k reaches over the start of a packed sequence: the sequence and the place in its state.

        Both are [length].
        """
        assert self.marks is not None
        assert self.cu_seqlens is not None
        sequence = self.marks[0, self.reach :]
        since = torch.arange(self.length, device=sequence.device) - self.cu_seqlens[sequence]
        return sequence, (since + k).clamp(0, self.reach - 1)

    def total(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The values before the activation, [batch, dim, length]."""
        taps = weight.to(self.line.dtype)
        total = 0.0 if bias is None else bias.to(self.line.dtype)[:, None]
        for k in range(self.reach + 1):
            total = total + self.tap(k) * taps[:, k, None]
        return total  # pyright: ignore[reportReturnType]

    def ends(self) -> tuple[Tensor, Tensor]:
        """The last `reach` positions of each packed sequence, [sequences, reach], in x and in the sequence.

        The second is negative where a sequence is shorter: `reach` more is the place in the initial state.
        """
        assert self.cu_seqlens is not None
        at = self.cu_seqlens[1:, None] - self.reach + torch.arange(self.reach, device=self.cu_seqlens.device)
        return at, at - self.cu_seqlens[:-1, None]

    def final(self) -> Tensor:
        """The final states [sequences, dim, reach]: the last positions of each sequence.

        Where a sequence is shorter than `reach`, its initial state comes before them.
        """
        if self.cu_seqlens is None:
            final = self.line[..., self.length :]
            return final if self.marks is None else torch.where(self.last(self.marks), final, 0.0)
        (_, dim, _), sequences = self.line.shape, self.cu_seqlens.shape[0] - 1
        if self.reach == 0:
            return self.line.new_zeros(sequences, dim, 0)
        at, since = self.ends()
        inside = self.line[0, :, (at + self.reach).clamp(0, self.line.shape[2] - 1)].transpose(0, 1)
        if self.states is None:
            return torch.where((since >= 0)[:, None], inside, 0.0)
        place = (since + self.reach).clamp(0, self.reach - 1)[:, None].expand(sequences, dim, self.reach)
        return torch.where((since >= 0)[:, None], inside, self.states.gather(2, place))

    def last(self, marks: Tensor) -> Tensor:
        """Whether each of the last positions belongs to the sequence of the very last, [batch, 1, reach]."""
        return (marks[:, self.length :] == marks[:, -1:])[:, None]


def _marks(
    seq_idx: Tensor | None, cu_seqlens: Tensor | None, x: Tensor, reach: int, states: bool
) -> Tensor | None:
    batch, _, length = x.shape
    if cu_seqlens is not None:
        here = torch.arange(length, device=x.device, dtype=cu_seqlens.dtype)
        own = torch.searchsorted(cu_seqlens[1:].contiguous(), here, right=True).clamp(
            max=cu_seqlens.shape[0] - 2
        )[None]
    elif seq_idx is not None and length > 0:
        own = seq_idx
        if states:  # initial states belong to the sequence of the first position
            return torch.cat([own[:, :1].expand(batch, reach), own], 1)
    else:
        return None
    return torch.cat([own.new_full((batch, reach), -1), own], 1)


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
    initial_states: Tensor | None,
    return_final_states: bool,
) -> tuple[Tensor, Tensor]:
    """Add up one shifted product per tap in float32 (float64 for float64), and round once.

    Final states are empty where not asked for.
    """
    check(x, weight, bias, activation, seq_idx, cu_seqlens, initial_states)
    seen = Seen.of(x, weight, seq_idx, cu_seqlens, initial_states)
    y = seen.total(weight, bias)
    if activation == "silu":
        y = F.silu(y)
    if seq_idx is not None:
        y = torch.where(seq_idx[:, None] < 0, 0.0, y)
    y = dense(y.to(x.dtype), channel_last(x))
    if not return_final_states:
        return y, torch.empty(0, dtype=x.dtype, device=x.device)
    return y, fresh(seen.final().to(x.dtype))


def vjp(inputs: tuple, grads: tuple) -> Sequence[Tensor | None]:
    """A gradient for each input of the reference, by the op that computes them all in one pass."""
    from turnout.ops.causal_conv1d_backward import CAUSAL_CONV1D_BACKWARD

    x, weight, bias, *_, cu_seqlens, initial_states, return_final_states = inputs
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    grad = torch.zeros_like(x) if grads[0] is None else grads[0]
    grad_final = grads[1]
    if grad_final is None:
        grad_final = x.new_zeros((sequences, x.shape[1], weight.shape[1] - 1) if return_final_states else 0)
    # While a graph is traced the tensors stand for others, and the graph gets the op itself.
    run = (
        CAUSAL_CONV1D_BACKWARD
        if type(x) in (Tensor, torch.nn.Parameter)
        else CAUSAL_CONV1D_BACKWARD.when_compiled
    )
    dx, dweight, dbias, dinitial = run(grad, grad_final, *inputs)
    return (
        dx,
        dweight,
        None if bias is None else dbias,
        None,
        None,
        None,
        None if initial_states is None else dinitial,
        None,
    )


def work(problem: CausalConv1d) -> Work:
    """x read once, y written once, a multiplication and an addition a tap.

    Filters, marks and states are small beside them.
    """
    size = problem.elements * problem.dtype.itemsize
    return Work(2 * size, 2 * problem.elements * problem.width, size)


def family(problem: CausalConv1d) -> tuple[tuple, int]:
    """Problems that differ in length only share a family; the size is the length."""
    strides = problem.strides if problem.layout == "strided" else ()
    without_sizes = problem._replace(length=0, strides=strides, sequences=min(problem.sequences, 1))
    return (problem.layout, *without_sizes), problem.length


def reference_cost(problem: CausalConv1d, device: Device) -> float | None:
    """Every tap is a product and a sum of its own, in float32."""
    fitted = device.fitted("causal_conv1d.reference")
    if device.type == "cuda":
        moved = device.seconds(problem.elements * (20 * problem.width + 24))
        return None if moved is None else max(fitted.host * (2 * problem.width + 10), moved / fitted.share)
    if device.type == "cpu":
        per_element = fitted.element_tap * problem.width + fitted.element
        return fitted.start + fitted.start_tap * problem.width + problem.elements * per_element
    return None


CAUSAL_CONV1D = Op(
    "causal_conv1d",
    reference,
    problem_type=CausalConv1d,
    cost=reference_cost,
    work=work,
    cases="turnout.ops.causal_conv1d.cases",
    family=family,
    autocast="ignore",
    vjp=vjp,
)


@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = ...,
    *,
    activation: str | None = ...,
    seq_idx: Tensor | None = ...,
    cu_seqlens: Tensor | None = ...,
    initial_states: Tensor | None = ...,
    return_final_states: Literal[False] = ...,
) -> Tensor: ...
@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = ...,
    *,
    activation: str | None = ...,
    seq_idx: Tensor | None = ...,
    cu_seqlens: Tensor | None = ...,
    initial_states: Tensor | None = ...,
    return_final_states: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@public(CAUSAL_CONV1D, of_cases=True)
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Depthwise causal convolution: `y[b, d, l] = act(bias[d] + sum_k weight[d, k] * x[b, d, l - (W-1) +
    k])`.

    x: `[B, D, L]` with any strides; weight: `[D, W]` and bias: `[D]`, in x's dtype or another; activation:
    None or `"silu"`. Sums are taken in float32 (float64 for float64). Returns y like x, dense, channels side
    by side where x has them so.

    Several sequences in a row: `seq_idx` `[B, L]` numbers them, a position sees only its own, a negative
    number is padding (output 0). Or `cu_seqlens` `[N + 1]` gives their ends, from 0 to L; x then has B = 1.
    On a GPU its values are read back once per tensor to be checked, never while a graph is captured.

    `initial_states` `[N, D, W-1]` are the positions before each sequence, zeros if not given; with
    `return_final_states` the last W-1 positions, `[N, D, W-1]`, are returned too: they are the next chunk's
    initial states. N is B unless `cu_seqlens` says otherwise; with `seq_idx` the states belong to the
    sequences of the first and of the last position.

    >>> import torch, turnout
    >>> x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    >>> turnout.causal_conv1d(x, torch.tensor([[10.0, 1.0]]))
    tensor([[[ 1., 12., 23., 34.]]])
    >>> y, final = turnout.causal_conv1d(x, torch.tensor([[10.0, 1.0]]), return_final_states=True)
    >>> turnout.causal_conv1d(x, torch.tensor([[10.0, 1.0]]), initial_states=final)
    tensor([[[41., 12., 23., 34.]]])
    """
    if cu_seqlens is not None:
        check_ends(cu_seqlens, x)
    y, final = CAUSAL_CONV1D(
        x, weight, bias, activation, seq_idx, cu_seqlens, initial_states, return_final_states
    )
    return (y, final) if return_final_states else y

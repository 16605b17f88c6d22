"""norm_rope: what diffusion transformers do to q and k before attention, in one pass: RMS norm, rotary
embedding, permute, join.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from turnout.ops.norm_rope.checks import Call, Streams, check, table_kind
from turnout.routing.device import Device
from turnout.routing.mistakes import UNCLEAR, raise_clearer
from turnout.routing.op import Op
from turnout.routing.public import public
from turnout.routing.route import Work


class NormRope(NamedTuple):
    """Everything that may change the answer or the speed of one call."""

    batch: int
    lengths: tuple[int, ...]  # tokens of each stream
    heads: tuple[int, ...]  # of q, and of k where it comes along
    dim: int
    rotary: int  # how many of `dim` columns rotate
    strides: tuple[tuple[int, ...], ...]  # of q and its second stream, then of k
    dtype: torch.dtype
    weight_dtype: torch.dtype | None
    table: Literal["none", "pair", "element", "complex"]
    table_shape: tuple[int, ...]
    table_strides: tuple[tuple[int, ...], ...]  # of cos and of sin
    table_dtype: torch.dtype | None
    norm: str
    pairing: str
    out_layout: str
    round_before_weight: bool

    @staticmethod
    def of(*args: Any) -> NormRope:
        call = Call(*args)
        check(call)
        weights = [w for w in call.weights if w is not None]
        tables = [t for t in (call.cos, call.sin) if t is not None]
        return NormRope(
            call.q.shape[0],
            tuple(x.shape[1] for x in (call.q, call.q2) if x is not None),
            tuple(x.shape[2] for x in (call.q, call.k) if x is not None),
            call.q.shape[3],
            call.rotary,
            tuple(x.stride() for x in call.streams if x is not None),
            call.q.dtype,
            weights[0].dtype if weights else None,
            table_kind(call.cos, call.rotary),
            () if call.cos is None else tuple(call.cos.shape),
            tuple(t.stride() for t in tables),
            None if call.cos is None else call.cos.dtype,
            call.norm,
            call.pairing,
            call.out_layout,
            call.round_before_weight,
        )

    @property
    def tokens(self) -> int:
        return self.batch * sum(self.lengths)

    @property
    def elements(self) -> int:
        return self.tokens * sum(self.heads) * self.dim


def normed(x: Tensor, weight: Tensor | None, eps: float, norm: str, round_before_weight: bool) -> Tensor:
    """RMS norm of x [B, S, H, D] with the roundings of `torch.nn.RMSNorm`, or of diffusers' own module, which
    rounds before the weight.
    """
    if norm == "none":
        return x
    rows = x.flatten(2) if norm == "all" else x
    if weight is None or (weight.dtype == x.dtype and not round_before_weight):
        return F.rms_norm(rows, rows.shape[-1:], weight, eps).view(x.shape)
    wide = rows.to(torch.promote_types(x.dtype, torch.float32))
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if round_before_weight:
        scaled = scaled.to(x.dtype)
    return (scaled * weight).to(x.dtype).view(x.shape)


def table_rows(table: Tensor) -> Tensor:
    """cos or sin as [B or 1, S, H or 1, width]."""
    if table.dim() == 2:
        return table[None, :, None]
    return table[:, :, None] if table.dim() == 3 else table


def rotated(x: Tensor, cos: Tensor | None, sin: Tensor | None, rotary: int, pairing: str) -> Tensor:
    """x [B, S, H, D] with its first `rotary` columns rotated in float32 and rounded once."""
    if cos is None:
        return x
    turning, rest = x[..., :rotary], x[..., rotary:]
    wide = turning.to(torch.promote_types(x.dtype, torch.float32))
    first, second = wide.unflatten(-1, (-1, 2)).unbind(-1) if pairing == "interleaved" else wide.chunk(2, -1)
    cos = table_rows(cos)
    if sin is None:
        turned = torch.view_as_real(torch.complex(first, second) * cos)  # [..., rotary / 2, 2]
        out = turned.flatten(-2) if pairing == "interleaved" else turned.transpose(-1, -2).flatten(-2)
    else:
        sin = table_rows(sin)
        if cos.shape[-1] != rotary:
            cos, sin = (
                t.repeat_interleave(2, -1) if pairing == "interleaved" else torch.cat([t, t], -1)
                for t in (cos, sin)
            )
        across = (
            torch.stack([-second, first], -1).flatten(-2)
            if pairing == "interleaved"
            else torch.cat([-second, first], -1)
        )
        out = wide * cos + across * sin
    out = out.to(x.dtype)
    return torch.cat([out, rest], -1) if rotary < x.shape[-1] else out


def reference(
    q: Tensor,
    q2: Tensor | None,
    k: Tensor | None,
    k2: Tensor | None,
    q_weight: Tensor | None,
    q2_weight: Tensor | None,
    k_weight: Tensor | None,
    k2_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    eps: float,
    norm: str,
    rotary: int,
    pairing: str,
    out_layout: str,
    round_before_weight: bool,
) -> tuple[Tensor, Tensor]:
    """The chain of diffusers: norm, rounded to x's dtype; rotation in float32, rounded again; permute.

    Without k its output is empty.
    """
    scales = (q_weight, q2_weight, k_weight, k2_weight)
    options = (eps, norm, rotary, pairing, out_layout, round_before_weight)
    call = Call(q, q2, k, k2, *scales, cos, sin, *options)
    check(call)

    def chain(streams: Streams) -> Tensor:
        y = rotated(joined(streams, call), cos, sin, rotary, pairing)
        return (y.transpose(1, 2) if out_layout == "bhsd" else y).clone(memory_format=torch.contiguous_format)

    outputs = [chain(streams) for streams in call.of_q_and_k]
    return outputs[0], outputs[1] if len(outputs) == 2 else q.new_empty(0)


def joined(streams: Streams, call: Call) -> Tensor:
    """Both streams `[B, S, H, D]` with their norms, one behind the other."""
    (x, x2, weight, weight2), rounding = streams, call.round_before_weight
    y = normed(x, weight, call.eps, call.norm, rounding)
    return y if x2 is None else torch.cat([y, normed(x2, weight2, call.eps, call.norm, rounding)], 1)


def work(problem: NormRope) -> Work:
    """Every element read once and written once, and the tables; a norm is 4 operations an element, a rotation
    3.
    """
    size = problem.elements * problem.dtype.itemsize
    width = {"none": 0, "pair": problem.rotary, "complex": problem.rotary, "element": 2 * problem.rotary}[
        problem.table
    ]
    heads = problem.table_shape[2] if len(problem.table_shape) == 4 else 1
    batch = problem.table_shape[0] if len(problem.table_shape) > 2 else 1
    tables = batch * sum(problem.lengths) * heads * width * 4 if problem.table != "none" else 0
    return Work(2 * size + tables, 7 * problem.elements, size)


def family(problem: NormRope) -> tuple[tuple, int]:
    """Problems that differ in their tokens only, and the number of those.

    Strides between tokens and heads tell layouts apart.
    """
    last = len(problem.lengths) - 1
    shares = problem.lengths[0] * 8 // max(1, sum(problem.lengths)) if last else 0
    steps = tuple(strides[1:] for strides in problem.strides)
    same = problem._replace(
        batch=min(problem.batch, 2), lengths=(shares, last), strides=steps, table_shape=(), table_strides=()
    )
    return tuple(same), problem.tokens


def reference_cost(problem: NormRope, device: Device) -> float | None:
    """A dozen passes over float32 for a rotation, a permutation at a third of the bandwidth: measured on an
    H200 (S 4608 and 32760, H 24) and on two cores (1 x 1024 x 24 x 128)."""
    tensors, streams, norm, turn = (
        len(problem.heads),
        len(problem.lengths),
        problem.norm != "none",
        problem.table != "none",
    )
    fitted = device.fitted("norm_rope.reference")
    if device.type == "cuda":
        passes = fitted.passes + fitted.passes_norm * norm + fitted.passes_rotation * turn
        passes += fitted.passes_stream * (streams - 1)
        moved = device.seconds(problem.elements * problem.dtype.itemsize * passes)
        calls = 1 + norm * streams + 10 * turn + (streams - 1)
        return None if moved is None else max(fitted.host * tensors * calls, moved)
    if device.type == "cpu":
        each = fitted.element + fitted.element_norm * norm + fitted.element_rotation * turn
        return tensors * fitted.start * (1 + norm + 6 * turn) + problem.elements * each
    return None


Stream = Tensor | Sequence[Tensor]
Weight = Tensor | Sequence[Tensor] | None


def _two(x: Stream | None, name: str) -> tuple[Tensor | None, Tensor | None]:
    if x is None or isinstance(x, Tensor):
        return x, None
    if not isinstance(x, (list, tuple)):
        raise TypeError(f"{name} is no tensor and no list of tensors")
    if not 1 <= len(x) <= 2:
        raise ValueError(f"{name} has {len(x)} streams, it needs one or two: join others with torch.cat")
    return x[0], x[1] if len(x) == 2 else None


def arguments(
    q: Stream,
    k: Stream | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    q_weight: Weight = None,
    k_weight: Weight = None,
    norm: bool | None = None,
    eps: float = 1e-6,
    across_heads: bool = False,
    pairing: str = "interleaved",
    rotary_dim: int | None = None,
    out_layout: str = "bhsd",
    round_before_weight: bool = False,
) -> tuple:
    """The reference's arguments of a public call."""
    try:
        (first, second), keys = _two(q, "q"), _two(k, "k")
        scales = (*_two(q_weight, "q_weight"), *_two(k_weight, "k_weight"))
        assert first is not None
        kind = (
            "none"
            if not (norm if norm is not None else scales[0] is not None)
            else "all"
            if across_heads
            else "head"
        )
        rotary = 0
        if cos is not None:
            dim, width = first.shape[-1], cos.shape[-1] * (2 if cos.is_complex() else 1)
            rotary = rotary_dim or (dim if width in (dim, dim // 2) else width)
    except UNCLEAR as failure:
        given = {"q": q, "k": k, "cos": cos, "sin": sin, "q_weight": q_weight, "k_weight": k_weight}
        if k is None:
            given |= {"x": q, "weight": q_weight, "k": None, "k_weight": None}
        function = norm_rope if k is None else norm_rope_qk
        raise_clearer(function.__name__, function, given.items(), failure)
        raise
    return (
        first,
        second,
        *keys,
        *scales,
        cos,
        sin,
        eps,
        kind,
        rotary,
        pairing,
        out_layout,
        round_before_weight,
    )


NORM_ROPE = Op(
    "norm_rope",
    reference,
    problem_type=NormRope,
    cost=reference_cost,
    work=work,
    cases="turnout.ops.norm_rope.cases",
    family=family,
    autocast="ignore",
)


@public(NORM_ROPE)
def norm_rope(
    x: Stream,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    weight: Weight = None,
    norm: bool | None = None,
    eps: float = 1e-6,
    across_heads: bool = False,
    pairing: str = "interleaved",
    rotary_dim: int | None = None,
    out_layout: str = "bhsd",
    round_before_weight: bool = False,
) -> Tensor:
    """RMS norm, rotary embedding and permutation in one pass: `[B, S, H, D]` in, `[B, H, S, D]` (or `"bshd"`:
    `[B, S, H, D]`) out.

    x: `[B, S, H, D]`, any strides, such as a slice of a packed projection; or two such streams, which are
    joined along S (text, then image), with a weight for each. Every step is optional: without a weight there
    is no norm (unless `norm=True`), without `cos` no rotation, and what is left is the permutation that v
    needs.

    weight: `[D]`, or `[H * D]` with `across_heads`, which normalises a token over all heads (Wan, LTX).
    Roundings are those of `torch.nn.RMSNorm`; `round_before_weight` is for diffusers' own RMSNorm, which
    rounds once more (Qwen-Image, Cosmos).

    cos, sin: `[S, width]`, `[B, S, width]` or `[B, S, H, width]`, where B and H may be 1. A width of D holds
    a value for each element, D/2 one for each pair; a narrower one rotates the first `width` columns only
    (`rotary_dim` says otherwise: it may be twice the width). Or cos is complex, `[..., D/2]`, and sin None.
    Pairs are neighbours (`"interleaved"`) or half the width apart (`"half"`). The rotation is computed in
    float32 and rounded to x's dtype.

    >>> import torch, turnout
    >>> x = torch.tensor([[[[3.0, 4.0]]]])  # one token, one head, D = 2
    >>> quarter_turn = torch.tensor([[0.0]]), torch.tensor([[1.0]])
    >>> turnout.norm_rope(x, *quarter_turn)
    tensor([[[[-4.,  3.]]]])
    >>> turnout.norm_rope(x, weight=torch.ones(2), eps=0.0).square().mean()
    tensor(1.)
    """
    return NORM_ROPE(
        *arguments(
            x,
            None,
            cos,
            sin,
            q_weight=weight,
            norm=norm,
            eps=eps,
            across_heads=across_heads,
            pairing=pairing,
            rotary_dim=rotary_dim,
            out_layout=out_layout,
            round_before_weight=round_before_weight,
        )
    )[0]


@public(NORM_ROPE)
def norm_rope_qk(
    q: Stream,
    k: Stream,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    q_weight: Weight = None,
    k_weight: Weight = None,
    norm: bool | None = None,
    eps: float = 1e-6,
    across_heads: bool = False,
    pairing: str = "interleaved",
    rotary_dim: int | None = None,
    out_layout: str = "bhsd",
    round_before_weight: bool = False,
) -> tuple[Tensor, Tensor]:
    """`norm_rope` of q and of k in one launch: same tokens, same tables, weights of their own. k may have
    another number of heads.

    >>> import torch, turnout
    >>> q, k = torch.randn(1, 5, 4, 8), torch.randn(1, 5, 2, 8)
    >>> angles = torch.randn(5, 4)
    >>> ones = torch.ones(8)
    >>> a, b = turnout.norm_rope_qk(q, k, angles.cos(), angles.sin(), q_weight=ones, k_weight=ones)
    >>> a.shape, b.shape
    (torch.Size([1, 4, 5, 8]), torch.Size([1, 2, 5, 8]))
    """
    if k is None:
        raise TypeError(
            "norm_rope_qk: k is None, it needs to be a Tensor or a list of Tensors; norm_rope takes q alone"
        )
    return NORM_ROPE(
        *arguments(
            q,
            k,
            cos,
            sin,
            q_weight=q_weight,
            k_weight=k_weight,
            norm=norm,
            eps=eps,
            across_heads=across_heads,
            pairing=pairing,
            rotary_dim=rotary_dim,
            out_layout=out_layout,
            round_before_weight=round_before_weight,
        )
    )

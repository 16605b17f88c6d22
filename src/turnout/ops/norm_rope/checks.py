"""What a call of norm_rope needs, said before any launch. Looks at shapes and types, never at values."""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor


def table_kind(cos: Tensor | None, rotary: int) -> Literal["none", "pair", "element", "complex"]:
    """How a table of cosines is to be read: a value for each pair, for each element, or complex numbers for
    each pair.
    """
    if cos is None:
        return "none"
    if cos.is_complex():
        return "complex"
    return "element" if cos.shape[-1] == rotary else "pair"


class Streams(NamedTuple):
    """q or k: a stream, one that is joined to it, and their weights."""

    x: Tensor
    x2: Tensor | None
    weight: Tensor | None
    weight2: Tensor | None


class Call(NamedTuple):
    """The arguments of the reference."""

    q: Tensor  # [B, S, H, D]
    q2: Tensor | None  # [B, S2, H, D], joined to q along S
    k: Tensor | None  # [B, S, heads of k, D]
    k2: Tensor | None
    q_weight: Tensor | None  # [D], or [H * D] where `norm` is "all"
    q2_weight: Tensor | None
    k_weight: Tensor | None
    k2_weight: Tensor | None
    cos: Tensor | None  # [S + S2, width], [B, S + S2, width] or [B, S + S2, H, width]
    sin: Tensor | None
    eps: float
    norm: str  # "none", "head" or "all"
    rotary: int  # columns that rotate
    pairing: str  # "interleaved" or "half"
    out_layout: str  # "bhsd" or "bshd"
    round_before_weight: bool

    @property
    def streams(self) -> tuple[Tensor | None, ...]:
        return self.q, self.q2, self.k, self.k2

    @property
    def weights(self) -> tuple[Tensor | None, ...]:
        return self.q_weight, self.q2_weight, self.k_weight, self.k2_weight

    @property
    def of_q_and_k(self) -> list[Streams]:
        """Those of q, then those of k if there is one."""
        q = Streams(self.q, self.q2, self.q_weight, self.q2_weight)
        return [q] if self.k is None else [q, Streams(self.k, self.k2, self.k_weight, self.k2_weight)]


def check(call: Call) -> None:
    q, q2, k, k2 = call.q, call.q2, call.k, call.k2
    for name, value, allowed in (
        ("norm", call.norm, ("none", "head", "all")),
        ("pairing", call.pairing, ("interleaved", "half")),
        ("out_layout", call.out_layout, ("bhsd", "bshd")),
    ):
        if value not in allowed:
            raise ValueError(f"{name} {value!r}, it needs to be one of {', '.join(allowed)}")
    check_streams(q, q2, k, k2)
    check_weights(q, q2, k, call.weights, call.norm)
    if call.cos is not None:
        check_tables(q, q2, k, call.cos, call.sin, call.rotary)
    elif call.sin is not None or call.rotary:
        raise ValueError("sin or rotary_dim without cos, a rotation needs both tables or a complex one")


def check_streams(q: Tensor, q2: Tensor | None, k: Tensor | None, k2: Tensor | None) -> None:
    if q.dim() != 4 or not q.is_floating_point():
        raise ValueError(
            f"x is {q.dtype} {list(q.shape)}, it needs to be floating-point [batch, tokens, heads, dim]"
        )
    if (k2 is None) != (k is None or q2 is None):
        raise ValueError("q and k need the same number of streams")
    batch, tokens, heads, dim = q.shape
    check_shape("the second stream", q2, q, (batch, None, heads, dim))
    check_shape("k", k, q, (batch, tokens, None, dim))
    if k is not None and q2 is not None:
        check_shape("the second stream of k", k2, q, (batch, q2.shape[1], k.shape[2], dim))


def check_shape(name: str, x: Tensor | None, q: Tensor, wanted: tuple[int | None, ...]) -> None:
    if x is None:
        return
    if x.dim() != 4 or any(size is not None and size != n for size, n in zip(wanted, x.shape, strict=True)):
        needed = ", ".join("any" if size is None else str(size) for size in wanted)
        raise ValueError(f"{name} is {list(x.shape)}, it needs to be [{needed}] to go with {list(q.shape)}")
    if x.dtype != q.dtype or x.device != q.device:
        raise ValueError(f"{name} is {x.dtype} on {x.device}, it needs {q.dtype} on {q.device}")


def check_weights(
    q: Tensor, q2: Tensor | None, k: Tensor | None, weights: tuple[Tensor | None, ...], norm: str
) -> None:
    are_given = [w is not None for w in weights]
    if norm == "none" and any(are_given):
        raise ValueError("a weight without a norm, leave one of them out")
    wanted = [True, q2 is not None, k is not None, q2 is not None and k is not None]
    if any(are_given) and are_given != wanted:
        raise ValueError(
            f"weights are given for {sum(are_given)} of {sum(wanted)} tensors, "
            "each stream of q and k needs its own"
        )
    if len({w.dtype for w in weights if w is not None}) > 1:
        raise ValueError(
            f"weights are {', '.join(str(w.dtype) for w in weights if w is not None)}, they need one dtype"
        )
    for i, weight in enumerate(weights):
        x = k if i >= 2 and k is not None else q
        size = x.shape[2] * x.shape[3] if norm == "all" else x.shape[3]
        if weight is None:
            continue
        if tuple(weight.shape) != (size,) or not weight.is_floating_point() or weight.device != q.device:
            raise ValueError(
                f"a weight is {weight.dtype} {list(weight.shape)} on {weight.device}, "
                f"it needs to be [{size}] on {q.device}"
            )


def check_tables(
    q: Tensor, q2: Tensor | None, k: Tensor | None, cos: Tensor, sin: Tensor | None, rotary: int
) -> None:
    batch, tokens, heads, dim = q.shape
    tokens += 0 if q2 is None else q2.shape[1]
    if cos.is_complex() != (sin is None):
        raise ValueError("cos is complex and sin is None, or both are real: one of the two")
    if sin is not None and (sin.shape != cos.shape or sin.dtype != cos.dtype):
        raise ValueError(
            f"sin is {sin.dtype} {list(sin.shape)}, it needs to be like cos: {cos.dtype} {list(cos.shape)}"
        )
    if not (cos.is_floating_point() or cos.is_complex()):
        raise ValueError(f"cos is {cos.dtype}, it needs a floating-point or a complex dtype")
    widths = (rotary // 2,) if cos.is_complex() else (rotary, rotary // 2)
    if rotary % 2 or not 0 < rotary <= dim or cos.shape[-1] not in widths:
        raise ValueError(
            f"a table {cos.shape[-1]} wide and {rotary} rotating columns of {dim}, "
            "it needs an even number and that or half"
        )
    fits = {
        2: lambda: cos.shape[0] == tokens,
        3: lambda: cos.shape[0] in (1, batch) and cos.shape[1] == tokens,
        4: lambda: (
            cos.shape[0] in (1, batch)
            and cos.shape[1] == tokens
            and (cos.shape[2] == 1 or all(cos.shape[2] == x.shape[2] for x in (q, k) if x is not None))
        ),
    }
    if cos.dim() not in fits or not fits[cos.dim()]():
        raise ValueError(
            f"cos is {list(cos.shape)}, it needs to be [tokens, width], [batch, tokens, width] or "
            f"[batch, tokens, heads, width] for {tokens} tokens, a batch of {batch} and {heads} heads"
        )
    for table in (cos, sin):
        if table is not None and table.device != q.device:
            raise ValueError(f"a table is on {table.device}, it needs x's device {q.device}")

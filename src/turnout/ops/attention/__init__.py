"""attention: softmax(q k^T * scale) v, torch's scaled_dot_product_attention; padded keys cost nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from turnout.ops.attention import costs, padding
from turnout.ops.layouts import with_strides
from turnout.routing.choose import plain
from turnout.routing.fallback import needs_any_derivative
from turnout.routing.mistakes import UNCLEAR, raise_clearer
from turnout.routing.op import Op
from turnout.routing.public import public
from turnout.routing.route import Work


class Attention(NamedTuple):
    """Everything that may change the answer or the speed of one attention."""

    batch: int
    heads: int
    kv_heads: int
    rows: int
    keys: int
    dim: int
    dim_v: int
    dtype: torch.dtype
    strides: tuple[tuple[int, ...], ...]  # of q, k and v
    causal: bool
    mask: Literal["keys", "bool", "float"] | None  # "keys": the same for all heads and queries
    padding: Literal["host", "device"] | None  # who knows the lengths of the keys
    share: int  # of valid keys in percent, where the host knows it
    common: int  # of keys that are valid for every batch element, in one run, in percent

    @staticmethod
    def of(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float,
        kv_lengths: Tensor | None,
        lengths: Sequence[int],
    ) -> Attention:
        check(q, k, v, mask)
        kind = None
        if mask is not None:
            over_keys = padding.key_mask(mask, q.shape[0], k.shape[2]) is not None
            kind = "keys" if over_keys else "bool" if mask.dtype is torch.bool else "float"
        lengths_on = "host" if lengths else None if kv_lengths is None else "device"
        keys = max(1, k.shape[2])
        share = 100 * sum(lengths) // (q.shape[0] * keys) if lengths else 100
        common = 100 * padding.Common.of(lengths, k.shape[2]).size // keys if lengths else 100
        strides = (q.stride(), k.stride(), v.stride())
        (batch, heads, rows, dim), kv_heads, dim_v = q.shape, k.shape[1], v.shape[3]
        return Attention(
            batch,
            heads,
            kv_heads,
            rows,
            k.shape[2],
            dim,
            dim_v,
            q.dtype,
            strides,
            causal,
            kind,
            lengths_on,
            share,
            common,
        )

    @property
    def heads_inside(self) -> bool:
        return heads_inside((self.batch, self.heads, self.rows, self.dim), self.strides[0])


def check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
    """Raise where shapes or dtypes do not fit together. Looks at no values."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name} is {list(x.shape)}, it needs to be [batch, heads, length, dim]")
        if not x.is_floating_point() or x.dtype != q.dtype:
            raise ValueError(
                f"{name} is {plain(x.dtype)} and q is {plain(q.dtype)}, "
                "both need the same floating-point dtype"
            )
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3] or k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"q is {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)}: "
            "batch, head dim and number of keys need to agree"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"q has {q.shape[1]} heads and k has {k.shape[1]}, q's need to be a multiple of k's")
    if mask is not None:
        scores = (*q.shape[:3], k.shape[2])
        if mask.dim() > 4 or any(
            n not in (1, size) for n, size in zip(mask.shape[::-1], scores[::-1], strict=False)
        ):
            raise ValueError(f"mask is {list(mask.shape)}, it needs to broadcast to {list(scores)}")
        if mask.dtype not in (torch.bool, q.dtype):
            raise ValueError(
                f"mask is {plain(mask.dtype)}, it needs to be bool or q's dtype {plain(q.dtype)}"
            )


def heads_inside(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether q [B, H, S, D] is [B, S, H, D] in memory: the heads of one position side by side."""
    return shape[1] > 1 and shape[2] > 1 and strides[1] < strides[2]


def like_queries(out: Tensor, q: Tensor) -> Tensor:
    """Make values dense: [B, S, H, D] in memory where q is so, else [B, H, S, D]. No copy where they are so
    already.
    """
    return with_strides(out, strides_like_queries(out.shape, q))


def strides_like_queries(shape: Sequence[int], q: Tensor) -> tuple[int, int, int, int]:
    """Strides of an output [B, H, S, D] without gaps, [B, S, H, D] in memory where q is."""
    heads, rows, dim = shape[1] or 1, shape[2] or 1, shape[3] or 1
    if heads_inside(q.shape, q.stride()):
        return heads * rows * dim, dim, heads * dim, 1
    return heads * rows * dim, rows * dim, dim, 1


# With fewer keys than a vector has elements torch's kernel for CPUs loses NaN (torch 2.13, AVX-512): more
# keys, which do not count, help.
_VECTOR = 16

_CHUNK_BYTES = {"cpu": 2**26, "cuda": 2**31}  # of scores, where torch writes all of them to memory


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    kv_lengths: Tensor | None,
    lengths: list[int],
) -> Tensor:
    """torch's own attention, with a mask for padded keys. Queries that attend to no key give zero."""
    short = q.is_cpu and 0 < k.shape[2] < _VECTOR
    if mask is None and kv_lengths is None and not lengths and not short and not _written_down(q, k, v, mask):
        return like_queries(_by_torch(q, k, v, None, causal, scale), q)
    check(q, k, v, mask)
    valid = padding.valid_key_mask(lengths, kv_lengths, k.shape[0], k.shape[2], q.device)
    if short:
        k, v, mask, valid = padding.lengthened(k, v, mask, valid, _VECTOR)
    if valid is not None:
        k, v = padding.blanked(k, v, valid)
        allowed = valid[:, None, None]
        mask = (
            allowed
            if mask is None
            else mask & allowed
            if mask.dtype is torch.bool
            else mask.masked_fill(~allowed, float("-inf"))
        )
    if mask is not None and mask.dim() < 2:
        mask = mask.expand(1, k.shape[2])
    rows = _rows_at_once(q, k, v, mask)
    parts = []
    for first in range(0, q.shape[2], rows) if rows < q.shape[2] else (0,):
        some = mask if mask is None or mask.shape[-2] == 1 else mask[..., first : first + rows, :]
        parts.append(_attend(q[:, :, first : first + rows], k, v, some, causal, scale, first))
    return like_queries(parts[0] if len(parts) == 1 else torch.cat(parts, 2), q)


def _by_torch(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """torch's attention; by products and a softmax where its fused kernels lack a wanted derivative."""
    gqa = bool(q.shape[1] != k.shape[1])
    if not needs_any_derivative():
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=gqa)
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=gqa)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, first: int
) -> Tensor:
    """Queries from `first` on against all keys."""
    if causal and (mask is not None or first):
        causal_mask = (
            torch.arange(k.shape[2], device=q.device)
            <= torch.arange(first, first + q.shape[2], device=q.device)[:, None]
        )
        mask = (
            causal_mask
            if mask is None
            else mask & causal_mask
            if mask.dtype is torch.bool
            else mask.masked_fill(~causal_mask, float("-inf"))
        )
    if mask is not None and q.dtype is torch.float64:
        return _with_care(q, k, v, mask, scale)
    out = _by_torch(q, k, v, mask, causal and mask is None, scale)
    if mask is None:
        return out
    sees = mask if mask.dtype is torch.bool else mask != float("-inf")
    return torch.where(sees.any(-1, keepdim=True), out, 0.0)


def _with_care(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """In float64, the reference for errors, masked keys have no influence at all. torch adds -inf to their
    scores, which gives NaN where a score is infinite. As in torch, a query whose scores are all -inf gives
    zero."""
    shared = k.shape[1], q.shape[1] // k.shape[1]  # heads that share keys
    scores = (q.unflatten(1, shared) @ k.unsqueeze(2).transpose(3, 4)).flatten(1, 2) * scale
    hidden = ~mask if mask.dtype is torch.bool else mask == float("-inf")
    scores = (scores if mask.dtype is torch.bool else scores + mask).masked_fill(hidden, float("-inf"))
    lost = (scores == float("-inf")).all(-1, keepdim=True)
    weights = torch.softmax(scores, -1).masked_fill(lost, 0.0)
    output = weights.unflatten(1, shared) @ v.unsqueeze(2)
    # Not recorded as a view, as inside `matmul`: nobody else has `found`.
    return torch.ops.aten._unsafe_view(output, (*q.shape[:3], v.shape[3]))


def _written_down(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Whether torch has no fused kernel for this call, and would store all scores."""
    if q.is_cuda:
        grouped = q.shape[1] != k.shape[1] and (mask is not None or q.shape[3] > 256)
        return q.dtype is torch.float64 or grouped
    return q.shape[3] != v.shape[3] or (mask is not None and q.dtype is torch.float64)


def _rows_at_once(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> int:
    """How many queries to take at once: all, or fewer where scores are stored, to bound their memory."""
    batch, heads, rows, _ = q.shape
    if not _written_down(q, k, v, mask) or not isinstance(rows, int) or q.device.type not in _CHUNK_BYTES:
        return rows
    row_bytes = batch * heads * k.shape[2] * q.element_size()
    return max(1, min(rows, _CHUNK_BYTES[q.device.type] // max(1, row_bytes)))


def work(problem: Attention) -> Work:
    """q, k, v read once, the output written once, two products a score; keys known to be padding count
    nothing.
    """
    queries = problem.batch * problem.heads * problem.rows
    keys = problem.batch * problem.kv_heads * problem.keys * problem.share // 100
    size = problem.dtype.itemsize
    read, written = queries * problem.dim + keys * (problem.dim + problem.dim_v), queries * problem.dim_v
    return Work((read + written) * size, costs.flops(problem), written * size)


def family(problem: Attention) -> tuple[tuple, int]:
    """Problems that differ in length only, and a little in the share of padding, have one family; the size is
    the length."""
    square = problem.rows == problem.keys
    packed = all(strides[3] == 1 for strides in problem.strides)
    without_sizes = problem._replace(
        rows=0, keys=0 if square else problem.keys, strides=(), share=0, common=0
    )
    uneven = (problem.share - problem.common) // 20
    return (square, packed, problem.heads_inside, uneven, *without_sizes), problem.rows


def arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    kv_lengths: Tensor | Sequence[int] | Sequence[Sequence[int]] | None = None,
) -> tuple:
    """The reference's arguments of a public call: lengths as the host knows them, where it can."""
    ends: Tensor | None = None
    lengths: list[int] = []
    try:
        if scale is None:
            scale = q.shape[-1] ** -0.5 if q.shape[-1] else 1.0
        if kv_lengths is not None:
            ends, lengths = padding.pairs(kv_lengths, q.shape[0], k.shape[2])
        elif mask is not None and not mask.requires_grad:
            masked_lengths = padding.of_mask(mask, q.shape[0], k.shape[2])
            if masked_lengths is not None:
                mask, lengths = None, masked_lengths
    except UNCLEAR as failure:
        raise_clearer("attention", arguments, locals().items(), failure)
        check(q, k, v, mask)  # says which one has too few dimensions
        raise
    return q, k, v, mask, causal, scale, ends, lengths


ATTENTION = Op(
    "attention",
    reference,
    problem_type=Attention,
    cost=costs.reference,
    work=work,
    cases="turnout.ops.attention.cases",
    family=family,
    autocast="cast",
)


@public(ATTENTION, of_cases=True)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    kv_lengths: Tensor | Sequence[int] | Sequence[Sequence[int]] | None = None,
) -> Tensor:
    """Attention: `softmax(q k^T * scale) v`, as `torch.nn.functional.scaled_dot_product_attention` has it.

    q: `[B, H, S, D]`, k: `[B, G, N, D]`, v: `[B, G, N, E]`, any strides, H a multiple of G (grouped heads are
    not repeated). Returns `[B, H, S, E]` without gaps, in memory `[B, S, H, E]` where q is a transposed `[B,
    S, H, D]`, else `[B, H, S, E]`.
    `mask`: True where a key counts, or numbers to add to the scores; broadcasts to `[B, H, S, N]`. `causal`:
    query i sees keys 0 to i.
    `scale`: D ** -0.5 if not given. A query that sees no key gives zero.

    `kv_lengths` says how many keys of each batch element count, without a mask: `[B]` the first ones; `[B,
    2]` the first and the last
    ones, as for text padded to a fixed length with an image behind it: `(text length, image length)`. What
    stands in other keys does not matter, not even NaN. A list, or a tensor; a tensor on a GPU is read back
    once, its values then belong to it. A boolean mask over keys, `[B, 1, 1, N]`, that says the same is taken
    the same way.

    >>> import torch, turnout
    >>> q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    >>> turnout.attention(q, k, v, kv_lengths=[7, 3]).shape
    torch.Size([2, 4, 5, 8])
    >>> mask = torch.arange(7) < torch.tensor([7, 3])[:, None, None, None]
    >>> padded = turnout.attention(q, k, v, kv_lengths=[7, 3])
    >>> torch.allclose(padded, turnout.attention(q, k, v, mask=mask), atol=1e-6)
    True
    """
    return ATTENTION(*arguments(q, k, v, mask, causal, scale, kv_lengths))

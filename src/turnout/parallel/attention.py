"""Attention of a split model: a rank asks for its own pixels, and sees all of them.

Every rank computes queries, keys and values of the whole frame, as one process does: they cost little beside
the attention, and their bits do not depend on who computes them. Of the attention itself a rank computes the
rows of its own pixels, by the route that the whole call takes; the other rows are zeros, which nobody reads.

Whether a row's bits depend on how many others are computed with it is known of torch's kernel for CPUs: it
takes rows by 32, 64 or 256, and only a rest of one to three rows goes another way. So own rows are filled up
to whole blocks, and such a rest of the whole call is computed as one. All the same, each kind of call is
compared with the whole one when it is first seen, and computed whole where it differs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from turnout.models.sdpa import answering
from turnout.ops.attention import ATTENTION, arguments
from turnout.parallel.exchange import Exchange
from turnout.routing import settings
from turnout.routing.choose import REFERENCE

Rows = Callable[[Tensor, Tensor, Tensor], Tensor]
_LEAST_ROWS = 32  # of a block of torch's kernel for CPUs


class OwnQueries:
    """Attention of one rank, whose queries are the pixels of whole frames, row by row.

    runs: kinds of calls, and what computes rows of them; None where rows by themselves are not those of the
    whole.
    """

    def __init__(self, exchange: Exchange):
        self.exchange = exchange
        self.runs: dict[tuple, Rows | None] = {}

    @contextlib.contextmanager
    def of_frames(self, height: int, width: int) -> Iterator[None]:
        """Inside this block attention of frames of this size is computed for this rank's pixels."""
        with answering(functools.partial(self.attend, height, width)):
            yield

    def attend(self, height: int, width: int, whole: Rows, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v `[B, H, S, D]`; `whole` is what would be called.

        Rows that are not this rank's may be zeros.
        """
        if self.exchange.axis == 0 or not q.shape[2] or q.shape[2] % (height * width):
            return whole(q, k, v)
        rows = self._rows(height, width, q.shape[2], q.device)
        kind = (settings.current(), *((tuple(x.shape), x.stride(), x.dtype) for x in (q, k, v)))
        if kind in self.runs:
            run = self.runs[kind]
            return whole(q, k, v) if run is None else _rows_of(run, q, k, v, rows)
        run = _route_of_the_whole(q, k, v) if _saves(q, len(rows)) else None
        expected = whole(q, k, v)
        if run is not None and not torch.equal(
            _rows_of(run, q, k, v, rows)[:, :, rows], expected[:, :, rows]
        ):
            run = None
        self.runs[kind] = run
        return expected

    def _rows(self, height: int, width: int, queries: int, device: torch.device) -> Tensor:
        """The queries of this rank's pixels."""
        frames = torch.arange(queries, device=device).view(-1, height, width)
        return self.exchange.own(frames).flatten()


def _saves(q: Tensor, rows: int) -> bool:
    return rows < q.shape[2] if q.device.type != "cpu" else _filled(rows) < q.shape[2]


def _route_of_the_whole(q: Tensor, k: Tensor, v: Tensor) -> Rows | None:
    """What the whole call takes, for some rows of it; None where it is a route whose rows are not known on a
    CPU.
    """
    args = arguments(q, k, v)
    verdict = ATTENTION.explain(args)
    if verdict.chosen == REFERENCE:
        return torch.nn.functional.scaled_dot_product_attention
    if q.device.type == "cpu":
        return None
    run, config = ATTENTION.routes[verdict.chosen].run, dict(verdict.config)
    return lambda *qkv: run(*arguments(*qkv), **config)


def _rows_of(run: Rows, q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    """`[B, H, S, E]` with some rows of the attention, zeros elsewhere."""
    batch, heads, queries, _ = q.shape
    y = q.new_zeros(batch, queries, heads, v.shape[3]).transpose(1, 2)
    if q.device.type != "cpu":
        y[:, :, rows] = run(q[:, :, rows], k, v)
        return y
    first = queries - _rest(queries)  # of rows that go another way
    blocks, rest = rows[rows < first], rows[rows >= first]
    if len(blocks):
        filled = torch.cat([blocks, blocks[-1:].expand(_filled(len(blocks)) - len(blocks))])
        y[:, :, blocks] = run(q[:, :, filled], k, v)[:, :, : len(blocks)]
    if len(rest):
        y[:, :, rest] = run(q[:, :, first:], k, v)[:, :, rest - first]
    return y


def _filled(rows: int) -> int:
    """So many rows and those that fill their last block.

    >>> _filled(33), _filled(64)
    (64, 64)
    """
    return -(-rows // _LEAST_ROWS) * _LEAST_ROWS


def _rest(queries: int) -> int:
    """How many rows torch's kernel for CPUs takes in a last block of one to three.

    >>> [_rest(queries) for queries in (35, 36, 96, 258, 801, 1026)]
    [3, 0, 0, 2, 0, 2]
    """
    rest = queries % (256 if queries >= 768 else 64 if queries >= 192 else _LEAST_ROWS)
    return rest if rest < 4 else 0

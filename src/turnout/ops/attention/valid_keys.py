"""Attention by vendor kernels on the valid keys alone; what is left of them goes to our kernel."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch.nn.functional as F
from torch import Tensor

from turnout.ops import needs
from turnout.ops.attention import Attention, backends, costs, padding, reference
from turnout.ops.attention.backends import with_sums
from turnout.ops.attention.costs import STEP
from turnout.ops.attention.flash import tile_bytes
from turnout.ops.attention.launches import empty_like_queries, run_flash, take_turns
from turnout.ops.integers import ceil_div, power_of_two
from turnout.routing.device import Device
from turnout.routing.route import Config

MOST_APART = 2**25  # bytes of an output that is not yet copied to its place


def refuses_narrow(problem: Attention, device: Device) -> Iterator[str]:
    if problem.padding != "host":
        yield "no lengths known to the host, this route needs them"
    if problem.mask is not None:
        yield "a mask, this route needs lengths only"
    if problem.causal:
        yield "a causal call, this route needs queries that see all keys"
    if problem.batch > 64:
        yield f"batch {problem.batch}, this route needs at most 64, as each takes a call"


def narrow(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    kv_lengths: Tensor | None,
    lengths: list[int],
) -> Tensor:
    """Run torch's own attention for one batch element after the other, on its valid keys.

    Neighbours with the same lengths share a call.
    """
    out = empty_like_queries(q, v.shape[3])
    grouped = bool(q.shape[1] != k.shape[1])
    for first, count, prefix, suffix in padding.alike(lengths):
        some = slice(first, first + count)
        if prefix + suffix == 0:
            out[some] = 0.0
            continue
        near, far = (padding.valid_keys(x[some], prefix, suffix) for x in (k, v))
        if q.is_cpu:  # where torch loses NaN with few keys
            out[some] = reference(q[some], near, far, None, False, scale, None, [])
        else:
            out[some] = F.scaled_dot_product_attention(q[some], near, far, scale=scale, enable_gqa=grouped)
    return out


def refuses_common(problem: Attention, device: Device) -> Iterator[str]:
    yield from needs.needs_triton(device)
    if problem.padding is not None:
        yield from refuses_narrow(problem, device)
    elif problem.causal or problem.mask is not None:
        yield "a causal call or a mask, this route needs queries that see all keys"
    elif problem.keys % STEP == 0 or problem.keys < STEP:
        yield (
            f"{problem.keys} keys that count for all, "
            f"this route needs more than {STEP} and not a multiple of it, or lengths"
        )
    yield from backends.refuses_flash(problem._replace(padding=None), device)
    if problem.common == 0:
        yield "no run of keys that counts for all, this route needs 1 % of them at least"


def common_configs(problem: Attention, device: Device) -> list[Config]:
    """Blocks for the few keys that are left to our kernel: small, so that several fit a multiprocessor."""
    cudnn = costs.prefers_cudnn(device) and not any(
        backends.refuses_cudnn(problem._replace(padding=None), device)
    )
    rows, keys, warps, stages = (
        (64, 32, 4, 2) if tile_bytes(problem, 64, 32, 2) <= device.shared else (16, 16, 4, 1)
    )
    rows = min(rows, max(16, power_of_two(problem.rows)))
    fixed = {
        "cudnn": cudnn,
        "step": STEP if cudnn else 1,
        "rows": rows,
        "keys": keys,
        "warps": warps,
        "stages": stages,
    }
    apart, together = costs.common_apart(problem, device), costs.common_together(problem, device)
    choices = [False] if problem.common == problem.share else [True, False]
    if apart is not None and together is not None and together < apart:
        choices.reverse()
    return [{"apart": choice, **fixed} for choice in choices]


def common_keys(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    kv_lengths: Tensor | None,
    lengths: list[int],
    *,
    cudnn: bool = False,
    step: int = 1,
    apart: bool = False,
    rows: int = 64,
    keys: int = 64,
    warps: int = 4,
    stages: int = 2,
) -> Tensor:
    """Run a vendor kernel on keys that are valid for all batch elements; ours adds the other keys.

    The vendor kernel gets a multiple of `step` keys, in one call. With `apart` each batch element has a call
    of its own, on more of its keys, in turns on two streams.
    """
    lengths = lengths or [k.shape[2], 0] * k.shape[0]

    def together(some: slice, some_rows: slice, lengths: Sequence[int]) -> Tensor:
        run = padding.Common.of(lengths, k.shape[2], step)
        (near, more_near), (far, more_far) = run.split(k[some]), run.split(v[some])
        queries = q[some, :, some_rows]
        out, sums = with_sums(queries, near, far, scale, cudnn and run.size > 1)
        first, size = run.some
        if size:
            rest = padding.on_device(run.rest[2 * first : 2 * (first + size)], q.device)
            queries, more_near, more_far, part, behind = (
                x.narrow(0, first, size) for x in (queries, more_near, more_far, out, sums)
            )
            run_flash(
                queries,
                more_near,
                more_far,
                None,
                False,
                scale,
                rest,
                rows,
                keys,
                warps,
                stages,
                so_far=(part, behind),
            )
        return out

    groups = padding.alike(lengths)
    if len(groups) == 1 or not apart:
        return together(slice(None), slice(None), lengths)
    out = empty_like_queries(q, v.shape[3])

    def alone(first: int, count: int, prefix: int, suffix: int, some_rows: slice) -> None:
        some = slice(first, first + count)
        out[some, :, some_rows] = together(some, some_rows, [prefix, suffix] * count)

    # Those that leave most to our kernel first: it then runs beside another element's call.
    groups.sort(
        key=lambda group: group[2] + group[3] - padding.Common.of(group[2:], k.shape[2], step).size,
        reverse=True,
    )
    shares = [
        (group, some_rows)
        for group in groups
        for some_rows in at_a_time(q.shape, group[1], v.shape[3] * q.dtype.itemsize)
    ]
    take_turns([functools.partial(alone, *group, some_rows) for group, some_rows in shares], q.device)
    return out


def at_a_time(shape: Sequence[int], count: int, row_bytes: int) -> list[slice]:
    """Split queries into parts, each with an output of at most `MOST_APART` bytes.

    >>> at_a_time((2, 24, 4608, 128), 1, 256)
    [slice(0, 4608, None)]
    >>> at_a_time((2, 40, 32760, 128), 1, 256)[-1]
    slice(29952, 32760, None)
    """
    _, heads, rows, _ = shape
    shares = max(1, ceil_div(count * heads * rows * row_bytes, MOST_APART))
    size = STEP * ceil_div(rows, STEP * shares)
    return [slice(i, min(i + size, rows)) for i in range(0, rows, size)]

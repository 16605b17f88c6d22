"""The routes of attention: torch's kernels by name, vendor kernels on the valid keys, and our own kernels
where no other takes the call.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from turnout.launch import LaunchPlan, prepare_from_plan, runs_plan
from turnout.ops import needs
from turnout.ops.attention import ATTENTION, Attention, backends, costs, padding, reference
from turnout.ops.attention.backends import (
    by_cudnn,
    by_efficient,
    by_flash,
    by_flash_attention_3,
    by_flash_attention_4,
    with_sums,
)
from turnout.ops.attention.costs import STEP
from turnout.ops.attention.launches import (
    KEYS,
    QUERIES,
    ceil_div,
    empty_like_queries,
    plan_flash,
    plan_wide_hopper,
    power_of_two,
    run_flash,
    take_turns,
)
from turnout.routing.device import Device
from turnout.routing.op import Config

LONGEST = 2**30 - 2**16  # positions are counted in 32 bits; offsets have 64
WIDE = range(257, 513)
FLASH = ("turnout.ops.attention.kernels:flash_kernel",)
MOST_APART = 2**25  # bytes of an output that is not yet copied to its place

# torch's backends


@ATTENTION.route("cudnn", refuses=backends.refuses_cudnn, cost=costs.cudnn, numerics="close", version=1)
def cudnn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    kv_lengths: Tensor | None,
    lengths: list[int],
) -> Tensor:
    return by_cudnn(q, k, v, causal, scale)


@ATTENTION.route("flash", refuses=backends.refuses_flash, cost=costs.flash, numerics="close", version=1)
def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    kv_lengths: Tensor | None,
    lengths: list[int],
) -> Tensor:
    return by_flash(q, k, v, causal, scale)


@ATTENTION.route(
    "efficient", refuses=backends.refuses_efficient, cost=costs.efficient, numerics="close", version=1
)
def efficient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    kv_lengths: Tensor | None,
    lengths: list[int],
) -> Tensor:
    return by_efficient(q, k, v, causal, scale)


def flash_attention(package: str) -> dict[str, Any]:
    """The keywords that declare FlashAttention 3 and 4.

    They have no cost: only a measurement or a pin selects them.
    """
    refuses = functools.partial(backends.refuses_flash_attention, package=package)
    return {"refuses": refuses, "cost": lambda problem, device: None, "numerics": "close", "version": 1}


@ATTENTION.route("flash-attention-3", **flash_attention("flash_attn_interface"))
def flash_attention_3(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    kv_lengths: Tensor | None,
    lengths: list[int],
) -> Tensor:
    return by_flash_attention_3(q, k, v, causal, scale)


@ATTENTION.route("flash-attention-4", **flash_attention("flash_attn.cute"))
def flash_attention_4(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    kv_lengths: Tensor | None,
    lengths: list[int],
) -> Tensor:
    return by_flash_attention_4(q, k, v, causal, scale)


def refuses_math(problem: Attention, device: Device) -> Iterator[str]:
    # Half types are computed in float32; in float32 itself the error would exceed `close`.
    yield from needs.needs_dtype(problem.dtype, *costs.HALF)
    if problem.padding is not None or problem.mask == "float":
        yield "keys that do not count for all, this route needs all keys or a boolean mask"
    scores = problem.batch * problem.heads * problem.rows * problem.keys
    if scores > 2**24:
        yield f"{scores} scores, this route needs at most {2**24}, as it writes them down"


@ATTENTION.route("math", refuses=refuses_math, cost=lambda problem, device: None, numerics="close", version=1)
def math(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    kv_lengths: Tensor | None,
    lengths: list[int],
) -> Tensor:
    """Attention that writes all scores to memory: for short sequences, and only where it was measured."""
    return backends.by_math(q, k, v, mask, causal, scale)


# Vendor kernels on the keys that count


def refuses_narrow(problem: Attention, device: Device) -> Iterator[str]:
    if problem.padding != "host":
        yield "no lengths known to the host, this route needs them"
    if problem.mask is not None:
        yield "a mask, this route needs lengths only"
    if problem.causal:
        yield "a causal call, this route needs queries that see all keys"
    if problem.batch > 64:
        yield f"batch {problem.batch}, this route needs at most 64, as each takes a call"


@ATTENTION.route("narrow", refuses=refuses_narrow, cost=costs.narrow, numerics="close", version=1)
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


@ATTENTION.route(
    "common-keys",
    refuses=refuses_common,
    cost=costs.common,
    configs=common_configs,
    numerics="close",
    version=2,
    kernels=FLASH,
)
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


# Our own kernels


def refuses_triton(problem: Attention, device: Device) -> Iterator[str]:
    """Reasons why the Triton kernel cannot take a problem, at any head dim."""
    yield from needs.needs_triton(device)
    yield from needs.needs_dtype(problem.dtype, *costs.HALF)
    if problem.mask not in (None, "keys"):
        yield f"a {problem.mask} mask, this route needs none or one over keys alone"
    if 0 in (problem.batch, problem.heads, problem.rows, problem.keys, problem.dim, problem.dim_v):
        yield "nothing to attend to, this route needs at least one query and one key"
    if max(problem.rows, problem.keys) > LONGEST:
        yield f"{max(problem.rows, problem.keys)} positions, this route needs at most {LONGEST}"


def refuses_flash_triton(problem: Attention, device: Device) -> Iterator[str]:
    yield from refuses_triton(problem, device)
    dim = max(problem.dim, problem.dim_v)
    if dim > 256:
        yield f"head dim {dim}, this route needs at most 256"


def refuses_wide(problem: Attention, device: Device) -> Iterator[str]:
    yield from refuses_triton(problem, device)
    dim = max(problem.dim, problem.dim_v)
    if dim not in WIDE:
        yield f"head dim {dim}, this route needs 257 to 512"
    if tile_bytes(problem, 16, 16) > device.shared and device.type == "cuda":
        yield f"{device.shared} bytes of shared memory, this route needs {tile_bytes(problem, 16, 16)}"


def tile_bytes(problem: Attention, rows: int, keys: int, stages: int = 1) -> int:
    """Shared memory of one program: its queries, and as many blocks of k and v as there are stages."""
    dim, dim_v = power_of_two(problem.dim), power_of_two(problem.dim_v)
    return problem.dtype.itemsize * (rows * dim + stages * keys * (dim + dim_v)) + 2048


def flash_configs(problem: Attention, device: Device) -> list[Config]:
    """The largest blocks that fit the card's shared memory: the fastest of those tried on an H200."""
    shapes = [(128, 64, 8, 3), (128, 64, 8, 2), (128, 32, 8, 2), (64, 32, 4, 2), (16, 16, 4, 1)]
    if power_of_two(max(problem.dim, problem.dim_v)) > 128:
        shapes = [(128, 64, 8, 2), (64, 32, 4, 2), (16, 16, 4, 1)]
    rows, keys, warps, stages = next(
        (s for s in shapes if tile_bytes(problem, s[0], s[1], s[3]) <= device.shared), shapes[-1]
    )
    few = 16 if problem.rows <= 16 else 64
    if problem.rows <= few < rows:
        rows, warps = few, 4
    return [{"rows": rows, "keys": keys, "warps": warps, "stages": stages}]


def wide_configs(problem: Attention, device: Device) -> list[Config]:
    shapes = ((64, 64, 8), (64, 32, 8), (32, 32, 4), (16, 16, 4))
    rows, keys, warps = next(
        (s for s in shapes if tile_bytes(problem, s[0], s[1]) <= device.shared), shapes[-1]
    )
    return [{"rows": rows, "keys": keys, "warps": warps, "stages": 1}]


@ATTENTION.route(
    "wide-head",
    refuses=refuses_wide,
    cost=costs.wide,
    configs=wide_configs,
    prepare=prepare_from_plan,
    numerics="close",
    version=1,
    kernels=FLASH,
)
@runs_plan
def wide_head(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    kv_lengths: Tensor | None,
    lengths: list[int],
    *,
    rows: int = 64,
    keys: int = 32,
    warps: int = 8,
    stages: int = 1,
) -> LaunchPlan:
    """Heads of 257 to 512 in plain Triton, on any card."""
    return with_padding(q, k, v, mask, causal, scale, kv_lengths, lengths, rows, keys, warps, stages)


@ATTENTION.route(
    "flash-triton",
    refuses=refuses_flash_triton,
    cost=costs.flash_triton,
    configs=flash_configs,
    prepare=prepare_from_plan,
    numerics="close",
    version=1,
    kernels=FLASH,
)
@runs_plan
def flash_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    kv_lengths: Tensor | None,
    lengths: list[int],
    *,
    rows: int = 64,
    keys: int = 32,
    warps: int = 4,
    stages: int = 2,
) -> LaunchPlan:
    """Heads up to 256 in plain Triton; the kernel itself skips padded and masked keys."""
    return with_padding(q, k, v, mask, causal, scale, kv_lengths, lengths, rows, keys, warps, stages)


def with_padding(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    kv_lengths: Tensor | None,
    lengths: list[int],
    rows: int,
    keys: int,
    warps: int,
    stages: int,
) -> LaunchPlan:
    if lengths:
        kv_lengths = padding.on_device(tuple(lengths), q.device)
    over_keys = padding.key_mask(mask, q.shape[0], k.shape[2])
    return plan_flash(q, k, v, over_keys, causal, scale, kv_lengths, rows, keys, warps, stages)


def refuses_wide_hopper(problem: Attention, device: Device) -> Iterator[str]:
    yield from needs.needs_hopper(device)
    yield from needs.needs_dtype(problem.dtype, *costs.HALF)
    if problem.mask is not None or problem.padding is not None:
        yield "some keys do not count, this route needs all of them to"
    if problem.dim not in WIDE or problem.dim % 8 or problem.dim != problem.dim_v:
        yield (
            f"head dims {problem.dim} and {problem.dim_v}, "
            "this route needs both the same, 257 to 512 and a multiple of 8"
        )
    if 0 in (problem.batch, problem.heads, problem.rows, problem.keys):
        yield "nothing to attend to, this route needs at least one query and one key"
    if max(problem.rows, problem.keys) > LONGEST:
        yield f"{max(problem.rows, problem.keys)} positions, this route needs at most {LONGEST}"
    sizes = (
        (problem.batch, problem.heads, problem.rows),
        *[(problem.batch, problem.kv_heads, problem.keys)] * 2,
    )
    for name, size, strides in zip("qkv", sizes, problem.strides, strict=True):
        steps = [stride for n, stride in zip(size, strides, strict=False) if n > 1]
        if strides[3] != 1 or any(step % 8 or step == 0 for step in steps):
            yield (
                f"{name} with strides {list(strides)}, "
                "this route needs a last one of 1 and others that are multiples of 8"
            )


def splits_of(problem: Attention, device: Device) -> int:
    """The number of parts the keys are split into, so that few queries do not leave most of the card idle."""
    programs = problem.batch * problem.heads * ceil_div(problem.rows, QUERIES)
    blocks = ceil_div(problem.keys, KEYS)
    if programs >= device.units or problem.causal:
        return 1
    return max(1, min(device.units // programs, blocks // 4, 8))


def wide_hopper_configs(problem: Attention, device: Device) -> list[Config]:
    return [{"splits": splits_of(problem, device)}]


@ATTENTION.route(
    "wide-head-hopper",
    refuses=refuses_wide_hopper,
    cost=costs.wide_hopper,
    configs=wide_hopper_configs,
    prepare=prepare_from_plan,
    numerics="close",
    version=1,
    kernels=(
        "turnout.ops.attention.hopper_kernels:wide_kernel",
        "turnout.ops.attention.kernels:combine_kernel",
    ),
)
@runs_plan
def wide_head_hopper(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    kv_lengths: Tensor | None,
    lengths: list[int],
    *,
    splits: int = 1,
) -> LaunchPlan:
    """Heads of 257 to 512 on Hopper, in Gluon."""
    return plan_wide_hopper(q, k, v, causal, scale, splits)

"""Our own kernels for attention: what they refuse, their configurations, and the routes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from turnout.launch import LaunchPlan, runs_plan
from turnout.ops import needs
from turnout.ops.attention import Attention, costs, padding
from turnout.ops.attention.launches import KEYS, QUERIES, plan_flash, plan_wide_hopper
from turnout.ops.integers import ceil_div, power_of_two
from turnout.routing.configured import configured
from turnout.routing.device import Device
from turnout.routing.route import Config

LONGEST = 2**30 - 2**16  # positions are counted in 32 bits; offsets have 64
WIDE = range(257, 513)


def tile_bytes(problem: Attention, rows: int, keys: int, stages: int = 1) -> int:
    """Shared memory of one program: its queries, and as many blocks of k and v as there are stages."""
    dim, dim_v = power_of_two(problem.dim), power_of_two(problem.dim_v)
    return problem.dtype.itemsize * (rows * dim + stages * keys * (dim + dim_v)) + 2048


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


def plan_with_padding(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    kv_lengths: Tensor | None,
    lengths: list[int],
    **tile: Any,
) -> LaunchPlan:
    """Plan the Triton kernel, which itself skips padded and masked keys."""
    if lengths:
        kv_lengths = padding.on_device(tuple(lengths), q.device)
    over_keys = padding.key_mask(mask, q.shape[0], k.shape[2])
    return plan_flash(q, k, v, over_keys, causal, scale, kv_lengths, **tile)


# Heads of 257 to 512 in plain Triton, on any card.
wide_head = runs_plan(configured(plan_with_padding, {"rows": 64, "keys": 32, "warps": 8, "stages": 1}))
# Heads up to 256 in plain Triton.
flash_triton = runs_plan(configured(plan_with_padding, {"rows": 64, "keys": 32, "warps": 4, "stages": 2}))


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

"""The routes of the group norms on a GPU: two launches, one takes moments and one applies them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from turnout.launch import LaunchPlan, prepare_from_plan, runs_plan
from turnout.ops.group_norm_silu import GROUP_NORM_SILU, GROUP_NORM_SILU_INTO, guards, tiles
from turnout.ops.group_norm_silu.launches import (
    Modulation,
    PlaneTile,
    RowTile,
    gapped_plan,
    norm_of,
    planes_plan,
    rows_plan,
    spatial_plan,
    two_launches,
)
from turnout.ops.group_norm_silu.padded import GROUP_NORM_SILU_PAD, padded_shape, padded_strides
from turnout.ops.group_norm_silu.spatial import SPATIAL_NORM_SILU
from turnout.routing.configured import configured

ROW_KERNELS = [f"turnout.ops.group_norm_silu.kernels:row_{part}" for part in ("moments", "apply")]
PLANE_KERNELS = [f"turnout.ops.group_norm_silu.kernels:plane_{part}" for part in ("moments", "apply")]
GAPPED_KERNELS = [
    ROW_KERNELS[0],
    *(f"turnout.ops.group_norm_silu.gapped_kernels:gapped_{part}" for part in ("moments", "apply")),
]
PLANNED: Any = {"prepare": prepare_from_plan, "numerics": "close", "version": 1}
# The second launch is the only one that writes, and reads each element before it writes there.
INTO: Any = {"in_place": ("x",), "fails_before_writing": True}
GAPPED_TILE = RowTile(walks=6)
SPATIAL_TILE = RowTile(unroll=2, walks=6)


def declare(plan: Callable[..., Any], tile: RowTile | PlaneTile, name: str, **declaration: Any) -> None:
    """Declare a route of group_norm_silu, and of its form that writes into a buffer, by two launches.

    plan: gives the launches for a `Norm` and a tile of this type, whose values are the defaults.
    """

    def new(
        x: Tensor,
        groups: int,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        silu: bool,
        **config: int,
    ) -> LaunchPlan:
        out = torch.empty_like(x)
        return into(x, groups, weight, bias, out, eps, silu, **config)._replace(outputs=out)

    def into(
        x: Tensor,
        groups: int,
        weight: Tensor | None,
        bias: Tensor | None,
        out: Tensor,
        eps: float,
        silu: bool,
        **config: int,
    ) -> LaunchPlan:
        now = tile._replace(**config)
        launches = plan(norm_of(x, groups, out), now)
        return two_launches(launches, x, weight, bias, out, eps, silu, now.warps, outputs=None)

    defaults = tile._asdict()
    GROUP_NORM_SILU.route(name, **declaration, **PLANNED)(runs_plan(configured(new, defaults)))
    GROUP_NORM_SILU_INTO.route(name, **declaration, **PLANNED, **INTO)(runs_plan(configured(into, defaults)))


declare(
    rows_plan,
    RowTile(),
    "rows",
    refuses=guards.refuses_rows,
    cost=tiles.gpu_cost,
    configs=tiles.rows_configs,
    kernels=ROW_KERNELS,
)
declare(
    gapped_plan,
    GAPPED_TILE,
    "gapped-rows",
    refuses=guards.refuses_gapped_rows,
    cost=tiles.gapped_cost,
    configs=tiles.gapped_configs,
    kernels=GAPPED_KERNELS,
)
declare(
    planes_plan,
    PlaneTile(),
    "planes",
    refuses=guards.refuses_planes,
    cost=tiles.gpu_cost,
    configs=tiles.planes_configs,
    kernels=PLANE_KERNELS,
)


def plan_padded(
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    silu: bool,
    padding: list[int],
    mode: str,
    **config: int,
) -> LaunchPlan:
    tile, shape = GAPPED_TILE._replace(**config), padded_shape(x.shape, padding)
    out = torch.empty_strided(shape, padded_strides(shape, True), dtype=x.dtype, device=x.device)
    plan = gapped_plan(norm_of(x, groups, out), tile, tuple(padding), mode)
    return two_launches(plan, x, weight, bias, out, eps, silu, tile.warps, outputs=out)


GROUP_NORM_SILU_PAD.route(
    "gapped-rows",
    refuses=guards.refuses_padded,
    cost=tiles.padded_cost,
    configs=tiles.gapped_configs,
    kernels=GAPPED_KERNELS,
    **PLANNED,
)(runs_plan(configured(plan_padded, GAPPED_TILE._asdict())))


def plan_spatial(
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor,
    shift: Tensor,
    eps: float,
    silu: bool,
    first_apart: bool,
    **config: int,
) -> LaunchPlan:
    """Where the channels of scale or shift are not side by side, copies are taken."""
    tile, out = SPATIAL_TILE._replace(**config), torch.empty_like(x)
    scale, shift = (
        t if t.stride(1) == 1 else t.movedim(1, -1).contiguous().movedim(-1, 1) for t in (scale, shift)
    )
    modulation = Modulation(scale.shape, scale.stride(), shift.stride(), first_apart)
    plan = spatial_plan(norm_of(x, groups, out, scale, shift), modulation, tile)
    return two_launches(
        plan, x, weight, bias, out, eps, silu, tile.warps, modulation=(scale, shift), outputs=out
    )


SPATIAL_NORM_SILU.route(
    "gapped-rows",
    refuses=guards.refuses_spatial,
    cost=tiles.spatial_cost,
    configs=tiles.spatial_configs,
    kernels=[*GAPPED_KERNELS[:2], "turnout.ops.group_norm_silu.gapped_kernels:spatial_apply"],
    **PLANNED,
)(runs_plan(configured(plan_spatial, SPATIAL_TILE._asdict())))

"""The route of selective_scan_update: one launch of selective_scan's kernel on a GPU, which then writes where
it read.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from turnout.launch import Launch, LaunchPlan, prepare_from_plan, runs_plan
from turnout.ops import needs
from turnout.ops.integers import ceil_div, power_of_two
from turnout.ops.selective_scan.routes import MOST_STATES, fewer_channels
from turnout.ops.selective_scan_update import SELECTIVE_SCAN_UPDATE, SelectiveScanUpdate, work
from turnout.routing.device import Device
from turnout.routing.route import Config

NAMES = ("x", "state", "dt", "A", "B", "C", "D", "z", "dt_bias")


def refuses(problem: SelectiveScanUpdate, device: Device) -> Iterator[str]:
    yield from needs.needs_triton(device)
    yield from needs.needs_half_or_single(**dict(zip(NAMES, problem.dtypes, strict=True)))
    if 0 in (problem.batch, problem.dim, problem.states):
        yield "nothing to scan, this route needs at least one element and one state"
    if problem.states > MOST_STATES:
        yield f"{problem.states} states, this route needs at most {MOST_STATES}"
    if any(
        stride == 0 and size > 1
        for stride, size in zip(problem.strides[1], (problem.batch, problem.dim, problem.states), strict=True)
    ):
        yield "states that share memory, this route needs memory of its own for each"


def cost(problem: SelectiveScanUpdate, device: Device) -> float | None:
    moving = device.seconds(work(problem).bytes)
    fitted = device.fitted("selective_scan_update.kernels")
    return (
        None
        if moving is None or device.type != "cuda"
        else max(fitted.host, fitted.start + moving / fitted.share)
    )


def configs(problem: SelectiveScanUpdate, device: Device) -> list[Config]:
    return [
        {"channels": fewer_channels(problem.states, problem.batch, problem.dim, device.units), "warps": 1}
    ]


@SELECTIVE_SCAN_UPDATE.route(
    "one-launch",
    refuses=refuses,
    cost=cost,
    configs=configs,
    prepare=prepare_from_plan,
    numerics="close",
    version=1,
    kernels=("turnout.ops.selective_scan.kernels:scan",),
    fails_before_writing=True,
)
@runs_plan
def on_gpu(
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
    *,
    channels: int = 32,
    warps: int = 1,
) -> LaunchPlan:
    from turnout.ops.selective_scan.kernels import scan

    (batch, dim), states = x.shape, A.shape[1]
    y = torch.empty((batch, dim), dtype=x.dtype, device=x.device)
    place = state.stride()
    numbers = (
        dim,
        1,
        *x.stride(),
        0,
        *dt.stride(),
        0,
        *A.stride(),
        *B.stride(),
        0,
        *C.stride(),
        0,
        *((0, 0) if z is None else z.stride()),
        0,
        *place,
        dim,
        1,
        0,
        *place,
    )
    constants = {
        "SOFTPLUS": dt_softplus,
        "LOG": log_rates,
        "FINAL": True,
        "STATES": states,
        "N": max(2, power_of_two(states)),
        "BD": channels,
        "STEPS": 1,
    }
    skip, bias = D if D is None else D.contiguous(), dt_bias if dt_bias is None else dt_bias.contiguous()
    tensors = (x, dt, A, B, C, skip, z, bias, state, y, state)
    launch = Launch(scan, batch * ceil_div(dim, channels), tensors, numbers, constants, warps)
    return LaunchPlan((launch,), y)

"""The route of selective_scan: one launch on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from turnout.launch import Launch, LaunchPlan, prepare_from_plan, runs_plan
from turnout.ops import needs
from turnout.ops.causal_conv1d import channel_last
from turnout.ops.causal_conv1d.launches import empty_dense
from turnout.ops.integers import ceil_div, power_of_two
from turnout.ops.selective_scan import SELECTIVE_SCAN, SelectiveScan, work
from turnout.routing.device import Device
from turnout.routing.route import Config

MOST_STATES = 256
LONGEST = 2**31 - 1
AHEAD = 8  # steps that a warp reads at a time where it is alone
HELD = 512  # states of one warp, 16 to a thread
NAMES = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_state")


def refuses(problem: SelectiveScan, device: Device) -> Iterator[str]:
    yield from needs.needs_triton(device)
    yield from needs.needs_half_or_single(**dict(zip(NAMES, problem.dtypes, strict=True)))
    if problem.elements == 0 or problem.states == 0:
        yield "nothing to scan, this route needs at least one element and one state"
    if problem.states > MOST_STATES:
        yield f"{problem.states} states, this route needs at most {MOST_STATES}"
    if problem.length > LONGEST:
        yield f"length {problem.length}, this route needs at most {LONGEST}"


def cost(problem: SelectiveScan, device: Device) -> float | None:
    """The bytes, or the steps: a multiprocessor runs four warps at a time, and a step of one took 0.4 us on
    an H200.
    """
    moving = device.seconds(work(problem).bytes)
    if moving is None or device.type != "cuda":
        return None
    warps = problem.batch * ceil_div(problem.dim, channels_of_a_warp(problem.states))
    turns = max(1.0, warps / (4 * device.units))
    fitted = device.fitted("selective_scan.kernels")
    steps = problem.length * turns * fitted.step
    return max(fitted.host, fitted.start + moving / fitted.share, fitted.start + steps)


def channels_of_a_warp(states: int) -> int:
    """A channel to a thread with up to 16 states; fewer where there are more."""
    return max(4, HELD // max(16, power_of_two(states)))


def fewer_channels(states: int, batch: int, dim: int, programs: int) -> int:
    """Those of a warp, or as few as it takes to have that many programs."""
    channels = channels_of_a_warp(states)
    while channels > 8 and batch * ceil_div(dim, channels) < programs:
        channels //= 2
    return channels


def configs(problem: SelectiveScan, device: Device) -> list[Config]:
    """A warp for each of a multiprocessor's four schedulers, if that can be had. One that is alone there has
    nobody to wait with and reads further ahead."""
    channels = fewer_channels(problem.states, problem.batch, problem.dim, 4 * device.units)
    if problem.length == 1:
        return [{"channels": channels, "steps": 1, "warps": 1}]
    tries = [
        (channels, AHEAD if channels <= 8 else 4),
        (channels, 4 if channels <= 8 else AHEAD),
        (max(4, channels // 2), 4),
    ]
    return [{"channels": n, "steps": steps, "warps": 1} for n, steps in tries]


@SELECTIVE_SCAN.route(
    "one-launch",
    refuses=refuses,
    cost=cost,
    configs=configs,
    prepare=prepare_from_plan,
    numerics="close",
    version=3,
    kernels=("turnout.ops.selective_scan.kernels:scan",),
)
@runs_plan
def one_launch(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    initial_state: Tensor | None,
    return_final_state: bool,
    *,
    channels: int = 32,
    steps: int = 4,
    warps: int = 1,
) -> LaunchPlan:
    from turnout.ops.selective_scan.kernels import scan

    (batch, dim, length), states = x.shape, A.shape[1]
    y = empty_dense(x, channel_last(x))
    final = torch.empty(
        (batch, dim, states) if return_final_state else 0, dtype=torch.float32, device=x.device
    )
    none = (0, 0, 0)
    numbers = (
        dim,
        length,
        *x.stride(),
        *dt.stride(),
        *A.stride(),
        *B.stride(),
        *C.stride(),
        *(none if z is None else z.stride()),
        *(none if initial_state is None else initial_state.stride()),
        *y.stride(),
        *(final.stride() if return_final_state else none),
    )
    constants = {
        "SOFTPLUS": dt_softplus,
        "LOG": False,
        "FINAL": return_final_state,
        "STATES": states,
        "N": max(2, power_of_two(states)),
        "BD": channels,
        "STEPS": steps,
    }
    skip, bias = (None if t is None else t.contiguous() for t in (D, dt_bias))
    tensors = (x, dt, A, B, C, skip, z, bias, initial_state, y, final)
    # A warp that reads far ahead has a scheduler for itself: all registers are its own, and ptxas need not
    # save any.
    registers = 255 if steps == AHEAD else None
    launch = Launch(
        scan, batch * ceil_div(dim, channels), tensors, numbers, constants, warps, {"maxnreg": registers}
    )
    return LaunchPlan((launch,), (y, final))

"""The track of selective_scan: one launch on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from turnout.ops import needs
from turnout.ops.causal_conv1d import channel_last
from turnout.ops.causal_conv1d.launches import ceil_div, empty_dense
from turnout.ops.selective_scan import SELECTIVE_SCAN, SelectiveScan
from turnout.routing.device import Device
from turnout.routing.op import Config

KINDS = (torch.float32, torch.float16, torch.bfloat16)
MOST_STATES = 256
LONGEST = 2**31 - 1


def refuses(problem: SelectiveScan, device: Device) -> Iterator[str]:
    yield from needs.needs_triton(device)
    names = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_state")
    for name, kind in zip(names, problem.dtypes, strict=True):
        if kind is not None:
            yield from (f"{name} of {reason}" for reason in needs.needs_dtype(kind, *KINDS))
    if problem.elements == 0 or problem.states == 0:
        yield "nothing to scan, this route needs at least one element and one state"
    if problem.states > MOST_STATES:
        yield f"{problem.states} states, this route needs at most {MOST_STATES}"
    if problem.length > LONGEST:
        yield f"length {problem.length}, this route needs at most {LONGEST}"


def cost(problem: SelectiveScan, device: Device) -> None:
    """No estimate until the GPU tests have passed on a card: until then a pin takes this route, or `tune`, which checks outputs."""


def configs(problem: SelectiveScan, device: Device) -> list[Config]:
    """A warp for each 32 channels with 16 states; fewer channels where there are more states or too few programs."""
    channels = max(4, 512 // max(16, 1 << (problem.states - 1).bit_length()))
    while channels > 8 and problem.batch * ceil_div(problem.dim, channels) < device.units:
        channels //= 2
    return [{"channels": channels, "steps": 1 if problem.length == 1 else 8, "warps": 1}]


@SELECTIVE_SCAN.route("one-launch", refuses=refuses, cost=cost, configs=configs, numerics="close", version=1)
def one_launch(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None,
    dt_softplus: bool, initial_state: Tensor | None, return_final_state: bool, *, channels: int = 32, steps: int = 8, warps: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from turnout.ops.launching import launch
    from turnout.ops.selective_scan.kernels import scan

    (batch, dim, length), states = x.shape, A.shape[1]
    y = empty_dense(x, channel_last(x))
    final = torch.empty((batch, dim, states) if return_final_state else 0, dtype=torch.float32, device=x.device)
    none = (0, 0, 0)
    numbers = (
        dim, length, states, *x.stride(), *dt.stride(), *A.stride(), *B.stride(), *C.stride(), *(none if z is None else z.stride()),
        *(none if initial_state is None else initial_state.stride()), *y.stride(),
    )  # fmt: skip
    constants = {
        "SOFTPLUS": dt_softplus,
        "FINAL": return_final_state,
        "N": max(2, 1 << (states - 1).bit_length()),
        "BD": channels,
        "STEPS": steps,
    }
    skip, bias = (None if t is None else t.contiguous() for t in (D, dt_bias))
    tensors = (x, dt, A, B, C, skip, z, bias, initial_state, y, final)
    launch(scan, batch * ceil_div(dim, channels), tensors, numbers, constants, warps=warps)
    return y, final

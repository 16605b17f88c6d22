"""The route of add_repeated: one kernel, a program for a few pixels of x and all of their repeats."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from turnout.launch import LaunchPlan, prepare_from_plan, runs_plan
from turnout.ops import needs
from turnout.ops.add_repeated import ADD_REPEATED, AddRepeated, picks_of, side_by_side, work
from turnout.ops.add_repeated.launches import launch_of
from turnout.ops.integers import power_of_two
from turnout.ops.layouts import VECTOR_BYTES
from turnout.routing.device import Device
from turnout.routing.route import Config

MOST_REPEATS = 16  # a program holds them all in registers
THREADS = 128
LARGE = 2**20  # elements from which on a second configuration is worth trying


def refuses_pixels(problem: AddRepeated, device: Device) -> Iterator[str]:
    yield from needs.needs_triton(device)
    yield from needs.needs_half_or_single(y=problem.dtype)
    if 0 in problem.shape or 0 in problem.x_shape:
        yield "nothing to add, this route needs at least one element"
    if not side_by_side(problem):
        yield (
            f"channels {problem.strides[1]} and {problem.x_strides[1]} apart, "
            "this route needs them side by side"
        )
    repeats, picks = prod(problem.times), picks_of(problem.x_shape[1], problem.shape[1], problem.times)
    if repeats > MOST_REPEATS:
        yield f"{repeats} repeats of each pixel, this route needs at most {MOST_REPEATS}"
    if picks is not None and prod(picks) > 2:
        yield f"{prod(picks)} of x's channels for each of y's, this route needs 1 or 2"


def gpu_cost(problem: AddRepeated, device: Device) -> float | None:
    """Three streams at the share of the bandwidth that such kernels reach; a guess, see NOTES.md."""
    moving = device.seconds(work(problem).bytes)
    return None if moving is None or device.type != "cuda" else max(1.2e-5, 4e-6 + moving / 0.75)


def pixels_configs(problem: AddRepeated, device: Device) -> list[Config]:
    """A vector for each of 128 threads, for one repeat; two with the second."""
    least = THREADS * VECTOR_BYTES // problem.dtype.itemsize
    channels = min(power_of_two(problem.shape[1]), least // 2)
    pixels = min(least // channels, power_of_two(problem.x_shape[4]))
    tries = (1, 2) if problem.elements >= LARGE else (1,)
    return [{"pixels": n * pixels, "channels": channels, "warps": 4} for n in tries]


@ADD_REPEATED.route(
    "pixels",
    refuses=refuses_pixels,
    cost=gpu_cost,
    configs=pixels_configs,
    prepare=prepare_from_plan,
    numerics="exact",
    version=1,
    kernels=("turnout.ops.add_repeated.kernels:add_repeated",),
)
@runs_plan
def pixels(
    y: Tensor, x: Tensor, times: list[int], *, pixels: int = 4, channels: int = 256, warps: int = 4
) -> LaunchPlan:
    out = torch.empty_like(y)
    return LaunchPlan((launch_of(y, x, out, times, pixels, channels, warps),), out)

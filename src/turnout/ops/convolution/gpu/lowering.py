"""How kernels of convolutions are launched: what a portable one and one for Hopper have to say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from turnout.launch import Launch
from turnout.launch import descriptors as tma
from turnout.ops.convolution.gpu.operands import Geometry, Layout, Operands
from turnout.routing.device import Device

# The order of axes: batch, the one along which outputs share inputs, the other one, width, channels.
AXES = {"depth": (0, 2, 3, 4, 1), "height": (0, 3, 2, 4, 1), "rolled": (0, 2, 3, 4, 1)}


class Portable(NamedTuple):
    """How a kernel for any GPU and any strides is launched.

    tile: the type of its configuration. launch: its launch on tensors with three spatial axes.
    """

    tile: type[Any]
    launch: Callable[[Operands, Geometry, Any], Launch]


class HopperCall(NamedTuple):
    """All that a plan for a Hopper kernel follows from, with three spatial axes."""

    x: Layout
    weight: tuple[int, ...]  # its shape; channels last, without gaps
    out: Layout
    residual: Layout
    cache: Layout
    dtype: torch.dtype
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    replicates: bool  # the first frame instead of zeros
    streams: bool  # other calls of the layer have a cache
    device: Device


class HopperPlan(NamedTuple):
    """All arguments of a launch but the tensors. Working them out takes longer than the launch."""

    patterns: tuple  # of the TMA descriptors
    programs: int
    numbers: tuple[int, ...]
    constants: dict[str, Any]
    registers: int | None = None  # of a thread


class Hopper(NamedTuple):
    """How a Hopper kernel is launched.

    tile: the type of its configuration. plan: works out a plan from a call and a tile. launch: the launch of
    a plan on tensors with channels last. by_tma: the operands that TMA reads or writes. portable: the kernel
    that takes their place where they start at addresses that TMA cannot take. pads_channels: whether channels
    of half precision that TMA cannot read are copied with zeros behind them.
    """

    tile: type[Any]
    plan: Callable[[HopperCall, Any], HopperPlan]
    launch: Callable[[HopperPlan, Operands], Launch]
    by_tma: tuple[str, ...]
    portable: Portable
    pads_channels: bool


Lowering = Portable | Hopper


def pattern_along(axes: tuple[int, ...], layout: Layout, dtype: torch.dtype, block: tuple[int, ...]) -> Any:
    """The pattern of TMA descriptors for a tensor with its axes in another order; None without a tensor."""
    if not layout:
        return None
    shape, strides = (tuple(numbers[axis] for axis in axes) for numbers in layout)
    return tma.pattern(shape, strides, dtype, block)

"""The routes of attention: torch's kernels by name, vendor kernels on the valid keys, and our own kernels
where no other takes the call.
"""

from __future__ import annotations

import functools
from typing import Any

from turnout.launch import prepare_from_plan
from turnout.ops.attention import ATTENTION, Attention, backends, costs, flash, valid_keys
from turnout.routing.device import Device

FLASH = ("turnout.ops.attention.kernels:flash_kernel",)
CLOSE: Any = {"numerics": "close", "version": 1}
PLANNED: Any = {"prepare": prepare_from_plan, **CLOSE}


def no_cost(problem: Attention, device: Device) -> None:
    """Only a measurement or a pin selects such a route."""


# torch's backends, and FlashAttention 3 and 4

ATTENTION.route("cudnn", refuses=backends.refuses_cudnn, cost=costs.cudnn, **CLOSE)(
    backends.on_all_keys(backends.by_cudnn)
)
ATTENTION.route("flash", refuses=backends.refuses_flash, cost=costs.flash, **CLOSE)(
    backends.on_all_keys(backends.by_flash)
)
ATTENTION.route("efficient", refuses=backends.refuses_efficient, cost=costs.efficient, **CLOSE)(
    backends.on_all_keys(backends.by_efficient)
)
for name, package, run in (
    ("flash-attention-3", "flash_attn_interface", backends.by_flash_attention_3),
    ("flash-attention-4", "flash_attn.cute", backends.by_flash_attention_4),
):
    refuses = functools.partial(backends.refuses_flash_attention, package=package)
    ATTENTION.route(name, refuses=refuses, cost=no_cost, **CLOSE)(backends.on_all_keys(run))
ATTENTION.route("math", refuses=backends.refuses_math, cost=no_cost, **CLOSE)(backends.by_math)

# Vendor kernels on the keys that count

ATTENTION.route("narrow", refuses=valid_keys.refuses_narrow, cost=costs.narrow, **CLOSE)(valid_keys.narrow)
ATTENTION.route(
    "common-keys",
    refuses=valid_keys.refuses_common,
    cost=costs.common,
    configs=valid_keys.common_configs,
    numerics="close",
    version=2,
    kernels=FLASH,
)(valid_keys.common_keys)

# Our own kernels

ATTENTION.route(
    "wide-head",
    refuses=flash.refuses_wide,
    cost=costs.wide,
    configs=flash.wide_configs,
    kernels=FLASH,
    **PLANNED,
)(flash.wide_head)
ATTENTION.route(
    "flash-triton",
    refuses=flash.refuses_flash_triton,
    cost=costs.flash_triton,
    configs=flash.flash_configs,
    kernels=FLASH,
    **PLANNED,
)(flash.flash_triton)
ATTENTION.route(
    "wide-head-hopper",
    refuses=flash.refuses_wide_hopper,
    cost=costs.wide_hopper,
    configs=flash.wide_hopper_configs,
    kernels=(
        "turnout.ops.attention.hopper_kernels:wide_kernel",
        "turnout.ops.attention.kernels:combine_kernel",
    ),
    **PLANNED,
)(flash.wide_head_hopper)

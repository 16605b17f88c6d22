"""The routes of conv2d and conv3d by our own GPU kernels, and how the other convolutions declare theirs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from turnout.launch import LaunchPlan, prepare_from_plan
from turnout.ops.convolution import costs
from turnout.ops.convolution.gpu.declared import KERNELS, Kernel, task_of
from turnout.ops.convolution.gpu.launching import convolved, plan_convolution
from turnout.ops.convolution.problem import Convolution
from turnout.routing.configured import configured
from turnout.routing.device import Device
from turnout.routing.op import Op
from turnout.routing.route import Config, Cost, Guard

Configs = Callable[[Any, Device], list[Config]]


def declare(
    op: Op,
    name: str,
    kernel: Kernel,
    run: Callable[..., Tensor],
    plan: Callable[..., LaunchPlan | None],
    *,
    refuses: Guard,
    cost: Cost,
    configs: Configs,
    more_kernels: tuple[str, ...] = (),
) -> None:
    """Declare an op's route by one of our kernels.

    run, plan: called with the kernel's lowering, the arguments of the op and the configuration; `plan` gives
    the launches of what `run` does, or None where tensors have to be copied first. more_kernels: those that
    the op launches besides.
    """
    op.route(
        name,
        refuses=refuses,
        cost=cost,
        configs=configs,
        prepare=functools.partial(prepare_from_plan, plan=functools.partial(plan, kernel.lowering)),
        numerics="close",
        version=1,
        kernels=(*kernel.kernels, *more_kernels),
        grain=kernel.grain,
    )(configured(functools.partial(run, kernel.lowering), kernel.defaults))


def declare_kernels(op: Op) -> None:
    """Declare the routes of conv2d or conv3d by our kernels."""
    for name, kernel in KERNELS.items():
        declare(op, name, kernel, convolved, plan_convolution, **guard_and_cost(kernel))


def guard_and_cost(kernel: Kernel) -> dict[str, Any]:
    """What a route of conv2d or conv3d by this kernel refuses, costs and offers."""

    def refuses(problem: Convolution, device: Device) -> Iterator[str]:
        why = problem.invalid()
        if why is not None:
            yield why
        elif problem.dtype != problem.weight_dtype or problem.bias_dtype not in (None, problem.dtype):
            yield (
                f"a weight of {problem.weight_dtype} and a bias of {problem.bias_dtype}, "
                "this route needs the input's dtype"
            )
        else:
            yield from kernel.refuses_on(kernel.widened(task_of(problem)), device)

    def cost(problem: Convolution, device: Device) -> float | None:
        return kernel.cost(task_of(problem), costs.around(problem._replace(residual=None), device), device)

    def configs(problem: Convolution, device: Device) -> list[Config]:
        return kernel.configs(kernel.widened(task_of(problem)), device)

    return {"refuses": refuses, "cost": cost, "configs": configs}

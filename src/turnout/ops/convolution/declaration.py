"""The op of conv2d and of conv3d: torch's own convolution, and a residual that is added to it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from turnout.ops.convolution.costs import family, reference_cost, simpler, work
from turnout.ops.convolution.gradients import convolution_vjp
from turnout.ops.convolution.layout import with_residual
from turnout.ops.convolution.problem import Convolution, torch_settings
from turnout.routing.op import Op


def convolution_op(name: str, convolve: Callable[..., Tensor], problem_type: type[Convolution]) -> Op:
    """Declare an op by torch's own function."""

    def reference(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: list[int],
        padding: list[int],
        dilation: list[int],
        groups: int,
        residual: Tensor | None,
    ) -> Tensor:
        return with_residual(convolve(input, weight, bias, stride, padding, dilation, groups), residual)

    return Op(
        name,
        reference,
        problem_type=problem_type,
        cost=reference_cost,
        work=work,
        cases=f"turnout.ops.{name}.cases",
        family=family,
        simpler=simpler,
        autocast="cast",
        vjp=convolution_vjp,
        ambient=torch_settings,
    )

"""Cases: real calls of ops, each with the model it comes from, for tuning, benchmarks and GPU tests."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from turnout.routing.torch_private import FakeTensorMode

if TYPE_CHECKING:
    from turnout.routing.op import Op


@dataclass(frozen=True)
class Case:
    """One real call of an op.

    source: the model it comes from. make: `make(device, seed)` builds its public arguments, of random values.
    """

    name: str
    source: str
    dtype: torch.dtype
    make: Callable[[torch.device, int], tuple]
    timed: tuple[str, ...] = ("cpu", "cuda")  # types of devices on which its time is worth knowing

    def timed_on(self, device_type: str) -> bool:
        """Whether its time there is worth knowing."""
        return device_type in self.timed

    def only_for_tests(self) -> Case:
        """The same, timed nowhere: a tiny call takes what the host takes, which `bench router` measures."""
        return replace(self, timed=())

    def only_on_a_cpu(self) -> Case:
        """The same, timed on CPUs: it is too small for a GPU."""
        return replace(self, timed=("cpu",))

    def __str__(self) -> str:
        return f"{self.name} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class Cases:
    """An op's real calls, and what benchmarks and tests need to know about the op.

    calls: real calls, small ones first. random_call: draws the public arguments of a small valid call.
    peers, bounds: functions the op is timed against, by name; they take the reference's arguments. A bound
    does less than the op, such as a plain copy of the same size. exact: sums of small integers come out
    exact, so tests compare routes bit for bit. ordinary: arguments that get no NaN or infinity in tests,
    because torch's own kernels disagree about those. of_torch: routes that launch no kernels but torch's,
    copies aside. not_interpreted: routes whose kernels Triton's interpreter cannot run.
    """

    calls: Sequence[Case]
    random_call: Callable[[random.Random, torch.device], tuple]
    peers: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    bounds: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    exact: bool = True
    ordinary: tuple[str, ...] = ()
    of_torch: tuple[str, ...] = ()
    not_interpreted: tuple[str, ...] = ()


class Outline(NamedTuple):
    """A case without its data: the problem of its call, and the reference's arguments on the meta device."""

    problem: Any
    args: tuple


def outline(op: Op, case: Case) -> Outline:
    """The problem and the arguments of a case, without allocating its tensors where that can be avoided."""
    try:
        with FakeTensorMode():
            args = op.arguments(*case.make(torch.device("cpu"), 0))
            problem = op.problem(*args)
    except (RuntimeError, TypeError, NotImplementedError):
        # The problem depends on values, such as a mask's: fake tensors have none.
        args = op.arguments(*case.make(torch.device("cpu"), 0))
        problem = op.problem(*args)
    return Outline(problem, tuple(_on_meta(x) if isinstance(x, torch.Tensor) else x for x in args))


def _on_meta(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def normal(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> torch.Tensor:
    """A tensor of standard normal values; of an integer dtype, of small integers, whose sums are exact."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=dtype, device=device, generator=generator)
    return torch.randint(
        -4 if dtype.is_signed else 0, 5, shape, dtype=dtype, device=device, generator=generator
    )


def seeded(device: torch.device, seed: int) -> torch.Generator:
    """A generator of random numbers on a device, with its seed set."""
    return torch.Generator(device).manual_seed(seed)


def copies(args: tuple[Any, ...], count: int) -> list[tuple]:
    """`count` sets of the same arguments, strides kept: the given ones, and copies in other memory."""
    return [
        args,
        *(tuple(copy(x) if isinstance(x, torch.Tensor) else x for x in args) for _ in range(count - 1)),
    ]


def copy(x: torch.Tensor) -> torch.Tensor:
    """Copy a tensor into other memory, with the same strides unless its elements share memory."""
    if any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True)):
        return x.clone()
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)


def laid_like(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Copy values of x's shape into new memory with x's strides.

    Along an axis where x is expanded, the first value is repeated.
    """
    for axis, stride in enumerate(x.stride()):
        if stride == 0 and x.shape[axis] > 1:
            values = values.narrow(axis, 0, 1)
    return (
        torch.empty_strided(values.shape, x.stride(), dtype=x.dtype, device=x.device)
        .copy_(values)
        .expand(x.shape)
    )


def small_integers(
    draw: random.Random, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A tensor of values in -1, 0, 1, whose sums are exact in any dtype, in a random layout: dense, permuted,
    strided, sliced, expanded.
    """
    size = tuple(n * draw.choice((1, 1, 2)) for n in shape)
    order = draw.sample(range(len(shape)), len(shape)) if draw.random() < 0.3 else range(len(shape))
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    low = 0 if not (dtype.is_signed or dtype.is_complex) else -1
    values = torch.randint(low, 2, [size[i] for i in order], generator=generator)
    if dtype.is_complex:
        values = torch.complex(
            values.double(), torch.randint(-1, 2, values.shape, generator=generator).double()
        )
    tensor = values.to(dtype).to(device).permute([list(order).index(i) for i in range(len(shape))])
    steps = tuple(
        slice(None, None, 2) if full > n else slice(None) for full, n in zip(size, shape, strict=True)
    )
    tensor = tensor[steps]
    if shape and shape[0] > 1 and draw.random() < 0.1:
        tensor = tensor[:1].expand(shape)
    return tensor

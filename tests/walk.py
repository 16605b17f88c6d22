"""What every layer walks: ops, their routes, and random calls. A declared route is covered by all of them."""

import functools
import itertools
import random
import re

import pytest
import torch

import turnout  # noqa: F401
from turnout.launch import prepare_from_plan
from turnout.measure.verify import Verifier, outputs, truth
from turnout.routing.case import copy
from turnout.routing.device import Device
from turnout.routing.op import OPS

CPU = torch.device("cpu")
H200 = Device.named("h200")

ops = pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())
contractions = pytest.mark.parametrize(
    "op", [OPS[name] for name in ("dot", "inner", "matmul")], ids=["dot", "inner", "matmul"]
)


def random_call(op, seed, device):
    """The reference's arguments of a random valid call."""
    return op.arguments(*op.declared_cases.random_call(random.Random(seed), device))


def equal(op, run, args):
    """Whether a run gives what the reference gives: outputs and what it writes into, values, dtypes, strides.

    Sums of small integers are exact, so values must be the same bit for bit; an op that divides or takes
    roots says in its cases that it is not `exact`, and is held to `close` instead."""
    if not op.declared_cases.exact:
        return Verifier(op, args).mismatch("close", run) is None
    actual, expected = outputs(op, run, args), outputs(op, op.reference, args)
    alike = [
        x.dtype == y.dtype and (not y.numel() or x.stride() == y.stride())
        for x, y in zip(actual, expected)  # noqa: B905
    ]
    same = all(map(torch.equal, actual, expected))
    if not same:
        # The reference may be the one that is wrong: some cuDNN kernels transform their inputs and round, and
        # oneDNN's for groups in bfloat16 read beside their input.
        same = all(torch.equal(x, y.to(x.dtype)) for x, y in zip(actual, truth(op, args)))  # noqa: B905
    return len(actual) == len(expected) and all(alike) and same


def lets_pass(op, run, args):
    """Where a run gives what is not finite for NaN and Inf in the middle of the first argument and at its
    end, that is where float64 does, or where the reference does if it has its own mind. Float64 on a CPU: a
    GPU's kernels may transform. Why not, or None."""
    for value, place in itertools.product((float("nan"), float("inf")), (args[0].shape[-1] // 2, -1)):
        first = copy(args[0])
        first.select(-1, place).fill_(value)
        changed = (first, *args[1:])
        true = truth(op, tuple(x.cpu() if isinstance(x, torch.Tensor) else x for x in changed))
        for i, parts in enumerate(
            zip(outputs(op, run, changed), outputs(op, op.reference, changed), true, strict=True)
        ):
            ours, theirs, right = (x.isfinite().cpu() for x in parts)
            if not torch.equal(ours, right) and not torch.equal(ours, theirs):
                count = int((ours != right).sum())
                return f"{value} at {place}: output {i} differs from float64 at {count} places"
    return None


def elsewhere(args, off=0):
    """The same arguments in other places, so many elements off."""

    def moved(x):
        span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        there = torch.zeros(span + off, dtype=x.dtype, device=x.device)
        there[off:] = x.as_strided((span,), (1,))
        return there.as_strided(x.shape, x.stride(), off)

    return tuple(moved(x) if isinstance(x, torch.Tensor) and x.numel() else x for x in args)


def calls(op, route, device, target, count, seeds=range(100_000)):
    """`count` random calls on `device` that the route takes on the device `target`."""
    results = []
    for seed in seeds:
        args = random_call(op, seed, device)
        if not any(route.refuses(op.problem(*args), target)):
            results.append(args)
            if len(results) == count:
                return results
    raise AssertionError(f"no {count} calls for {op.name} {route.name} among the random calls")


@functools.cache
def problems(op):
    """Those of some random calls."""
    return [op.problem(*random_call(op, seed, CPU)) for seed in range(300)]


def takes(op, route, target):
    """Whether the route takes some random call on the device `target`."""
    return any(not any(route.refuses(problem, target)) for problem in problems(op))


def runs_on_numba(route):
    """Whether a route's kernels are Numba's: they lie in files for a CPU."""
    return any("cpu" in re.split(r"[._]", kernel.partition(":")[0]) for kernel in route.kernels)


def _parametrised(pairs):
    return pytest.mark.parametrize(
        ("op", "route"), pairs, ids=[f"{op.name}-{route.name}" for op, route in pairs]
    )


ALL = [(op, route) for op in OPS.values() for route in op.routes.values()]
routes = _parametrised(ALL)
ON_GPU = [(op, route) for op, route in ALL if takes(op, route, H200)]
gpu_routes = _parametrised(ON_GPU)
LAUNCHING = [(op, route) for op, route in ON_GPU if route.name not in op.declared_cases.of_torch]
launching_routes = _parametrised(LAUNCHING)
prepared_routes = _parametrised([(op, route) for op, route in LAUNCHING if route.prepare is not None])
planned_routes = _parametrised([(op, route) for op, route in LAUNCHING if route.prepare is prepare_from_plan])
triton_routes = _parametrised(
    [(op, route) for op, route in LAUNCHING if route.name not in op.declared_cases.not_interpreted]
)
ON_CPU = [(op, route) for op, route in ALL if takes(op, route, Device.of("cpu"))]
cpu_routes = _parametrised(ON_CPU)
numba_routes = _parametrised([(op, route) for op, route in ON_CPU if runs_on_numba(route)])

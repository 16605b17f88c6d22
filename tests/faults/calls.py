"""Calls that keep a CPU route busy for about a millisecond: long enough for a signal to arrive inside."""

import functools
import importlib
import itertools
import math

import torch

from tests import walk
from turnout.measure.timer import time_call
from turnout.ops.convolution.cases import FIRST, LAST, convolution_case
from turnout.routing.device import Device

WANTED_MS = 1.0
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_here = Device.of("cpu")


def sized_cases(op_name):
    """Cases of an op, of every dtype and layout that its routes tell apart. Other ops have none."""
    layouts = list(itertools.product(DTYPES, (FIRST, LAST)))
    sequence_layouts = list(itertools.product(DTYPES, ("channel-first", "channel-last")))
    if op_name == "attention":
        case = importlib.import_module("turnout.ops.attention.cases").case
        whole = [case("signals", "", 2, 4, 128, 64, dtype) for dtype in DTYPES]
        return whole + [case("signals", "", 2, 4, 128, 64, dtype, lengths=[100, 128]) for dtype in DTYPES]
    if op_name == "causal_conv1d":
        case = importlib.import_module("turnout.ops.causal_conv1d.cases").case
        packed = {"width": 3, "sequences": 3, "states": True}
        forms = [(dtype, layout, batch) for dtype, layout in sequence_layouts for batch in (2, 1)]
        return [
            case("signals", "", (batch, 384, 2048), layout, dtype, **(packed if batch == 1 else {}))
            for dtype, layout, batch in forms
        ]
    if op_name == "causal_conv1d_update":
        case = importlib.import_module("turnout.ops.causal_conv1d_update.cases").case
        return [case("signals", "", 64, 2048, dtype, length=length) for dtype in DTYPES for length in (0, 3)]
    if op_name in ("conv2d", "conv3d"):
        size = (40, 40) if op_name == "conv2d" else (4, 24, 24)
        forms = itertools.product(layouts, (1, 3), ((64, 64), (16, 48)))
        return [convolution_case("", size, c, dtype, kernel=k, layout=at) for (dtype, at), k, c in forms]
    if op_name == "causal_conv3d":
        case = importlib.import_module("turnout.ops.causal_conv3d.cases").case
        return [case("", (3, 20, 20), (32, 32), dtype, layout=layout) for dtype, layout in layouts]
    if op_name == "upsample_conv2d":
        case = importlib.import_module("turnout.ops.upsample_conv2d.cases").case
        return [case("", (24, 24), (48, 48), dtype, layout=layout) for dtype, layout in layouts]
    if op_name in ("dot", "inner", "matmul"):
        case = importlib.import_module("turnout.ops.dot.cases").case
        length = 4_000_000
        sizes = ((1, length), (length, 1)) if op_name == "matmul" else ((length,), (length,))
        return [case("signals", *sizes, dtype) for dtype in DTYPES]
    if op_name == "norm_rope":
        case = importlib.import_module("turnout.ops.norm_rope.cases").case
        forms = itertools.product(DTYPES, ("head", "all"))
        return [case("signals", "", (100, 156), dtype=dtype, norm=norm) for dtype, norm in forms]
    if op_name == "rms_norm_silu":
        case = importlib.import_module("turnout.ops.rms_norm_silu.cases").case
        return [case("signals", "", (1, 96, 4, 64, 96), layout, dtype) for dtype, layout in sequence_layouts]
    if op_name == "rms_norm_silu_into":
        case = importlib.import_module("turnout.ops.rms_norm_silu.cases_into").case
        return [case("signals", (1, 96, 4, 64, 96), layout, dtype) for dtype, layout in sequence_layouts]
    return []


class Call:
    """A call of a route with two sets of values: memory that one has left behind is wrong for the other."""

    def __init__(self, op, route, make):
        self.op, self.route = op, route
        self.sets = [op.arguments(*make(walk.CPU, seed)) for seed in (0, 1)]
        problem = op.problem(*self.sets[0])
        self.refused = any(route.refuses(problem, _here))
        if not self.refused:
            self.run = route.prepared(self.sets[0], dict(next(iter(route.configs(problem, _here))))).call

    def seconds(self):
        """The time of one call, the best of two."""
        times = []
        for _ in range(3):
            args = self.fresh(0)
            times.append(1e-3 * time_call(functools.partial(self.run, *args), walk.CPU).ms)
        return min(times[1:])

    def fresh(self, which):
        """The arguments, those that the op writes into in memory of their own."""
        names = self.op.signature.parameters
        return tuple(
            walk.copy(x) if name in self.op.mutates and isinstance(x, torch.Tensor) else x
            for name, x in zip(names, self.sets[which], strict=True)
        )


def calls(op, route):
    """One call per dtype that the route takes, each as near to WANTED_MS as there is one, with its seconds.

    An op without sized cases falls back to random calls.
    """
    dtypes = {}
    for case in sized_cases(op.name):
        call = Call(op, route, case.make)
        if not call.refused:
            dtypes.setdefault(case.dtype, []).append((call, call.seconds()))
    if not dtypes:
        for args in walk.calls(op, route, walk.CPU, _here, 10):
            call = Call(op, route, lambda device, seed, args=args: args)
            dtypes.setdefault(None, []).append((call, call.seconds()))

    def misses(timed):
        return abs(math.log(timed[1] * 1e3 / WANTED_MS))

    return [min(result, key=misses) for result in dtypes.values()]

"""Small convolutions in float32 on this CPU: no route loses more digits than torch, whichever way torch adds
up here.
"""

import functools
import random
from dataclasses import replace

import pytest
import torch

import turnout
from turnout.measure.verify import Verifier, allowed_error
from turnout.ops.causal_conv3d import CAUSAL_CONV3D
from turnout.ops.conv2d import CONV2D
from turnout.ops.conv3d import CONV3D
from turnout.ops.upsample_conv2d import UPSAMPLE_CONV2D
from turnout.routing.device import Device

CALLS = 300


def small_call(draw):
    """An op and random arguments of it: few or many channels, one to five frames, with and without a batch,
    bias and cache.
    """
    op = draw.choice([CONV2D, CONV3D, CAUSAL_CONV3D, UPSAMPLE_CONV2D])
    batch, channels, filters = (
        draw.choice([1, 1, 2]),
        draw.choice([3, 16, 24, 32, 48, 64, 96, 192, 256, 384]),
        draw.choice([3, 8, 32, 96]),
    )
    kernel, depth = draw.choice([1, 3, 3]), draw.choice([1, 3, 3, 5])
    size = [draw.randint(3, 20), draw.randint(3, 20)]
    clip = op in (CONV3D, CAUSAL_CONV3D)
    x = torch.randn(batch, channels, *([draw.randint(1, 5)] if clip else []), *size)
    weight = torch.randn(filters, channels, *([depth] if clip else []), kernel, kernel) / 8
    bias = draw.choice([None, torch.randn(filters)])
    if draw.random() < 0.5:
        x, weight = (
            t.contiguous(memory_format=torch.channels_last_3d if clip else torch.channels_last)
            for t in (x, weight)
        )
    if op is CAUSAL_CONV3D:
        cache = torch.randn(batch, channels, depth - 1, *size) if depth > 1 and draw.random() < 0.5 else None
        return op, op.arguments(x, weight, bias, cache=cache, padding=kernel // 2)
    return op, op.arguments(
        x, weight, bias, padding=(depth // 2, kernel // 2, kernel // 2) if clip else kernel // 2
    )


def test_small_calls_are_as_accurate_as_torch():
    """A few may by luck: the bound is a multiple of an error that is itself a matter of luck.

    None may by much.
    """
    torch.manual_seed(0)
    draw, cpu, over, worst, tried = random.Random(0), Device.of("cpu"), [], 0.0, 0
    for _ in range(CALLS):
        op, args = small_call(draw)
        problem, trial = op.problem(*args), Verifier(op, args)
        allowed = allowed_error(
            torch.stack([x[0] for x in trial.expected]), torch.stack([x[0] for x in trial.true])
        )
        for route in op.routes.values():
            if any(route.refuses(problem, cpu)):
                continue
            run = functools.partial(route.run, **route.configs(problem, cpu)[0])
            why, tried = trial.mismatch(route.numerics, run), tried + 1
            if why is not None:
                over.append((op.name, route.name, problem, why))
                worst = max(worst, trial.error(run) / allowed)
    assert tried > CALLS
    assert len(over) <= tried / 100, over
    assert worst < 1.2, over


@pytest.mark.parametrize("carefully", [True, False])
def test_where_torchs_own_loop_adds_carefully(carefully):
    """As on an AMD Zen 4: what oneDNN adds up in one go must be short then. On an Intel it need not be."""
    with_avx512 = frozenset([torch.float32, torch.bfloat16])
    cpu = replace(Device.of("cpu"), one_dnn=with_avx512, careful_loop=carefully)

    def refused(channels, *kernel):
        x, weight = torch.empty(1, channels, 5, 8, 9), torch.empty(16, channels, *kernel)
        verdict = turnout.explain("conv3d", x, weight, padding=[k // 2 for k in kernel], device=cpu).refused
        return {
            name
            for name in ("one-dnn", "depth-taps")
            if any("adds more carefully" in why for why in verdict.get(name, ()))
        }

    assert refused(8, 3, 3, 3) == refused(32, 3, 1, 1) == set()
    assert refused(32, 3, 3, 3) == ({"one-dnn"} if carefully else set())
    assert refused(64, 3, 3, 3) == ({"one-dnn", "depth-taps"} if carefully else {"depth-taps"})
    assert refused(192, 3, 3, 3) == refused(192, 3, 1, 1) == {"depth-taps"}
    assert refused(64, 5, 3, 3) == {"one-dnn", "depth-taps"}

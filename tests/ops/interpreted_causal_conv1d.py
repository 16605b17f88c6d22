"""What the walkers do not ask of the GPU routes of causal_conv1d, its update and its backward: the
activation, NaN, wrong ends. In Triton's interpreter, on CPU tensors, collected by tests/interpret. float32
and float16 only: it is silently wrong for bfloat16."""

import random

import pytest
import torch

import turnout.ops.causal_conv1d.routes
import turnout.ops.causal_conv1d_backward.routes
import turnout.ops.causal_conv1d_update.routes  # noqa: F401
from turnout.measure.verify import Verifier
from turnout.routing.device import Device
from turnout.routing.op import OPS

H200, CPU = Device.named("h200"), torch.device("cpu")
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:overflow encountered"),
    pytest.mark.usefixtures("poison"),
]

NAMES = ("causal_conv1d", "causal_conv1d_update", "causal_conv1d_backward")
PAIRS = [
    (OPS[name], route)
    for name in NAMES
    for route in OPS[name].routes.values()
    if not route.name.startswith("cpu")
]
routes = pytest.mark.parametrize(
    ("op", "route"), PAIRS, ids=[f"{op.name}-{route.name}" for op, route in PAIRS]
)


def taken_calls(op, route, first, count):
    """The first `count` random calls that the route takes; backwards are slow here."""
    total = 0
    for seed in range(first, first + 1000):
        args = op.arguments(*op.declared_cases.random_call(random.Random(seed), CPU))
        half = any(isinstance(x, torch.Tensor) and x.dtype is torch.bfloat16 for x in args)
        if not half and args[0].numel() <= 1000 and not any(route.refuses(op.problem(*args), H200)):
            yield args
            total += 1
            if total >= (count if op.name != "causal_conv1d_backward" else count // 3):
                return


def with_silu(op, args, seed):
    """The same call with normal values and the activation."""
    generator = torch.Generator().manual_seed(seed)
    names = list(op.signature.parameters)

    def normal(x):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(
            torch.randn(x.shape, generator=generator)
        )

    floats = [
        normal(x) if isinstance(x, torch.Tensor) and x.is_floating_point() and 0 not in x.stride() else x
        for x in args
    ]
    floats[names.index("activation")] = "silu"
    return tuple(floats)


@routes
def test_silu_is_close(op, route):
    seen = 0
    for seed, args in enumerate(taken_calls(op, route, 100, 6)):
        args = with_silu(op, args, seed)
        assert Verifier(op, args).mismatch(route.numerics, route.run) is None, op.problem(*args)
        seen += 1
    assert seen >= 2


@pytest.mark.parametrize(
    "route", [route for op, route in PAIRS if op.name == "causal_conv1d"], ids=lambda route: route.name
)
def test_nan_stays_in_its_own_sequence(route):
    last = route.name == "channel-last"
    x = torch.randn(1, 24, 8).transpose(1, 2) if last else torch.randn(1, 8, 24)
    x[0, 3, 10] = float("nan")
    weight, ends = torch.randn(8, 4), torch.tensor([0, 5, 11, 24], dtype=torch.int32)
    for packing in ((None, ends), (torch.tensor([0] * 5 + [1] * 6 + [2] * 13)[None], None)):
        y, _ = route.run(x, weight, None, "silu", *packing, None, False)
        poisoned = torch.zeros_like(y, dtype=torch.bool)
        poisoned[0, 3, 10] = True
        assert torch.equal(y.isnan(), poisoned)


def test_wrong_ends_stay_inside_x():
    """On a GPU cu_seqlens is not read before every launch; whatever it holds, only x is read."""
    route = OPS["causal_conv1d"].routes["channel-first"]
    x, weight = torch.randn(1, 4, 16), torch.randn(4, 4)
    for ends in ([0, 7, 99], [5, 3, 40], [-4, 8, 16], [0, 16, 2]):
        y, final = route.run(
            x, weight, None, None, None, torch.tensor(ends, dtype=torch.int32), torch.randn(2, 4, 3), True
        )
        assert y.isfinite().all()
        assert final.isfinite().all()

"""First, second and forward-mode derivatives of every op, through every route that takes it on a CPU."""

import contextlib
import itertools
from dataclasses import replace

import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.nn.attention import SDPBackend, sdpa_kernel

import turnout
from tests.faults.public_calls import CALLS, Made, flat, routes_for, wanting_gradients
from tests.faults.test_settings_transforms import places, tensor_at, with_tensors
from turnout.ops.causal_conv1d_backward import CAUSAL_CONV1D_BACKWARD

DIFFERENTIABLE = [call for call in CALLS if not call.written()]
calls = pytest.mark.parametrize("call", DIFFERENTIABLE, ids=str)


def of_floats(call, dtype):
    """The call as a function of its floating-point tensors, and these."""
    kwargs = call.make(dtype)
    there = [place for place in places(kwargs) if tensor_at(kwargs, place).is_floating_point()]
    tensors = [tensor_at(kwargs, place).clone().requires_grad_() for place in there]

    def function(*tensors):
        return tuple(y for y in flat(call.function(**with_tensors(kwargs, there, tensors))) if y.numel())

    return function, tensors


@calls
def test_gradients_and_their_gradients_in_float64(call):
    function, tensors = of_floats(call, torch.float64)
    for name in routes_for(call, torch.float64):
        # torch's fused attention has no second derivatives.
        math = sdpa_kernel(SDPBackend.MATH) if name == "reference" else contextlib.nullcontext()
        with turnout.pin(**{call.name: name}), math:
            assert gradcheck(function, tensors, fast_mode=True, check_forward_ad=True), name
            assert gradgradcheck(function, tensors, fast_mode=True), name


def derivatives(function, tensors, seed=0):
    """Outputs, gradients, and gradients of these, each weighed with random numbers."""
    draw = Made(torch.float64, seed)

    def weighed(values):
        return sum((y.double() * draw(*y.shape)).sum() for y in values if y is not None and y.requires_grad)

    outputs = function(*tensors)
    first = torch.autograd.grad(weighed(outputs), tensors, create_graph=True, allow_unused=True)
    total = weighed(first)
    if isinstance(total, int):  # a linear function
        return [*outputs, *first]
    second = torch.autograd.grad(total, tensors, allow_unused=True)
    return [*outputs, *first, *second]


def compare(call, name, actual, expected, tolerance):
    for i, (x, y) in enumerate(zip(actual, expected, strict=True)):
        x, y = (None if t is None or not t.any() else t.detach().double() for t in (x, y))
        if x is None or y is None:
            assert x is None or float(x.abs().max()) < tolerance, (call, name, i)
            assert y is None or float(y.abs().max()) < tolerance, (call, name, i)
            continue
        assert float((x - y).norm()) <= tolerance * float(y.norm()) + tolerance, (
            call,
            name,
            i,
            float((x - y).norm()),
            float(y.norm()),
        )


@calls
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_second_derivatives_through_every_route(call, dtype):
    function, wide = of_floats(call, torch.float64)
    narrow = [x.detach().to(dtype) for x in wide]
    with turnout.pin(**{call.name: "reference"}), sdpa_kernel(SDPBackend.MATH):
        expected = derivatives(function, [x.double().requires_grad_() for x in narrow])
    for name in routes_for(call, dtype)[1:]:
        with turnout.pin(**{call.name: name}):
            actual = derivatives(function, [x.clone().requires_grad_() for x in narrow])
        compare(call, name, actual, expected, 1e-4 if dtype is torch.float32 else 0.1)


@calls
def test_automatic_choice_has_second_derivatives(call):
    """Or torch's own error where torch has none for its fused attention."""
    function, tensors = of_floats(call, torch.float32)
    refused, results = None, []
    try:
        results = derivatives(function, tensors)
    except RuntimeError as failure:
        refused = str(failure)
    if refused is not None:
        assert call.name == "attention"
        assert "flash_attention_for_cpu_backward is not implemented" in refused
        assert turnout.explain(call.function, **wanting_gradients(call.make())).chosen == "reference"
        return
    function, tensors = of_floats(call, torch.float64)
    with sdpa_kernel(SDPBackend.MATH):
        compare(call, None, results, derivatives(function, tensors), 1e-4)


@calls
def test_forward_mode_in_a_level_and_as_a_transform(call):
    """Dual tensors do not say that they want gradients: a route would lose their tangents."""
    for name, dtype in itertools.product(routes_for(call), (torch.float32,)):
        function, tensors = of_floats(call, dtype)
        tensors = [x.detach() for x in tensors]
        tangents = [torch.randn_like(x) for x in tensors]
        with turnout.pin(**{call.name: name}):
            function(*tensors)  # remembered
            with forward_ad.dual_level():
                duals = [forward_ad.make_dual(x, t) for x, t in zip(tensors, tangents, strict=True)]
                actual = [forward_ad.unpack_dual(y).tangent for y in function(*duals)]
            _, expected = torch.func.jvp(function, tuple(tensors), tuple(tangents))
        assert all(t is not None for t in actual)
        wide_function, wide = of_floats(call, torch.float64)
        at, along = tuple(x.detach() for x in wide), tuple(t.double() for t in tangents)
        _, true = torch.func.jvp(wide_function, at, along)
        compare(call, name, actual, expected, 1e-5)
        compare(call, name, actual, true, 1e-3)


@calls
def test_transforms_of_transforms(call):
    """Hessian-vector products, forward over reverse and reverse over reverse."""
    function, tensors = of_floats(call, torch.float64)
    x, *rest = [t.detach() for t in tensors]

    def total(x):
        return sum(y.square().sum() for y in function(x, *rest))

    v = torch.randn_like(x)
    _, forward_over_reverse = torch.func.jvp(torch.func.grad(total), (x,), (v,))
    reverse_over_reverse = torch.func.grad(lambda x: (torch.func.grad(total)(x) * v).sum())(x)
    torch.testing.assert_close(forward_over_reverse, reverse_over_reverse, rtol=1e-7, atol=1e-8)


def stand_in(monkeypatch, op):
    """A route of an op that takes every call here, as those of a GPU do there."""

    def run(*args):
        assert not torch.is_grad_enabled()
        return op.reference(*args)

    run.__signature__ = op.signature
    example = next(iter(op.routes.values()))
    anything = replace(example, refuses=lambda problem, device: (), configs=lambda problem, device: ({},))
    route = replace(anything, name="stand-in", run=run, prepare=None, kernels=())
    monkeypatch.setitem(op.routes, "stand-in", route)


@calls
def test_second_derivatives_of_ops_whose_routes_need_a_gpu(call, monkeypatch):
    """A route that knows nothing of gradients, in every op, also in that of causal_conv1d's gradients."""
    function, tensors = of_floats(call, torch.float64)
    with turnout.pin(**{call.name: "reference"}), sdpa_kernel(SDPBackend.MATH):
        expected = derivatives(function, tensors)
    op = call.lowered().op
    ops = [op, CAUSAL_CONV1D_BACKWARD] if call.name == "causal_conv1d" else [op]
    for one in ops:
        stand_in(monkeypatch, one)
    for pinned in itertools.product(("stand-in", "reference"), repeat=len(ops)):
        if "stand-in" in pinned:
            with turnout.pin(**dict(zip((one.name for one in ops), pinned, strict=True))):
                compare(call, pinned, derivatives(function, tensors), expected, 1e-9)

"""Under torch.compile: one graph, static and dynamic sizes, gradients; opcheck with every route pinned."""

import pytest
import torch

import turnout
from tests.walk import CPU, contractions, cpu_routes, equal, random_call
from turnout.routing.case import copy
from turnout.routing.device import Device


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def floating_calls(op, route, count):
    """Calls in a floating-point type whose layouts a clone keeps, as opcheck clones what it is given."""
    results = []
    for seed in range(4000):
        args = random_call(op, seed, CPU)
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        if (
            not args[0].is_floating_point()
            or not args[0].numel()
            or any(x.clone().stride() != x.stride() for x in tensors)
        ):
            continue
        if route is None or not any(route.refuses(op.problem(*args), Device.of("cpu"))):
            results.append(args)
            if len(results) == count:
                return results
    raise AssertionError(f"no {count} floating-point calls for {op.name}")


@cpu_routes
def test_opcheck_with_the_route_pinned(op, route):
    """A call with gradients and one without."""
    plain, other = floating_calls(op, route, 2)
    wanting = tuple(
        copy(x).requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for x in other
    )
    with turnout.pin(**{op.name: route.name}):
        torch.library.opcheck(op.opaque, plain)
        torch.library.opcheck(op.opaque, other if op.mutates else wanting)


@cpu_routes
def test_fullgraph_with_the_route_pinned(op, route):
    for args in floating_calls(op, route, 2):
        with turnout.pin(**{op.name: route.name}):
            assert equal(op, torch.compile(lambda *a: op(*a), fullgraph=True, backend="aot_eager"), args)


@contractions
def test_fullgraph_dynamic_sizes(op):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda a, b: op(a, b), fullgraph=True, dynamic=True, backend=counter)
    for length in (32, 40, 48, 1024):
        a, b = torch.randn(length), torch.randn(length)
        torch.testing.assert_close(compiled(a, b), op.reference(a, b))
    assert counter.frame_count == 1


@contractions
def test_a_known_choice_of_the_reference_leaves_plain_torch_in_the_graph(op):
    seen = []

    def keep(graph, inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    from torch._dynamo.backends.common import aot_autograd

    torch.compile(lambda a, b: op(a, b), fullgraph=True, backend=aot_autograd(fw_compiler=keep))(
        torch.randn(8), torch.randn(8)
    )
    assert seen
    assert not any("turnout" in target for target in seen)


def test_a_chosen_route_stays_one_op_in_the_graph():
    seen = []

    def keep(graph, inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    from torch._dynamo.backends.common import aot_autograd

    with turnout.pin(matmul="as-dot"):
        torch.compile(turnout.matmul, fullgraph=True, backend=aot_autograd(fw_compiler=keep))(
            torch.randn(1, 8), torch.randn(8, 1)
        )
    assert seen == ["turnout.matmul.default"]


@contractions
def test_gradients_eager_and_compiled(op):
    for seed, args in enumerate(floating_calls(op, None, 4)):
        torch.manual_seed(seed)
        ours = [torch.randn_like(x, dtype=torch.float64).requires_grad_() for x in args]
        theirs = [x.detach().clone().requires_grad_() for x in ours]
        weight = torch.randn_like(op.reference(*theirs))
        (op.reference(*theirs) * weight).sum().backward()
        for run in (op, op.opaque, torch.compile(lambda *a: op(*a), fullgraph=True, backend="aot_eager")):
            for x in ours:
                x.grad = None
            (run(*ours) * weight).sum().backward()
            for x, y in zip(ours, theirs, strict=True):
                torch.testing.assert_close(x.grad, y.grad)


@contractions
def test_gradcheck_and_gradgradcheck_of_the_opaque_op(op):
    args = tuple(torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(op.opaque, args)
    assert torch.autograd.gradgradcheck(op.opaque, args)


def test_gradient_of_one_input_only():
    a, b = torch.randn(1, 6, requires_grad=True), torch.randn(6, 1)
    with turnout.pin(matmul="as-dot"):
        turnout.matmul(a, b).sum().backward()
    torch.testing.assert_close(a.grad, b.T)


def test_inductor_gives_the_same_and_the_same_gradients():
    """Each graph takes a C++ compiler ten seconds: once for all ops."""
    a, b = torch.randint(-3, 4, (2, 1, 5000)).float()
    ours, theirs = ([x.clone().requires_grad_() for x in (a, b.T)] for _ in range(2))
    compiled = torch.compile(lambda a, b: (turnout.matmul(a * 2, b) + 1) ** 2, fullgraph=True)
    with turnout.pin(matmul="as-dot"):
        result, expected = compiled(*ours), (torch.matmul(theirs[0] * 2, theirs[1]) + 1) ** 2
        torch.testing.assert_close(result, expected)
        result.sum().backward()
        expected.sum().backward()
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x.grad, y.grad)

"""What stands around a call: failures at launch, transforms, modes, autocast, subclasses, lazy tensors, wrong
arguments.
"""

import warnings
from dataclasses import replace

import pytest
import torch

import turnout
from turnout.ops.dot import DOT
from turnout.ops.matmul import MATMUL
from turnout.routing.op import OPS, Op

A = torch.arange(8.0)
BIG = torch.ones(1, 10_000_000), torch.ones(10_000_000, 1)


def failing(monkeypatch, op, name, error):
    def fail(*args, **kwargs):
        raise error

    route = op.routes[name]
    monkeypatch.setitem(
        op.routes,
        name,
        type(route)(name, fail, route.refuses, route.cost, route.numerics, route.version, route.configs),
    )


def test_a_route_is_prepared_once_for_calls_that_look_alike(monkeypatch):
    prepared_for = []

    def prepare(prepared, args):
        prepared_for.append(prepared.config)
        return (lambda *call: 2 * prepared.run_route(*call)) if len(args[0]) == 4 else None

    monkeypatch.setitem(
        DOT.routes, "in-halves", replace(DOT.routes["cpu-chunks"], name="in-halves", prepare=prepare)
    )
    with turnout.pin(dot="in-halves"):
        assert [turnout.dot(torch.full((4,), x), torch.ones(4)).item() for x in (1.0, 2.0)] == [
            8,
            16,
        ]  # the second in other memory
        assert turnout.dot(torch.ones(5), torch.ones(5)).item() == 5
    assert len(prepared_for) == 2


def test_a_route_that_fails_at_launch_falls_to_the_next_warns_once_and_is_remembered(monkeypatch):
    first = turnout.explain("matmul", *BIG).chosen
    failing(monkeypatch, MATMUL, first, torch.OutOfMemoryError("no memory\nmore lines"))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert [turnout.matmul(*BIG).item() for _ in range(3)] == [10_000_000] * 3
    assert [str(w.message) for w in seen] == [
        f"turnout.matmul: route {first!r} failed at launch: OutOfMemoryError: no memory; taking the next one"
    ]
    verdict = turnout.explain("matmul", *BIG)
    assert verdict.chosen not in (first, None)
    assert verdict.refused[first] == ["failed at launch: OutOfMemoryError: no memory"]
    assert (
        turnout.explain("matmul", torch.ones(1, 20_000_000), torch.ones(20_000_000, 1)).chosen == first
    )  # another problem


def test_all_routes_failing_leaves_the_reference(monkeypatch):
    for name in ("as-dot", "cpu-chunks"):
        failing(monkeypatch, MATMUL, name, MemoryError("broken"))
    with pytest.warns(turnout.TurnoutWarning):
        assert turnout.matmul(*BIG).item() == 10_000_000


def test_a_pinned_route_that_fails_raises(monkeypatch):
    failing(monkeypatch, MATMUL, "as-dot", RuntimeError("broken"))
    with turnout.pin(matmul="as-dot"), pytest.raises(RuntimeError, match="broken"):
        turnout.matmul(*BIG)


def test_a_bug_in_a_route_raises(monkeypatch):
    failing(monkeypatch, MATMUL, turnout.explain("matmul", *BIG).chosen, AttributeError("a bug"))
    with pytest.raises(AttributeError, match="a bug"):
        turnout.matmul(*BIG)


@pytest.mark.parametrize("pinned", ["reference", "cpu-chunks"])
def test_transforms_modes_subclasses_and_lazy_tensors_are_torchs(pinned):
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    expected = (x * y).sum(1)
    with turnout.pin(dot=pinned):
        turnout.dot(x[0], y[0])  # remembered before anything unusual
        torch.testing.assert_close(torch.vmap(turnout.dot)(x, y), expected)
        torch.testing.assert_close(torch.func.grad(turnout.dot)(x[0], y[0]), y[0])
        from torch.utils.flop_counter import FlopCounterMode

        with FlopCounterMode(display=False):
            torch.testing.assert_close(turnout.dot(x[0], y[0]), expected[0])
        negative = torch._neg_view(x[0])
        assert negative.is_neg()
        torch.testing.assert_close(turnout.dot(negative, y[0]), -expected[0])
        assert turnout.dot(torch.ones(8, device="meta"), torch.ones(8, device="meta")).device.type == "meta"

        class Mine(torch.Tensor):
            pass

        if pinned == "reference":
            assert type(turnout.dot(x[0].as_subclass(Mine), y[0])) is Mine
        else:
            with pytest.raises(turnout.Refused, match=r"pinned to 'cpu-chunks'.*tensor subclass Mine"):
                turnout.dot(x[0].as_subclass(Mine), y[0])
        mode = torch._subclasses.FakeTensorMode()
        fakes = mode.from_tensor(x[0]), mode.from_tensor(y[0])
        with mode:
            assert type(turnout.dot(*fakes)).__name__ == "FakeTensor"


@pytest.mark.parametrize("name", ["dot", "inner", "matmul"])
def test_torchs_own_function_runs_where_it_is_chosen(name):
    op, theirs = OPS[name], getattr(torch, name)
    with turnout.pin(**{name: "reference"}):
        op.dispatch_cache.clear()
        assert torch.equal(op.call(A, A), theirs(A, A))
        assert list(op.dispatch_cache.values()) == [theirs]


def test_lazy_conjugation():
    a, b = torch.randn(6, dtype=torch.complex64), torch.randn(6, dtype=torch.complex64)
    with turnout.pin(matmul="as-dot"):
        for x, y in ((a, b), (a.conj(), b), (a, b.conj()), (a, b)):
            torch.testing.assert_close(turnout.matmul(x[None], y[:, None]), torch.matmul(x[None], y[:, None]))


@pytest.mark.parametrize("call", ["dot", "inner", "matmul"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_autocast_gives_torchs_dtype(call, dtype):
    x = torch.ones(1, 64).to(dtype) if call != "dot" else torch.ones(64).to(dtype)
    y = x.T if call == "matmul" else x
    for enabled in (True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            ours, theirs = getattr(turnout, call)(x, y), getattr(torch, call)(x, y)
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


def test_autocast_still_routes():
    with torch.autocast("cpu", torch.bfloat16), turnout.pin(matmul="cpu-chunks"):
        assert turnout.matmul(torch.ones(1, 64), torch.ones(64, 1)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("call", "args"),
    [
        ("dot", (torch.ones(3), torch.ones(4))),
        ("dot", (torch.ones(2, 2), torch.ones(2))),
        ("dot", (torch.ones(3), torch.ones(3).double())),
        ("dot", (torch.ones(3), None)),
        ("dot", ([1.0], torch.ones(1))),
        ("dot", (torch.ones(3, dtype=torch.bool), torch.ones(3, dtype=torch.bool))),
        ("inner", (torch.ones(3), torch.ones(4))),
        ("inner", (torch.ones(2, 3), torch.ones(3).long())),
        ("matmul", (torch.ones(2, 3), torch.ones(4, 5))),
        ("matmul", (torch.ones(1, 3), torch.ones(4, 1))),
        ("matmul", (torch.tensor(1.0), torch.ones(3))),
        ("matmul", (torch.ones(1, 3), torch.ones(3, 1).half())),
        ("matmul", (torch.ones(2, 1, 3), torch.ones(3, 3, 1))),
    ],
)
def test_invalid_arguments_raise_the_error_of_torch(call, args):
    with pytest.raises(Exception) as theirs:  # noqa: PT011
        getattr(torch, call)(*args)
    for _ in range(2):
        with pytest.raises(type(theirs.value)) as ours:
            getattr(turnout, call)(*args)
        assert str(ours.value) == str(theirs.value)


def test_nothing_is_kept_forever(monkeypatch):
    monkeypatch.setattr("turnout.routing.dispatch_cache.MOST_CALLS", 16)
    for n in range(64):
        turnout.dot(torch.ones(n), torch.ones(n))
    assert len(DOT.dispatch_cache) <= 16


def test_grad_calls_of_the_reference_stay_torchs_own():
    x = torch.ones(3, requires_grad=True)
    assert "Dot" in type(turnout.dot(x, x).grad_fn).__name__
    with torch.no_grad():
        assert turnout.dot(x, x).grad_fn is None


def test_zero_length_empty_and_scalars():
    assert turnout.dot(torch.ones(0), torch.ones(0)) == 0
    assert turnout.matmul(torch.ones(1, 0), torch.ones(0, 1)).tolist() == [[0.0]]
    assert turnout.matmul(torch.ones(0, 1, 3), torch.ones(0, 3, 1)).shape == (0, 1, 1)
    assert turnout.inner(torch.tensor(2.0), torch.tensor([1.0, 2.0])).tolist() == [2.0, 4.0]


@pytest.mark.parametrize("route", ["cpu-chunks", "reference"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_nan_and_inf_pass_through_on_the_cpu(route, value, dtype):
    a, b = torch.ones(40_000, dtype=dtype), torch.ones(40_000, dtype=dtype)
    a[33_333] = value
    with turnout.pin(dot=route):
        assert torch.equal(turnout.dot(a, b).isnan(), torch.dot(a, b).isnan())
        assert turnout.dot(a, b).isnan() or turnout.dot(a, b) == value


def test_results_do_not_depend_on_the_number_of_threads():
    a, b = torch.randn(300_000), torch.randn(300_000)
    before = torch.get_num_threads()
    results = set()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            with turnout.pin(dot="cpu-chunks"):
                results.add(turnout.dot(a, b).item())
    finally:
        torch.set_num_threads(before)
    assert len(results) == 1


def test_a_wrong_signature_or_name_raises_at_declaration():
    with pytest.raises(TypeError, match="it needs the reference's"):
        DOT.route("x", refuses=lambda p, d: (), cost=lambda p, d: 1.0, numerics="close", version=1)(
            lambda a, c: a
        )
    with pytest.raises(TypeError, match="must be keyword-only with defaults"):
        DOT.route("x", refuses=lambda p, d: (), cost=lambda p, d: 1.0, numerics="close", version=1)(
            lambda a, b, block: a
        )
    with pytest.raises(ValueError, match="has a route 'two-stage' already"):
        DOT.route("two-stage", refuses=lambda p, d: (), cost=lambda p, d: 1.0, numerics="close", version=1)(
            lambda a, b: a
        )
    with pytest.raises(ValueError, match="numerics 'fine'"):
        DOT.route("x", refuses=lambda p, d: (), cost=lambda p, d: 1.0, numerics="fine", version=1)(
            lambda a, b: a
        )


def test_ops_are_known_by_name():
    assert isinstance(DOT, Op)
    assert repr(DOT) == "<turnout op dot: single-launch, two-stage, cpu-chunks, reference>"
    assert turnout.routes()["matmul"] == ["as-dot", "single-launch", "two-stage", "cpu-chunks", "reference"]


def test_no_warning_in_ordinary_use():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        turnout.dot(A, A)
        turnout.matmul(*BIG)

"""Every public call can be asked about, and what explain says is what runs."""

import contextlib
import inspect
import itertools
import json
import operator
import random
import re
import time
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

import turnout
from tests import walk
from tests.faults.public_calls import (
    CALLS,
    EVERY_CALL,
    MAKERS,
    calls,
    changed,
    flat,
    names,
    routes_for,
    tensors_in,
    wanting_gradients,
)
from turnout import cli
from turnout.ops.dot import DOT
from turnout.routing import settings
from turnout.routing.device import Device
from turnout.routing.op import OPS, forget_choices
from turnout.routing.public import PUBLIC, lower


@pytest.fixture
def runs(monkeypatch):
    """The routes that really run, each as (op, route, configuration), the first of a call first."""
    seen = []

    def recorded(op, name, run):
        def record(*args, **config):
            seen.append((op.name, name, config))
            return run(*args, **config)

        return record

    for op in OPS.values():
        for name, route in list(op.routes.items()):
            watched = replace(route, run=recorded(op, name, route.run), prepare=None)
            monkeypatch.setitem(op.routes, name, watched)
        reference = recorded(op, "reference", op.reference)
        monkeypatch.setattr(op, "reference", reference)
        if op.plain != op._without_autocast:
            monkeypatch.setattr(op, "plain", reference)
        if op.builtin is not None:
            monkeypatch.setattr(op, "builtin", recorded(op, "reference", op.builtin))
    forget_choices()
    yield seen
    forget_choices()


def test_every_function_is_declared_and_every_argument_is_used():
    functions = [name for name in turnout.__all__ if inspect.isfunction(getattr(turnout, name))]
    of_models = {"accelerate", "accelerated", "distribute", "restore", "warm"}
    about_routes = {"explain", "numerics", "pin", "routes", "tune"}
    assert set(functions) - of_models - about_routes == set(names()) == set(PUBLIC) == set(MAKERS)
    for name in names():
        used = {argument for call in CALLS if call.name == name for argument in call.make()}
        assert used == set(PUBLIC[name].signature.parameters), name


def test_no_function_has_an_argument_that_explain_tune_or_the_command_line_take_themselves():
    selected = {
        *inspect.signature(turnout.explain).parameters,
        *inspect.signature(turnout.tune).parameters,
        "dtype",
        "json",
    }
    for name in names():
        assert not (selected - {"args", "kwargs"}) & set(PUBLIC[name].signature.parameters), name


def forms(function, kwargs):
    """The same call by position, by name, mixed, and with defaults written out."""
    parameters = inspect.signature(function).parameters
    full = {name: kwargs.get(name, p.default) for name, p in parameters.items()}
    positional = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    arguments = [name for name in positional if name in kwargs]
    leading = [name for i, name in enumerate(arguments) if positional[: i + 1] == arguments[: i + 1]]
    yield (), kwargs
    yield (
        tuple(full[name] for name in positional),
        {name: full[name] for name in full if name not in positional},
    )
    for count in range(1, len(leading) + 1):
        yield (
            tuple(kwargs[n] for n in leading[:count]),
            {n: x for n, x in kwargs.items() if n not in leading[:count]},
        )


@calls
def test_explain_takes_the_arguments_of_the_call_in_every_form(call, runs):
    answers = []
    for args, kwargs in forms(call.function, call.make()):
        for requested in (call.function, call.name):
            answers.append(turnout.explain(requested, *args, **kwargs))
        assert not runs, "explain ran something"
        turnout_result = call.function(*args, **kwargs)
        assert all(isinstance(x, torch.Tensor) for x in flat(turnout_result))
        assert (answers[-1].op, answers[-1].chosen) == runs[0][:2]
        runs.clear()
    assert len({(a.op, a.problem, a.chosen, a.authority) for a in answers}) == 1


@calls
def test_what_the_function_refuses_explain_refuses(call):
    kwargs = call.make()
    for wrong in ({**kwargs, "nonsense": 1}, dict(list(kwargs.items())[1:])):
        with pytest.raises(TypeError):
            call.function(**wrong)
        with pytest.raises(TypeError):
            turnout.explain(call.function, **wrong)
    with pytest.raises(TypeError):
        turnout.explain(call.name, *([None] * 40))


@calls
def test_tune_takes_the_arguments_of_the_call(call):
    [row] = turnout.tune(call.function, **call.make(), budget=0.05, save=False, progress=False)
    assert row.op == call.lowered().op.name
    assert set(row.us) >= {"reference"}


@calls
def test_a_pin_runs_as_explain_says_with_its_configuration(call, runs):
    for name, grad in itertools.product(routes_for(call), (False, True)):
        kwargs = call.make()
        if grad and not call.written():
            kwargs = wanting_gradients(kwargs)
        with turnout.pin(**{call.name: name}):
            verdict = turnout.explain(call.function, **kwargs)
            call.function(**kwargs)
        assert (verdict.chosen, verdict.authority) == (name, "pin")
        assert runs[0] == (verdict.op, name, dict(verdict.config))
        if name != "reference":
            op, args = lower(call.function, **kwargs)
            first, *_ = op.routes[name].configs(op.problem(*args), Device.of("cpu"))
            assert dict(verdict.config) == dict(first)
        runs.clear()


def test_a_pin_runs_the_configuration_that_was_measured(monkeypatch):
    ran = []

    def slow_or_fast(a, b, *, pause=0.02):
        ran.append(pause)
        time.sleep(pause)
        return torch.dot(a, b)

    example = DOT.routes["cpu-chunks"]
    route = replace(
        example,
        name="pausing",
        run=slow_or_fast,
        prepare=None,
        configs=lambda problem, device: ({"pause": 0.005}, {"pause": 0.0}),
    )
    monkeypatch.setitem(DOT.routes, "pausing", route)
    a = torch.ones(500)
    with turnout.pin(dot="pausing"):
        # Nothing was measured: the first configuration.
        assert turnout.explain(turnout.dot, a, a).config == {"pause": 0.005}
        turnout.dot(a, a)
        assert ran == [0.005]
    [row] = turnout.tune("dot", a, a, budget=1, progress=False)
    assert row.config["pausing"] == {"pause": 0.0}
    with turnout.pin(dot="pausing"):
        ran.clear()
        assert turnout.explain(turnout.dot, a, a).config == {"pause": 0.0}
        turnout.dot(a, a)
        turnout.dot(a.clone().requires_grad_(), a)
        assert ran == [0.0, 0.0]


class Mine(torch.Tensor):
    """A subclass that changes nothing."""


class Unchanged(TorchDispatchMode):
    """A mode that changes nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def plainly(ask, call, kwargs):
    ask(kwargs)


def with_gradients(ask, call, kwargs):
    if not call.written():
        ask(wanting_gradients(kwargs))


def entered(*contexts):
    def enter(ask, call, kwargs):
        with contextlib.ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())
            ask(kwargs)

    return enter


def with_tensors(change):
    return lambda ask, call, kwargs: ask(changed(kwargs, change))


def transformed(transform):
    def enter(ask, call, kwargs):
        if call.written():  # torch lets a transform write only into what it made itself
            return
        floats = [n for n, x in kwargs.items() if tensors_in(x) and tensors_in(x)[0].is_floating_point()]
        name = floats[0]
        arguments = kwargs[name]
        if isinstance(arguments, torch.Tensor):
            transform(lambda x: ask({**kwargs, name: x}), arguments)
        else:  # streams: the first of them
            transform(lambda x: ask({**kwargs, name: [x, *arguments[1:]]}), arguments[0])

    return enter


def total(f):
    return lambda x: sum(y.float().sum() for y in flat(f(x)))


def in_dual_level(f, x):
    with forward_ad.dual_level():
        f(forward_ad.make_dual(x, torch.ones_like(x)))


@contextlib.contextmanager
def autocast_cuda():
    """As on a machine with a GPU: `torch.autocast` turns itself off where there is none."""
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)


SITUATIONS = {
    "plain": plainly,
    "gradients": with_gradients,
    "no_grad": entered(torch.no_grad),
    "inference": entered(torch.inference_mode),
    "exact": entered(lambda: turnout.numerics("exact")),
    "lossy": entered(lambda: turnout.numerics("lossy")),
    "autocast cpu bfloat16": entered(lambda: torch.autocast("cpu", torch.bfloat16)),
    "autocast cpu float16": entered(lambda: torch.autocast("cpu", torch.float16)),
    "autocast cuda": entered(autocast_cuda),
    "mode": entered(Unchanged),
    "flop counter": entered(lambda: FlopCounterMode(display=False)),
    "meta context": entered(lambda: torch.device("meta")),
    "subclass": with_tensors(lambda t: t.as_subclass(Mine)),
    "parameter": with_tensors(lambda t: torch.nn.Parameter(t, requires_grad=False)),
    "meta": with_tensors(lambda t: t.to("meta")),
    "negated": with_tensors(lambda t: torch._neg_view(t) if t.is_floating_point() else t),
    "vmap": transformed(lambda f, x: torch.vmap(f)(torch.stack([x, x]))),
    "grad": transformed(lambda f, x: torch.func.grad(total(f))(x)),
    "jvp": transformed(lambda f, x: torch.func.jvp(f, (x,), (x,))),
    "functionalize": transformed(lambda f, x: torch.func.functionalize(f)(x)),
    "dual": transformed(in_dual_level),
    "make_fx": transformed(lambda f, x: make_fx(f)(x)),
    "trace": transformed(lambda f, x: torch.jit.trace(f, x, check_trace=False)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("name", MAKERS)
def test_what_explain_says_is_what_runs(name, situation, runs):
    """Also where the call was remembered before the situation arose, and with every route pinned."""
    for call in CALLS:
        if call.name != name:
            continue
        routes, dtypes = routes_for(call), (torch.float32, torch.bfloat16)
        if not EVERY_CALL:
            routes, dtypes = routes[-1:], dtypes[:1]
        for pinned, dtype in itertools.product([None, *routes], dtypes):
            with contextlib.ExitStack() as stack:
                if pinned is not None:
                    if pinned not in routes_for(call, dtype):
                        continue
                    stack.enter_context(turnout.pin(**{call.name: pinned}))
                call.function(**call.make(dtype))
                runs.clear()

                def ask(kwargs, call=call, pinned=pinned):
                    try:
                        verdict = turnout.explain(call.function, **kwargs)
                    except turnout.Refused as why:
                        with pytest.raises(turnout.Refused, match=re.escape(str(why).rpartition(": ")[2])):
                            call.function(**kwargs)
                        assert not runs
                        raise
                    result = call.function(**kwargs)
                    assert (verdict.op, verdict.chosen) == runs[0][:2], (call, verdict)
                    if verdict.chosen != "reference":
                        assert dict(verdict.config) == runs[0][2]
                    elif pinned not in (None, "reference"):
                        assert verdict.why.endswith("a pin does not count there")
                    runs.clear()
                    return result

                with contextlib.suppress(turnout.Refused):
                    SITUATIONS[situation](ask, call, call.make(dtype))


RANDOM_CALLS = 200 if EVERY_CALL else 15
AUTOCASTS = ("autocast cpu bfloat16", "autocast cuda")
MIXED = ("plain", "no_grad", "inference", "exact", *AUTOCASTS, "mode", "parameter", "subclass")


class Asked(NamedTuple):
    """A call of an op itself, in the form that situations know."""

    op: Any

    def written(self):
        return self.op.mutates


@walk.ops
def test_what_explain_says_of_random_calls_is_what_runs(op, runs):
    """Shapes, strides, dtypes and settings at random, a pin in half of them."""
    draw, selected = random.Random(op.name), set()
    for seed in range(RANDOM_CALLS):
        args = walk.random_call(op, seed, walk.CPU)
        situation = SITUATIONS[draw.choice(MIXED)]
        named = dict(zip(op.signature.parameters, args, strict=True))
        offered = turnout.explain(op, *args)
        pins = [name for name in offered.microseconds if name not in offered.refused]

        def ask(kwargs, op=op):
            try:
                verdict = turnout.explain(op, **kwargs)
            except turnout.Refused:
                with pytest.raises(turnout.Refused):
                    op(*kwargs.values())
                return
            op(*kwargs.values())
            assert (verdict.op, verdict.chosen) == runs[0][:2]
            if verdict.chosen != "reference":
                assert dict(verdict.config) == runs[0][2]
            selected.add(verdict.chosen)

        with turnout.pin(**{op.name: draw.choice(pins)}) if draw.random() < 0.5 else contextlib.nullcontext():
            situation(ask, Asked(op), named)
        runs.clear()
    assert "reference" in selected


def read_by_the_host(call):
    """Whether the choice depends on values in a tensor, such as lengths: a compiled program does not know
    them.
    """
    tensors = [x for value in call.make().values() for x in tensors_in(value)]
    return call.name == "attention" and not all(x.is_floating_point() for x in tensors)


COMPILED = [call for call in CALLS if (EVERY_CALL or call.number == 0) and not read_by_the_host(call)]


@pytest.mark.parametrize("call", COMPILED, ids=str)
def test_what_explain_says_is_what_a_compiled_call_runs(call, runs):
    """A route is run inside the graph; where the reference is chosen, the graph is plain torch."""
    op = call.lowered().op
    for name in routes_for(call)[:: -1 if EVERY_CALL else -100]:
        torch._dynamo.reset()
        kwargs = call.make()
        with turnout.pin(**{call.name: name}):
            verdict = turnout.explain(call.function, **kwargs)
            compiled = torch.compile(call.function, backend="aot_eager", fullgraph=True)
            compiled(**kwargs)
            runs.clear()
            compiled(**kwargs)
        assert runs == (
            [] if verdict.chosen == "reference" else [(op.name, verdict.chosen, dict(verdict.config))]
        )


def test_a_pin_on_a_subclass_raises_and_says_why():
    for call in CALLS:
        for name in routes_for(call)[1:]:
            kwargs = changed(call.make(), lambda t: t.as_subclass(Mine))
            with turnout.pin(**{call.name: name}):
                for ask in (call.function, lambda call=call, **k: turnout.explain(call.function, **k)):
                    with pytest.raises(
                        turnout.Refused,
                        match=f"pinned to '{name}'.*tensor subclass Mine, routes need plain tensors",
                    ):
                        ask(**kwargs)


def test_a_public_name_pins_every_op_it_calls():
    x = torch.randn(2, 6, 3, 4)
    with turnout.pin(rms_norm_silu="cpu-planes"):
        assert turnout.explain("rms_norm_silu", x, eps=1e-6).authority == "pin"
        assert turnout.explain("rms_norm_silu", x, eps=1e-6, out=torch.empty_like(x)).authority == "pin"
    with turnout.pin(norm_rope_qk="reference"):
        assert turnout.explain("norm_rope_qk", x, x).authority == "pin"
    # The op's own name comes first.
    with turnout.pin(rms_norm_silu_into="cpu-rows", rms_norm_silu="reference"):
        assert settings.current().pins == {"rms_norm_silu": "reference", "rms_norm_silu_into": "cpu-rows"}
    with pytest.raises(ValueError, match=r"norm_rope_qk has no route 'nope'; one of: .*cpu-rows, reference"):
        turnout.pin(norm_rope_qk="nope")


def test_explain_for_another_device_minds_its_autocast():
    x, w = torch.empty(1, 96, 4, 480, 832, device="meta"), torch.empty(96, 96, 3, 3, 3, device="meta")
    torch.set_autocast_enabled("cuda", True)  # `torch.autocast` does that only where there is a GPU
    try:
        verdict = turnout.explain("conv3d", x, w, padding=1, device="h200")
        assert verdict.problem.dtype is torch.get_autocast_dtype("cuda")
    finally:
        torch.set_autocast_enabled("cuda", False)
    with torch.autocast("cpu", torch.bfloat16):
        assert turnout.explain("conv3d", x, w, padding=1, device="h200").problem.dtype is torch.float32


def test_tune_measures_what_autocast_makes_of_a_call():
    a = torch.ones(1, 4096)
    with torch.autocast("cpu", torch.bfloat16):
        [row] = turnout.tune("matmul", a, a.T, budget=0.1, save=False, progress=False)
    assert row.problem["a_dtype"] == "bfloat16"
    with pytest.raises(ValueError, match="matmul cannot be measured here: tensor subclass Mine"):
        turnout.tune("matmul", a.as_subclass(Mine), a.T, budget=0.1, save=False, progress=False)


INTEGERS = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint64, int, operator.index]


@pytest.mark.parametrize("kind", INTEGERS, ids=lambda kind: kind.__name__)
def test_lengths_may_be_any_integers(kind):
    q, k = torch.randn(2, 2, 5, 8), torch.randn(2, 2, 20, 8)
    expected = turnout.attention(q, k, k, kv_lengths=[7, 20])
    for lengths in ([kind(7), kind(20)], (kind(7), 20), [[kind(7), kind(0)], (kind(20), 0)]):
        assert torch.equal(turnout.attention(q, k, k, kv_lengths=lengths), expected)
        assert turnout.explain(turnout.attention, q, k, k, kv_lengths=lengths).problem.share == 67
    arrays = [np.array([7, 20], kind), np.array([[7, 0], [20, 0]], kind)] if isinstance(kind, type) else []
    for array in arrays:
        assert torch.equal(turnout.attention(q, k, k, kv_lengths=array), expected)
    with pytest.raises(ValueError, match="it needs lengths from 0 to 20"):
        turnout.attention(q, k, k, kv_lengths=[kind(7), kind(21)])


def words(kwargs):
    """A call as words on the command line."""
    for name, value in kwargs.items():
        dtypes = [str(x.dtype).removeprefix("torch.") for x in tensors_in(value)]
        sizes = [",".join(map(str, x.shape)) for x in tensors_in(value)]
        shapes = [f"{size}:{dtype}" for size, dtype in zip(sizes, dtypes, strict=True)]
        if shapes:
            text = ";".join(shapes)
        elif isinstance(value, bool) or value is None:
            text = str(value).lower()
        elif isinstance(value, (tuple, list)):
            nested = isinstance(value[0], (tuple, list))
            text = ";".join(",".join(map(str, x)) for x in value) if nested else ",".join(map(str, value))
        else:
            text = str(value)
        yield from (f"--{name.replace('_', '-')}", text)


@calls
def test_the_command_line_takes_the_arguments_of_the_call(call):
    kwargs = call.make()
    requested = ["explain", call.name, *words(kwargs), "--device", "cpu", "--json"]
    done = CliRunner().invoke(cli.app, requested, catch_exceptions=False)
    output = json.loads(done.stdout)
    on_meta = changed(kwargs, lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"))
    verdict = turnout.explain(call.function, **on_meta, device="cpu")
    assert (output["op"], output["problem"], output["chosen"]) == (
        verdict.op,
        json.loads(verdict.json())["problem"],
        verdict.chosen,
    )

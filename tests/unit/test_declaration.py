"""Mistakes in the declaration of an op, a route or a public function are told where they are made; what a
guard, a cost or `configs` returns, with the function that returned it."""

import math
import sys
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import turnout
from turnout import doctor
from turnout.measure.verify import Verifier
from turnout.ops.dot import DOT
from turnout.routing.case import Cases
from turnout.routing.op import OPS, Op, forget_choices
from turnout.routing.public import public
from turnout.routing.route import Work

A = torch.ones(64)


def product(a: Tensor, b: Tensor) -> Tensor:
    return torch.dot(a, b)


def blocked(a: Tensor, b: Tensor, *, block: int = 4) -> Tensor:
    return torch.dot(a, b)


def positional(a: Tensor, b: Tensor, block: int = 4) -> Tensor:
    return torch.dot(a, b)


@pytest.fixture
def declare():
    """Declare a route of dot, for the length of a test."""
    before = dict(DOT.routes)
    forget_choices()

    def declare(run=product, name="mine", **changed):
        usual = {"refuses": lambda p, d: (), "cost": lambda p, d: 0.0, "numerics": "close", "version": 1}
        return DOT.route(name, **(usual | changed))(run)

    yield declare
    DOT.routes.clear()
    DOT.routes.update(before)
    forget_choices()


WRONG_ROUTES = [
    ({"run": lambda x, y: x}, "takes (x, y), it needs the reference's (a: Tensor, b: Tensor) -> Tensor"),
    ({"run": lambda *args: 0}, "takes (*args)"),
    ({"run": positional}, "configuration (block: int = 4) must be keyword-only with defaults"),
    ({"run": 3}, "route 'mine' of dot is 3, it needs to be a function"),
    ({"run": torch.dot}, "whose arguments are not known: wrap it in a def"),
    ({"name": "a=b"}, "its name needs to be a text without spaces, commas and equal signs"),
    ({"name": "two-stage"}, "op dot has a route 'two-stage' already"),
    ({"version": "1"}, "version '1', it needs to be a whole number from 1 up"),
    ({"numerics": "clsoe"}, "numerics 'clsoe' is not known; did you mean close?"),
    ({"numerics": None}, "numerics None is not known"),
    ({"refuses": lambda p: ()}, "refuses needs to take (problem, device)"),
    ({"cost": 1e-6}, "cost is 1e-06, it needs to be a function"),
    ({"configs": [{}]}, "configs is [{}], it needs to be a function"),
    ({"kernels": "a:b"}, "kernels is 'a:b', it needs to be a tuple of texts, such as ('a:b',)"),
    ({"kernels": ("turnout.ops.dot.kernels",)}, 'it needs to be "package.module:function"'),
    ({"kernels": ("nowhere.kernels:f",)}, "there is no module nowhere.kernels"),
    ({"kernels": ("turnout.ops.dot.kernels:f",)}, "turnout.ops.dot.kernels does not define f"),
    ({"in_place": ("a",)}, "need an op that writes (mutates=)"),
    ({"grain": 3}, "grain is 3"),
    ({"prepare": lambda: None}, "prepare needs to take (prepared, args)"),
]


@pytest.mark.parametrize(("changed", "message"), WRONG_ROUTES)
def test_wrong_route_is_refused_when_it_is_declared(declare, changed, message):
    with pytest.raises((TypeError, ValueError)) as mistake:
        declare(**changed)
    assert message in str(mistake.value)
    assert "mine" not in DOT.routes


def yielding(*reasons):
    return lambda problem, device: iter(reasons)


def returning(value):
    return lambda problem, device: value


WRONG_ANSWERS = [
    ({"refuses": returning(None)}, "the guard of route 'mine' of dot", "returned None, it needs to yield"),
    ({"refuses": returning("no")}, "the guard of route 'mine'", "returned 'no'"),
    ({"refuses": yielding(3)}, "the guard of route 'mine'", "yielded 3, a reason is a text"),
    ({"refuses": yielding("")}, "the guard of route 'mine'", "yielded ''"),
    *(
        (
            {"cost": returning(value)},
            "the cost of route 'mine' of dot",
            "a number of seconds from 0 up, or None",
        )
        for value in (math.nan, math.inf, -1.0, "1", 1j, A[0])
    ),
    (
        {"configs": returning({"block": 4})},
        "configs of route 'mine' of dot",
        "needs to return a list of dicts",
    ),
    ({"configs": returning(())}, "configs of route 'mine'", "returned nothing, it needs one at least"),
    ({"configs": returning([{"blok": 4}])}, "configs of route 'mine'", "the route's function takes block"),
    ({"configs": returning([{"block": [4]}])}, "configs of route 'mine'", "values need to be numbers"),
    ({"prepare": returning(3)}, "route 'mine'", "prepare returned 3, it needs to return a function or None"),
]


@pytest.mark.parametrize(("changed", "whose", "message"), WRONG_ANSWERS)
def test_wrong_answer_names_the_function_that_gave_it(declare, changed, whose, message):
    declare(blocked, **changed)
    with pytest.raises((TypeError, ValueError)) as mistake, turnout.pin(dot="mine"):
        turnout.dot(A, A)
    assert whose in str(mistake.value)
    assert message in str(mistake.value)


def test_what_a_guard_raises_says_whose_it_is(declare):
    def raising(problem, device):
        raise KeyError("oops")

    declare(refuses=raising)
    with pytest.raises(KeyError, match="oops") as failure:
        turnout.dot(A, A)
    if sys.version_info >= (3, 11):
        [note] = failure.value.__notes__
        assert note.startswith("raised by the guard of route 'mine' of dot (tests.unit.test_declaration.")


def test_costs_and_configurations_of_other_kinds_of_numbers_and_lists_count(declare):
    import numpy as np

    declare(blocked, cost=lambda p, d: np.float32(0), configs=lambda p, d: ({"block": n} for n in (8, 4)))
    verdict = turnout.explain("dot", A, A)
    assert (verdict.chosen, dict(verdict.config)) == ("mine", {"block": 8})
    assert '"mine": 0.0' in verdict.json()


@pytest.mark.parametrize(
    ("result", "why"),
    [((A[0],), "it is a tuple"), (1.0, "it is a float"), (None, "it is a NoneType")],
)
def test_a_route_that_returns_no_tensor_is_found_by_every_check(declare, result, why):
    declare(lambda a, b: result)
    assert Verifier(DOT, (A, A)).mismatch("close", DOT.routes["mine"].run).startswith(why)
    states = {check.what: (check.state, check.note) for check in doctor.routes([DOT])}
    assert states["dot mine on cpu"] == ("failed", f"{why}, the reference gives a tensor")


# ---- ops


class Shape(NamedTuple):
    shape: tuple[int, ...]

    @classmethod
    def of(cls, x: Tensor) -> "Shape":
        return cls(x.shape)


class WithoutOf(NamedTuple):
    shape: tuple[int, ...]


class OfTwo(NamedTuple):
    shape: tuple[int, ...]

    @classmethod
    def of(cls, x: Tensor, y: Tensor) -> "OfTwo":
        return cls(x.shape)


class Unhashable(NamedTuple):
    shape: list[int]

    @classmethod
    def of(cls, x: Tensor) -> "Unhashable":
        return cls(list(x.shape))


class Holding(NamedTuple):
    x: Tensor

    @classmethod
    def of(cls, x: Tensor) -> "Holding":
        return cls(x)


def relu(x: Tensor) -> Tensor:
    return torch.relu(x)


def with_default(x: Tensor, k: int = 1) -> Tensor:
    return x


def without_types(x):
    return x


def number_first(k: int, x: Tensor) -> Tensor:
    return x


def of_tensors(x: list[Tensor]) -> Tensor:
    return x[0]


def without_result(x: Tensor):
    return x


def as_list(x: Tensor) -> list[Tensor]:
    return [x]


def op(name, reference=relu, **changed):
    usual = {
        "problem_type": Shape,
        "cost": lambda p, d: 1.0,
        "work": lambda p: Work(8, 8, written=4),
        "cases": Cases([], lambda draw, device: (torch.ones(2),)),
    }
    return Op(name, reference, **(usual | changed))


WRONG_OPS = [
    ({"name": "my-op"}, "its name needs to be one that a function may have"),
    ({"name": "dot"}, "there is an op 'dot' already"),
    ({"reference": 3}, "is 3, it needs to be a function"),
    ({"reference": with_default}, "by position, without defaults"),
    ({"reference": without_types}, "x needs an annotation, one of Tensor, int"),
    ({"reference": of_tensors}, "x needs an annotation, one of Tensor, int"),
    ({"reference": number_first}, "the first needs to be a Tensor"),
    ({"reference": without_result}, "its return annotation needs to be Tensor"),
    ({"reference": as_list}, "its return annotation needs to be Tensor"),
    ({"problem_type": None}, "problem_type is None, it needs to be a NamedTuple"),
    ({"problem_type": WithoutOf}, "WithoutOf needs a classmethod `of`"),
    ({"problem_type": OfTwo}, "OfTwo.of needs to take (x)"),
    ({"cost": None}, "cost is None, it needs to be a function"),
    ({"work": lambda: None}, "work needs to take (problem)"),
    ({"mutates": "x"}, "mutates is 'x', it needs to be a tuple"),
    ({"mutates": ("y",)}, "mutates names 'y', which is no tensor among these"),
    ({"autocast": "of"}, "autocast 'of' is not known"),
]


@pytest.mark.parametrize(("changed", "message"), WRONG_OPS)
def test_wrong_op_is_refused_when_it_is_declared(changed, message):
    declared = dict(OPS)
    with pytest.raises((TypeError, ValueError)) as mistake:
        op(**({"name": "never_declared"} | changed))
    assert message in str(mistake.value)
    assert declared == OPS


@pytest.mark.parametrize("problem_type", [Unhashable, Holding])
def test_a_problem_that_cannot_be_remembered_names_its_field(monkeypatch, problem_type):
    monkeypatch.setattr("turnout.routing.op.OPS", dict(OPS))
    declared = op(f"op_of_{problem_type.__name__.lower()}", problem_type=problem_type)
    message = f"field {problem_type._fields[0]} of {problem_type.__name__} is .*: choices are remembered"
    with pytest.raises(TypeError, match=message):
        turnout.explain(declared, torch.ones(2))
    with pytest.raises(TypeError, match=message):
        declared(torch.ones(2))


@pytest.mark.parametrize("cases", ["math", [1]])
def test_cases_that_are_none_are_told_and_do_not_end_the_doctor(monkeypatch, cases):
    monkeypatch.setattr("turnout.routing.op.OPS", dict(OPS))
    declared = op(f"op_with_cases_{len(cases)}", cases=cases)
    with pytest.raises(TypeError, match="it needs to be a Cases, or the name of a module whose CASES is one"):
        declared.cases()
    [check] = doctor.routes([declared])
    assert (check.state, check.what) == ("failed", f"{declared.name} on cpu")


def test_public_needs_ops_and_a_name_of_its_own():
    with pytest.raises(TypeError, match=r"needs the ops that the function calls: @public\(OP\)"):
        public(relu)
    with pytest.raises(TypeError, match=r"@public\(\) needs the ops"):
        public()

    def conv2d(a, b):
        return DOT(a, b)

    with pytest.raises(ValueError, match=r"conv2d is public as 'conv2d' already; give .*another name"):
        public(DOT)(conv2d)

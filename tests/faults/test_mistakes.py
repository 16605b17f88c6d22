"""A tired user's call: the error names the argument, says what was given and what is needed."""

import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import turnout
from tests.faults.public_calls import CALLS
from turnout.ops.upsample_conv2d import UPSAMPLE_CONV2D
from turnout.parallel import Lockstep
from turnout.routing.device import Device
from turnout.routing.public import PUBLIC

OF_TORCH = ("dot", "inner", "matmul")  # which raise torch's own errors
WRONG = {
    "a numpy.ndarray": lambda x: x.numpy(),
    "[1.5]": lambda x: [1.5],
    "'x'": lambda x: "x",
    "a torch.nn.modules.linear.Linear": lambda x: torch.nn.Linear(2, 2),
    "None": lambda x: None,
}
# The arguments of the op behind a function, where their names differ.
ALSO = {("norm_rope", "x"): "q", ("norm_rope", "weight"): "q_weight"}


def asked(call):
    """The call, and what asks about it."""
    return call.function, lambda **kwargs: turnout.explain(call.function, **kwargs)


@pytest.mark.parametrize("call", [call for call in CALLS if call.name not in OF_TORCH], ids=str)
def test_error_names_the_argument_that_is_no_tensor(call):
    parameters = PUBLIC[call.name].signature.parameters
    for name, value in call.make().items():
        annotation = str(parameters[name].annotation)
        for described, wrong in WRONG.items() if isinstance(value, torch.Tensor) else ():
            if described == "None" and "None" in annotation:
                continue
            if described in ("[1.5]", "a numpy.ndarray") and "Sequence" in annotation:  # lengths, streams
                continue
            for ask in asked(call):
                kwargs = call.make()
                kwargs[name] = wrong(kwargs[name])
                with pytest.raises(TypeError) as mistake:
                    ask(**kwargs)
                names = f"({name}|{ALSO.get((call.name, name))})"
                message = f"{names} is {re.escape(described)}, it needs to be a Tensor"
                assert re.search(message, str(mistake.value))


@pytest.mark.parametrize("call", [call for call in CALLS if "conv" not in call.name], ids=str)
def test_error_names_the_tensor_that_has_no_strides(call):
    for name, value in call.make().items():
        if not isinstance(value, torch.Tensor) or value.dim() < 3 or call.name in OF_TORCH:
            continue
        kwargs = call.make() | {name: value.to_sparse()}
        names = f"({name}|{ALSO.get((call.name, name))})"
        message = ""
        try:
            call.function(**kwargs)  # of some arguments torch takes sparse ones
        except (RuntimeError, TypeError, ValueError) as mistake:
            message = str(mistake)
        assert re.search(f"^$|{names} is sparse_coo, it needs to be dense", message)


@pytest.mark.parametrize("name", ["conv2d", "conv3d"])
@pytest.mark.parametrize("argument", ["stride", "padding", "dilation", "groups"])
@pytest.mark.parametrize("value", [np.int64(1), torch.tensor(1), np.int32(1)], ids=str)
def test_whole_numbers_of_other_libraries_are_taken_as_torch_takes_them(name, argument, value):
    spatial = int(name[4])
    x, weight = torch.randn(1, 4, *[5] * spatial), torch.randn(4, 4, *[3] * spatial)
    expected = getattr(F, name)(x, weight, **{argument: value})
    assert torch.equal(getattr(turnout, name)(x, weight, **{argument: value}), expected)
    problem = turnout.explain(name, x, weight, **{argument: value}).problem
    assert problem == turnout.explain(name, x, weight, **{argument: 1}).problem
    assert '"groups": 1' in turnout.explain(name, x, weight, **{argument: value}).json()


@pytest.mark.parametrize("name", ["conv2d", "conv3d"])
@pytest.mark.parametrize(
    ("argument", "value"),
    [("stride", None), ("stride", "x"), ("padding", 1.5), ("dilation", [1.5]), ("groups", "two")],
)
def test_wrong_numbers_are_torchs_kind_of_error_and_named(name, argument, value):
    spatial = int(name[4])
    x, weight = torch.randn(1, 4, *[5] * spatial), torch.randn(4, 4, *[3] * spatial)
    with pytest.raises(TypeError):
        getattr(F, name)(x, weight, **{argument: value})
    with pytest.raises(TypeError, match=f"{name}: {argument} is .*, it needs to be "):
        getattr(turnout, name)(x, weight, **{argument: value})


@pytest.mark.parametrize("weight", [torch.tensor(1.0), torch.empty(0)])
def test_weights_of_too_few_dimensions_raise_what_torch_raises(weight):
    with pytest.raises(RuntimeError) as theirs:
        F.conv2d(torch.ones(1, 2, 4, 4), weight)
    with pytest.raises(RuntimeError) as ours:
        turnout.conv2d(torch.ones(1, 2, 4, 4), weight)
    assert str(ours.value) == str(theirs.value)


def test_a_scale_that_no_picture_has_is_refused_at_once():
    with pytest.raises(ValueError, match="it must be a whole number from 1 to"):
        turnout.upsample_conv2d(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 3, 3), scale=10**20)
    point = torch.empty(1, 1, 1, 1, device="meta")
    problem = UPSAMPLE_CONV2D.problem(point, point, None, 2**20, [0, 0])
    for route in turnout.routes("upsample_conv2d"):
        list(route.refuses(problem, Device.of("cpu")))  # at once, without a list of so many phases


def test_values_that_are_accepted_are_still_listed():
    x = torch.ones(1, 2, 4)
    with pytest.raises(ValueError, match=r"activation is 1\.5, it needs to be None or 'silu'"):
        turnout.causal_conv1d(x, torch.ones(2, 3), activation=1.5)


A, B = torch.ones(8), torch.ones(8)
MODEL, PICTURE = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3)), torch.ones(1, 3, 8, 8)
ASKED = [
    (lambda: turnout.accelerate("a/folder"), "str is neither an nn.Module .* load the model first"),
    (lambda: turnout.accelerate(torch.nn.Conv2d), "Conv2d is neither an nn.Module"),
    (lambda: turnout.explain("dot", A, B, device=3), "device '3' is not known"),
    (lambda: turnout.explain("dot", [1.0], B), r"dot: a is \[1.0\], it needs to be a Tensor"),
    (lambda: turnout.explain("dot", A), "dot: missing a required argument: 'b'; it takes a, b"),
    (
        lambda: turnout.explain("conv2d", A, B, paddin=1),
        "unexpected keyword argument 'paddin'; it takes .*padding",
    ),
    (lambda: turnout.pin(dot=["as-dot"]), r"op dot has no route \['as-dot'\]; one of"),
    (lambda: turnout.numerics(None), "numerics level None is not known"),
    (lambda: turnout.tune("dot", budget="1"), "budget '1' seconds, it needs to be more than 0"),
    (lambda: turnout.tune("dot", device="h200"), "device 'h200' is not one of this machine's"),
    (lambda: turnout.tune(during=3), "during is 3, it needs to be a function"),
    (lambda: turnout.tune(None, A, B), "the arguments of a call and no op"),
    (lambda: turnout.tune("dot", [1.0], [2.0], progress=False), r"dot: a is \[1.0\]"),
    (lambda: turnout.tune("dot", A.to("meta"), B.to("meta"), progress=False), "a tensor on meta"),
    (lambda: turnout.warm(MODEL, PICTURE, device=3), "device"),
    (lambda: turnout.warm(MODEL, PICTURE, device="h200", dtype="int32"), "a model runs in bfloat16"),
    (lambda: turnout.warm(MODEL, PICTURE, device="h200", jobs="2"), "jobs is '2'"),
    (lambda: Lockstep("2"), "'2' ranks, it needs"),
]


@pytest.mark.parametrize(("ask", "message"), ASKED, ids=[message for _, message in ASKED])
def test_functions_on_models_and_routes_name_what_is_wrong(ask, message):
    with pytest.raises((TypeError, ValueError), match=message):
        ask()

"""Who asks an accelerated model for the class of its processors gets the answers of the stock model, and so
may set others.
"""

import copy
import pickle
import subprocess
import sys
import types

import pytest
import torch
import torch.nn.functional as F

import turnout
from tests.models.zoo import ZOO, made
from turnout.models.accelerate import _instances
from turnout.models.patch import patched

pytestmark = pytest.mark.filterwarnings("ignore")

ORDERS = ("accelerated", "copied", "pickled", "restored")


def processors(model):
    return [instance for _, instance in _instances(model) if not isinstance(instance, torch.nn.Module)]


def accelerated(name, order):
    model = made(name)
    turnout.accelerate(model)
    if order == "copied":
        return copy.deepcopy(model)
    if order == "pickled":
        return pickle.loads(pickle.dumps(model))
    if order == "restored":
        turnout.restore(model)
    return model


def answers(processor, stock):
    """Every way to ask for the class of a processor, but for `is`."""
    from diffusers.models.attention_processor import CROSS_ATTENTION_PROCESSORS

    cls = processor.__class__
    other = type("Other", (), {})
    return [
        cls == stock,
        stock == cls,
        cls != stock,
        stock != cls,
        cls in (other, stock),
        cls in {stock},
        {stock: 1}.get(cls),
        cls == other,
        cls in CROSS_ATTENTION_PROCESSORS,
        isinstance(processor, stock),
        issubclass(cls, stock),
        hash(cls) == hash(stock),
        cls.__name__,
        cls.__module__,
        str(cls),
        repr(processor).partition(" at ")[0],
        cls in (object, type),
    ]


WITH_PROCESSORS = [name for name in ZOO if processors(made(name))]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", WITH_PROCESSORS)
def test_processors_answer_as_stock_ones(name, order):
    actual, expected = processors(accelerated(name, order)), processors(made(name))
    assert any(patched(each) for each in actual) == (order != "restored")
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert answers(one, type(other)) == answers(other, type(other))
    assert len({type(each) for each in actual}) == len({type(each) for each in expected})


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "name", [name for name in WITH_PROCESSORS if hasattr(made(name), "set_default_attn_processor")]
)
def test_default_processors_can_be_set(name, order):
    model, stock = accelerated(name, order), made(name)
    for each in (model, stock):
        each.set_default_attn_processor()
    assert list(map(type, processors(model))) == list(map(type, processors(stock)))
    with torch.no_grad():
        expected = ZOO[name][1](stock)
        for _ in range(2):
            actual = ZOO[name][1](model)
            torch.testing.assert_close(actual, expected, rtol=0, atol=3e-5 * expected.abs().max().item())
            turnout.accelerate(model)  # what was set is patched then
    turnout.restore(model)
    assert torch.equal(ZOO[name][1](model), expected)


def test_classes_that_differ_do_not_equal_each_other():
    from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0

    one, other = made("unet"), made("unet")
    turnout.accelerate(one)
    turnout.accelerate(other, numerics="exact")
    fast, exact = type(processors(one)[0]), type(processors(other)[0])
    assert fast is not exact
    assert fast == exact == AttnProcessor2_0
    assert AttnProcessor not in (fast, exact)
    assert types.new_class("AttnProcessor2_0", (fast,)) != AttnProcessor2_0  # a user's own


@torch.no_grad()
def test_a_processor_that_calls_its_parent_compiles():
    from diffusers.models.attention_processor import AttnProcessor2_0

    class Own(AttnProcessor2_0):
        def __call__(self, attn, hidden_states, *args, **kwargs):
            hidden_states = (
                hidden_states + 0.1 * F.scaled_dot_product_attention(*[hidden_states[:, None]] * 3)[:, 0]
            )
            return super().__call__(attn, hidden_states, *args, **kwargs)

    model = made("unet")
    model.set_attn_processor(Own())
    expected = ZOO["unet"][1](model)
    turnout.accelerate(model)
    assert all(patched(each) for each in processors(model))
    torch.compiler.reset()
    model.compile(fullgraph=True, backend="eager")
    torch.testing.assert_close(ZOO["unet"][1](model), expected)


@torch.no_grad()
def test_another_process_gets_an_accelerated_model(tmp_path):
    model = made("unet")
    expected = ZOO["unet"][1](model)
    turnout.accelerate(model)
    (tmp_path / "model").write_bytes(pickle.dumps(model))
    there = """
import pickle, sys, torch
from tests.models.zoo import ZOO
from turnout.models.patch import patched
model = pickle.load(open(f"{sys.argv[1]}/model", "rb"))
with torch.no_grad():
    patches = sum(patched(m) is not None for m in model.modules())
    torch.save((ZOO["unet"][1](model), patches), f"{sys.argv[1]}/found")
"""
    subprocess.run([sys.executable, "-c", there, str(tmp_path)], check=True)
    actual, patches = torch.load(tmp_path / "found")
    torch.testing.assert_close(actual, expected)
    assert patches == sum(patched(m) is not None for m in model.modules()) > 0

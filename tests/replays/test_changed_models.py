"""A model that has changed is not replayed as it was: weights, modules, hooks, attributes, LoRA."""

import collections
import functools
import gc
import types

import numpy
import pytest
import torch
import torch.nn.functional as F

from tests.replays import read_outside
from tests.replays.graphed import Graphed, scaled

pytestmark = pytest.mark.filterwarnings("ignore:turnout.accelerate patched nothing")


def replace_parameter(model):
    model.proj_out.weight = torch.nn.Parameter(scaled(model, "proj_out.weight"))


def replace_data(model):
    model.proj_out.weight.data = scaled(model, "proj_out.weight")


def write_data(model):
    model.proj_out.weight.mul_(1.5)


def load(model):
    model.load_state_dict({name: x * 1.1 for name, x in model.state_dict().items()})


def replace_child(model):
    layer = torch.nn.Linear(model.proj_out.in_features, model.proj_out.out_features).to(model.device)
    torch.nn.init.constant_(layer.weight, 0.25)
    torch.nn.init.constant_(layer.bias, 0.5)
    model.proj_out = layer


def replace_forward(model):
    layer = model.transformer_blocks[0].ff
    layer.forward = lambda x, *rest: torch.zeros_like(x)


def hook(model):
    model.transformer_blocks[0].ff.register_forward_hook(lambda module, args, result: result * 2)


def pre_hook(model):
    model.proj_out.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def forget_hooks(model):
    layer = model.transformer_blocks[0].ff
    layer._forward_hooks = type(layer._forward_hooks)()
    layer.register_forward_hook(lambda module, args, result: result * 3)


def set_number(model):
    for block in model.transformer_blocks:
        block.norm2.eps = 0.5


def drop_block(model):
    del model.single_transformer_blocks[0]


def set_processor(model):
    from diffusers.models.transformers.transformer_flux import FluxAttnProcessor

    class Halved(FluxAttnProcessor):
        def __call__(self, *args, **kwargs):
            result = super().__call__(*args, **kwargs)
            return tuple(x / 2 for x in result) if isinstance(result, tuple) else result / 2

    model.set_attn_processor(Halved())


def cast(model):
    torch.nn.Module.to(model, torch.float64)
    torch.nn.Module.to(model, torch.float32)


CHANGES = [
    replace_parameter, replace_data, write_data, load, replace_child, replace_forward, hook, pre_hook,
    set_number, drop_block, set_processor, cast,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changed_model_is_not_replayed_as_it_was(change, graphed):
    graphed.warm()
    graphed.both(change)
    assert not graphed.check()
    for _ in range(3):
        graphed.check()


def test_hooks_that_were_forgotten_and_hung_anew_are_seen(graphed):
    graphed.both(hook)
    for _ in range(3):
        assert not graphed.check()
    graphed.both(forget_hooks)
    for _ in range(3):
        assert not graphed.check()
    assert "transformer_blocks.0.ff has a hook" in graphed.report.details()


def test_hooks_of_the_model_itself_run_around_replays(graphed):
    seen = []
    graphed.both(lambda model: model.register_forward_hook(lambda *given: seen.append(1)))
    graphed.warm()
    assert len(seen) == 6


def test_class_whose_forward_was_replaced_is_seen(graphed, monkeypatch):
    graphed.warm()
    cls = type(graphed.model.proj_out)
    forward = torch.nn.Linear.forward
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, x: forward(self, x) * 1.5)
    assert issubclass(cls, torch.nn.Linear)
    assert not graphed.check()


def test_weights_that_were_offloaded_and_came_back_are_captured_again(graphed):
    graphed.warm()
    for parameter in graphed.model.parameters():
        parameter.data = parameter.data.clone()
    gc.collect()
    assert not graphed.check()
    assert [graphed.check() for _ in range(2)] == [False, True]
    assert any("moved" in line for line in graphed.report.graphs[""].lines())


def test_attributes_set_to_an_equal_value_are_no_change(graphed):
    graphed.warm()
    model = graphed.model
    model.config_of_mine = {"scale": [1.0, {"a": 2}]}
    assert not graphed.check()
    assert [graphed.check() for _ in range(2)] == [False, True]
    model.config_of_mine = {"scale": [1.0, {"a": 2}]}
    assert graphed.check()
    model.config_of_mine["scale"][1]["a"] = 3
    assert not graphed.check()


def test_training_mode_is_a_change(graphed):
    graphed.warm()
    for switch in (torch.nn.Module.train, torch.nn.Module.eval):
        switch(graphed.model.transformer_blocks[0])
        assert [graphed.check() for _ in range(3)] == [False, False, True]


def test_dropout_draws_new_numbers_in_every_call(device):
    graphed = Graphed(device)
    graphed.model.train()
    graphed.model.transformer_blocks[0].ff.net[1].p = 0.5
    result = [graphed().sample for _ in range(4)]
    assert not any(torch.equal(result[0], other) for other in result[1:])
    assert graphed.replays.captured == 0


def test_lora_is_toggled_scaled_and_taken_away(device):
    from peft import LoraConfig

    graphed = Graphed(device)

    def add(model):
        torch.manual_seed(1)
        model.add_adapter(LoraConfig(r=2, target_modules=["to_q", "proj_out"], init_lora_weights=False))

    graphed.warm()
    graphed.both(add)
    steps = [
        lambda model: None,
        lambda model: model.set_adapters("default", 0.25),
        lambda model: model.disable_adapters(),
        lambda model: model.enable_adapters(),
        lambda model: model.delete_adapters("default"),
    ]
    for step in steps:
        graphed.both(step)
        assert not graphed.check()
        assert [graphed.check() for _ in range(2)] == [False, True]


def test_tensor_that_is_no_buffer_is_watched(small):
    model, replays, x = small(lambda model, x, scale: x * model.factors[0])
    model.factors = [torch.full((4,), 2.0, device=x.device)]
    for _ in range(3):
        assert torch.equal(model(x), x * 2)
    model.factors[0].fill_(3)
    assert torch.equal(model(x), x * 3)
    model.factors[0] = torch.full((4,), 5.0, device=x.device)
    for _ in range(4):
        assert torch.equal(model(x), x * 5)
    assert replays.captured == 2


def test_module_that_is_no_child_is_watched(small):
    model, replays, x = small(lambda model, x, scale: model.hidden[0](x))
    model.hidden = [torch.nn.Linear(4, 4).to(x.device).eval()]
    for _ in range(3):
        model(x)
    assert replays.replayed == 1
    model.hidden[0].weight.mul_(2)
    torch.testing.assert_close(model(x), F.linear(x, model.hidden[0].weight, model.hidden[0].bias))


def test_number_that_was_replaced_by_a_tensor_is_seen(small):
    model, _, x = small(lambda model, x, scale: x * model.steps)
    for _ in range(3):
        model(x)
    model.steps = torch.zeros((), device=x.device)
    model(x)
    for i in range(4):
        model.steps.fill_(i)
        assert torch.equal(model(x), x * i)


def holds(**attributes):
    return lambda model: [setattr(model, name, value) for name, value in attributes.items()]


def sets(path, name, value):
    """Sets an attribute, or an element, of an attribute of the model."""

    def change(model):
        place = getattr(model, path)
        (setattr if isinstance(name, str) else type(place).__setitem__)(place, name, value)

    return change


def gives(name, make):
    """Sets the data of a tensor of the model to a view of it."""

    def change(model):
        tensor = functools.reduce(getattr, name.split("."), model)
        tensor.data = make(tensor.data)

    return change


def moves_a_block(model):
    block = model.first[1]
    del model.first[1]
    model.second.insert(0, block)


class Slotted:
    __slots__ = ("scale",)

    def __init__(self):
        self.scale = 2.0


class Same:
    """Its instances equal each other, whatever they hold."""

    __hash__ = None

    def __init__(self, scale):
        self.scale = scale

    def __eq__(self, other):
        return True


def two_lists(model):
    model.first = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])
    model.second = torch.nn.ModuleList([torch.nn.Linear(4, 4)])
    model.third = torch.nn.ModuleList([])


def through_lists(model, x, scale):
    for i, blocks in enumerate((model.first, model.second, model.third)):
        for block in blocks:
            x = block(x) * (i + 1)
    return x


def with_closure(model):
    factors = [2.0]
    model.function = lambda x: x * factors[0]


# What a forward reads, how it comes to be there, and what is done to it between calls.
READ = {
    "transposed data": (lambda m, x, _: F.linear(x, m.linear.weight), holds(),
                        gives("linear.weight", torch.t)),
    "data cut off": (lambda m, x, _: F.linear(x, m.linear.weight), holds(),
                     gives("linear.weight", lambda x: x[:2])),
    "data seen as integers": (lambda m, x, _: x * m.held, lambda m: setattr(m, "held", on(m, [2.0] * 4)),
                              gives("held", lambda x: x.view(torch.int32))),
    "a block that moves on": (through_lists, two_lists, moves_a_block),
    "an empty list that grows": (through_lists, two_lists,
                                 lambda m: m.third.append(torch.nn.Linear(4, 4).to(m.linear.weight.device))),
    "an empty dict that grows": (lambda m, x, _: x * len(m.linear._buffers), holds(),
                                 lambda m: m.linear.register_buffer("more", torch.ones(1))),
    "a key": (lambda m, x, _: x * m.held.get("a", 3), holds(held={"a": 2.0}),
              lambda m: m.held.update(b=m.held.pop("a"))),
    "one dict to another": (lambda m, x, _: x * m.held.get("a", 3) * m.other.get("a", 5),
                            holds(held={"a": 2.0}, other={}),
                            lambda m: m.other.update(a=m.held.pop("a"))),
    "an order": (lambda m, x, _: x * next(iter(m.held.values())),
                 lambda m: setattr(m, "held", collections.OrderedDict(a=1.0, b=2.0)),
                 lambda m: m.held.move_to_end("a")),
    "1 that becomes True": (lambda m, x, _: x * (2 if m.held is True else 3), holds(held=1),
                            holds(held=True)),
    "1 that becomes 1.0": (lambda m, x, _: x.long() * m.held, holds(held=1), holds(held=1.0)),
    "0 that becomes -0": (lambda m, x, _: 1 / (x * m.held), holds(held=0.0), holds(held=-0.0)),
    "1 in a list": (lambda m, x, _: x.long() * m.held[0], holds(held=[1]), sets("held", 0, 1.0)),
    "a tensor that equals": (lambda m, x, _: x.long() * m.held, lambda m: setattr(m, "held", on(m, 2.0)),
                             lambda m: setattr(m, "held", on(m, 2))),
    "objects that equal": (lambda m, x, _: x * m.held.scale, holds(held=Same(2.0)), holds(held=Same(3.0))),
    "slots": (lambda m, x, _: x * m.held.scale, lambda m: setattr(m, "held", Slotted()),
              sets("held", "scale", 3.0)),
    "a deque": (lambda m, x, _: x * m.held[0], lambda m: setattr(m, "held", collections.deque([2.0])),
                sets("held", 0, 3.0)),
    "bytes": (lambda m, x, _: x * m.held[0], lambda m: setattr(m, "held", bytearray([2])),
              sets("held", 0, 3)),
    "an array": (lambda m, x, _: x * float(m.held[0]), lambda m: setattr(m, "held", numpy.ones(2)),
                 sets("held", 0, 3.0)),
    "a view of a dict": (lambda m, x, _: x * m.held["a"],
                         lambda m: setattr(m, "held", types.MappingProxyType({"a": 2.0})),
                         lambda m: gc.get_referents(m.held)[0].update(a=3.0)),
    "a closure": (lambda m, x, _: m.function(x), with_closure,
                  lambda m: m.function.__closure__[0].cell_contents.__setitem__(0, 3.0)),
    "a default": (lambda m, x, _: m.function(x),
                  lambda m: setattr(m, "function", types.FunctionType(
                      (lambda x, by: x * by).__code__, {}, argdefs=(2.0,))),
                  lambda m: setattr(m.function, "__defaults__", (3.0,))),
    "code": (lambda m, x, _: m.function(x),
             lambda m: setattr(m, "function", types.FunctionType((lambda x: x * 2).__code__, {})),
             lambda m: setattr(m.function, "__code__", (lambda x: x * 3).__code__)),
    "a partial": (lambda m, x, _: m.function(x),
                  lambda m: setattr(m, "function", functools.partial(read_outside.times, by=2.0)),
                  lambda m: m.function.keywords.update(by=3.0)),
    "the object of a method": (lambda m, x, _: m.function(x),
                               lambda m: setattr(m, "function", read_outside.Scaled().call),
                               lambda m: setattr(m.function.__self__, "scale", 3.0)),
    "an object's class": (lambda m, x, _: m.held(x), lambda m: setattr(m, "held", read_outside.Scaled()),
                          lambda m: setattr(m.held, "__class__", read_outside.Negated)),
    "a number on the host": (lambda m, x, _: x * m.held, lambda m: setattr(m, "held", torch.tensor(2.0)),
                             lambda m: m.held.data.fill_(3)),
}  # fmt: skip


def on(model, value):
    return torch.tensor(value, device=model.linear.weight.device)


def check_seen(small, body, prepare, change):
    """That after a change the model gives what it now gives without graphs, and that it gave it before."""
    model, replays, x = small(body)
    prepare(model)
    x = x * 3
    for _ in range(3):
        assert_same(model(x), body(model, x, 1.0))
    assert replays.replayed == 1
    change(model)
    for _ in range(3):
        assert_same(model(x), body(model, x, 1.0))


def assert_same(actual, expected):
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("name", READ)
def test_what_a_forward_reads_is_watched(name, small):
    check_seen(small, *READ[name])


# In a module, what is replaced in it.
OUTSIDE = {
    "a global": ("NUMBER", 3.0),
    "a function": ("helper", lambda x: x - 1),
    "a class attribute": ("Scaled.scale", 3.0),
    "a method": ("Scaled.help", lambda self, x: x - 1),
    "a property": ("Scaled.twice", property(lambda self: 7.0)),
    "an attribute that shadows its parent's": ("Scaled.inherited", 3.0),
    "an element of a global": ("TABLE.inner.by", 3.0),
    "an attribute of a global": ("SPACE.inner.scale", 3.0),
    "a class method's class": ("Helper.scale", 3.0),
    "a name of Python's own": ("max", lambda *given: 7.0),
    "a function of torch": ("F.relu", lambda x: x * 0 + 1),
    "a function under a layer of torch's": ("F.linear", lambda x, weight, bias=None: x * 2),
    "how layers are called": ("nn.Module.__call__", read_outside.called_twice),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_code_reads_elsewhere_is_watched(name, small, monkeypatch):
    path, value = OUTSIDE[name]

    def change(model):
        place = read_outside
        *above, last = path.split(".")
        for each in above:
            place = place[each] if isinstance(place, dict) else getattr(place, each)
        if isinstance(place, dict):
            monkeypatch.setitem(place, last, value)
        else:
            monkeypatch.setattr(place, last, value, raising=False)

    def body(model, x, scale):
        return model.reader(x)

    check_seen(small, body, lambda model: setattr(model, "reader", read_outside.Reader().to(
        model.linear.weight.device)), change)  # fmt: skip


def test_globals_that_only_share_their_names_with_attributes_are_no_change(small, monkeypatch):
    model, replays, x = small(lambda model, x, scale: model.reader(x))
    model.reader = read_outside.Reader().to(x.device)
    for _ in range(3):
        model(x)
    monkeypatch.setattr(read_outside, "scale", 3.0, raising=False)  # an attribute in that module's code
    monkeypatch.setattr(read_outside, "NUMBER", float("2.0"))  # another object, and the same number
    model(x)
    assert replays.replayed == 2


def test_tensors_that_want_gradients_from_now_on_are_seen(small):
    model, replays, x = small(lambda model, x, scale: model.hidden[0](x) * model.factor)
    model.hidden, model.factor = [torch.nn.Linear(4, 4).to(x.device)], torch.ones(4, device=x.device)
    model.requires_grad_(False)
    model.hidden[0].requires_grad_(False)
    with torch.enable_grad():
        for _ in range(3):
            assert not model(x).requires_grad
        for wants in (model.factor, model.hidden[0]):
            wants.requires_grad_()
            assert model(x).requires_grad
            wants.requires_grad_(False)
    assert replays.replayed == 1

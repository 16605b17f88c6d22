"""A model that has changed is not replayed as it was: weights, modules, hooks, attributes, LoRA."""

import gc

import pytest
import torch
import torch.nn.functional as F

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

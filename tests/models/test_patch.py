"""Patching: instances only, all of it undone, and never in silence."""

import copy
import pickle

import pytest
import torch
from torch import nn

import turnout
from turnout.models import patch
from turnout.models.accelerate import Report


class Twice(patch.Adapter):
    summary = "twice as much"

    def forward(self, x):
        return 2 * super().forward(x)


def test_one_instance_only():
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    other.load_state_dict(one.state_dict())
    x = torch.ones(1, 2)
    stock = one(x)
    patch.apply(one, Twice, None)
    assert torch.equal(one(x), 2 * stock)
    assert torch.equal(other(x), stock)
    assert isinstance(one, nn.Linear)
    assert type(one).__name__ == "Linear"
    assert repr(one) == repr(other)
    assert patch.patched(one) == (nn.Linear, Twice, None, False)
    assert patch.undo(one)
    assert not patch.undo(one)
    assert type(one) is nn.Linear
    assert torch.equal(one(x), stock)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_of_any_protocol(protocol):
    one = nn.Linear(2, 2)
    patch.apply(one, Twice, "exact")
    other = pickle.loads(pickle.dumps(one, protocol))
    assert type(other) is type(one)
    assert torch.equal(other(torch.ones(1, 2)), one(torch.ones(1, 2)))
    assert copy.copy(one)(torch.ones(1, 2)).shape == (1, 2)


def test_hooks_stay():
    one, seen = nn.Conv2d(1, 1, 1), []
    one.register_forward_hook(lambda *args: seen.append(1))
    turnout.accelerate(one)
    one(torch.ones(1, 1, 2, 2))
    turnout.restore(one)
    one(torch.ones(1, 1, 2, 2))
    assert seen == [1, 1]


class Unknown(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv3d(4, 8, 3, padding=1)
        self.flat = nn.Conv2d(4, 4, 3, padding="same")
        self.mirror = nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect")
        self.norm = nn.GroupNorm(2, 8)
        self.attention = SelfAttention()

    def forward(self, x):
        x = self.mirror(self.flat(x.flatten(0, 1))).unflatten(0, x.shape[:2]).transpose(1, 2)
        x = self.norm(self.conv(x))
        return self.attention(x.flatten(2).transpose(1, 2))


class SelfAttention(nn.Module):
    def forward(self, x):
        return torch.nn.functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]


@torch.no_grad()
def test_an_unknown_model_gets_its_layers_routed_and_is_told_so():
    torch.manual_seed(0)
    model, x = Unknown(), torch.randn(2, 3, 4, 5, 6)
    stock = model(x)
    report = turnout.accelerate(model)
    assert "is not known: its single layers are routed" in str(report)
    assert {entry.name: entry.adapter for entry in report.patched} == {
        "Conv3d": "turnout.conv3d", "Conv2d": "turnout.conv2d", "GroupNorm": "turnout.group_norm_silu",
        "SelfAttention": "turnout.attention in place of scaled_dot_product_attention",
    }  # fmt: skip
    assert [(entry.path, entry.reasons) for entry in report.refused] == [
        ("mirror", ("padding mode reflect, this adapter needs zeros",))
    ]
    assert (model(x) - stock).abs().max() < 1e-5
    turnout.restore(model)
    assert torch.equal(model(x), stock)


def test_weights_lie_channels_last_while_patched():
    from tests.models.zoo import made

    model = made("wan").bfloat16()
    conv = model.decoder.mid_block.resnets[0].conv1
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    values, strides = conv.weight.clone(), conv.weight.stride()
    turnout.accelerate(model)
    assert conv.weight.is_contiguous(memory_format=torch.channels_last_3d)
    assert torch.equal(conv.weight, values)
    assert any(conv.weight is held for held in optimizer.param_groups[0]["params"])
    other = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    for each in (model, other):
        turnout.restore(each)
        weight = each.decoder.mid_block.resnets[0].conv1.weight
        assert weight.stride() == strides
        assert torch.equal(weight, values)
    turnout.accelerate(model, numerics="exact")
    assert conv.weight.stride() == strides
    conv.to(memory_format=torch.channels_last_3d)  # the user's own wish outlives ours
    turnout.accelerate(model)
    turnout.restore(model)
    assert conv.weight.is_contiguous(memory_format=torch.channels_last_3d)


def test_nothing_to_patch_is_said_loudly():
    with pytest.warns(turnout.TurnoutWarning, match="patched nothing"):
        report = turnout.accelerate(nn.Sequential(nn.Linear(2, 2)))
    assert isinstance(report, Report)
    assert str(report).endswith("nothing was patched")


def test_a_replaced_forward_is_not_touched():
    model = nn.Conv2d(1, 1, 1)
    norm = nn.GroupNorm(1, 1)
    norm.forward = lambda x: x
    with pytest.warns(turnout.TurnoutWarning, match="its forward was replaced"):
        turnout.accelerate(nn.Sequential(norm))
    assert type(norm) is nn.GroupNorm
    turnout.accelerate(model)


def test_only_models_and_pipelines():
    with pytest.raises(TypeError, match="nor a pipeline with components"):
        turnout.accelerate([nn.Conv2d(1, 1, 1)])
    with pytest.raises(ValueError, match="numerics level"):
        turnout.accelerate(nn.Conv2d(1, 1, 1), numerics="sloppy")


def test_a_pipeline_as_a_whole():
    from diffusers import DiffusionPipeline

    from tests.models.zoo import made

    class Pipeline(DiffusionPipeline):
        def __init__(self, vae, transformer):
            super().__init__()
            self.register_modules(vae=vae, transformer=transformer)

    pipeline = Pipeline(made("wan"), made("wan-transformer"))
    report = turnout.accelerate(pipeline)
    assert list(report.models) == ["vae", "transformer"]
    assert any(entry.path.startswith("vae.decoder") for entry in report.patched)
    assert any(entry.path.startswith("transformer.blocks") for entry in report.patched)
    assert turnout.restore(pipeline) == len(report.patched)


def test_accelerated_restores_after_an_error():
    model = nn.Conv2d(1, 1, 1)
    with pytest.raises(RuntimeError), turnout.accelerated(model):
        model(torch.ones(1, 2, 2, 2))
    assert type(model) is nn.Conv2d


class OwnConv(nn.Conv2d):
    def _conv_forward(self, input, weight, bias):
        return 2 * super()._conv_forward(input, weight, bias)


class OwnNorm(nn.GroupNorm):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("layer", [lambda: OwnConv(4, 4, 1), lambda: OwnNorm(2, 4)])
@torch.no_grad()
def test_code_of_a_class_derived_from_torchs_is_kept(layer):
    layer, x = layer(), torch.randn(1, 4, 5, 5)
    expected = layer(x)
    report = turnout.accelerate(nn.Sequential(layer))
    assert "of its own, this adapter needs that of" in report.details()
    assert torch.equal(layer(x), expected)

"""Patching: instances only, all of it undone, and never in silence."""

import collections
import contextlib
import copy
import pickle
import types
from pathlib import Path

import pytest
import torch
from torch import nn

import turnout
from turnout.models import patch
from turnout.models.accelerate import Report
from turnout.models.bare import is_as_written


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


def test_accelerated_inside_accelerated_gives_back_what_was_before():
    from tests.models.zoo import made

    model = made("flux-vae").bfloat16()
    stock = [type(module) for module in model.modules()]
    with turnout.accelerated(model, numerics="exact"):
        outer = [type(module) for module in model.modules()]
        with contextlib.suppress(RuntimeError), turnout.accelerated(model):
            assert [type(module) for module in model.modules()] != outer
            raise RuntimeError
        assert [type(module) for module in model.modules()] == outer
    assert [type(module) for module in model.modules()] == stock


def kept_by_offloading(model):
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_module

    cpu_offload(model, execution_device=torch.device("cpu"))
    return lambda: remove_hook_from_module(model, recurse=True)


def kept_by_hooks_of_diffusers(model):
    from diffusers.hooks import HookRegistry, ModelHook

    class Calls(ModelHook):
        def new_forward(self, module, *args, **kwargs):
            return self.fn_ref.original_forward(*args, **kwargs)

    parts = [module for module in model.modules() if module.forward.__name__ == "forward"]
    for part in parts:
        HookRegistry.check_if_exists_or_initialize(part).register_hook(Calls(), "calls")
    return lambda: [part._diffusers_hook.remove_hook("calls", recurse=False) for part in parts]


def kept_by_a_user(model):
    stock = {module: module.forward for module in model.modules() if module.forward.__name__ == "forward"}
    for module, forward in stock.items():
        module.forward = lambda *args, forward=forward, **kwargs: forward(*args, **kwargs)

    def put_back():
        for module, forward in stock.items():
            module.forward = forward

    return put_back


@pytest.mark.parametrize("keep", [kept_by_offloading, kept_by_hooks_of_diffusers, kept_by_a_user])
@pytest.mark.parametrize("name", ["flux-vae", "wan", "flux", "unet"])
@torch.no_grad()
def test_a_forward_that_was_kept_is_that_of_stock_once_restored(name, keep):
    from tests.models.zoo import ZOO, made

    expected = ZOO[name][1](made(name))
    model = made(name)
    turnout.accelerate(model)
    put_back = keep(model)
    turnout.restore(model)
    assert torch.equal(ZOO[name][1](model), expected)  # still kept
    put_back()
    assert torch.equal(ZOO[name][1](model), expected)
    model = made(name)
    turnout.accelerate(model)
    put_back = keep(model)
    put_back()
    turnout.restore(model)
    assert torch.equal(ZOO[name][1](model), expected)
    assert not [m for m in model.modules() if m.forward.__func__.__module__.startswith("turnout.")]


@torch.no_grad()
@pytest.mark.parametrize(("file", "is_stocks"), [("utils/decorators.py", True), ("/a/user.py", False)])
def test_decorators_of_a_library_leave_its_methods_as_written(file, is_stocks, monkeypatch):
    """As transformers and diffusers have them around some methods, in some releases."""
    import diffusers
    from diffusers.models.attention import FeedForward

    assert is_as_written(FeedForward)
    stock = FeedForward.forward

    def decorated(*args, **kwargs):
        return stock(*args, **kwargs)

    code = decorated.__code__.replace(co_filename=str(Path(diffusers.__path__[0], file)))
    method = types.FunctionType(code, decorated.__globals__, "forward", None, decorated.__closure__)
    monkeypatch.setattr(FeedForward, "forward", method)
    assert is_as_written(FeedForward) is is_stocks


def test_a_users_class_in_front_of_a_patched_one_outlives_restore():
    from tests.models.zoo import ZOO, made

    def scaled(model):
        block = model.decoder.mid_block.resnets[0]

        class Scaled(type(block)):
            def forward(self, *args, **kwargs):
                return 0.9 * super().forward(*args, **kwargs)

        block.__class__ = Scaled
        return model

    expected = ZOO["flux-vae"][1](scaled(made("flux-vae")))
    model = made("flux-vae")
    turnout.accelerate(model)
    scaled(model)
    torch.testing.assert_close(ZOO["flux-vae"][1](model), expected, rtol=1e-5, atol=1e-4)
    turnout.restore(model)
    assert torch.equal(ZOO["flux-vae"][1](model), expected)


def new_hook_dicts(model, call):
    for module in model.modules():
        module._forward_hooks = collections.OrderedDict()
    call()
    for module in model.modules():
        module.register_forward_hook(lambda module, args, out: 1.01 * out if torch.is_tensor(out) else out)


def other_buffers(model, call):
    """Weights become buffers, and later other buffers."""
    held = [
        (module, name) for module in model.modules() for name, _ in module.named_parameters(recurse=False)
    ]
    weights = [(module, name, getattr(module, name).detach()) for module, name in held]
    for module, name, weight in weights:
        delattr(module, name)
        module.register_buffer(name, weight)
    call()
    for module, name, weight in weights:
        setattr(module, name, 1.1 * weight)


def other_output_scales(model, call):
    for module in model.modules():
        if hasattr(module, "output_scale_factor"):
            module.output_scale_factor = 1.5


def dilated(model, call):
    """As pictures of other sizes than those of the training are made."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.kernel_size == (3, 3) and module.padding == (1, 1):
            module.padding = module.dilation = (2, 2)


@pytest.mark.parametrize("change", [new_hook_dicts, other_buffers, other_output_scales, dilated])
@pytest.mark.parametrize("name", ["flux-vae", "flux", "unet"])
@torch.no_grad()
def test_what_is_changed_between_two_calls_is_seen(name, change):
    from tests.models.zoo import ZOO, made

    outputs = []
    for accelerated in (False, True):
        model = made(name)
        if accelerated:
            turnout.accelerate(model)
        ZOO[name][1](model)
        change(model, lambda model=model: ZOO[name][1](model))
        outputs.append(ZOO[name][1](model))
    expected, actual = outputs
    torch.testing.assert_close(actual, expected, rtol=0, atol=3e-5 * expected.abs().max().item())

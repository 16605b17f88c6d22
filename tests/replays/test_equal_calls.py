"""Which calls are equal: other arguments, settings or modes are another call."""

import contextlib
import copy
import re
import types

import pytest
import torch
import torch.nn.functional as F

import turnout
from tests.replays.graphed import flux_inputs
from turnout.models import replays as replays_module
from turnout.routing.torch_private import kernel_flags

pytestmark = pytest.mark.filterwarnings("ignore:turnout.accelerate patched nothing")


@contextlib.contextmanager
def precision():
    torch.backends.mkldnn.matmul.fp32_precision, before = "bf16", torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision, of_cuda = "tf32", torch.backends.cuda.matmul.fp32_precision
    try:
        yield
    finally:
        torch.backends.mkldnn.matmul.fp32_precision, torch.backends.cuda.matmul.fp32_precision = (
            before,
            of_cuda,
        )


@contextlib.contextmanager
def no_flash():
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_flash_sdp(True)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class Double(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is F.scaled_dot_product_attention else result


class Halve(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result / 2 if func is torch.ops.aten.gelu.default else result


def backend():
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry, attention_backend

    active, _ = _AttentionBackendRegistry.get_active_backend()  # other tests may have set it
    return attention_backend("native" if active.value == "_native_math" else "_native_math")


SETTINGS = {
    "numerics": lambda: turnout.numerics("exact"),
    "pin": lambda: turnout.pin(norm_rope="reference"),
    "fp32 precision": precision,
    "sdpa backends": no_flash,
    "attention backend": backend,
    "deterministic": deterministic,
    "inference mode": torch.inference_mode,
    "function mode": Double,
    "dispatch mode": Halve,
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_other_settings_are_another_call(setting, graphed):
    graphed.warm()
    with SETTINGS[setting]():
        assert not graphed.check()
        graphed.check()
        graphed.check()
    assert graphed.check()


def test_settings_that_torch_itself_comes_to_in_the_first_call_cost_no_other_call(small):
    """At the first attention on some cards it puts cuDNN's before the others."""
    before = torch._C._get_sdp_priority_order()
    other = [*before[1:], before[0]]

    def body(model, x, scale):
        if torch._C._get_sdp_priority_order() != other:
            torch._C._set_sdp_priority_order(other)
        return model.linear(x) * scale

    model, replays, x = small(body)
    try:
        counts = []
        for _ in range(3):
            model(x)
            counts.append((replays.captured, replays.replayed))
    finally:
        torch._C._set_sdp_priority_order(before)
    assert counts == [(0, 0), (1, 0), (1, 1)]


def setter_of(getter):
    """torch's setter of the flag that this getter asks for, or None."""
    name = getter.__name__.removeprefix("_get_")
    attention = re.fullmatch(r"(\w+)_sdp_enabled", name)
    return getattr(torch._C, f"_set_sdp_use_{attention[1]}" if attention else f"_set_{name}", None)


def can_be_switched(getter):
    """Whether torch has such a switch, and takes it on this machine: not every CPU has float16 arithmetic."""
    value, setter = getter(), setter_of(getter)
    if type(value) is not bool or setter is None:
        return False
    try:
        setter(not value)
    except RuntimeError:
        return False
    setter(value)
    return True


SWITCHES = [flag.__name__ for flag in kernel_flags if can_be_switched(flag)]


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_of_torch_is_another_call(name):
    getter, settings = getattr(torch._C, name), replays_module._settings
    before, value = settings(torch.device("cpu")), getter()
    setter_of(getter)(not value)
    try:
        assert settings(torch.device("cpu")) != before
    finally:
        setter_of(getter)(value)
    assert settings(torch.device("cpu")) == before


def test_every_setting_of_torch_is_watched_or_known_to_change_no_kernel():
    """A newer torch has more of them: read what each does, and let `replays` watch it, or name it here."""
    elsewhere = {"cublas_allow_tf32", "cudnn_allow_tf32", "onednn_allow_tf32", "float32_matmul_precision"}
    elsewhere |= {"sdp_priority_order", "default_device"}
    no_kernel = {
        "autograd_fallback_mode",
        "backcompat_broadcast_warn",
        "backcompat_keepdim_warn",
        "warnAlways",
    }
    no_kernel |= {"thread_name", "symbolize_mode", "torch_function_state", "tracing_state", "value_trace"}
    no_kernel |= {"dispatch_mode", "fake_constant", "tensor_metadata"}
    scripts_or_quantized = {"graph_exec_group", "graph_executor_optimize", "qengine"}
    pairs = {name[5:] for name in dir(torch._C) if name.startswith("_get_")} & {
        name[5:] for name in dir(torch._C) if name.startswith("_set_")
    }
    watched = {flag.__name__[5:] for flag in kernel_flags}
    assert pairs - watched - elsewhere - no_kernel - scripts_or_quantized == set()


def test_autocast_is_another_call(graphed):
    graphed.warm()
    graphed.stock = turnout.restore(twin := copy.deepcopy(graphed.model)) and twin
    for _ in range(2):  # weights that were cast in one block are gone in the next
        with torch.autocast(graphed.device.type, torch.bfloat16):
            result = [graphed().sample for _ in range(4)]
            expected = graphed(graphed.stock).sample
        for each in result:
            torch.testing.assert_close(each.float(), expected.float(), rtol=0.05, atol=0.05)
            assert each.dtype == expected.dtype
    assert graphed.check()


def test_attention_that_was_put_in_the_place_of_torchs_is_called(graphed, monkeypatch):
    graphed.warm()
    sdpa = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args, **kwargs: sdpa(*args, **kwargs) * 2)
    assert not graphed.check()


def test_calls_that_want_gradients_run_without_graphs(graphed):
    graphed.warm()
    with torch.enable_grad():
        for _ in range(3):
            result, expected = graphed().sample, graphed(graphed.stock).sample
            ours, theirs = (
                torch.autograd.grad(y.sum(), m.proj_out.weight)[0]
                for y, m in ((result, graphed.model), (expected, graphed.stock))
            )
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert "gradients are wanted: call it under torch.no_grad()" in graphed.report.details()
    assert graphed.check()


ARGUMENTS = {
    "shape": lambda given: flux_inputs(given["timestep"].device, batch=1),
    "strides": lambda given: {
        "hidden_states": given["hidden_states"].transpose(1, 2).contiguous().transpose(1, 2)
    },
    "dtype": lambda given: {"timestep": given["timestep"].double()},
    "left out": lambda given: {"guidance": given["guidance"].float().clone(), "joint_attention_kwargs": {}},
    "return_dict": lambda given: {"return_dict": False},
    "residuals": lambda given: {
        "controlnet_block_samples": [torch.ones_like(given["hidden_states"])[..., :1]]
    },
}


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_other_arguments_are_another_call(argument, graphed):
    graphed.warm()
    changes = ARGUMENTS[argument](graphed.inputs)
    assert not graphed.check(**changes)
    assert graphed.check()
    assert [graphed.check(**changes) for _ in range(2)] == [False, True]
    assert graphed.check()


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_value_of_a_host_tensor_is_a_part_of_the_call(small):
    """A tensor of one number on the host may stand beside those of a card, whose kernels are given it."""
    model, replays, x = small(lambda model, x, scale: model.linear(x) * scale)
    for value in (0.5, 0.5, 0.5, 0.75):
        result = model(x, torch.tensor(value))
        torch.testing.assert_close(result, model.linear(x) * value)
    assert replays.replayed == 1


def test_unknown_objects_among_arguments_are_left_to_the_stock_call(graphed):
    unknown = types.SimpleNamespace()
    for _ in range(3):
        assert not graphed.check(joint_attention_kwargs={"unknown": unknown})
    assert "an argument of type SimpleNamespace" in graphed.report.details()


def test_branch_on_an_argument_is_another_call(small):
    model, replays, x = small(lambda model, x, scale: model.linear(x) * scale if scale > 1 else x - scale)
    for scale in (1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 1.0, -0.0, 0.0):
        expected = model.body(model, x, scale)
        torch.testing.assert_close(model(x, scale), expected)
    assert replays.captured == 2

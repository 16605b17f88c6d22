"""Models inside something else: compilers, tracers, several processes, peft.

And models that cannot be accelerated as they are.
"""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

import turnout
from tests.models.zoo import ZOO, made, random
from turnout.models.patch import patched

pytestmark = pytest.mark.filterwarnings("ignore")

VAES = {
    "wan": (1, 4, 1, 4, 6),
    "wan22": (1, 6, 1, 2, 4),
    "qwen-image-vae": (1, 4, 1, 4, 6),
    "flux-vae": (1, 4, 8, 12),
    "sdxl-vae": (1, 4, 8, 12),
    "flux2-vae": (1, 4, 8, 12),
    "ltx": (1, 4, 2, 3, 4),
    "ltx2": (1, 4, 2, 3, 4),
    "hunyuan": (1, 4, 2, 4, 6),
    "cogvideox": (1, 4, 2, 4, 6),
}
WHOLE = ("flux", "wan-transformer", "qwen-image")


class Called(nn.Module):
    """What is compiled: a whole transformer, or the decoder of a VAE."""

    def __init__(self, name):
        super().__init__()
        self.model, self.name = made(name), name
        self.named = {} if name in VAES else arguments(name)

    def forward(self, x):
        if self.name in VAES:
            return self.model.decode(x).sample
        return self.model(**{**self.named, "hidden_states": x}, return_dict=False)[0]


def arguments(name):
    """What the zoo calls a transformer with."""
    given = {}

    class Model:
        dtype, sample = torch.float32, None

        def __call__(self, *args, **named):
            given.update(named, hidden_states=args[0] if args else named["hidden_states"])
            return self

    ZOO[name][1](Model())
    return given


def given(name):
    return random(*VAES[name]) if name in VAES else arguments(name)["hidden_states"]


def close(actual, expected):
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= 3e-5 * expected.abs().max()


@pytest.mark.parametrize("order", ["accelerate first", "compile first"])
@pytest.mark.parametrize("name", [*VAES, *WHOLE])
@torch.no_grad()
def test_compiles_into_one_graph_in_both_orders(name, order):
    model, x = Called(name).eval(), given(name)
    expected = model(x)
    torch.compiler.reset()
    if order == "accelerate first":
        turnout.accelerate(model)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    if order == "compile first":
        report = turnout.accelerate(compiled)
        assert "Called" in report.models[""]
    close(compiled(x), expected)
    turnout.restore(compiled)
    torch.compiler.reset()
    close(compiled(x), expected)


@pytest.mark.parametrize("name", ["flux-vae", "ltx", "flux", "wan-transformer"])
@torch.no_grad()
def test_exports(name):
    model, x = Called(name).eval(), given(name)
    expected = model(x)
    turnout.accelerate(model)
    close(torch.export.export(model, (x,)).module()(x), expected)


@pytest.mark.parametrize("name", ["flux-vae", "hunyuan", "ltx", "flux"])
@torch.no_grad()
def test_traces(name):
    model, x = Called(name).eval(), given(name)
    expected = model(x)
    turnout.accelerate(model)
    close(torch.jit.trace(model, (x,), check_trace=False)(x), expected)


@pytest.mark.parametrize("name", ["flux-vae", "wan", "hunyuan", "flux", "wan-transformer", "mamba"])
def test_full_backward_hooks(name):
    def gradients(order):
        model, seen = made(name), []
        if order == "accelerate first":
            turnout.accelerate(model)
        for path, module in model.named_modules():
            if not list(module.children()):
                module.register_full_backward_hook(lambda module, ins, outs, path=path: seen.append(path))
        if order == "accelerate last":
            turnout.accelerate(model)
        ZOO[name][1](model).square().mean().backward()
        return sorted(seen), {key: p.grad for key, p in model.named_parameters() if p.grad is not None}

    seen, expected = gradients("stock")
    scale = max(grad.abs().max() for grad in expected.values())
    for order in ("accelerate first", "accelerate last"):
        actual = gradients(order)
        assert actual[0] == seen
        assert actual[1].keys() == expected.keys()
        assert all((actual[1][key] - grad).abs().max() <= 1e-4 * scale for key, grad in expected.items())


@pytest.fixture
def alone(tmp_path):
    """A group of one process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def ddp(model):
    return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)


def fsdp1(model):
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def fsdp2(model):
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    for block in model.modules():
        if type(block).__name__ in ("FluxTransformerBlock", "WanTransformerBlock", "ResnetBlock2D"):
            fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@pytest.mark.parametrize("order", ["accelerate first", "accelerate last"])
@pytest.mark.parametrize("wrap", [ddp, fsdp1, fsdp2], ids=lambda wrap: wrap.__name__)
@pytest.mark.parametrize("name", ["flux", "wan-transformer"])
def test_trains_in_several_processes(alone, name, wrap, order):
    def step(order):
        model = made(name).train()
        if order == "accelerate first":
            turnout.accelerate(model)
        wrapped = wrap(model)
        if order == "accelerate last":
            report = turnout.accelerate(wrapped)
            classes = {"flux": "FluxTransformer2DModel", "wan-transformer": "WanTransformer3DModel"}
            assert f"{classes[name]} is known" in str(report)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-2)
        if wrap is not fsdp2:
            wrapped.dtype = torch.float32
        losses = []
        for _ in range(2):
            optimizer.zero_grad()
            loss = ZOO[name][1](wrapped).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if order != "stock":
            turnout.restore(wrapped)
            assert not any(patched(m) for m in wrapped.modules())
        return losses

    stock, fast = step("stock"), step(order)
    assert stock[0] != stock[1]
    assert all(abs(one - other) <= 1e-4 * abs(other) for one, other in zip(fast, stock, strict=True))


def test_a_wrapped_model_is_known():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(made("flux"), LoraConfig(target_modules=["to_q", "to_k"]))
    assert "FluxTransformer2DModel is known" in str(turnout.accelerate(model))
    assert "FluxTransformer2DModel is known" in str(turnout.accelerate(torch.compile(made("flux"))))


def test_what_is_not_touched_is_named():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.Conv1d(4, 4, 1), nn.ConvTranspose2d(4, 4, 2), nn.BatchNorm2d(4)
    )
    message = str(turnout.accelerate(model))
    assert "not touched: 1 x Conv1d, 1 x ConvTranspose2d, 1 x BatchNorm2d" in message


def test_partly_known_models_are_called_so():
    model = nn.Sequential(made("flux-vae").decoder.mid_block.resnets[0], nn.Conv1d(3, 3, 1))
    report = turnout.accelerate(model)
    assert "is partly known: 1 part of it is fused" in str(report)
    assert len(str(report).splitlines()) <= 24
    assert "0 (ResnetBlock2D) fused" in report.details()
    assert "0.conv1 (Conv2d) done by 0" in report.details()


def test_a_model_without_weights_says_so():
    with torch.device("meta"):
        model = ZOO["flux-vae"][0]()
    assert "all weights are on the meta device" in str(turnout.accelerate(model))
    assert turnout.restore(model) > 0


def test_mixed_dtypes_are_told_and_run_as_stock():
    model, x = made("flux-vae"), random(1, 4, 8, 12)
    model.decoder.up_blocks[0].resnets[0].double()
    with pytest.raises(RuntimeError) as stock:
        model.decode(x)
    report = turnout.accelerate(model)
    assert "weights of float32 " in str(report)
    assert "and float64 " in str(report)
    with pytest.raises(RuntimeError) as fast:
        model.decode(x)
    assert str(fast.value) == str(stock.value)


def test_half_offloaded_models_are_told():
    from accelerate import cpu_offload

    model, x = made("flux-vae"), random(1, 4, 8, 12)
    with torch.no_grad():
        expected = model.decode(x).sample
        cpu_offload(model.decoder.mid_block, execution_device=torch.device("cpu"))
        report = turnout.accelerate(model)
        assert "are on the meta device (offloaded)" in str(report)
        close(model.decode(x).sample, expected)


@torch.no_grad()
def test_a_restored_model_holds_no_weights_that_were_replaced():
    model, x = made("flux-vae"), random(1, 4, 8, 12)
    turnout.accelerate(model)
    model.decode(x)
    conv = model.decoder.mid_block.resnets[0].conv1
    before = weakref.ref(conv.weight)
    turnout.restore(model)
    conv.weight = nn.Parameter(torch.zeros_like(conv.weight))
    gc.collect()
    assert before() is None


def test_a_failure_leaves_nothing_patched(monkeypatch):
    from turnout.models import patch as module

    model, calls = made("flux-vae"), []
    patch = module.apply

    def fails(*args, **kwargs):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return patch(*args, **kwargs)

    monkeypatch.setattr(module, "apply", fails)
    with pytest.raises(KeyboardInterrupt):
        turnout.accelerate(model)
    assert not any(patched(m) for m in model.modules())

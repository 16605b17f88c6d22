"""Each model that is known, tiny, on the CPU: accelerated it says what it said before, and restored it is
what it was before.
"""

import contextlib
import copy
import pickle

import pytest
import torch

import turnout
from tests.models.zoo import CLIPS, PARTLY_KNOWN, ZOO, made, random, tokens
from turnout.models import bare, patch
from turnout.models.patch import patched
from turnout.routing.op import OPS, watched

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
every = pytest.mark.parametrize("name", ZOO)
decoders = pytest.mark.parametrize("name", CLIPS)


@contextlib.contextmanager
def counted_calls():
    """Counts the calls of each op."""
    count = dict.fromkeys(OPS, 0)

    def watch(op, args):
        count[op.name] += 1

    with watched(watch, every_call=True):
        yield count


def close(actual, expected, share=2e-5):
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    assert (actual - expected).abs().max() <= share * expected.abs().max()


@every
@torch.no_grad()
def test_accelerated_agrees_and_restored_is_the_same(name):
    model, (_, call, op) = made(name), ZOO[name]
    state, attributes = {key: value.clone() for key, value in model.state_dict().items()}, _attributes(model)
    stock = call(model)
    report = turnout.accelerate(model)
    with counted_calls() as count:
        fast = call(model)
    assert count[op] > 0
    close(fast, stock)
    assert report.patched
    assert len(str(report).splitlines()) <= 24  # it fits a screen
    known = "is partly known" if name in PARTLY_KNOWN else "is known"
    assert all(known in said for said in report.models.values())
    assert model.state_dict().keys() == state.keys()
    assert turnout.restore(model) == len(report.patched)
    assert torch.equal(call(model), stock)
    assert _attributes(model) == attributes
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert turnout.restore(model) == 0


def _attributes(model):
    """Class, attributes and forward of every module: what patching must leave as it was.

    Decoding adds a cache's bookkeeping of its own.
    """
    own = ("_feat_map", "_conv_idx", "_conv_num", "_enc_feat_map", "_enc_conv_idx", "_enc_conv_num")
    return [
        (
            path,
            type(module),
            module.forward.__func__,
            type(getattr(module, "processor", None)),
            sorted(vars(module).keys() - set(own)),
        )
        for path, module in model.named_modules()
    ]


@decoders
@torch.no_grad()
def test_encoders_agree(name):
    model, clip = made(name), random(*CLIPS[name])
    stock = model.encode(clip).latent_dist.mean
    with turnout.accelerated(model):
        close(model.encode(clip).latent_dist.mean, stock)


@every
@torch.no_grad()
def test_every_part_stays_bare_and_is_looked_at_once(name, monkeypatch):
    model, built, answers = made(name), [], []
    turnout.accelerate(model)
    stock, watch = patch.is_bare, bare._Watch
    monkeypatch.setattr(bare, "_Watch", lambda root, *args: built.append(root) or watch(root, *args))
    monkeypatch.setattr(
        patch, "is_bare", lambda root, *args: answers.append((stock(root, *args), root)) or answers[-1][0]
    )
    ZOO[name][1](model)
    built.clear()
    ZOO[name][1](model)
    assert not built
    assert not [type(root).__name__ for is_bare, root in answers if not is_bare]


@every
@torch.no_grad()
def test_copies_and_pickles_are_accelerated_too(name):
    model, (_, call, _) = made(name), ZOO[name]
    stock = call(model)
    turnout.accelerate(model)
    fast = call(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(call(other), fast)
        assert [type(module) for module in other.modules()] == [type(module) for module in model.modules()]
        assert turnout.restore(other) > 0
        assert torch.equal(call(other), stock)
    assert torch.equal(call(model), fast)


@pytest.mark.parametrize("name", ["wan", "flux-vae", "ltx", "hunyuan", "cogvideox", "flux", "mamba"])
@torch.no_grad()
def test_half_types(name):
    """A model that was accelerated first and cast then; errors are those of the dtype."""
    _, call, _ = ZOO[name]
    truth = call(made(name))
    stock = call(made(name, torch.bfloat16))
    model = made(name)
    turnout.accelerate(model)
    fast = call(torch.nn.Module.to(model, torch.bfloat16))
    assert fast.dtype == stock.dtype
    assert (fast - truth).square().mean() <= 1.3 * (stock - truth).square().mean() + 1e-12


@pytest.mark.parametrize(
    "name", ["wan", "wan22", "flux-vae", "ltx", "ltx2", "hunyuan", "cogvideox", "flux", "mamba"]
)
def test_gradients_agree(name):
    model, (_, call, _) = made(name), ZOO[name]

    def gradients():
        model.zero_grad()
        call(model).square().mean().backward()
        return {
            key: parameter.grad.clone()
            for key, parameter in model.named_parameters()
            if parameter.grad is not None
        }

    stock = gradients()
    with turnout.accelerated(model):
        fast = gradients()
    assert fast.keys() == stock.keys()
    scale = max(grad.abs().max() for grad in stock.values())
    for key, grad in stock.items():
        assert (fast[key] - grad).abs().max() <= 1e-4 * scale, key


@pytest.mark.parametrize("name", ["flux-vae", "flux"])
def test_gradients_where_backward_runs_under_hooks_on_saved_tensors(name):
    model, (_, call, _) = made(name), ZOO[name]

    def gradients():
        model.zero_grad()
        with torch.autograd.graph.save_on_cpu():
            call(model).square().mean().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    stock = gradients()
    scale = max(grad.abs().max() for grad in stock)
    with turnout.accelerated(model):
        for actual, expected in zip(gradients(), stock, strict=True):
            assert (actual - expected).abs().max() <= 1e-4 * scale


@pytest.mark.parametrize("name", ["wan", "flux-vae", "mamba"])
@torch.no_grad()
def test_train_and_eval(name):
    model, (_, call, _) = made(name), ZOO[name]
    model.train()
    stock = call(model)
    with turnout.accelerated(model):
        assert all(module.training for module in model.modules())
        close(call(model), stock)
        model.eval()
        close(call(model), call(made(name)))


@torch.no_grad()
def test_dropout_still_drops_in_training():
    from diffusers import AutoencoderKLWan

    torch.manual_seed(0)
    model = AutoencoderKLWan(
        base_dim=8, z_dim=4, num_res_blocks=1, latents_mean=[0.0] * 4, latents_std=[1.0] * 4, dropout=0.5
    )
    z = random(1, 4, 2, 4, 6)
    stock = model.eval().decode(z).sample
    turnout.accelerate(model)
    assert not torch.allclose(model.train().decode(z).sample, model.decode(z).sample)
    close(model.eval().decode(z).sample, stock)


@every
@pytest.mark.filterwarnings("ignore:turnout.accelerate patched nothing")
@torch.no_grad()
def test_exact_keeps_every_bit(name):
    model, (_, call, _) = made(name), ZOO[name]
    stock = call(model)
    with turnout.accelerated(model, numerics="exact"):
        assert torch.equal(call(model), stock)


@torch.no_grad()
def test_exact_keeps_every_bit_of_an_encoder():
    model = made("wan", torch.bfloat16)
    clip = random(1, 3, 5, 32, 32).bfloat16()
    stock = model.encode(clip).latent_dist.mean
    report = turnout.accelerate(model, numerics="exact")
    assert torch.equal(model.encode(clip).latent_dist.mean, stock)
    assert any("cache, input and padding written once" in str(entry.adapter) for entry in report.patched)


@every
@torch.no_grad()
def test_twice_is_once(name):
    model = made(name)
    first = turnout.accelerate(model)
    classes = [type(module) for module in model.modules()]
    second = turnout.accelerate(model)
    assert str(first) == str(second)
    assert classes == [type(module) for module in model.modules()]
    turnout.restore(model)
    assert not any(patched(module) for module in model.modules())


@pytest.mark.parametrize("name", ["wan", "flux-vae"])
@torch.no_grad()
def test_tiling_and_slicing(name):
    model = made(name)
    z = random(2, 4, 2, 3, 3) if name == "wan" else random(2, 4, 16, 16)
    model.enable_slicing()
    model.enable_tiling()
    if name == "wan":
        model.enable_tiling(16, 16, 12, 12)
    else:
        model.tile_sample_min_size, model.tile_latent_min_size = 16, 8
    stock = model.decode(z).sample
    with turnout.accelerated(model):
        close(model.decode(z).sample, stock, 1e-4)


@pytest.mark.parametrize("name", ["mamba", "mamba2", "bamba"])
@torch.no_grad()
def test_generation(name):
    model = made(name)

    def generated():
        settings = {
            "do_sample": False,
            "pad_token_id": 0,
            "eos_token_id": None,
            "output_logits": True,
            "return_dict_in_generate": True,
        }
        return torch.stack(model.generate(tokens(), max_new_tokens=6, **settings).logits)

    stock = generated()
    with turnout.accelerated(model), counted_calls() as count:
        close(generated(), stock)
    assert count["causal_conv1d_update"] > 0


@torch.no_grad()
def test_masks_of_padded_prompts():
    model = made("mamba")
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :3] = 0
    stock = model(tokens(), attention_mask=mask).logits
    with turnout.accelerated(model):
        close(model(tokens(), attention_mask=mask).logits, stock)


@torch.no_grad()
def test_a_backend_the_user_chose_keeps_the_attention():
    model = made("flux")
    stock = ZOO["flux"][1](model)
    turnout.accelerate(model)
    model.set_attention_backend("_native_math")
    with counted_calls() as count:
        close(ZOO["flux"][1](model), stock)
    assert count["attention"] == 0
    assert count["norm_rope"] > 0


@torch.no_grad()
def test_fused_projections():
    model = made("flux")
    stock = ZOO["flux"][1](model)
    turnout.accelerate(model)
    model.fuse_qkv_projections()
    close(ZOO["flux"][1](model), stock)


@torch.no_grad()
def test_two_models_in_two_threads():
    import threading

    models = [made("wan"), made("wan")]
    expected = ZOO["wan"][1](models[0])
    actual = {}
    for model in models:
        turnout.accelerate(model)

    def run(i):
        with torch.no_grad():
            actual[i] = ZOO["wan"][1](models[i])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(2):
        close(actual[i], expected)


@pytest.mark.parametrize("name", ["wan", "flux-vae"])
@torch.no_grad()
def test_compiles_into_one_graph(name):
    model = made(name)
    z = random(1, 4, 1, 4, 6) if name == "wan" else random(1, 4, 8, 12)
    stock = model.decoder(z)
    turnout.accelerate(model)
    torch.compiler.reset()
    compiled = torch.compile(model.decoder, fullgraph=True, backend="aot_eager")
    close(compiled(z), stock)

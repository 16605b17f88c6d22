"""torch's settings and transforms around a call: float32 precision, autocast, devices, vmap, traces."""

import contextlib
import functools
import itertools
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import turnout
from tests.faults.public_calls import (
    CALLS,
    EVERY_CALL,
    MAKERS,
    calls,
    changed,
    flat,
    mapped,
    routes_for,
    tensors_in,
    wanting_gradients,
)
from tests.float32 import PLACES, all_precisions, left_as_it_was
from turnout.ops.attention import padding
from turnout.ops.causal_conv1d import checks
from turnout.routing import machine
from turnout.routing.op import forget_choices
from turnout.routing.precision import get_precision, strict_float32


def run(call, kwargs):
    """What a call returns and what it writes, the given tensors left as they are."""
    kwargs = {n: mapped(x, torch.clone) if n in call.written() else x for n, x in kwargs.items()}
    return [*flat(call.function(**kwargs)), *(kwargs[name] for name in call.written())]


def backward(call, kwargs):
    """Run a call and its backward."""
    sum(y.sum() for y in flat(call.function(**wanting_gradients(kwargs)))).backward()


def pinned_routes(dtype=torch.float32, keep=lambda call: True):
    """Every call with every route that takes it."""
    for call in filter(keep, CALLS):
        for name in routes_for(call, dtype):
            yield call, name


# How float32 is multiplied


def set_flag(module, name, *values):
    return [functools.partial(setattr, module, name, value) for value in values]


SETTINGS = [
    *set_flag(torch.backends, "fp32_precision", "ieee", "tf32", "none"),
    *set_flag(torch.backends.cudnn, "fp32_precision", "ieee", "tf32", "none"),
    *set_flag(torch.backends.cudnn.conv, "fp32_precision", "ieee", "tf32", "none"),
    *set_flag(torch.backends.cudnn.rnn, "fp32_precision", "ieee", "tf32"),
    *set_flag(torch.backends.cuda.matmul, "fp32_precision", "ieee", "tf32", "none"),
    *set_flag(torch.backends.mkldnn, "fp32_precision", "ieee", "tf32", "bf16", "none"),
    *set_flag(torch.backends.mkldnn.conv, "fp32_precision", "ieee", "tf32", "bf16", "none"),
    *set_flag(torch.backends.mkldnn.matmul, "fp32_precision", "ieee", "tf32", "bf16", "none"),
    *set_flag(torch.backends.cudnn, "allow_tf32", True, False),
    *set_flag(torch.backends.cuda.matmul, "allow_tf32", True, False),
    *(functools.partial(torch.set_float32_matmul_precision, how) for how in ("highest", "high", "medium")),
]


@pytest.fixture
def precisions():
    """Settings as torch has them when it starts, before and after."""

    def reset():
        for place in PLACES:
            torch._C._set_fp32_precision_setter(*place, "none")
        for kind in ("conv", "rnn"):
            torch._C._set_fp32_precision_setter("cuda", kind, "tf32")

    reset()
    yield
    reset()


def error(result, truth):
    return float((result.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("seed", range(6))
def test_float32_is_multiplied_as_torch_is_told_in_whatever_order(seed, precisions):
    """Settings change before and between calls: never an error, never fewer digits than torch's."""
    draw = random.Random(seed)
    x, weights = torch.randn(2, 32, 9, 9), [torch.randn(32, 32, k, k) for k in (1, 3)]
    truths = [F.conv2d(x.double(), w.double()) for w in weights]
    forget_choices()
    machine.loop_adds_carefully.cache_clear()
    for _ in range(12):
        draw.choice(SETTINGS)()
        errors = [error(F.conv2d(x, w), truth) for w, truth in zip(weights, truths, strict=True)]
        if get_precision("mkldnn", "conv") not in ("none", "ieee"):
            errors = [max(errors)] * 2  # torch 2.11 does not use what it is allowed where the kernel is 1 x 1
        for w, truth, of_torch in zip(weights, truths, errors, strict=True):
            message = turnout.explain("conv2d", x, w)
            there = turnout.explain("conv2d", x.to("meta"), w.to("meta"), device="h200")
            for backend, verdict in (("mkldnn", message), ("cuda", there)):
                output = [get_precision(backend, kind).replace("none", "ieee") for kind in ("conv", "matmul")]
                assert list(verdict.problem.float32) == output
            for name in (None, "reference", *(r for r in message.microseconds if r not in message.refused)):
                with turnout.pin(conv2d=name) if name else contextlib.nullcontext():
                    assert error(turnout.conv2d(x, w), truth) <= max(2 * of_torch, 1e-6), (name, message)


@pytest.mark.parametrize("name", MAKERS)
def test_no_call_raises_whatever_the_settings(name, precisions):
    draw = random.Random(name)
    for call in CALLS:
        if call.name == name:
            for _ in range(4):
                draw.choice(SETTINGS)()
                run(call, call.make())
                turnout.explain(call.function, **call.make())
                turnout.tune(call.function, **call.make(), budget=0.01, save=False, progress=False)
                if not call.written():
                    backward(call, call.make())


def test_matrix_products_that_are_less_exact_are_not_taken_for_convolutions(precisions):
    x, w = torch.randn(2, 64, 16, 16), torch.randn(64, 64, 1, 1)
    assert "pointwise" not in turnout.explain("conv2d", x, w).refused
    turnout.conv2d(x, w)
    for conv, matmul, refuses in (
        ("ieee", "bf16", True),
        ("ieee", "tf32", True),
        ("tf32", "bf16", True),
        ("bf16", "bf16", False),
        ("bf16", "ieee", False),
    ):
        torch.backends.mkldnn.conv.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision = conv, matmul
        reasons = turnout.explain("conv2d", x, w).refused.get("pointwise", ())
        assert any("matrix products" in reason for reason in reasons) == refuses, (conv, matmul, reasons)


def test_strict_float32_leaves_the_settings_as_they_were(precisions):
    for change in SETTINGS:
        change()
        before = all_precisions()
        with strict_float32(("cuda", "conv"), ("mkldnn", "matmul")):
            assert get_precision("cuda", "conv") == get_precision("mkldnn", "matmul") == "ieee"
        assert all_precisions() == before


def test_a_test_that_leaves_another_setting_behind_fails(precisions):
    before = all_precisions()
    with pytest.raises(AssertionError, match=r"\('cuda', 'conv'\): 'ieee'"), left_as_it_was():
        torch.backends.cudnn.conv.fp32_precision = "ieee"
    assert all_precisions() == before
    with left_as_it_was(), strict_float32(("cuda", "conv"), ("mkldnn", "matmul")):
        assert all_precisions() != before


FIRST = """
import torch, turnout
{setting}
torch.manual_seed(0)
x, w = torch.randn(1, 8, 9, 9), torch.randn(8, 8, 3, 3)
truth = torch.conv2d(x.double(), w.double())
assert (turnout.conv2d(x, w) - truth).norm() < 2e-2 * truth.norm()
assert (turnout.matmul(x[0, 0, :1], x[0, 0, :1].T) - (x[0, 0, 0] ** 2).sum()).abs() < 1
turnout.attention(x, x, x), turnout.explain("conv2d", x, w)
"""


def test_settings_before_the_first_call_of_a_process():
    settings = [
        "torch.backends.fp32_precision = 'tf32'",
        "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'; torch.set_float32_matmul_precision('medium')",
    ]
    settings = settings if EVERY_CALL else settings[:1]
    programs = [[sys.executable, "-c", FIRST.format(setting=setting)] for setting in settings]
    running = [subprocess.Popen(program, stderr=subprocess.PIPE, text=True) for program in programs]
    for process, setting in zip(running, settings, strict=True):
        assert process.communicate(timeout=120) == (None, ""), setting
        assert process.returncode == 0


# Autocast, device contexts, deterministic algorithms


AUTOCASTS = [
    ("cpu", torch.bfloat16),
    ("cpu", torch.float16),
    ("cuda", torch.float16),
    ("cuda", torch.bfloat16),
]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


@contextlib.contextmanager
def autocast(kind, dtype):
    """Also for a GPU that is not here, where `torch.autocast` turns itself off."""
    before = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    torch.set_autocast_enabled(kind, True)
    torch.set_autocast_dtype(kind, dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled(kind, before[0])
        torch.set_autocast_dtype(kind, before[1])
        torch.clear_autocast_cache()


def close(ours, theirs, dtype):
    tolerance = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype]
    for x, y in zip(ours, theirs, strict=True):
        assert x.dtype == y.dtype
        largest = max(1.0, float(y.double().abs().max()))
        torch.testing.assert_close(x.double(), y.double(), rtol=tolerance, atol=tolerance * largest)


@pytest.mark.parametrize(("kind", "to"), AUTOCASTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_autocast(dtype, kind, to):
    """Ops that torch casts are cast as it would; others do not notice, whatever torch does to their parts."""
    for call in CALLS:
        op, _ = call.lowered()
        kwargs = call.make(dtype)
        cast, becomes = kwargs, dtype
        if op.autocast == "cast" and kind == "cpu" and dtype is not torch.float64:
            cast, becomes = changed(kwargs, lambda t: t.to(to) if t.is_floating_point() else t), to
        if op.autocast == "reference":
            args = call.lowered(**kwargs).args
            with autocast(kind, to):
                expected = flat(op.reference(*args))[:1]
                actual = run(call, kwargs)[:1]
        else:
            expected = run(call, cast)
            with autocast(kind, to):
                actual = run(call, kwargs)
        if call.name == "causal_conv3d":  # the cache is of the input as it was given
            actual, expected = actual[:1], expected[:1]
        close(actual, expected, becomes)
        for name in routes_for(call, becomes)[1:] if op.autocast != "reference" else ():
            with turnout.pin(**{call.name: name}), autocast(kind, to):
                close(run(call, kwargs)[: len(expected)], expected, becomes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_autocast_in_a_compiled_program(dtype):
    x, w = torch.randn(1, 16, 8, 8).to(dtype), torch.randn(16, 16, 3, 3).to(dtype)

    def convolve(x):
        return turnout.conv2d(x, w, padding=1)

    for name in ("reference", "channels-last", "winograd"):
        torch._dynamo.reset()
        with turnout.pin(conv2d=name), torch.autocast("cpu", torch.bfloat16):
            actual = torch.compile(convolve, backend="aot_eager", fullgraph=True)(x)
            expected = convolve(x)
        assert actual.dtype is expected.dtype is torch.bfloat16
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("device", ["meta", "cuda"])
def test_a_device_context_changes_nothing(device):
    """No factory of a route or a reference takes the default device; that of a GPU raises here."""
    for dtype in (torch.float32, torch.bfloat16):
        for call, name in pinned_routes(dtype):
            kwargs = call.make(dtype)
            with turnout.pin(**{call.name: name}):
                expected = run(call, kwargs)
                forget_choices()
                with torch.device(device):
                    actual = run(call, kwargs)
                    turnout.explain(call.function, **kwargs)
                    if not call.written():
                        backward(call, kwargs)
            assert all(map(torch.equal, actual, expected)), (call, name)


def test_modules_are_made_and_accelerated_under_a_device_context():
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU())
        turnout.accelerate(model)
        assert model(torch.ones(1, 3, 8, 8)).device.type == "meta"
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(1, 3, 8, 8)
    with torch.no_grad():
        actual = model(x)
        with torch.device("meta"):
            assert torch.equal(model(x), actual)
        turnout.restore(model)
        torch.testing.assert_close(model(x), actual, rtol=1e-4, atol=1e-5)


def test_deterministic_algorithms(poison):
    for call, name in pinned_routes():
        kwargs = call.make()
        with turnout.pin(**{call.name: name}):
            first, second = run(call, kwargs), run(call, kwargs)
            assert all(map(torch.equal, first, second))
            assert all(x.isfinite().all() for x in first)
            if not call.written():
                backward(call, kwargs)


# vmap


def places(kwargs):
    """Where the tensors of a call are: an argument, or one of a sequence."""
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor):
            yield name, None
        else:
            yield from ((name, i) for i in range(len(tensors_in(value))))


def tensor_at(kwargs, place):
    name, i = place
    return kwargs[name] if i is None else kwargs[name][i]


def with_tensors(kwargs, chosen, tensors):
    kwargs = {n: list(x) if isinstance(x, (tuple, list)) else x for n, x in kwargs.items()}
    for (name, i), x in zip(chosen, tensors, strict=True):
        if i is None:
            kwargs[name] = x
        else:
            kwargs[name][i] = x
    return kwargs


@pytest.mark.parametrize("name", MAKERS)
def test_vmap_of_each_argument_alone_and_in_pairs(name):
    """Along any dimension, each against a loop. What a call writes into needs the batch, as in torch."""
    dtypes = (torch.float64, torch.float32) if EVERY_CALL else (torch.float64,)
    for call, dtype in itertools.product((c for c in CALLS if c.name == name), dtypes):
        samples = [call.make(dtype, seed) for seed in range(3)]
        there = list(places(samples[0]))
        written = [place for place in there if place[0] in call.written()]
        for chosen in [(place,) for place in there] + list(itertools.combinations(there, 2)):
            dim = random.Random(f"{call}{chosen}").choice((0, 1, -1))
            stacks = [
                torch.stack([tensor_at(k, place) for k in samples], dim) for place in (*chosen, *written)
            ]

            def batched(*tensors, call=call, samples=samples, chosen=chosen, written=written):
                return tuple(flat(call.function(**with_tensors(samples[0], (*chosen, *written), tensors))))

            if not written:
                actual = torch.vmap(batched, in_dims=dim)(*stacks)
                each = [batched(*(tensor_at(k, place) for place in chosen)) for k in samples]
                expected = [torch.stack(outputs) for outputs in zip(*each, strict=True)]
                close(actual, expected, dtype)
                continue
            if not set(chosen) & set(written):
                refuses_to_write_without_a_batch(call, dtype, chosen, written, dim, stacks[: len(chosen)])
            fresh_samples = [call.make(dtype, seed) for seed in range(3)]
            # These write into the tensors of `again`.
            each = [batched(*(tensor_at(k, place) for place in (*chosen, *written))) for k in fresh_samples]
            actual = torch.vmap(batched, in_dims=dim)(*stacks)
            close(actual, [torch.stack(outputs) for outputs in zip(*each, strict=True)], dtype)
            for place, stack in zip(written, stacks[len(chosen) :], strict=True):
                close([stack], [torch.stack([tensor_at(k, place) for k in fresh_samples], dim)], dtype)


def refuses_to_write_without_a_batch(call, dtype, chosen, written, dim, stacks):
    """A batch cannot be written into one tensor. What does not depend on it is written."""
    kwargs, alone = call.make(dtype), call.make(dtype)
    call.function(**alone)
    refused = None
    try:
        torch.vmap(lambda *x: flat(call.function(**with_tensors(kwargs, chosen, x))), in_dims=dim)(*stacks)
    except RuntimeError as failure:
        refused = str(failure)
    if refused is not None:
        assert "vmap: in" in refused
    else:
        close(
            [tensor_at(kwargs, place) for place in written],
            [tensor_at(alone, place) for place in written],
            dtype,
        )


def test_vmap_of_masks_and_lengths_in_and_out_of_each_other():
    q, k = torch.randn(3, 2, 2, 5, 8), torch.randn(3, 2, 2, 20, 8)
    masks, lengths = torch.rand(4, 2, 1, 1, 20) < 0.6, torch.tensor([[7, 20], [1, 0], [20, 20], [3, 9]])
    for name, many in (("mask", masks), ("kv_lengths", lengths)):
        nested = torch.vmap(
            torch.vmap(lambda q, k, m, name=name: turnout.attention(q, k, k, **{name: m}), (None, None, 0)),
            (0, 0, None),
        )
        pairs = zip(q, k, strict=True)
        rows = [torch.stack([turnout.attention(a, b, b, **{name: m}) for m in many]) for a, b in pairs]
        close([nested(q, k, many)], [torch.stack(rows)], torch.float32)


# Traces


OTHER_VALUES = {
    "kv_lengths": torch.tensor([2, 5]),
    "cu_seqlens": torch.tensor([0, 7, 9]),
    "seq_idx": torch.tensor([[0, 1, 1, 1, 2, 2], [0, 0, 0, 3, -1, -1]]),
    "mask": (torch.arange(20) < 5).expand(2, 1, 1, 20),
    "cache_seqlens": torch.tensor([3, 1]),
    "conv_state_indices": torch.tensor([1, 4]),
}


def other_values(call):
    """The call with other values in all tensors, those that say lengths included."""
    kwargs = call.make(seed=1)
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor) and not value.is_floating_point():
            kwargs[name] = OTHER_VALUES[name].to(value.dtype)
    return kwargs


def of_tensors(call):
    """The call as a function of its tensors alone, and where they are."""
    kwargs = call.make()
    there = list(places(kwargs))
    return lambda *tensors: tuple(run(call, with_tensors(kwargs, there, tensors))), there


def with_lengths(call):
    """Whether some tensor of a call says lengths, marks or places."""
    kwargs = call.make()
    return not all(tensor_at(kwargs, place).is_floating_point() for place in places(kwargs))


TRACED = [
    (call, mode)
    for call, mode in itertools.product(CALLS, ("real", "fake", "symbolic"))
    if mode == "real" or EVERY_CALL or with_lengths(call)
]


@pytest.mark.parametrize(("call", "mode"), TRACED, ids=lambda arguments: str(arguments))
def test_make_fx_keeps_no_values(call, mode):
    function, there = of_tensors(call)
    graph = make_fx(function, tracing_mode=mode)(*(tensor_at(call.make(), place) for place in there))
    for kwargs in (call.make(), other_values(call)):
        close(graph(*(tensor_at(kwargs, place) for place in there)), run(call, kwargs), torch.float32)


@pytest.mark.filterwarnings("ignore")
@calls
def test_jit_trace_keeps_no_values(call):
    for name in (None, *(routes_for(call) if EVERY_CALL else routes_for(call)[-1:])):
        function, there = of_tensors(call)
        with turnout.pin(**{call.name: name}) if name else contextlib.nullcontext():
            run(call, call.make())  # remembered
            example = tuple(tensor_at(call.make(), place) for place in there)
            traced = torch.jit.trace(function, example, check_trace=False)
        for kwargs in (call.make(), other_values(call)):
            close(traced(*(tensor_at(kwargs, place) for place in there)), run(call, kwargs), torch.float32)


@pytest.mark.filterwarnings("ignore")
def test_jit_trace_of_an_accelerated_model():
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1),
        torch.nn.GroupNorm(2, 8),
        torch.nn.SiLU(),
        torch.nn.Conv2d(8, 3, 1),
    ).eval()
    turnout.accelerate(model)
    x, y = torch.randn(2, 1, 3, 16, 16)
    with torch.no_grad():
        traced = torch.jit.trace(model, x)
        close([traced(x), traced(y)], [model(x), model(y)], torch.float32)
    graph = make_fx(model)(x)
    close([graph(y)], [model(y)], torch.float32)


# Values that are remembered


class OnGpu(torch.Tensor):
    """Values on a CPU that say they are on a GPU."""

    @property
    def device(self):
        return SimpleNamespace(type="cuda")

    @property
    def is_cuda(self):
        return True


@pytest.fixture
def readable(monkeypatch):
    """Tensors that say they are on a GPU can be read, and no graph is captured."""
    for module in (padding, checks):
        monkeypatch.setattr(module, "can_read_values", lambda tensor: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


@pytest.mark.parametrize("inference", [False, True])
def test_a_mask_that_changes_in_place_is_read_again(readable, inference):
    with torch.inference_mode(inference):
        mask = (torch.arange(8) < 3).expand(1, 1, 1, 8).clone().as_subclass(OnGpu)
        assert mask.is_inference() == inference
        reads = []

        def read(arguments):
            reads.append(arguments)
            return int(arguments.as_subclass(torch.Tensor).sum())

        assert [padding._values(mask, read) for _ in range(2)] == [3, 3]
        assert len(reads) == (2 if inference else 1)
        for keys in (5, 2):
            mask[..., :keys] = True
            mask[..., keys:] = False
            assert padding._values(mask, read) == keys


@pytest.mark.parametrize("inference", [False, True])
def test_ends_that_change_in_place_are_checked_again(readable, inference):
    with torch.inference_mode(inference):
        ends, x = torch.tensor([0, 4, 9]).as_subclass(OnGpu), torch.randn(1, 2, 9)
        checks.check_ends(ends, x)
        checks.check_ends(ends, x)
        ends[1] = 12
        for _ in range(2):
            with pytest.raises(ValueError, match="it needs to rise from 0"):
                checks.check_ends(ends, x)


def test_masks_of_inference_mode_change_in_place():
    with torch.inference_mode():
        q, k = torch.randn(2, 2, 5, 8), torch.randn(2, 2, 20, 8)
        mask, lengths = torch.ones(2, 1, 1, 20, dtype=torch.bool), torch.tensor([20, 20])
        for keys in (20, 3, 11):
            mask[:] = torch.arange(20) < keys
            lengths[:] = keys
            expected = turnout.attention(q, k[:, :, :keys], k[:, :, :keys])
            close(
                [turnout.attention(q, k, k, mask=mask), turnout.attention(q, k, k, kv_lengths=lengths)],
                [expected] * 2,
                torch.float32,
            )

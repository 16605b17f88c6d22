"""scaled_dot_product_attention inside a model: torch's own, whatever it is given, and routed where a route is
chosen."""

import contextlib
import functools
import itertools
import re
import threading
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

import turnout
from tests.models.test_models import close, counted_calls
from turnout.models import patch, rebinding, routed, sdpa
from turnout.models.sdpa import scaled_dot_product_attention

pytestmark = pytest.mark.filterwarnings("ignore")

STOCK = sdpa.STOCK
HALF = {"dtype": torch.bfloat16}


def random(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def outcome(call):
    try:
        return call()
    except Exception as failure:
        return type(failure), str(failure)


def agree(*args, **kwargs):
    """The same result, bit for bit, or the same error."""
    expected, actual = (
        outcome(lambda f=f: f(*args, **kwargs)) for f in (STOCK, scaled_dot_product_attention)
    )
    if not isinstance(expected, torch.Tensor):
        assert actual == expected
        return
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    if not actual.is_nested and not actual.is_meta:
        assert torch.equal(actual.nan_to_num(7.0), expected.nan_to_num(7.0))


SHAPES = {
    "square": ((2, 4, 17, 8),) * 3,
    "cross": ((2, 4, 5, 8), (2, 4, 19, 8), (2, 4, 19, 8)),
    "few keys": ((2, 4, 17, 8), (2, 4, 3, 8), (2, 4, 3, 8)),
    "k and v for every batch element": ((2, 4, 17, 8), (1, 4, 17, 8), (1, 4, 17, 8)),
    "grouped": ((2, 4, 17, 8), (2, 2, 17, 8), (2, 2, 17, 8)),
    "one head of k and v": ((2, 4, 17, 8), (2, 1, 17, 8), (2, 1, 17, 8)),
    "grouped unevenly": ((2, 4, 17, 8), (2, 3, 17, 8), (2, 3, 17, 8)),
    "wider v": ((2, 4, 17, 8), (2, 4, 17, 8), (2, 4, 17, 12)),
    "other head dim": ((2, 4, 17, 8), (2, 4, 17, 6), (2, 4, 17, 8)),
    "other number of keys": ((2, 4, 17, 8), (2, 4, 17, 8), (2, 4, 16, 8)),
    "2-D": ((17, 8),) * 3,
    "3-D": ((4, 17, 8),) * 3,
    "5-D": ((2, 3, 4, 17, 8),) * 3,
    "4-D and 3-D": ((2, 4, 17, 8), (4, 17, 8), (4, 17, 8)),
    "no queries": ((2, 4, 0, 8), (2, 4, 17, 8), (2, 4, 17, 8)),
    "no keys": ((2, 4, 17, 8), (2, 4, 0, 8), (2, 4, 0, 8)),
    "no batch": ((0, 4, 17, 8),) * 3,
    "no head dim": ((2, 4, 17, 0),) * 3,
}
MASKS = {
    "none": lambda q, k: None,
    "bool": lambda q, k: random(q, k) > -1,
    "bool over keys": lambda q, k: (torch.arange(k) < torch.tensor([[k], [k // 2]]))[:, None, None],
    "bool, nothing seen": lambda q, k: torch.zeros(q, k, dtype=torch.bool),
    "float32": lambda q, k: random(q, k),
    "bfloat16": lambda q, k: random(q, k, dtype=torch.bfloat16),
    "float64": lambda q, k: random(q, k, dtype=torch.float64),
    "int": lambda q, k: torch.ones(q, k, dtype=torch.int64),
    "one row": lambda q, k: random(k),
    "a number": lambda q, k: torch.tensor(0.5),
    "for all heads": lambda q, k: random(2, 4, q, k),
    "5-D": lambda q, k: random(1, 2, 4, q, k),
    "does not fit": lambda q, k: random(q + 1, k + 1),
}
OPTIONS = [
    {}, {"is_causal": True}, {"scale": 0.0}, {"scale": -1.0}, {"scale": 2}, {"enable_gqa": True},
    {"dropout_p": 1.0},
    {"is_causal": 1}, {"scale": "1"}, {"dropout_p": -0.5}, {"enable_gqa": True, "is_causal": True},
    {"dropout_p": 0},
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_says_what_torch_says(shape, dtype):
    q, k, v = (random(*size, dtype=dtype) for size in SHAPES[shape])
    for mask, options in itertools.product(MASKS, OPTIONS):
        agree(q, k, v, attn_mask=MASKS[mask](q.shape[-2], k.shape[-2]), **options)


@torch.no_grad()
def test_says_what_torch_says_of_other_arguments():
    q = random(2, 4, 17, 8)
    rows = [random(3, 4, 8), random(5, 4, 8)]
    nested = torch.nested.nested_tensor(rows).transpose(1, 2)
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)
    for one in (
        nested, jagged, q.to_sparse(), q.int(), q.bool(), q.to("meta"), q.half(), q.double(),
        q.to(torch.complex64), None, 3,
        q.transpose(1, 2), q[..., ::2], q.expand(2, 4, 17, 8), nn.Parameter(q),
    ):  # fmt: skip
        for args in ((one, one, one), (q, one, one), (one, q, q), (q, q, one)):
            agree(*args)
            agree(**dict(zip(("query", "key", "value"), args, strict=True)))
        agree(q, q, q, one)
    for args, kwargs in (
        ((), {}), ((q,), {}), ((q, q), {}), ((q,), {"value": q}), ((q, q, q), {"query": q}),
        ((q, q, q), {"mask": None}),
        ((q, q, q, None, 0.0, False, 1.0), {}), ((q, q, q, None, 0.0, True), {}), ((q, q, q, None, None), {}),
        ((q, q, q), {"scale": torch.tensor(0.5)}), ((q, q, q), {"enable_gqa": None}),
        ((q, q, q), {"is_causal": None}),
        (([1.0], q, q), {}), ((q, q, q), {"scale": [1.0]}),
    ):  # fmt: skip
        agree(*args, **kwargs)


def test_gradients_and_transforms_are_torchs():
    q = random(2, 4, 17, 8).requires_grad_()
    expected = torch.autograd.grad(STOCK(q, q, q).square().sum(), q)[0]
    actual = torch.autograd.grad(scaled_dot_product_attention(q, q, q).square().sum(), q)[0]
    assert torch.equal(actual, expected)
    many = random(3, 2, 4, 17, 8)
    vmapped = (torch.func.vmap(f)(many, many, many) for f in (STOCK, scaled_dot_product_attention))
    assert torch.equal(*vmapped)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        agree(q, q, q)
        agree(q, q, q, attn_mask=random(17, 17, dtype=torch.float64))
        agree(q, q, q.bfloat16(), attn_mask=random(17, 17))
    agree(q, q, q)


def test_a_mask_that_is_trained_gets_gradients():
    """Also after the same call without gradients."""
    q, mask = random(2, 4, 17, 8, **HALF), random(17, 17, **HALF).requires_grad_()
    with torch.no_grad():
        assert not scaled_dot_product_attention(q, q, q, mask).requires_grad
    (actual,) = torch.autograd.grad(scaled_dot_product_attention(q, q, q, mask).sum(), mask)
    (expected,) = torch.autograd.grad(STOCK(q, q, q, mask).sum(), mask)
    assert torch.equal(actual, expected)


@pytest.fixture
def math():
    """The op's route "math" is taken, as another one would be on a GPU."""
    with turnout.pin(attention="math"), torch.no_grad():
        yield


def takes_a_route(*args, **kwargs):
    with counted_calls() as count:
        scaled_dot_product_attention(*args, **kwargs)
    return bool(count["attention"])


@pytest.mark.usefixtures("math")
def test_takes_a_route_where_one_is_chosen():
    q = random(2, 4, 17, 8, **HALF)
    for _ in range(2):
        assert takes_a_route(q, q, q)
        assert takes_a_route(q, q[:, ::2], q[:, ::2], enable_gqa=True)
        assert takes_a_route(q, q, q, is_causal=True)
        assert takes_a_route(q, q, q, random(17, 17, **HALF) > -1)
        close(scaled_dot_product_attention(q, q, q, scale=0.3), STOCK(q, q, q, scale=0.3), 2e-2)
        with torch.autocast("cpu", torch.bfloat16):
            assert takes_a_route(q.float(), q.float(), q)
            assert scaled_dot_product_attention(q.float(), q.float(), q).dtype is torch.bfloat16


@pytest.mark.usefixtures("math")
@pytest.mark.parametrize("of_a_route", [False, True])
def test_what_the_op_cannot_take_is_torchs_also_after_calls_that_it_can(of_a_route):
    q, k = random(2, 4, 17, 8, **HALF), random(1, 4, 17, 8, **HALF)
    if of_a_route:
        assert takes_a_route(q, q, q)
        assert takes_a_route(q, q, q, is_causal=True)
    for args, kwargs in (
        ((q, k, k), {}), ((q, q, q, random(17, 17)), {}), ((q, q[:, ::2], q[:, ::2]), {}),
        ((q, q.float(), q), {}),
        ((q, q, q.float()), {}), ((q, q, q), {"is_causal": 1}), ((q, q, q), {"dropout_p": 1.0}),
        ((q, q, q), {"scale": 0.0}),
        ((q, q, q, random(17, 17, **HALF)), {"is_causal": True}), ((q[0], q[0], q[0]), {}),
        ((q, q, q), {"enable_gqa": 0}),
    ):  # fmt: skip
        with counted_calls() as count:
            agree(*args, **kwargs)
        assert count["attention"] == 0


@pytest.mark.usefixtures("math")
def test_what_the_user_decided_holds():
    q = random(2, 4, 17, 8, **HALF)
    assert takes_a_route(q, q, q)
    for backends in (
        SDPBackend.MATH,
        [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH],
        [SDPBackend.FLASH_ATTENTION],
    ):
        with sdpa_kernel(backends):
            assert not takes_a_route(q, q, q)
            agree(q, q, q)
    everything = [
        SDPBackend.MATH,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
    ]
    with sdpa_kernel(everything, set_priority=True):
        assert not takes_a_route(q, q, q)
    torch._C._set_sdp_priority_order(sdpa._ORDERS[0])
    torch._C._set_sdp_use_overrideable(True)
    assert takes_a_route(q, q, q)
    replacements = [name for name in dir(torch._C) if re.fullmatch(r"_set_sdp_use_fa\d+", name)]
    assert "_set_sdp_use_fa3" in replacements
    for name in replacements:
        getattr(torch._C, name)(True)
        try:
            assert not takes_a_route(q, q, q)
        finally:
            getattr(torch._C, name)(False)
    for enable in (torch.backends.cuda.enable_flash_sdp, torch.backends.cuda.enable_cudnn_sdp):
        enable(False)
        try:
            assert not takes_a_route(q, q, q)
        finally:
            enable(True)
    assert takes_a_route(q, q, q)


@pytest.mark.usefixtures("math")
def test_modes_and_replaced_functions_see_the_call(monkeypatch):
    q, seen = random(2, 4, 17, 8, **HALF), []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        assert not takes_a_route(q, q, q)
    assert seen.count(STOCK) == 1
    with torch.device("cpu"):
        assert takes_a_route(q, q, q)
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args, **kwargs: "theirs")
    assert scaled_dot_product_attention(q, q, q) == "theirs"


def test_masks_are_read_where_that_can_pay(monkeypatch):
    """A boolean mask over keys says how many keys count: a long call is shortened by that, a short one is
    torch's."""
    read, arguments = [], sdpa.arguments
    monkeypatch.setattr(sdpa, "arguments", lambda *args: (read.append(args), arguments(*args))[1])
    with torch.no_grad():
        for length, times in ((64, 0), (2048, 1)):
            q, mask = (
                random(2, 4, length, 64),
                (torch.arange(length) < torch.tensor([[length], [length // 4]]))[:, None, None],
            )
            actual = scaled_dot_product_attention(q, q, q, attn_mask=mask)
            close(actual, STOCK(q, q, q, attn_mask=mask), 1e-5)
            assert len(read) == times
        assert takes_a_route(q, q, q, attn_mask=mask)
        holes = mask & (torch.arange(length) % 2 == 0)
        agree(q, q, q, attn_mask=holes)


def test_choices_are_forgotten_with_those_of_the_op():
    from turnout.routing.op import forget_choices, watched

    q, calls = random(2, 4, 18, 8), []
    with torch.no_grad():
        scaled_dot_product_attention(q, q, q)
        with watched(lambda op, args: calls.append(op.name)):
            scaled_dot_product_attention(q, q, q)
            scaled_dot_product_attention(q, q, q)
        assert calls == ["attention"]
        for length in range(sdpa._MOST_REMEMBERED + 50):
            x = torch.empty(1, 1, 1 + length, 1)
            scaled_dot_product_attention(x[:, :, :1], x, x)
        assert len(sdpa._keys) <= sdpa._MOST_REMEMBERED
        forget_choices()


# Stock code with other globals


def helper(q, scale=None):
    return torch.nn.functional.scaled_dot_product_attention(q, q, q, scale=scale)


def in_two_steps(q):
    return helper(q)


def decorated(function):
    @functools.wraps(function)
    def run(self, *args, **kwargs):
        self.seen = getattr(self, "seen", 0) + 1
        return function(self, *args, **kwargs)

    return run


BACKENDS = {"ours": helper, "theirs": lambda q: q}


class Registry:
    backends: ClassVar = {"ours": helper}
    active = "ours"

    @classmethod
    def get(cls):
        return cls.active, cls.backends[cls.active]


class DirectAttention(nn.Module):
    def forward(self, x, *, scale: float | None = 0.5):
        return F.scaled_dot_product_attention(x, x, x, scale=scale)


class InheritedAttention(DirectAttention):
    pass


class LongNameAttention(nn.Module):
    def forward(self, x):
        return torch.nn.functional.scaled_dot_product_attention(query=x, key=x, value=x)


class HelpedAttention(nn.Module):
    def forward(self, x):
        return in_two_steps(x)


class DecoratedAttention(nn.Module):
    @torch.no_grad()
    @decorated
    def forward(self, x):
        return helper(x)


class MethodAttention(nn.Module):
    def forward(self, x):
        return self.attend(self.same(x))

    def attend(self, x):
        (actual,) = [F.scaled_dot_product_attention(y, y, y) for y in x[None]]
        return actual

    @staticmethod
    def same(x):
        return x


class SuperAttention(MethodAttention):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x) + super().forward(x)

    def extra_repr(self):
        return super().extra_repr() + "super"


class TableAttention(nn.Module):
    def forward(self, x):
        name, function = Registry.get()
        ours = BACKENDS["ours"](x) + BACKENDS.get("ours")(x) + Registry.backends.get(name)(x) + function(x)
        return ours + BACKENDS["theirs"](x)


class OwnTableAttention(nn.Module):
    backends: ClassVar = {"ours": helper}

    def forward(self, x):
        assert isinstance(self, OwnTableAttention)
        assert issubclass(type(self), OwnTableAttention)
        return OwnTableAttention.backends["ours"](x)


class ImportedAttention(nn.Module):
    def forward(self, x):
        inner = sdpa_of_torch

        def attend():
            return inner(x, x, x)

        return attend()


from torch.nn.functional import scaled_dot_product_attention as sdpa_of_torch  # noqa: E402

# How many calls reach the op.
REACHED = {
    DirectAttention: 1, InheritedAttention: 1, LongNameAttention: 1, HelpedAttention: 1,
    DecoratedAttention: 1,
    MethodAttention: 1, SuperAttention: 2, TableAttention: 4, OwnTableAttention: 1, ImportedAttention: 1,
}  # fmt: skip


@pytest.mark.parametrize("cls", REACHED)
@torch.no_grad()
def test_stock_code_reaches_ours_by_its_names(cls):
    layer, x = cls(), random(1, 2, 17, 8)
    expected, code = layer(x), cls.forward
    report = turnout.accelerate(layer)
    assert len(report.patched) == 1
    for _ in range(2):
        with counted_calls() as count:
            close(layer(x), expected)
        assert count["attention"] == REACHED[cls]
    with counted_calls() as count:
        close(cls()(x), expected)
    assert count["attention"] == 0  # other instances do not notice
    turnout.restore(layer)
    assert torch.equal(layer(x), expected)
    assert cls.forward is code


@pytest.mark.parametrize("cls", REACHED)
@torch.no_grad()
def test_compiled_and_traced_it_is_the_stock_code(cls):
    layer, x = cls(), random(1, 2, 17, 8)
    expected = layer(x)
    with turnout.accelerated(layer):
        if cls is not TableAttention:  # which torch.compile does not take from stock either, as one graph
            torch.compiler.reset()
            close(torch.compile(layer, fullgraph=True, backend="eager")(x), expected)
        traced = torch.jit.trace(layer, (x,))
        close(traced(x), expected)
        assert "scaled_dot_product_attention" in str(traced.inlined_graph)


@torch.no_grad()
def test_signature_defaults_and_decorators_are_the_stock_ones():
    x, layer, decorated = random(1, 2, 17, 8), DirectAttention(), DecoratedAttention()
    turnout.accelerate(layer)
    turnout.accelerate(decorated)
    close(layer(x), STOCK(x, x, x, scale=0.5))
    close(layer(x, scale=None), STOCK(x, x, x))
    with torch.enable_grad():
        assert not decorated(x.clone().requires_grad_()).requires_grad
    assert decorated.seen == 1


def test_code_that_cannot_be_followed_stays_stock():
    class HiddenAttention(nn.Module):
        def forward(self, x):
            return getattr(F, "scaled_dot_product_" + "attention")(x, x, x)

    class CountingAttention(nn.Module):
        def forward(self, x):
            global COUNT
            COUNT = 1
            return F.scaled_dot_product_attention(x, x, x)

    class ParentsAttention(DirectAttention):
        def forward(self, x):
            return super().forward(2 * x)

    for cls in (HiddenAttention, CountingAttention, ParentsAttention):
        layer, x = cls(), random(1, 2, 17, 8)
        model = nn.Sequential(layer, nn.Conv2d(2, 2, 1))
        report = turnout.accelerate(model)
        assert type(layer) is cls
        (entry,) = report.refused
        assert "reaches scaled_dot_product_attention under no name" in entry.reasons[0]
        layer(x)
    assert COUNT == 1


@torch.no_grad()
def test_what_is_assigned_later_is_heard(monkeypatch):
    layer, x = HelpedAttention(), random(1, 2, 17, 8)
    turnout.accelerate(layer)
    layer(x)
    monkeypatch.setitem(globals(), "helper", lambda q: "assigned")
    assert layer(x) == "assigned"
    monkeypatch.undo()
    close(layer(x), STOCK(x, x, x))
    with monkeypatch.context() as other:
        other.setattr(F, "scaled_dot_product_attention", lambda *args, **kwargs: "theirs")
        assert layer(x) == "theirs"
        assert DirectAttention()(x) == "theirs"
    with counted_calls() as count:
        layer(x)
    assert count["attention"] == 1
    with monkeypatch.context() as other:
        other.setattr(Registry, "backends", {"ours": lambda q: 2 * q})
        table = TableAttention()
        turnout.accelerate(table)
        close(table(x), 2 * STOCK(x, x, x) + 5 * x)


@torch.no_grad()
def test_names_that_were_not_replaced_are_looked_up_in_the_module(monkeypatch):
    rebound = rebinding.Rebinder(routed._instead).rebind(reads_a_name)
    assert rebound is not None
    x = random(1, 2, 17, 8)
    close(rebound.function(x), STOCK(x, x, x))
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    close(rebound.function(x), 3 * STOCK(x, x, x))
    monkeypatch.delitem(globals(), "FACTOR")
    with pytest.raises(NameError, match="FACTOR"):
        rebound.function(x)


def imports_its_neighbour(x):
    """As diffusers' processors do in their calls."""
    from .zoo import random as neighbour

    return neighbour(1) * F.scaled_dot_product_attention(x, x, x)


@torch.no_grad()
def test_relative_import_in_a_function_with_other_globals():
    rebound = rebinding.Rebinder(routed._instead).rebind(imports_its_neighbour)
    assert rebound is not None
    x = random(1, 2, 17, 8)
    close(rebound.function(x), imports_its_neighbour(x))


FACTOR = 1.0


def reads_a_name(x):
    return FACTOR * len([1]) * F.scaled_dot_product_attention(x, x, x)


@torch.no_grad()
def test_layers_in_several_threads():
    layer, x = TableAttention(), random(1, 2, 17, 8)
    expected, actual = layer(x), []
    turnout.accelerate(layer)
    threads = [threading.Thread(target=lambda: actual.extend(layer(x) for _ in range(20))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(actual) == 80
    for one in actual:
        close(one, expected)


# diffusers and transformers


def unet():
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(16, 32),
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 2), cross_attention_dim=16, attention_head_dim=(2, 4),
        use_linear_projection=True,
    ).eval()  # fmt: skip


@torch.no_grad()
def test_a_unet_runs_without_a_mode():
    pytest.importorskip("diffusers")
    model, x, text, calls = unet(), random(2, 4, 8, 8), random(2, 5, 16), []

    class Mode(TorchFunctionMode):
        """Counts modes that run inside this one: each of its calls passes through them."""

        def __torch_function__(self, func, types, args=(), kwargs=None):
            calls.append(torch._C._len_torch_function_stack())
            return func(*args, **(kwargs or {}))

    expected = model(x, 1, text).sample
    report = turnout.accelerate(model)
    attentions = sum("AttnProcessor2_0" in entry.name for entry in report.patched)
    assert attentions == len(model.attn_processors)
    with counted_calls() as count:
        close(model(x, 1, text).sample, expected)
    assert count["attention"] == attentions
    with Mode():
        close(model(x, 1, text).sample, expected)
    assert set(calls) == {0}
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    turnout.restore(model)
    expected = model(x, 1, text, encoder_attention_mask=mask).sample
    turnout.accelerate(model)
    close(model(x, 1, text, encoder_attention_mask=mask).sample, expected)


@torch.no_grad()
def test_a_float32_mask_with_half_queries():
    """As Allegro's transformer has it."""
    pytest.importorskip("diffusers")
    from diffusers.models.attention_processor import Attention, AttnProcessor2_0

    attention = Attention(query_dim=16, heads=2, dim_head=8, processor=AttnProcessor2_0()).bfloat16()
    x, mask = random(2, 17, 16, dtype=torch.bfloat16), random(2, 1, 17)
    expected = attention(x, attention_mask=mask)
    turnout.accelerate(attention)
    close(attention(x, attention_mask=mask), expected)


@torch.no_grad()
def test_a_trace_of_a_processor_takes_other_sizes():
    pytest.importorskip("diffusers")
    from diffusers.models.attention_processor import Attention, AttnProcessor2_0

    attention = Attention(query_dim=16, heads=2, dim_head=8, processor=AttnProcessor2_0()).eval()
    x, larger = random(2, 17, 16), random(3, 25, 16)
    expected = attention(larger)
    turnout.accelerate(attention)
    attention(x)
    traced = torch.jit.trace(attention, (x,))
    close(traced(larger), expected)


@pytest.mark.parametrize("inside", [contextlib.nullcontext, functools.partial(sdpa_kernel, SDPBackend.MATH)])
@torch.no_grad()
def test_attention_of_diffusers_and_transformers_is_found(inside):
    pytest.importorskip("diffusers")
    pytest.importorskip("transformers")
    from diffusers.models.attention_dispatch import attention_backend
    from diffusers.models.transformers.transformer_chroma import ChromaTransformer2DModel
    from transformers import LlamaConfig, LlamaModel

    llama = LlamaModel(
        LlamaConfig(
            num_hidden_layers=1,
            hidden_size=16,
            intermediate_size=16,
            vocab_size=32,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
    ).eval()
    chroma = ChromaTransformer2DModel(
        num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=8, in_channels=4,
        approximator_num_channels=8, approximator_hidden_dim=8, approximator_layers=1, axes_dims_rope=(4,
        6, 6),
    ).eval()  # fmt: skip
    places, tokens = torch.zeros(4, 3), torch.arange(6)[None]
    calls = {
        llama: lambda: llama(tokens).last_hidden_state,
        chroma: lambda: chroma(random(1, 4, 4), random(1, 3, 8), torch.ones(1), places, places[:3]).sample,
    }
    for model, call in calls.items():
        expected = call()
        # diffusers keeps the backend that another model was given last
        with turnout.accelerated(model), attention_backend("native"), inside(), counted_calls() as count:
            actual = call()
        close(actual, expected)
        assert (count["attention"] > 0) is (inside is contextlib.nullcontext)


def test_patched_classes_are_made_once():
    one, other = DirectAttention(), DirectAttention()
    turnout.accelerate(one)
    turnout.accelerate(other)
    assert type(one) is type(other)
    assert patch.patched(one).base is DirectAttention

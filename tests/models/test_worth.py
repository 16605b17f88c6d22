"""A layer that no route is worth for runs torch's own function, at next to no cost, and asks again when that
may have changed.
"""

import copy
import gc
import os
import statistics
import sys
import time
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import turnout
from tests.models.test_models import counted_calls
from turnout.models import worth
from turnout.routing.op import OPS, forget_choices

LAYERS = {
    "conv2d": (lambda: nn.Conv2d(4, 4, 1), (1, 4, 2, 2)),
    "conv3d": (lambda: nn.Conv3d(4, 4, 1), (1, 4, 2, 2, 2)),
    "group_norm_silu": (lambda: nn.GroupNorm(2, 4), (1, 4, 2, 2)),
}
every = pytest.mark.parametrize("op", LAYERS)


def made(op):
    layer = LAYERS[op][0]().eval()
    turnout.accelerate(layer)
    return layer, torch.randn(LAYERS[op][1])


@every
def test_layer_learns_that_its_call_is_torchs(op):
    layer, x = made(op)
    with torch.no_grad():
        assert not worth.is_torch(layer, OPS[op], x)
        first = layer(x)
        assert worth.is_torch(layer, OPS[op], x)
        assert torch.equal(layer(x), first)
        assert not worth.is_torch(layer, OPS[op], x[..., :1])
        assert not worth.is_torch(layer, OPS[op], x.double())
        assert not worth.is_torch(layer, OPS[op], x.transpose(-1, -2))
    assert not worth.is_torch(layer, OPS[op], x)  # gradients are wanted
    turnout.restore(layer)
    turnout.accelerate(layer)
    with torch.no_grad():
        assert not worth.is_torch(layer, OPS[op], x)


@every
@torch.no_grad()
def test_what_was_learned_is_forgotten_with_the_choices(op):
    layer, x = made(op)
    layer(x)
    forget_choices()
    assert not worth.is_torch(layer, OPS[op], x)
    layer(x)
    assert worth.is_torch(layer, OPS[op], x)


@every
@torch.no_grad()
def test_who_watches_sees_every_call(op):
    layer, x = made(op)
    layer(x)
    with counted_calls():
        assert not worth.is_torch(layer, OPS[op], x)


@every
@torch.no_grad()
def test_a_pin_is_heard(op):
    layer, x = made(op)
    layer(x)
    route = next(iter(OPS[op].routes))
    with turnout.pin(**{op: route}):
        verdict = {
            "conv2d": lambda: turnout.conv2d(x, layer.weight, layer.bias),
            "conv3d": lambda: turnout.conv3d(x, layer.weight, layer.bias),
            "group_norm_silu": lambda: turnout.group_norm_silu(
                x, 2, layer.weight, layer.bias, eps=layer.eps, silu=False
            ),
        }[op]
        try:
            expected = verdict()
        except ValueError as refused:
            with pytest.raises(type(refused)):
                layer(x)
        else:
            assert torch.equal(layer(x), expected)


@torch.no_grad()
def test_layer_that_gains_is_routed():
    layer = nn.Conv2d(64, 64, 3, padding=1).eval()
    turnout.accelerate(layer)
    x = torch.randn(1, 64, 128, 128)
    layer(x)
    gains = worth.gains(turnout.explain(turnout.conv2d, x, layer.weight, layer.bias, 1, 1))
    assert worth.is_torch(layer, OPS["conv2d"], x) is not gains
    assert worth.is_torch(layer, OPS["conv2d"], x[:, :, :1]) is None


@pytest.mark.parametrize(
    ("ours", "torchs", "pays"), [(10.0, 30.0, True), (10.0, 12.0, False), (None, 15.0, True)]
)
def test_gain_must_exceed_the_cost_of_asking(ours, torchs, pays):
    x, weight = torch.ones(1, 2, 4, 4), torch.ones(2, 2, 1, 1)
    verdict = turnout.explain(turnout.conv2d, x, weight)
    chosen = replace(
        verdict, chosen="a route", authority="model", microseconds={"a route": ours, "reference": torchs}
    )
    assert worth.gains(chosen) is pays
    assert worth.gains(replace(chosen, authority="pin"))


@torch.no_grad()
def test_layers_that_are_gone_are_forgotten():
    layer, x = made("conv2d")
    layer(x)
    key = id(layer)
    assert key in worth._learned
    del layer
    gc.collect()
    assert key not in worth._learned


@torch.no_grad()
def test_few_kinds_of_calls_are_remembered():
    layer, _ = made("conv2d")
    for size in range(1, 40):
        layer(torch.ones(1, 4, size, 2))
    assert len(worth._learned[id(layer)].torchs) == 16


@every
@torch.no_grad()
def test_knowing_takes_the_host_little(op):
    """Medians of nine runs of 2000 calls: a layer that has learned takes at most 3 us more than torch's."""
    stock, (layer, x) = LAYERS[op][0]().eval(), made(op)

    def us(run):
        times = []
        for _ in range(9):
            start = time.thread_time()
            for _ in range(2000):
                run(x)
            times.append((time.thread_time() - start) / 2000 * 1e6)
        return statistics.median(times)

    layer(x)
    assert us(layer) - us(stock) < 3


def python_calls(run, *args):
    """How many functions of Python a call enters, and how many of them are turnout's."""
    every, ours = 0, 0

    def count(frame, event, _):
        nonlocal every, ours
        if event == "call":
            every += 1
            ours += f"{os.sep}turnout{os.sep}" in frame.f_code.co_filename

    sys.setprofile(count)
    try:
        run(*args)
    finally:
        sys.setprofile(None)
    return every, ours


@every
@pytest.mark.parametrize("numerics", [None, "close"])
@torch.no_grad()
def test_model_of_small_layers_takes_no_more_steps_than_stock(op, numerics):
    """Counted, not timed: once a layer has learned that its calls are torch's, it enters no more functions of
    Python than torch's layer does (a group norm: one more; held to a level: five more)."""
    make, shape = LAYERS[op]
    stock, model = (nn.Sequential(*(make() for _ in range(10))).eval() for _ in range(2))
    x = torch.randn(shape)
    report = turnout.accelerate(model, numerics=numerics)
    for _ in range(2):
        model(x)
    (expected, none), (taken, ours) = python_calls(stock, x), python_calls(model, x)
    assert none == 0
    layers = len(report.patched)
    assert layers == 10
    if numerics is None:
        assert 0 < ours <= 3 * layers
        assert taken <= expected + layers * (op == "group_norm_silu")
    else:
        assert taken <= expected + 5 * layers


def a_weight_beside_the_parameters(layer):
    layer.__dict__["weight"] = 2 * layer.weight.detach()


def another_convolution(layer):
    convolve = layer._conv_forward
    layer._conv_forward = lambda x, weight, bias: 3 * convolve(x, weight, bias)


def a_parametrisation(layer):
    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    nn.utils.parametrize.register_parametrization(layer, "weight", Doubled())


def another_padding(layer):
    layer.padding_mode, layer._reversed_padding_repeated_twice = "circular", [1, 1, 1, 1]


def without_a_bias(layer):
    layer.bias = None


@pytest.mark.parametrize(
    "change",
    [a_weight_beside_the_parameters, another_convolution, a_parametrisation, another_padding, without_a_bias],
)
@torch.no_grad()
def test_layer_that_has_learned_sees_what_is_done_to_it(change):
    stock = nn.Conv2d(4, 4, 1).eval()
    layer = copy.deepcopy(stock)
    x = torch.randn(1, 4, 2, 2)
    turnout.accelerate(layer)
    before = layer(x)
    assert worth.is_torch(layer, OPS["conv2d"], x)
    change(layer)
    change(stock)
    assert not torch.equal(layer(x), before)
    assert torch.equal(layer(x), stock(x))


@torch.no_grad()
def test_layer_whose_forward_was_replaced_before_is_routed_where_that_calls_it():
    layer = nn.Conv2d(4, 4, 1).eval()
    forward = layer.forward
    layer.forward = lambda x: forward(x) + 1
    x = torch.randn(1, 4, 2, 2)
    expected = layer(x)
    assert len(turnout.accelerate(layer).patched) == 1
    assert torch.equal(layer(x), expected)
    assert worth.is_torch(layer, OPS["conv2d"], x)


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x, mask=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class ItsAttention(Attends):
    pass


@torch.no_grad()
def test_attention_that_is_torchs_runs_the_stock_code(monkeypatch):
    layer = ItsAttention().eval()
    turnout.accelerate(layer)
    x = torch.randn(2, 5, 16)
    expected = Attends.forward(layer, x)
    for _ in range(3):
        torch.testing.assert_close(layer(x), expected)
    assert worth.knows_call(layer, OPS["attention"], (x,), {})
    assert python_calls(layer, x)[1] <= 3  # one of the layer, two to see whether it knows
    assert not worth.knows_call(layer, OPS["attention"], (x[:1],), {})
    with counted_calls() as count:  # whoever watches sees it
        layer(x)
    assert count["attention"] == 1
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args, **kwargs: "theirs")
    assert layer(x) == "theirs"

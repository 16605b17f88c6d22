"""Models with graphs and their stock copies, for the tests of this folder."""

import copy

import torch

import turnout
from tests.models.zoo import made


class Graphed:
    """A small Flux transformer with graph=True, and a stock copy to compare with."""

    def __init__(self, device):
        self.device = device
        self.model = made("flux").to(device).eval()
        self.stock = copy.deepcopy(self.model)
        self.report = turnout.accelerate(self.model, graph=True)
        (self.replays,) = self.report.graphs.values()
        self.inputs = flux_inputs(device)

    def __call__(self, model=None, **changes):
        return (self.model if model is None else model)(**{**self.inputs, **changes})

    def check(self, **changes):
        """A call gives what the stock model does; returns whether it was replayed."""
        before = self.replays.replayed
        result = self(**changes)
        expected = self(self.stock, **changes)
        assert type(result) is type(expected)
        torch.testing.assert_close(result[0], expected[0], rtol=1e-4, atol=1e-4)
        return self.replays.replayed > before

    def warm(self):
        """Call until the next call is replayed."""
        assert [self.check() for _ in range(3)] == [False, False, True]

    def both(self, change):
        for model in (self.model, self.stock):
            change(model)


def flux_inputs(device, batch=2, seed=0):
    random = torch.Generator().manual_seed(seed)
    places = torch.stack([torch.zeros(12), torch.arange(12) // 4, torch.arange(12) % 4], 1)
    given = {
        "hidden_states": torch.randn(batch, 12, 4, generator=random),
        "encoder_hidden_states": torch.randn(batch, 5, 8, generator=random),
        "pooled_projections": torch.randn(batch, 8, generator=random),
        "timestep": torch.rand(batch, generator=random), "guidance": torch.full((batch,), 0.5),
        "img_ids": places, "txt_ids": torch.zeros(5, 3),
    }  # fmt: skip
    return {name: x.to(device) for name, x in given.items()}


def states_of(cache):
    return [held[0] for layer in cache.layers for held in (layer.conv_states, layer.recurrent_states)]


def scaled(model, name):
    weight = model.get_parameter(name)
    return weight * 1.5


class Small(torch.nn.Module):
    """A known model for these tests: `known` says so to `accelerate`."""

    def __init__(self, body):
        super().__init__()
        self.linear, self.body, self.steps = torch.nn.Linear(4, 4), body, 0

    def forward(self, x, scale=1.0):
        return self.body(self, x, scale)

"""Small calls of every public function, each with its arguments by name. Together they use every argument."""

import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import turnout
from turnout.routing.public import PUBLIC, lower

EVERY_CALL = bool(os.environ.get("TURNOUT_EVERY_CALL"))  # the long form of the tests, for `make fault-test`
WRITTEN = {
    "causal_conv1d_update": ("conv_state",),
    "selective_scan_update": ("state",),
}  # besides every `out`


class Made:
    """Random tensors of one dtype, the same for the same seed."""

    def __init__(self, dtype=torch.float32, seed=0):
        self.dtype, self.generator = dtype, torch.Generator().manual_seed(seed)

    def __call__(self, *shape):
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def rates(self, *shape):
        """Negative, as those of a recurrence that forgets."""
        return -self(*shape).abs() - 0.1


def _conv2d(t):
    yield {"input": t(2, 6, 9, 8), "weight": t(4, 6, 3, 3), "bias": t(4), "padding": 1}
    yield {"input": t(1, 16, 8, 8), "weight": t(16, 16, 1, 1)}
    yield {
        "input": t(6, 9, 8),
        "weight": t(4, 3, 3, 2),
        "stride": (2, 1),
        "padding": [1, 0],
        "dilation": 2,
        "groups": 2,
    }
    yield {"input": t(1, 6, 8, 8), "weight": t(4, 6, 3, 2), "padding": "same", "residual": t(1, 4, 8, 8)}


def _conv3d(t):
    yield {"input": t(1, 6, 4, 6, 6), "weight": t(4, 6, 3, 3, 3), "bias": t(4), "padding": 1}
    yield {"input": t(2, 16, 2, 4, 4), "weight": t(16, 16, 1, 1, 1), "residual": t(2, 16, 2, 4, 4)}
    yield {
        "input": t(4, 5, 6, 6),
        "weight": t(4, 2, 3, 2, 2),
        "stride": (2, 1, 1),
        "padding": "valid",
        "groups": 2,
        "dilation": (1, 2, 1),
    }


def _causal_conv3d(t):
    yield {
        "input": t(1, 6, 3, 6, 6),
        "weight": t(4, 6, 3, 3, 3),
        "bias": t(4),
        "padding": 1,
        "cache": t(1, 6, 2, 6, 6),
    }
    yield {
        "input": t(1, 4, 3, 5, 5),
        "weight": t(4, 2, 2, 1, 3),
        "padding": (0, 1),
        "groups": 2,
        "pad_mode": "replicate",
        "return_cache": True,
    }
    yield {
        "input": t(4, 3, 6, 6),
        "weight": t(4, 4, 2, 3, 3),
        "stride": (1, 2, 2),
        "dilation": (2, 1, 1),
        "residual": t(4, 3, 2, 2),
    }


def _upsample_conv2d(t):
    yield {"input": t(1, 8, 6, 5), "weight": t(4, 8, 3, 3), "bias": t(4)}
    yield {"input": t(4, 4, 4), "weight": t(4, 4, 3, 3), "scale": 3, "padding": (0, 1)}


def _causal_conv1d(t):
    yield {"x": t(2, 8, 20), "weight": t(8, 4)}
    yield {"x": t(2, 20, 8).transpose(1, 2), "weight": t(8, 3), "bias": t(8), "activation": "silu"}
    yield {"x": t(2, 4, 9), "weight": t(4, 4), "initial_states": t(2, 4, 3), "return_final_states": True}
    yield {
        "x": t(1, 4, 9),
        "weight": t(4, 3),
        "cu_seqlens": torch.tensor([0, 4, 9]),
        "initial_states": t(2, 4, 2),
        "return_final_states": True,
    }
    yield {
        "x": t(2, 4, 6),
        "weight": t(4, 3),
        "seq_idx": torch.tensor([[0, 0, 0, 1, 1, -1], [0, 1, 1, 1, 2, 2]]),
    }


def _causal_conv1d_update(t):
    yield {"x": t(2, 8), "conv_state": t(2, 8, 3), "weight": t(8, 4), "bias": t(8), "activation": "silu"}
    yield {
        "x": t(2, 4, 3),
        "conv_state": t(2, 4, 5),
        "weight": t(4, 3),
        "cache_seqlens": torch.tensor([0, 7]),
    }
    yield {
        "x": t(2, 4),
        "conv_state": t(5, 4, 3),
        "weight": t(4, 4),
        "conv_state_indices": torch.tensor([3, 0]),
    }


def _selective_scan(t):
    yield {
        "x": t(2, 4, 9),
        "dt": t(2, 4, 9),
        "A": t.rates(4, 3),
        "B": t(2, 3, 9),
        "C": t(2, 3, 9),
        "dt_softplus": True,
    }
    yield {
        "x": t(1, 4, 5),
        "dt": t(1, 4, 5),
        "A": t.rates(4, 3),
        "B": t(1, 3, 5),
        "C": t(1, 3, 5),
        "D": t(4),
        "z": t(1, 4, 5),
        "dt_bias": t(4),
        "dt_softplus": True,
        "initial_state": t(1, 4, 3),
        "return_final_state": True,
    }


def _selective_scan_update(t):
    yield {
        "x": t(2, 4),
        "state": t(2, 4, 3),
        "dt": t(2, 4),
        "A": t.rates(4, 3),
        "B": t(2, 3),
        "C": t(2, 3),
        "dt_softplus": True,
    }
    yield {
        "x": t(2, 4),
        "state": t(2, 4, 3),
        "dt": t(2, 4),
        "A": t(4, 3),
        "B": t(2, 3),
        "C": t(2, 3),
        "D": t(4),
        "z": t(2, 4),
        "dt_bias": t(4),
        "dt_softplus": True,
        "log_rates": True,
    }


def _norm_rope(t):
    yield {"x": t(2, 5, 4, 8), "cos": t(5, 4), "sin": t(5, 4), "weight": t(8)}
    yield {
        "x": t(2, 5, 4, 8),
        "cos": t(2, 5, 1, 8),
        "sin": t(2, 5, 1, 8),
        "weight": t(32),
        "across_heads": True,
        "pairing": "half",
    }
    yield {
        "x": [t(1, 3, 2, 8), t(1, 4, 2, 8)],
        "weight": [t(8), t(8)],
        "eps": 1e-5,
        "out_layout": "bshd",
        "round_before_weight": True,
    }
    yield {"x": t(1, 5, 2, 8), "cos": t(5, 2), "sin": t(5, 2), "rotary_dim": 4, "norm": True}
    yield {"x": t(1, 5, 2, 8)}


def _norm_rope_qk(t):
    yield {
        "q": t(2, 5, 4, 8),
        "k": t(2, 5, 2, 8),
        "cos": t(5, 4),
        "sin": t(5, 4),
        "q_weight": t(8),
        "k_weight": t(8),
        "eps": 1e-5,
    }
    yield {
        "q": (t(1, 3, 2, 8), t(1, 4, 2, 8)),
        "k": (t(1, 3, 2, 8), t(1, 4, 2, 8)),
        "cos": t(7, 8),
        "sin": t(7, 8),
        "q_weight": (t(8), t(8)),
        "k_weight": (t(8), t(8)),
        "pairing": "half",
        "out_layout": "bshd",
    }
    yield {"q": t(1, 5, 2, 8), "k": t(1, 5, 2, 8), "norm": True, "across_heads": True}
    yield {
        "q": t(1, 5, 2, 8),
        "k": t(1, 5, 2, 8),
        "cos": t(5, 2),
        "sin": t(5, 2),
        "rotary_dim": 4,
        "q_weight": t(8),
        "k_weight": t(8),
        "round_before_weight": True,
    }


def _layer_norm_modulate(t):
    yield {"x": t(2, 3, 8)}
    yield {"x": t(2, 3, 8), "scale": t(2, 8), "shift": t(2, 3, 8), "weight": t(8), "bias": t(8), "eps": 1e-5}
    yield {"x": t(2, 3, 8), "scale": t(2, 8), "residual": t(2, 3, 8), "gate": t(2, 1, 8)}


def _gated_add(t):
    yield {"residual": t(2, 3, 8), "gate": t(2, 8), "x": t(2, 3, 8)}
    yield {"residual": t(2, 3, 8), "gate": None, "x": t(2, 3, 8)}


def _add_repeated(t):
    yield {"y": t(2, 3, 4, 4, 6), "x": t(2, 3, 2, 2, 3), "times": [2, 2, 2]}
    yield {"y": t(1, 3, 1, 4, 6), "x": t(1, 6, 1, 2, 3), "times": (2, 2, 2)}


def _rms_norm_silu(t):
    yield {"x": t(2, 6, 3, 4), "weight": t(6), "eps": 1e-6}
    yield {"x": t(2, 4, 6), "weight": t(6), "bias": t(6), "eps": 1e-6, "dim": -1, "silu": False}
    yield {"x": t(2, 6, 3, 4), "weight": t(6, 1, 1), "eps": 1e-6, "style": "normalize"}
    yield {"x": t(2, 6, 3, 4), "weight": t(6), "eps": 1e-6, "out": torch.zeros(2, 6, 3, 4, dtype=t.dtype)}


def _group_norm_silu(t):
    yield {"x": t(2, 6, 3, 4), "groups": 3, "weight": t(6), "bias": t(6)}
    yield {"x": t(2, 6, 5), "groups": 2, "eps": 1e-6, "silu": False}
    yield {
        "x": t(2, 6, 3, 4),
        "groups": 3,
        "weight": t(6),
        "bias": t(6),
        "out": torch.zeros(2, 6, 3, 4, dtype=t.dtype),
    }


def _group_norm_silu_pad(t):
    yield {"x": t(2, 6, 3, 4), "groups": 3, "weight": t(6), "bias": t(6), "padding": [1, 1, 2, 0]}
    yield {
        "x": t(1, 6, 2, 4, 3),
        "groups": 2,
        "eps": 1e-6,
        "silu": False,
        "padding": (1, 0, 2, 1),
        "mode": "constant",
    }
    yield {"x": t(2, 6, 5), "groups": 2, "padding": (3, 4), "mode": "reflect"}


def _spatial_norm_silu(t):
    small = {"scale": t(2, 6, 3, 2), "shift": t(2, 6, 3, 2)}
    yield {"x": t(2, 6, 3, 4), "groups": 3, "weight": t(6), "bias": t(6), **small}
    small = {"scale": t(1, 6, 2, 2, 3), "shift": t(1, 6, 2, 2, 3)}
    yield {
        "x": t(1, 6, 3, 4, 3),
        "groups": 2,
        "weight": None,
        "bias": None,
        **small,
        "eps": 1e-6,
        "silu": False,
        "first_apart": True,
    }


def _attention(t):
    yield {"q": t(2, 4, 5, 8), "k": t(2, 2, 20, 8), "v": t(2, 2, 20, 8)}
    yield {"q": t(2, 2, 5, 8), "k": t(2, 2, 20, 8), "v": t(2, 2, 20, 8), "kv_lengths": [7, 20]}
    yield {
        "q": t(2, 2, 5, 8),
        "k": t(2, 2, 20, 8),
        "v": t(2, 2, 20, 8),
        "kv_lengths": [(3, 4), (5, 15)],
        "scale": 0.3,
    }
    yield {"q": t(2, 2, 5, 8), "k": t(2, 2, 7, 8), "v": t(2, 2, 7, 8), "kv_lengths": torch.tensor([7, 3])}
    yield {"q": t(2, 2, 6, 8), "k": t(2, 2, 6, 8), "v": t(2, 2, 6, 8), "causal": True}
    yield {
        "q": t(2, 2, 5, 8),
        "k": t(2, 2, 20, 8),
        "v": t(2, 2, 20, 8),
        "mask": (torch.arange(20) < 12).expand(2, 1, 1, 20),
    }
    yield {"q": t(2, 2, 5, 8), "k": t(2, 2, 20, 8), "v": t(2, 2, 20, 8), "mask": t(2, 2, 5, 20)}


def _sum(a, b):
    return lambda t: iter([{"a": t(*a), "b": t(*b)}])


MAKERS: dict[str, Callable[[Made], Any]] = {
    "add_repeated": _add_repeated,
    "attention": _attention,
    "causal_conv1d": _causal_conv1d,
    "causal_conv1d_update": _causal_conv1d_update,
    "causal_conv3d": _causal_conv3d,
    "conv2d": _conv2d,
    "conv3d": _conv3d,
    "dot": _sum((64,), (64,)),
    "gated_add": _gated_add,
    "group_norm_silu": _group_norm_silu,
    "group_norm_silu_pad": _group_norm_silu_pad,
    "inner": _sum((64,), (64,)),
    "layer_norm_modulate": _layer_norm_modulate,
    "matmul": _sum((1, 64), (64, 1)),
    "norm_rope": _norm_rope,
    "norm_rope_qk": _norm_rope_qk,
    "rms_norm_silu": _rms_norm_silu,
    "selective_scan": _selective_scan,
    "selective_scan_update": _selective_scan_update,
    "spatial_norm_silu": _spatial_norm_silu,
    "upsample_conv2d": _upsample_conv2d,
}


class Call(NamedTuple):
    """The n-th call of a public function."""

    name: str
    number: int

    def __str__(self):
        return f"{self.name}-{self.number}"

    @property
    def function(self):
        return getattr(turnout, self.name)

    def make(self, dtype=torch.float32, seed=0) -> dict[str, Any]:
        """Its arguments, new ones each time."""
        return list(MAKERS[self.name](Made(dtype, seed)))[self.number]

    def written(self) -> tuple[str, ...]:
        """The arguments it writes into."""
        return _written(self)

    def lowered(self, **kwargs):
        return lower(self.function, **(kwargs or self.make()))


@functools.cache
def _written(call: Call) -> tuple[str, ...]:
    return (*WRITTEN.get(call.name, ()), *(["out"] if "out" in call.make() else []))


def names() -> list[str]:
    """Every public function that calls an op, as the package exports them."""
    return [name for name in turnout.__all__ if name in PUBLIC]


CALLS = [Call(name, i) for name in MAKERS for i in range(len(list(MAKERS[name](Made()))))]
assert all(call.written() is not None for call in CALLS)  # known before a test changes the default device
calls = pytest.mark.parametrize("call", CALLS, ids=str)


def flat(result) -> list[torch.Tensor]:
    """What a call returns, as a list of tensors."""
    return [*result] if isinstance(result, (tuple, list)) else [result]


def tensors_in(value) -> list[torch.Tensor]:
    """The tensors of one argument: itself, or those of a sequence."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [x for x in value if isinstance(x, torch.Tensor)] if isinstance(value, (tuple, list)) else []


def mapped(value, change):
    """An argument with each of its tensors changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (tuple, list)) and any(isinstance(x, torch.Tensor) for x in value):
        return type(value)(mapped(x, change) for x in value)
    return value


def changed(kwargs, change) -> dict[str, Any]:
    """The arguments of a call with each tensor changed."""
    return {name: mapped(value, change) for name, value in kwargs.items()}


def wanting_gradients(kwargs) -> dict[str, Any]:
    """The arguments of a call, copied, floating-point ones with gradients wanted."""
    return changed(kwargs, lambda t: t.clone().requires_grad_(t.is_floating_point()))


def routes_for(call: Call, dtype=torch.float32) -> list[str]:
    """The routes that take this call here, the reference first."""
    from turnout.routing.device import Device

    op, args = call.lowered(**call.make(dtype))
    problem, device = op.problem(*args), Device.of("cpu")
    return [
        "reference",
        *(name for name, route in op.routes.items() if not any(route.refuses(problem, device))),
    ]

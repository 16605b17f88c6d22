"""Mamba, Mamba-2 and the hybrids built on them: the stock forward of a mixer, with the functions it calls bound to turnout's.

These models find their convolution and their scan among the globals of their module, under the names of the packages that have fast
ones. A patched mixer runs the same code with other globals; the module keeps its own.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

import turnout
from turnout.models.patch import Adapter, patched

_ACTIVATIONS = {None: None, "silu": "silu", "swish": "silu"}


def _conv(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, seq_idx: Tensor | None = None,
    **unused: Any,
) -> Any:  # fmt: skip
    return turnout.causal_conv1d(hidden_states, weight, bias, activation=_ACTIVATIONS[activation], seq_idx=seq_idx)


def _conv_update(
    hidden_states: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    return turnout.causal_conv1d_update(hidden_states, conv_state, weight, bias, activation=_ACTIVATIONS[activation])


def _scan(
    hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, z: Tensor | None = None,
    delta_bias: Tensor | None = None, delta_softplus: bool = False, return_last_state: bool = False, **unused: Any,
) -> Any:  # fmt: skip
    return turnout.selective_scan(
        hidden_states, dt, A, B, C, D=D, z=z, dt_bias=delta_bias, dt_softplus=delta_softplus, return_final_state=return_last_state
    )


def _scan_update(
    state: Tensor, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    dt_bias: Tensor | None = None, dt_softplus: bool = False, z: Tensor | None = None, **unused: Any,
) -> Tensor:  # fmt: skip
    """One more position of each sequence; `state` is moved on in place."""
    gate = None if z is None else z[..., None]
    y, moved = turnout.selective_scan(
        hidden_states[..., None], dt[..., None], A, B[..., None], C[..., None], D=D, z=gate, dt_bias=dt_bias, dt_softplus=dt_softplus,
        initial_state=state, return_final_state=True,
    )  # fmt: skip
    state.copy_(moved)
    return y[..., 0]


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _conv, "causal_conv1d_update": _conv_update, "mamba_selective_scan": _scan,
    "mamba_selective_state_update": _scan_update,
}  # fmt: skip


class Mixer(Adapter):
    """turnout's convolution and scan in place of those of its module"""

    @staticmethod
    def refuses(instance: Any) -> Iterable[str]:
        if instance.activation not in _ACTIVATIONS:
            yield f"activation {instance.activation}, this adapter needs SiLU"
        names = inspect.unwrap(type(instance).forward).__code__.co_names
        if "causal_conv1d_fn" not in names:
            yield "a forward without causal_conv1d_fn, this adapter needs one (transformers 5.16 or newer)"

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        patch = patched(self)
        assert patch is not None
        if any(hasattr(part, "_hf_hook") for part in self.children()):  # weights that are moved in by hooks: the stock forward knows how
            return super().forward(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        return _with_functions(patch.base)(self, *args, **kwargs)


@functools.cache
def _with_functions(mixer: type) -> Callable[..., Any]:
    """The mixer's own forward with FUNCTIONS among its globals. Without a module's name: torch.compile would look the rest up there."""
    stock: Any = mixer.forward  # pyright: ignore[reportAttributeAccessIssue]
    inner = inspect.unwrap(stock)
    known = {name: function for name, function in FUNCTIONS.items() if name in inner.__globals__}
    others = {name: value for name, value in inner.__globals__.items() if name != "__name__"}
    made = types.FunctionType(inner.__code__, others | known, inner.__name__, inner.__defaults__, inner.__closure__)
    made.__kwdefaults__ = inner.__kwdefaults__
    return made


class RMSNorm(Adapter):
    """turnout.rms_norm_silu"""

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        return turnout.rms_norm_silu(hidden_states, self.weight, eps=self.variance_epsilon, dim=-1, silu=False)

"""Mamba, Mamba-2 and the hybrids built on them: the stock forward of a mixer, with the functions it calls
bound to turnout's.

These models find their convolution and their scan among the globals of their module, under the names of the
packages that have fast ones. A patched mixer runs the same code with other globals; the module keeps its own.
A step of decoding is limited by the host, so Mamba's has its own forward, with six launches instead of fifty.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from turnout import ops
from turnout.models.patch import Adapter
from turnout.models.rebinding import Rebinder
from turnout.ops.causal_conv1d_update import CAUSAL_CONV1D_UPDATE
from turnout.ops.selective_scan_update.routes import SELECTIVE_SCAN_UPDATE
from turnout.routing.fallback import PLAIN_TENSORS, autocasts

_ACTIVATIONS = {None: None, "silu": "silu", "swish": "silu"}
_ALL_LAUNCH = 2**18  # elements whose norm takes a card less time than a host takes to ask for it


def _conv(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    seq_idx: Tensor | None = None,
    **unused: Any,
) -> Any:
    return ops.causal_conv1d(
        hidden_states, weight, bias, activation=_ACTIVATIONS[activation], seq_idx=seq_idx
    )


def _conv_update(
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    return ops.causal_conv1d_update(
        hidden_states, conv_state, weight, bias, activation=_ACTIVATIONS[activation]
    )


def _scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **unused: Any,
) -> Any:
    return ops.selective_scan(
        hidden_states,
        dt,
        A,
        B,
        C,
        D=D,
        z=z,
        dt_bias=delta_bias,
        dt_softplus=delta_softplus,
        return_final_state=return_last_state,
    )


def _scan_update(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **unused: Any,
) -> Tensor:
    return SELECTIVE_SCAN_UPDATE(hidden_states, state, dt, A, B, C, D, z, dt_bias, dt_softplus, False)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _conv, "causal_conv1d_update": _conv_update, "mamba_selective_scan": _scan,
    "mamba_selective_state_update": _scan_update,
}  # fmt: skip


class Mixer(Adapter):
    summary = "turnout's convolution and scan in place of those of its module"

    @staticmethod
    def refuses(instance: Any) -> Iterable[str]:
        if instance.activation not in _ACTIVATIONS:
            yield f"activation {instance.activation}, this adapter needs SiLU"
        names = inspect.unwrap(type(instance).forward).__code__.co_names
        if "causal_conv1d_fn" not in names:
            yield "a forward without causal_conv1d_fn, this adapter needs one (transformers 5.16 or newer)"

    def __init_subclass__(cls, **kwargs: Any):
        """The functions are made with the class of the patched instances: torch.compile cannot make any."""
        super().__init_subclass__(**kwargs)
        stock = next((vars(owner)["forward"] for owner in cls.__mro__ if _is_stock(owner)), None)
        if stock is not None:
            cls._turnout_eager = rebound(stock) or stock
            cls._turnout_traced = rebound(stock, frozen=True) or stock

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        hidden_states = args[0] if args else kwargs["hidden_states"]
        differentiable_step = (
            hidden_states.shape[1] == 1 and torch.is_grad_enabled()
        )  # ops that write states in place have no backward
        known = self.activation in _ACTIVATIONS  # it may have been set since
        if differentiable_step or not known or _hooked(self._modules.values()):
            return super().forward(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        if torch.compiler.is_compiling():
            return self._turnout_traced(*args, **kwargs)
        return self._turnout_eager(*args, **kwargs)


def _is_stock(owner: type) -> bool:
    return "forward" in vars(owner) and not issubclass(owner, Adapter)


def rebound(forward: Callable[..., Any], *, frozen: bool = False) -> Callable[..., Any] | None:
    """A mixer's forward with FUNCTIONS among its globals, and its decorators; None where it uses none of
    them.
    """
    rebinding = Rebinder(lambda name, value: FUNCTIONS.get(name), follow=False, frozen=frozen).rebind(forward)
    return None if rebinding is None else rebinding.function


def _hooked(parts: Iterable[Any]) -> bool:
    """Whether weights are moved in by hooks: the stock forward knows how, where it reads them past their
    modules.
    """
    return any("_hf_hook" in part.__dict__ for part in parts if part is not None)


class SelectiveMixer(Mixer):
    summary = (
        "turnout's convolution and scan in place of those of its module; "
        "decoding without what lies between them"
    )

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        held = _held(self, *args, **kwargs)
        return (
            super().forward(*args, **kwargs)
            if held is None
            else _step(self, args[0] if args else kwargs["hidden_states"], *held)
        )


def _held(
    mixer: Any,
    hidden_states: Tensor,
    cache_params: Any = None,
    attention_mask: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, Tensor] | None:
    """The states of the convolution and of the scan where this call is a plain step of decoding; None where
    the stock forward is to run.
    """
    if (
        cache_params is None
        or hidden_states.shape[1] != 1
        or attention_mask is not None
        or torch.is_grad_enabled()
    ):
        return None
    if torch.compiler.is_dynamo_compiling() or autocasts(hidden_states.device.type):
        return None
    # of a quantised model the stock forward calls dt_proj, of any other it multiplies with its weight
    if mixer.activation not in _ACTIVATIONS or hasattr(mixer.config, "_is_quantized"):
        return None
    layer, dt_proj = cache_params.layers[mixer.layer_idx], mixer.dt_proj
    weight = dt_proj.weight
    if not layer.has_previous_state[0] or layer.record_past or weight.dtype is not hidden_states.dtype:
        return None
    if type(weight) not in PLAIN_TENSORS:
        return None
    return None if _hooked((mixer.conv1d, dt_proj)) else (layer.conv_states[0], layer.recurrent_states[0])


def _step(mixer: Any, hidden_states: Tensor, conv_state: Tensor, state: Tensor) -> Tensor:
    """One position of each sequence, [batch, 1, channels] to the same; both states are moved on in place."""
    conv, dt_proj, size = mixer.conv1d, mixer.dt_proj, mixer.ssm_state_size
    inner, gate = mixer.in_proj(hidden_states.squeeze(1)).chunk(2, 1)
    activation = _ACTIVATIONS[mixer.activation]
    inner = CAUSAL_CONV1D_UPDATE(inner, conv_state, conv.weight.squeeze(1), conv.bias, activation, None, None)
    dt, into, out = mixer.x_proj(inner).split_with_sizes((mixer.time_step_rank, size, size), 1)
    if "dt_layernorm" in mixer._modules:  # Falcon Mamba and Jamba
        dt, into, out = mixer.dt_layernorm(dt), mixer.b_layernorm(into), mixer.c_layernorm(out)
    dt = F.linear(dt, dt_proj.weight)
    y = SELECTIVE_SCAN_UPDATE(
        inner, state, dt, mixer.A_log, into, out, mixer.D, gate, dt_proj.bias, True, True
    )
    return mixer.out_proj(y).unsqueeze(1)


class RMSNorm(Adapter):
    summary = "turnout.rms_norm_silu, and torch's own for a step of decoding"

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        weight = self.weight
        if (
            hidden_states.is_cuda
            and hidden_states.numel() <= _ALL_LAUNCH
            and weight.dtype is hidden_states.dtype
        ):
            return F.rms_norm(hidden_states, weight.shape, weight, self.variance_epsilon)
        return ops.rms_norm_silu(hidden_states, weight, eps=self.variance_epsilon, dim=-1, silu=False)

"""The causal-conv1d package's functions, under its names and with its signatures: any width, layout and
device, no CUDA build.

from turnout.compat.causal_conv1d import causal_conv1d_fn, causal_conv1d_update, causal_conv1d_varlen_states
"""

from __future__ import annotations

import torch
from torch import Tensor

from turnout.ops.causal_conv1d import causal_conv1d
from turnout.ops.causal_conv1d_update import causal_conv1d_update as _update
from turnout.routing.mutation import refuse_write

__all__ = ["causal_conv1d_fn", "causal_conv1d_update", "causal_conv1d_varlen_states"]

_ACTIVATIONS = {None: None, "silu": "silu", "swish": "silu"}


def _activation(name: str | None) -> str | None:
    if name not in _ACTIVATIONS:
        raise NotImplementedError(f"activation is {name!r}, it needs to be None, 'silu' or 'swish'")
    return _ACTIVATIONS[name]


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`turnout.causal_conv1d` as causal-conv1d spells it; "swish" is "silu". `final_states_out` is written
    and returned where given.

    >>> import torch
    >>> causal_conv1d_fn(torch.ones(1, 2, 3), torch.ones(2, 2))
    tensor([[[1., 2., 2.],
             [1., 2., 2.]]])
    """
    if return_final_states and final_states_out is not None and not torch.compiler.is_compiling():
        shape = [x.shape[0], x.shape[1], weight.shape[1] - 1]
        if list(final_states_out.shape) != shape:
            raise ValueError(f"final_states_out is {list(final_states_out.shape)}, it needs to be {shape}")
        refuse_write("causal_conv1d_fn", "final_states_out", final_states_out)
    result = causal_conv1d(
        x,
        weight,
        bias,
        activation=_activation(activation),
        seq_idx=seq_idx,
        initial_states=initial_states,
        return_final_states=return_final_states,
    )
    if isinstance(result, tuple) and final_states_out is not None:
        return result[0], final_states_out.copy_(result[1])
    return result


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
) -> Tensor:
    """`turnout.causal_conv1d_update` as causal-conv1d spells it.

    >>> import torch
    >>> causal_conv1d_update(torch.ones(1, 2), torch.ones(1, 2, 3), torch.ones(2, 4))
    tensor([[4., 4.]])
    """
    return _update(
        x,
        conv_state,
        weight,
        bias,
        activation=_activation(activation),
        cache_seqlens=cache_seqlens,
        conv_state_indices=conv_state_indices,
    )


def causal_conv1d_varlen_states(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor:
    """The last `state_len` positions of each packed sequence, zeros before its start: x `[total, D]` gives
    `[N, D, state_len]`.

    >>> import torch
    >>> causal_conv1d_varlen_states(torch.arange(1.0, 6.0)[:, None], torch.tensor([0, 4, 5]), 2)
    tensor([[[3., 4.]],
    <BLANKLINE>
            [[0., 5.]]])
    """
    if x.dim() != 2:
        raise ValueError(f"x is {list(x.shape)}, it needs to be [total length, channels]")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"cu_seqlens is {list(cu_seqlens.shape)}, it needs to be [sequences + 1]")
    at = cu_seqlens[1:, None] - state_len + torch.arange(state_len, device=x.device)  # [N, state_len]
    if x.shape[0] == 0:
        return x.new_zeros(at.shape[0], state_len, x.shape[1]).transpose(1, 2)
    frames = x[at.clamp(0, x.shape[0] - 1)]  # [N, state_len, D]
    return torch.where((at >= cu_seqlens[:-1, None])[..., None], frames, 0).transpose(1, 2)

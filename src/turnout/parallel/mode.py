"""torch's own functions in a distributed model: what stock code calls, wherever it stands.

Padding along the split axis becomes rows of the neighbours, a convolution gets its halo, a group norm is
computed of the whole. What mixes pixels in another way is refused: nothing is silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from turnout.parallel.split import Split
from turnout.routing import settings, torch_private
from turnout.routing.torch_private import without_function_modes

_CONVOLUTIONS = {torch.conv2d, torch.conv3d, F.conv2d, F.conv3d}
_NORMS = {torch.group_norm, F.group_norm}
_PADS = {F.pad, torch_private.pad}
_MEANS = {torch.mean, Tensor.mean}
_SHAPES = {
    Tensor.permute,
    Tensor.reshape,
    Tensor.view,
    Tensor.transpose,
    Tensor.flatten,
    Tensor.unflatten,
    Tensor.contiguous,
    torch.permute,
    torch.reshape,
    torch.transpose,
    torch.flatten,
    torch.unflatten,
}
_MIXING: set[Callable[..., Any]] = {
    F.scaled_dot_product_attention,
    F.avg_pool2d,
    F.avg_pool3d,
    F.max_pool2d,
    F.max_pool3d,
    F.adaptive_avg_pool2d,
    F.adaptive_avg_pool3d,
    F.adaptive_max_pool2d,
    F.adaptive_max_pool3d,
    F.conv_transpose2d,
    F.conv_transpose3d,
    torch.conv_transpose2d,
    torch.conv_transpose3d,
    F.batch_norm,
    torch.batch_norm,
    F.instance_norm,
    torch.instance_norm,
    F.unfold,
    F.fold,
    F.grid_sample,
}


class SplitMode(TorchFunctionMode):
    """Inside it torch's functions work on this rank's part of tensors `[B, C, (T,) H, W]`."""

    def __init__(self, split: Split):
        super().__init__()
        self.alone = split

    @property
    def split(self) -> Split:
        """The plan that is in force: one latent at a time, or several."""
        return settings.splitting() or self.alone

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _CONVOLUTIONS:
            return self.split.torch_convolution(func, *args, **kwargs)
        if func in _PADS:
            with without_function_modes():
                return self.split.pad(F.pad, *_bound(args, kwargs))
        if func in _NORMS:
            return self.split.everywhere(func, *args, **kwargs)
        if func is F.silu and _is_picture_on_cpu(*args):
            return self._activated(*args, **kwargs)
        if func in _MEANS and _is_picture_on_cpu(*args):
            return self._averaged(*args, **kwargs)
        if func in _SHAPES:
            y = func(*args, **kwargs)
            self.split.reshaped(args[0], y)
            return y
        if func is F.interpolate:
            _refuse_blends(*args, **kwargs)
        elif func in _MIXING:
            name = getattr(func, "__name__", str(func))
            raise NotImplementedError(
                f"{name} mixes pixels, and is not known to a distributed model; restore() the model to run it"
            )
        return func(*args, **kwargs)

    def _activated(self, x: Tensor, inplace: bool = False) -> Tensor:
        """SiLU on a CPU: of the last few elements torch takes another exponential than of the others, and
        which are the last is known of the whole only."""
        y = self.split.everywhere(F.silu, x)
        with without_function_modes():
            return x.copy_(y) if inplace else y

    def _averaged(self, x: Tensor, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Tensor:
        """A mean over channels that are not side by side: on a CPU torch adds up most pixels in another order
        than the last ones. The channels are dimension 1, or the last one of a view that was made for a
        norm."""
        axes = [each % x.dim() for each in ((dim,) if isinstance(dim, int) else dim or ())]
        behind = axes == [x.dim() - 1] and x.stride(-1) != 1
        if axes != [1] and not behind:
            return torch.mean(x, dim, keepdim, **kwargs)
        if axes == [1] and x.dim() not in (4, 5):
            return torch.mean(x, dim, keepdim, **kwargs)
        if not keepdim:
            raise NotImplementedError(
                "a mean over channels without keepdim in a distributed model; restore() the model to run it"
            )
        if not behind:
            return self.split.everywhere(torch.mean, x, dim, True, **kwargs)

        def mean(whole: Tensor) -> Tensor:
            return torch.mean(whole.movedim(1, -1), -1, True, **kwargs).movedim(-1, 1)

        return self.split.everywhere(mean, x.movedim(-1, 1)).movedim(1, -1)


def _is_picture_on_cpu(x: Tensor, *rest: Any) -> bool:
    return x.dim() > 3 and x.device.type == "cpu"


def _bound(args: tuple, kwargs: dict) -> tuple:
    def pad(input: Tensor, pad: Any, mode: str = "constant", value: float | None = None) -> tuple:
        return input, pad, mode, value

    return pad(*args, **kwargs)


def _refuse_blends(
    input: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    *rest: Any,
    **others: Any,
) -> None:
    if mode not in ("nearest", "nearest-exact"):
        raise NotImplementedError(
            f"interpolation by {mode!r} in a distributed model; restore() the model to run it"
        )

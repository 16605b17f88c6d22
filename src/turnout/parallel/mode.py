"""torch's own functions in a distributed model: what stock code calls, wherever it stands.

Padding along the split axis becomes rows of the neighbours, a convolution gets its halo, a group norm is computed
of the whole. What mixes pixels in another way is refused: nothing is silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from turnout.parallel.split import Split

_CONVOLUTIONS = {torch.conv2d, torch.conv3d, F.conv2d, F.conv3d}
_NORMS = {torch.group_norm, F.group_norm}
_PADS = {F.pad, torch._C._nn.pad}  # pyright: ignore[reportAttributeAccessIssue]
_MIXING: set[Callable[..., Any]] = {
    F.scaled_dot_product_attention, F.avg_pool2d, F.avg_pool3d, F.max_pool2d, F.max_pool3d, F.adaptive_avg_pool2d,
    F.adaptive_avg_pool3d, F.adaptive_max_pool2d, F.adaptive_max_pool3d, F.conv_transpose2d, F.conv_transpose3d,
    torch.conv_transpose2d, torch.conv_transpose3d, F.batch_norm, torch.batch_norm, F.instance_norm,
    torch.instance_norm, F.unfold, F.fold, F.grid_sample,
}  # fmt: skip


class SplitMode(TorchFunctionMode):
    """Inside it torch's functions work on this rank's part of tensors `[B, C, (T,) H, W]`."""

    def __init__(self, split: Split):
        super().__init__()
        self.split = split

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _CONVOLUTIONS:
            return self.split.torch_convolution(func, *args, **kwargs)
        if func in _PADS:
            with torch._C.DisableTorchFunction():
                return self.split.pad(F.pad, *_bound(args, kwargs))
        if func in _NORMS:
            return self.split.everywhere(func, *args, **kwargs)
        if func is F.interpolate:
            _refuse_blends(*args, **kwargs)
        elif func in _MIXING:
            name = getattr(func, "__name__", str(func))
            raise NotImplementedError(f"{name} mixes pixels, and is not known to a distributed model; restore() the model to run it")
        return func(*args, **kwargs)


def _bound(args: tuple, kwargs: dict) -> tuple:
    def pad(input: Tensor, pad: Any, mode: str = "constant", value: float | None = None) -> tuple:
        return input, pad, mode, value

    return pad(*args, **kwargs)


def _refuse_blends(input: Tensor, size: Any = None, scale_factor: Any = None, mode: str = "nearest", *rest: Any, **others: Any) -> None:
    if mode not in ("nearest", "nearest-exact"):
        raise NotImplementedError(f"interpolation by {mode!r} in a distributed model; restore() the model to run it")

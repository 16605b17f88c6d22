"""torch's own functions in a distributed model: what stock code calls, wherever it stands.

Padding along the split axis becomes rows of the neighbours, a convolution gets its halo, a group norm is
computed of the whole. What mixes pixels in another way is refused: nothing is silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
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
_PRODUCTS = {torch.matmul, torch.bmm, torch.einsum, Tensor.matmul, Tensor.__matmul__, Tensor.bmm}


def _functions(*names: str) -> set[Callable[..., Any]]:
    """torch's functions of these names, and the methods."""
    owners = (torch, Tensor, F)
    return {getattr(owner, name) for name in names for owner in owners if hasattr(owner, name)}


# Functions of all elements, or of those along dimensions. They are the first argument behind the tensor,
# or the second.
_REDUCTIONS = _functions(
    "mean", "sum", "prod", "amax", "amin", "aminmax", "max", "min", "std", "var", "norm", "median", "nanmean",
    "nansum", "nanmedian", "quantile", "nanquantile", "logsumexp", "argmax", "argmin", "any", "all",
    "count_nonzero", "std_mean", "var_mean", "normalize",
) | {torch.linalg.norm, torch.linalg.vector_norm}  # fmt: skip
# Those whose result at one element depends on where it stands, or on all others along a dimension
_ALONG = _functions(
    "softmax", "log_softmax", "softmin", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "sort",
    "argsort", "topk", "flip", "roll", "diff",
) | {torch.fliplr, torch.flipud, Tensor.fliplr, Tensor.flipud}  # fmt: skip
_DIM_IS_SECOND = _functions("norm", "quantile", "nanquantile", "roll", "topk", "diff", "normalize") | {
    torch.linalg.norm,
    torch.linalg.vector_norm,
}
_USUAL_DIM = dict.fromkeys(_functions("sort", "argsort", "topk", "diff"), -1) | {F.normalize: 1}
# Of the last few elements torch takes another function on a CPU than of the others
_ACTIVATIONS = _functions(
    "silu", "gelu", "mish", "softplus", "elu", "selu", "celu", "logsigmoid", "tanhshrink", "sigmoid", "tanh",
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "erf", "erfc", "sin", "cos", "tan", "sinh",
    "cosh", "asin", "acos", "atan",
)  # fmt: skip
_DROPOUTS = _functions("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout")
_RANDOM = _functions(
    "rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "normal", "bernoulli", "poisson",
    "multinomial", "normal_", "uniform_", "bernoulli_", "exponential_", "random_", "rrelu",
)  # fmt: skip


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
        if not args and "input" in kwargs:
            kwargs = dict(kwargs)
            args = (kwargs.pop("input"),)
        if func in _ACTIVATIONS and _is_picture_on_cpu(*args) and self._is_part(args[0]):
            return self._activated(func, *args, **kwargs)
        axes = _axes_of(func, *args, **kwargs) if func in _REDUCTIONS or func in _ALONG else None
        if func in _RANDOM or (func in _DROPOUTS and _drops(*args, **kwargs)):
            raise NotImplementedError(
                f"{func.__name__} draws numbers, which ranks would draw for themselves; "
                "call eval(), or restore() the model to run it"
            )
        mixes = func in _MIXING or (func in _PRODUCTS and any(map(_is_picture, args)))
        if mixes or (axes is not None and self._mixes(func, args[0], axes)):
            name = getattr(func, "__name__", str(func))
            raise NotImplementedError(
                f"{name} mixes pixels, and is not known to a distributed model; restore() the model to run it"
            )
        rounds_by_place = axes == {1} and func not in _MEANS and _is_picture_on_cpu(*args)  # as a mean does
        if rounds_by_place and self._is_part(args[0]):
            return self.split.everywhere(func, *args, **kwargs)
        if func in _MEANS and _is_picture_on_cpu(*args):
            return self._averaged(*args, **kwargs)
        if func in _SHAPES:
            y = func(*args, **kwargs)
            self.split.reshaped(args[0], y)
            return y
        if func is F.linear and _is_picture(*args):  # the channels of pixels, which are behind
            return self.split.everywhere(
                lambda whole: func(whole.movedim(1, -1), *args[1:], **kwargs).movedim(-1, 1),
                args[0].movedim(-1, 1),
            ).movedim(1, -1)
        if func is F.interpolate:
            _refuse_blends(*args, **kwargs)
        return func(*args, **kwargs)

    def _activated(
        self, function: Callable[..., Any], x: Tensor, *args: Any, inplace: bool = False, **kwargs: Any
    ) -> Tensor:
        """SiLU and others on a CPU: of the last few elements torch takes another exponential than of the
        others, and which are the last is known of the whole only."""
        if function is F.silu and args:
            inplace, args = args[0], ()
        y = self.split.everywhere(function, x, *args, **kwargs)
        with without_function_modes():
            return x.copy_(y) if inplace else y

    def _is_part(self, x: Tensor) -> bool:
        """Whether rows and columns are the last two dimensions, as far as sizes tell: norms move channels
        there."""
        exchange = self.split.exchange
        return x in self.split.halos or exchange.times(x.shape[exchange.axis]) is not None

    def _mixes(self, func: Any, x: Tensor, axes: set[int]) -> bool:
        """Whether such a function of a picture or a clip sees more than one part."""
        own = self.split.exchange.axis % x.dim()
        # the last one may be that of channels, in a view that was made for a norm
        is_norm = func in _REDUCTIONS and axes == {x.dim() - 1}
        return not axes or (own in axes and not is_norm)

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


def _sees_frames(x: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether a reduction of a picture or a clip is one of all elements, or of rows and columns. Weights are
    the same on every rank."""
    if not isinstance(x, Tensor) or isinstance(x, nn.Parameter) or x.dim() not in (4, 5):
        return False
    dims = next((kwargs[name] for name in ("dim", "dims", "axis") if name in kwargs), None)
    if dims is None:
        dims = next((arg for arg in args if isinstance(arg, int | tuple | list)), None)
    if dims is None or isinstance(dims, bool):
        return not any(isinstance(arg, Tensor) for arg in (*args, *kwargs.values()))  # torch.max of two
    axes = {dim % x.dim() for dim in ((dims,) if isinstance(dims, int) else dims)}
    return not axes or {x.dim() - 2, x.dim() - 1} <= axes


def _axes_of(func: Any, x: Any = None, *others: Any, **named: Any) -> set[int] | None:
    """Along which dimensions of a picture or a clip a function goes, none for all of them; None for other
    tensors. Weights are the same on every rank."""
    if not _is_picture(x):
        return None
    dims = next((named[name] for name in ("dim", "dims", "axis") if name in named), None)
    place = int(func in _DIM_IS_SECOND)
    if dims is None and len(others) > place:
        dims = others[place]
    if isinstance(dims, Tensor) or "other" in named:  # torch.max of two
        return None
    dims = _USUAL_DIM.get(func, ()) if dims is None or isinstance(dims, bool) else dims
    return {dim % x.dim() for dim in ((dims,) if isinstance(dims, int) else dims)}


def _is_picture(x: Any = None, *rest: Any) -> bool:
    """Whether a tensor has the dimensions of a picture or a clip, and is no weight."""
    return isinstance(x, Tensor) and not isinstance(x, nn.Parameter) and x.dim() in (4, 5)


def _drops(x: Any = None, p: float = 0.5, training: bool = True, *rest: Any, **others: Any) -> bool:
    return training and p > 0


def _is_picture_on_cpu(x: Any = None, *rest: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() > 3 and x.device.type == "cpu"


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

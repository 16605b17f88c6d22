"""What stands before the VAE and some of its modules while they are distributed."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from turnout.models import patch
from turnout.models.bare import is_bare
from turnout.routing import settings


class Attention:
    """Stands before modules whose last step that mixes pixels is attention."""

    def __call__(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        run = super().__call__  # pyright: ignore[reportAttributeAccessIssue]
        split = settings.splitting()
        return run(x, *args, **kwargs) if split is None else split.attention(run, x, *args, **kwargs)


class Whole:
    """Stands before modules that mix all pixels, unless their adapter minds that."""

    def __call__(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        run = super().__call__  # pyright: ignore[reportAttributeAccessIssue]
        split = settings.splitting()
        if split is None or _minds_parts(self, x):
            return run(x, *args, **kwargs)
        return split.everywhere(run, x, *args, **kwargs)


def _minds_parts(module: nn.Module, x: Tensor) -> bool:
    """Whether a module has an adapter that gathers what it needs, and that adapter is what runs."""
    patched = patch.patched(module)
    if patched is None or not patched.adapter.splits:
        return False
    inside = patched.adapter.inside
    return inside is None or is_bare(module, inside, x.dtype, x.device)


class Distributed:
    """Stands before the VAE."""

    def decode(self: Any, z: Any, *args: Any, **kwargs: Any) -> Any:
        run = super().decode  # pyright: ignore[reportAttributeAccessIssue]
        return self._turnout_distribution.call(self, "decode", z, run, args, kwargs)

    def encode(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        run = super().encode  # pyright: ignore[reportAttributeAccessIssue]
        return self._turnout_distribution.call(self, "encode", x, run, args, kwargs)


def twin_of(vae: Any) -> Any:
    """The same modules, with plain attributes of its own: stock models keep their caches there."""
    twin = object.__new__(type(vae))
    twin.__dict__ = dict(vars(vae))
    return twin

"""Every name that diffusers calls private and turnout uses, but for attributes of the classes it adapts.

Those attributes are covered by the fingerprints of the stock code (`models/stock.py`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor


def active_attention_backend() -> Any:
    """The backend that attention processors without one of their own take; None where diffusers has not been
    asked for any."""
    module = sys.modules.get("diffusers.models.attention_dispatch")
    return None if module is None else module._AttentionBackendRegistry.get_active_backend()[0]


def attention_of_backend(processor: Any) -> Callable[..., Tensor] | None:
    """The attention that was chosen for a processor: diffusers' dispatcher with a backend or a context
    parallel configuration. None where that is torch's own."""
    from diffusers.models.attention_dispatch import (
        AttentionBackendName,
        _AttentionBackendRegistry,
        dispatch_attention_fn,
    )

    backend, parallel = processor._attention_backend, processor._parallel_config
    active = _AttentionBackendRegistry.get_active_backend()[0]
    if backend is None and parallel is None and active == AttentionBackendName.NATIVE:
        return None

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return dispatch_attention_fn(q, k, v, attn_mask=mask, backend=backend, parallel_config=parallel)

    return attend


def show_to_caches(base: type, cls: type) -> None:
    """Tell the caches of diffusers that blocks or processors of class `cls` are what those of `base` are."""
    if "diffusers" not in sys.modules or not base.__module__.startswith("diffusers."):
        return
    from diffusers.hooks import _helpers as helpers

    for registry in (helpers.TransformerBlockRegistry, helpers.AttentionProcessorRegistry):
        with contextlib.suppress(ValueError):  # it is not there
            registry._registry[cls] = registry.get(base)

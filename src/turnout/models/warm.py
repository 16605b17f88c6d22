"""`turnout.warm`: compile all that a call will launch, before it is made."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from turnout.models.accelerate import accelerate
from turnout.models.patch import patched
from turnout.routing.device import Device
from turnout.warming.compiling import Compiler, most_jobs
from turnout.warming.planning import specs_of_call
from turnout.warming.warmed import Progress, Warmed, card_named, check_dtype, check_jobs, compile_specs


def warm(
    call: Callable[..., Any],
    *args: Any,
    device: str | torch.device | Device | None = None,
    dtype: torch.dtype | str | None = None,
    jobs: int | None = None,
    check: bool = False,
    progress: Progress | None = None,
    **kwargs: Any,
) -> Warmed:
    """Compile every kernel that `call(*args, **kwargs)` launches on a card, all together, into Triton's
    cache.

    Nothing runs, and no GPU is needed: the call is planned on tensors without memory, and its kernels are
    compiled in processes of their own. The first call on such a card, with the same software and the same
    cache folder (`TRITON_CACHE_DIR`), then compiles nothing.

    call: a model, a method of one (`vae.decode`), or a function that uses some. A model that is not
    accelerated is taken as it would be accelerated; the model itself is not changed. args: tensors of the
    sizes and dtypes to come, on any device, "meta" included. device: the card by name ("h200"), or as torch
    names one that is here; default: the one that is here. dtype: what models and floating-point arguments are
    cast to first. jobs: processes at a time; default: one for each core.
    check: only say what is missing. progress: called with how many are done, how many there are, and a name.

    What depends on values cannot be found ahead: a call that looks at a tensor on the card (`.item()`, a mask
    of lengths) raises `NeedsValuesError`, a RuntimeError.

    >>> import torch, turnout
    >>> norm = torch.nn.GroupNorm(8, 64)
    >>> warmed = turnout.warm(norm, torch.empty(1, 64, 64, 64), device="h200", check=True)
    >>> warmed.device
    'NVIDIA H200'
    """
    begun = time.perf_counter()
    card, jobs = card_named(device), check_jobs(most_jobs() if jobs is None else jobs)
    wanted = check_dtype(dtype)

    def prepare(model: nn.Module) -> None:
        if wanted is not None:
            nn.Module.to(model, wanted)
        if not any(patched(module) for module in model.modules()):
            accelerate(model)

    with Compiler() as compiler:
        specs = specs_of_call(call, _cast(args, wanted), _cast(kwargs, wanted), card, prepare)
        fewest = None if check else 1
        return compile_specs(compiler, specs, card, jobs=jobs, fewest=fewest, progress=progress, begun=begun)


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    """Arguments with their floating-point tensors in a dtype, those in containers too."""
    if dtype is None:
        return value
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if type(value) in (list, tuple):
        return type(value)(_cast(x, dtype) for x in value)
    return {name: _cast(x, dtype) for name, x in value.items()} if type(value) is dict else value

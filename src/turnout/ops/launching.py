"""Launching Triton kernels at half the host time.

`kernel[grid](...)` works out at every call which compiled version fits, asks the driver about every pointer and calls hooks that nobody
hung there: 25 us on the H200's host. A compiled version fits whenever the numbers, dtypes and alignments are the same, so it is kept under
exactly those, and it is handed addresses and a stream, about which there is nothing to ask.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_MOST_KEPT = 4096
_compiled: dict[tuple, Any] = {}
_hooks: list[Any] = []  # Triton's launch hooks, once it was needed


def launch(
    kernel: Any, programs: int, tensors: tuple[Any, ...], numbers: tuple, constants: Mapping[str, Any],
    *, warps: int, **options: Any,
) -> None:  # fmt: skip
    """Run `programs` programs of a kernel whose parameters are tensors, then numbers, then constants (in that order), on the current
    stream of the first tensor's device. A tensor that is not there is None. Triton's descriptors of tensors count as tensors."""
    first: Tensor = tensors[0] if isinstance(tensors[0], Tensor) else tensors[0].base
    device = first.device
    if device.index is not None and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, programs, tensors, numbers, constants, warps=warps, **options)
        return
    fixed = tuple(constants.values())
    addresses = [x.data_ptr() if isinstance(x, Tensor) else x for x in tensors]
    kinds = tuple([(x.dtype, x.data_ptr() % 16) if isinstance(x, Tensor) else _kind(x) for x in tensors])
    key = (kernel.fn, device, kinds, numbers, fixed, warps, *options.items())
    compiled = _compiled.get(key)
    if compiled is None:
        _first_launch(key, kernel, programs, tensors, numbers, constants, warps, options)
        return
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    if any(hook.calls for hook in _hooks):  # a profiler listens
        compiled[(programs, 1, 1)](*addresses, *numbers, *fixed, stream=stream)
        return
    compiled.run(
        programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *addresses, *numbers, *fixed
    )  # fmt: skip


def _kind(x: Any) -> Any:
    """What compiled code knows of a descriptor, a number if `ops.tma` made it: sizes, strides and the address travel with the launch."""
    return None if x is None else getattr(x, "kind", None) or (x.base.dtype, *x.block_shape, getattr(x, "layout", None), x.padding)


def _first_launch(key, kernel, programs, tensors, numbers, constants, warps, options) -> None:
    from triton import knobs

    compiled = kernel[(programs,)](*tensors, *numbers, **constants, num_warps=warps, **options)
    if compiled is not None:  # Triton's interpreter compiles nothing
        if len(_compiled) >= _MOST_KEPT:
            _compiled.clear()
        _hooks[:] = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        _compiled[key] = compiled

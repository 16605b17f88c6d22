"""Launching Triton kernels at a fraction of the host time.

`kernel[grid](...)` works out at every call which compiled version fits, and asks the driver about every pointer; on the H200's host that
is most of a launch. A compiled version fits whenever the numbers, dtypes and alignments are the same, so it is kept under exactly those,
and it is handed addresses and a stream, about which there is nothing to ask.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_MOST_KEPT = 4096
_compiled: dict[tuple, Any] = {}


def launch(
    kernel: Any, programs: int, tensors: tuple[Tensor | None, ...], numbers: tuple, constants: Mapping[str, Any],
    *, warps: int, **options: Any,
) -> None:  # fmt: skip
    """Run `programs` programs of a kernel whose parameters are tensors, then numbers, then constants (in that order), on the current
    stream of the first tensor's device. A tensor that is not there is None."""
    assert tensors[0] is not None
    device = tensors[0].device
    if device.index is not None and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(kernel, programs, tensors, numbers, constants, warps=warps, **options)
    fixed = tuple(constants.values())
    addresses = [None if x is None else x.data_ptr() for x in tensors]
    kinds = tuple([None if x is None else (x.dtype, x.data_ptr() % 16) for x in tensors])
    key = (kernel.fn, device, kinds, numbers, fixed, warps, *options.items())
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[(programs, 1, 1)](*addresses, *numbers, *fixed, stream=torch._C._cuda_getCurrentRawStream(device.index))
        return None
    compiled = kernel[(programs,)](*tensors, *numbers, **constants, num_warps=warps, **options)
    if compiled is not None:  # Triton's interpreter compiles nothing
        if len(_compiled) >= _MOST_KEPT:
            _compiled.clear()
        _compiled[key] = compiled
    return None

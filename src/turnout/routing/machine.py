"""Look at this machine, as far as a choice depends on it: packages, cuDNN, and a CPU's oneDNN.

Only `Device` asks here. Guards and costs read their `Device`, which may describe another machine as well.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from math import prod
from pathlib import Path

import torch

from turnout.routing.torch_private import (
    cpu_multiplies_bfloat16,
    cpu_multiplies_float16,
    without_dispatch_modes,
    without_function_modes,
)

_TRIED = (1, 32, 4, 8, 8), (8, 32, 3, 3, 3)  # input [N, C, D, H, W] and weight [F, C, KD, KH, KW] to try


@functools.cache
def has_package(name: str) -> bool:
    """Whether a package, or a module in one ("flash_attn.cute"), is installed. Imports nothing.

    >>> has_package("torch.nn"), has_package("torch.nothing"), has_package("no_such_package")
    (True, False, False)
    """
    package, _, module = name.partition(".")
    if package in sys.modules and sys.modules[package] is None:
        return False
    spec = importlib.util.find_spec(package)
    if spec is None or not module:
        return spec is not None
    folders = spec.submodule_search_locations or ()
    return any(Path(folder, module + end).exists() for folder in folders for end in (".py", "/__init__.py"))


@functools.cache
def one_dnn_dtypes() -> frozenset[torch.dtype]:
    """The dtypes that oneDNN has kernels for on this CPU: float16 and bfloat16 need AVX-512 at least."""
    if not torch.backends.mkldnn.is_available():
        return frozenset()
    halves = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return frozenset([torch.float32, *(dtype for dtype, is_supported in halves.items() if is_supported())])


@functools.cache
def native_halves() -> frozenset[torch.dtype]:
    """The half-precision dtypes that this CPU has multiplication instructions for."""
    native = {
        torch.bfloat16: cpu_multiplies_bfloat16(),
        torch.float16: cpu_multiplies_float16(),
    }
    return frozenset(dtype for dtype, has_instructions in native.items() if has_instructions)


def one_dnn_limit() -> str | None:
    """The newest instruction set that oneDNN is allowed to use; below AVX-512 it has no half types."""
    return os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA")


@functools.cache
def loop_adds_carefully() -> bool:
    """Whether torch's own convolution loop loses fewer digits than oneDNN on this CPU: tried once, on a small
    call.

    The loop is a matrix product, for which MKL adds up in shorter parts on an AMD Zen 4 (oneDNN has 1.6 times
    its error there) than on an Intel.
    """
    from turnout.routing.precision import strict_float32

    if not torch.backends.mkldnn.is_available():
        return False
    strict = strict_float32(("mkldnn", "conv"), ("mkldnn", "matmul"))
    # A mode of the caller may rewrite calls, as that of a split model does.
    no_modes = without_function_modes()
    with no_modes, without_dispatch_modes(), torch.no_grad(), torch.autocast("cpu", enabled=False), strict:
        x, weight = (
            torch.sin(torch.arange(prod(shape), dtype=torch.float64, device="cpu").square()).view(shape)
            for shape in _TRIED
        )
        exact = torch.conv3d(x, weight)
        call = (x.float(), weight.float(), None)
        of_loop = torch.ops.aten.slow_conv3d(call[0], call[1], _TRIED[1][2:])
        of_one_dnn = torch.ops.aten.mkldnn_convolution(*call, [0] * 3, [1] * 3, [1] * 3, 1)
        return float((of_one_dnn - exact).norm()) > 1.35 * float((of_loop - exact).norm())


@functools.cache
def cudnn() -> int | None:
    """The version of cuDNN, such as 91900; None in a build of torch without it."""
    return torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None

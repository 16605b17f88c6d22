"""Launch compiled Triton kernels with low host overhead.

`kernel[grid](...)` takes 25 us of host time (H200 machine): it looks up the specialization, queries every
pointer and runs hooks. While a route runs, `launch` keeps the compiled kernel in the route's `Prepared`,
under the exact numbers, dtypes and alignments, and hands addresses to Triton's launcher in C.
`turnout.launch.plans` does less still for calls that differ in nothing but addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from turnout.launch import operands
from turnout.launch.descriptors import encode, kind
from turnout.routing import torch_private
from turnout.routing.prepared import current

if TYPE_CHECKING:
    from turnout.launch.direct import DirectLauncher

BACKEND = "cuda" if torch.version.hip is None else "hip"  # Triton's name of what torch calls CUDA devices
hooks: list[Any] = []  # Triton's launch hooks, once it was needed
# Where this thread's launches go instead of to a card: see `launch.recording`.
recording: ContextVar[list[Launch] | None] = ContextVar("turnout_recording", default=None)
# What wants to be called before Triton compiles a kernel in this thread: see `launch.ahead.watch`.
watching: ContextVar[Callable[[Callable[[], bool]], object] | None] = ContextVar(
    "turnout_watching", default=None
)


class Launch(NamedTuple):
    """One launch. The kernel's parameters are tensors, then numbers, then constants, in that order.

    A tensor that is not there is None. Descriptors made by `launch.descriptors` count as tensors. Numbers
    that belong together, such as the strides of one tensor, may come as a NamedTuple.
    """

    kernel: Any
    programs: int
    tensors: tuple[Any, ...]
    numbers: tuple
    constants: Mapping[str, Any]
    warps: int
    options: Mapping[str, Any] = {}


def launch(
    kernel: Any,
    programs: int,
    tensors: tuple[Any, ...],
    numbers: tuple,
    constants: Mapping[str, Any],
    *,
    warps: int,
    **options: Any,
) -> None:
    """Run `programs` programs of a kernel on the current stream of the first tensor's device: `Launch`."""
    start(Launch(kernel, programs, tensors, numbers, constants, warps, options))


def start(request: Launch) -> DirectLauncher | None:
    """Launch, and return the compiled kernel; None if there is none, as when launches are recorded."""
    kernel, programs, tensors, numbers, constants, warps, options = request
    device = card_of(tensors[0] if isinstance(tensors[0], Tensor) else tensors[0].base)
    if device is None:
        _start_elsewhere(request)
        return None
    if device.index is not None and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return start(request)
    prepared = current()
    if prepared is None:
        return _start_in_triton(request)
    fixed = tuple(constants.values())
    kinds = tuple([(x.dtype, x.data_ptr() % 16) if isinstance(x, Tensor) else x and kind(x) for x in tensors])
    key = (kernel.fn, device, kinds, numbers, fixed, warps, *options.items())
    launcher: DirectLauncher | None = prepared.values.get(key)
    if launcher is None:
        launcher = _start_in_triton(request)
        return launcher and prepared.keep(key, launcher)
    stream = torch_private.cuda_stream(device.index)
    profiled = any(hook.calls for hook in hooks)
    if launcher.run is not None and not profiled:
        launcher.run(programs, stream, (*_arguments(tensors, launcher.kernel), *numbers, *fixed))
        return launcher
    addresses = [x.data_ptr() if isinstance(x, Tensor) else x for x in tensors]
    launcher.kernel[(programs, 1, 1)](*addresses, *numbers, *fixed, stream=stream)
    return launcher


def card_of(tensor: Tensor) -> torch.device | None:
    """The NVIDIA or AMD card that a tensor is on, or None: launches are then recorded, interpreted or left to
    Triton.
    """
    return tensor.device if tensor.device.type == "cuda" and recording.get() is None else None


def _start_elsewhere(request: Launch) -> None:
    launches = recording.get()
    if launches is not None:
        launches.append(request)
        return
    kernel, programs, tensors, numbers, constants, warps, options = request
    with operands.compiling(options) as supported:
        kernel[(programs,)](*tensors, *numbers, **constants, **compile_options(warps, supported))


def _start_in_triton(request: Launch) -> DirectLauncher | None:
    """Launch through Triton, which compiles the kernel if that was not done before."""
    from triton import knobs

    kernel, programs, tensors, numbers, constants, warps, options = request
    if watching.get() is not None:
        from turnout.launch.ahead import watch

        watch(kernel)
    with operands.compiling(options) as supported:
        compiled = kernel[(programs,)](*tensors, *numbers, **constants, **compile_options(warps, supported))
    if compiled is None:  # Triton's interpreter compiles nothing
        return None
    hooks[:] = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    from turnout.launch.direct import direct_launcher

    return direct_launcher(compiled, _argument_count(tensors) + len(numbers) + len(constants))


def compile_options(warps: int, options: Mapping[str, Any], backend: str = BACKEND) -> dict[str, Any]:
    """Triton's options for a kernel; where an option is None, Triton decides.

    A product and a sum may round once unless a launch says otherwise: Triton 3.9 warns where nobody decides
    that, and from 3.10 on it would not fuse. Only NVIDIA's compiler can be told how many registers to use.
    """
    passed_on = {
        name: value
        for name, value in options.items()
        if value is not None and (backend == "cuda" or name != "maxnreg")
    }
    return {"num_warps": warps, "enable_fp_fusion": True, **passed_on}


def _argument_count(tensors: tuple[Any, ...]) -> int:
    """Arguments of the launcher in C: a descriptor is spread out into the map, the sizes and the strides."""
    return sum(1 if x is None or isinstance(x, Tensor) else 1 + 2 * len(x.shape) for x in tensors)


def _arguments(tensors: tuple[Any, ...], kernel: Any) -> list[Any]:
    """Addresses of tensors; for a descriptor its encoding by Triton, which depends on the address alone."""
    arguments: list[Any] = []
    descriptors = 0
    for x in tensors:
        if x is None:
            arguments.append(None)
        elif isinstance(x, Tensor):
            arguments.append(x.data_ptr())
        else:
            arguments += encode(x, x.base.data_ptr(), kernel, descriptors)
            descriptors += 1
    return arguments

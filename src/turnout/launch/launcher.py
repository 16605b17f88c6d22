"""Launch compiled Triton kernels with low host overhead.

`kernel[grid](...)` takes 25 us of host time (H200 machine): it looks up the specialization, queries every pointer and
runs hooks. `launch` keeps the compiled kernel under the exact numbers, dtypes and alignments, and hands addresses to
Triton's launcher in C. `prepare_launch` does all of that once for calls that differ in nothing but addresses.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from turnout.launch import operands, recording
from turnout.launch.descriptors import encode
from turnout.launch.direct import DirectLauncher, direct_launcher
from turnout.routing.device import is_assumed

_MOST_KEPT = 4096
BACKEND = "cuda" if torch.version.hip is None else "hip"  # Triton's name of what torch calls CUDA devices
_kept: dict[tuple, DirectLauncher] = {}
_hooks: list[Any] = []  # Triton's launch hooks, once it was needed


def launch(
    kernel: Any, programs: int, tensors: tuple[Any, ...], numbers: tuple, constants: Mapping[str, Any],
    *, warps: int, **options: Any,
) -> None:  # fmt: skip
    """Run `programs` programs of a kernel on the current stream of the first tensor's device.

    The kernel's parameters are tensors, then numbers, then constants, in that order. A tensor that is not there is
    None. Descriptors made by `launch.descriptors` count as tensors.
    """
    first: Tensor = tensors[0] if isinstance(tensors[0], Tensor) else tensors[0].base
    device = first.device
    if device.type != "cuda" or recording.recording.get() is not None:
        _launch_elsewhere(kernel, programs, tensors, numbers, constants, warps, options)
        return
    if device.index is not None and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, programs, tensors, numbers, constants, warps=warps, **options)
        return
    fixed = tuple(constants.values())
    kinds = tuple([(x.dtype, x.data_ptr() % 16) if isinstance(x, Tensor) else x and x.kind for x in tensors])
    key = (kernel.fn, device, kinds, numbers, fixed, warps, *options.items())
    kept = _kept.get(key)
    if kept is None:
        _first_launch(key, kernel, programs, tensors, numbers, constants, warps, options)
        return
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    profiled = any(hook.calls for hook in _hooks)
    if kept.run is not None and not profiled:
        kept.run(programs, stream, (*_arguments(tensors, kept.kernel), *numbers, *fixed))
        return
    addresses = [x.data_ptr() if isinstance(x, Tensor) else x for x in tensors]
    kept.kernel[(programs, 1, 1)](*addresses, *numbers, *fixed, stream=stream)


def _launch_elsewhere(kernel, programs, tensors, numbers, constants, warps, options) -> None:
    """A launch on something else than an NVIDIA or AMD card: recorded, interpreted, or left to Triton's own way."""
    launches = recording.recording.get()
    if launches is not None:
        launches.append(recording.Launch(kernel, programs, tensors, numbers, constants, warps, options))
        return
    with operands.compiling(options) as known:
        kernel[(programs,)](*tensors, *numbers, **constants, **compile_options(warps, known))


def _first_launch(key, kernel, programs, tensors, numbers, constants, warps, options) -> None:
    from triton import knobs

    with operands.compiling(options) as known:
        compiled = kernel[(programs,)](*tensors, *numbers, **constants, **compile_options(warps, known))
    if compiled is not None:  # Triton's interpreter compiles nothing
        if len(_kept) >= _MOST_KEPT:
            _kept.clear()
        _hooks[:] = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        _kept[key] = direct_launcher(compiled, _argument_count(tensors) + len(numbers) + len(constants))


def compile_options(warps: int, options: Mapping[str, Any], backend: str = BACKEND) -> dict[str, Any]:
    """What Triton is told besides a kernel's arguments; what is None is left to it.

    A product and a sum may round once unless a launch says otherwise: Triton 3.9 warns where nobody decides that, and
    from 3.10 on it would not fuse. Only NVIDIA's compiler can be told how many registers to use.
    """
    known = {name: value for name, value in options.items() if value is not None and (backend == "cuda" or name != "maxnreg")}
    return {"num_warps": warps, "enable_fp_fusion": True, **known}


def _argument_count(tensors: tuple[Any, ...]) -> int:
    """Arguments of the launcher in C: a descriptor is spread out into the map, the sizes and the strides."""
    return sum(1 if x is None or isinstance(x, Tensor) else 1 + 2 * len(x.shape) for x in tensors)


def _arguments(tensors: tuple[Any, ...], kernel: Any) -> list[Any]:
    """Addresses of tensors; of descriptors what Triton makes of them, which is the same for the same address."""
    arguments: list[Any] = []
    descriptors = 0
    for x in tensors:
        if x is None:
            arguments.append(None)
        elif isinstance(x, Tensor):
            arguments.append(x.data_ptr())
        else:
            arguments += encode(x, kernel, descriptors)
            descriptors += 1
    return arguments


def prepare_launch(
    kernel: Any, programs: int, device: torch.device, numbers: tuple, constants: Mapping[str, Any], *, warps: int, **options: Any
) -> Callable[..., bool]:  # fmt: skip
    """Prepare a launch for tensors that differ from call to call in nothing but their addresses.

    Returns `relaunch(*tensors)`, which says whether it has launched: it does not where 16 bytes do not divide all
    addresses. Complex tensors count as their real views.
    """
    cuda, index, rest = device.type == "cuda" and not is_assumed(), device.index, (*numbers, *constants.values())
    ready = DirectLauncher(None, None)

    def relaunch(*tensors: Tensor | None) -> bool:
        nonlocal ready
        addresses = [0 if x is None else x.data_ptr() for x in tensors]
        if functools.reduce(operator.or_, addresses) & 15:
            return False
        here = cuda and torch._C._cuda_getDevice() == index
        if here and ready.run is not None:
            enter, leave = _hooks
            if not (enter.calls or leave.calls):
                ready.run(programs, torch._C._cuda_getCurrentRawStream(index), (*addresses, *rest))
                return True
        real = tuple([torch.view_as_real(x) if x is not None and x.is_complex() else x for x in tensors])
        launch(kernel, programs, real, numbers, constants, warps=warps, **options)
        if here and ready.kernel is None:
            with operands.compiling(options) as known:  # finds what was launched
                named = {**constants, **compile_options(warps, known)}
                compiled = kernel.warmup(*real, *numbers, **named, grid=(programs,))
            ready = ready if compiled is None else direct_launcher(compiled, len(addresses) + len(rest))
        return True

    return relaunch


class LaunchPlan(NamedTuple):
    """The only launch of a route, as `launch` takes it, and what the route returns: new tensors that it fills, or None."""

    kernel: Any
    programs: int
    tensors: tuple[Tensor | None, ...]
    numbers: tuple
    constants: Mapping[str, Any]
    outputs: Tensor | tuple[Tensor, ...] | None
    warps: int
    options: Mapping[str, Any] = {}


def one_launch(plan: Callable[..., LaunchPlan]) -> Callable[..., Any]:
    """Make a route of a function that allocates outputs and plans the route's only launch."""

    @functools.wraps(plan)
    def run(*args: Any, **config: Any) -> Any:
        planned = plan(*args, **config)
        launch(*planned[:5], warps=planned.warps, **planned.options)
        return planned.outputs

    return run


def prepare_from_plan(run: Callable[..., Any], args: tuple, config: Mapping[str, Any]) -> Callable[..., Any] | None:
    """Bind a route of `one_launch`: one plan for all calls that differ in nothing but addresses.

    A plan may depend on whether 16 bytes divide the addresses, so a call where they do not has its own. None where a
    tensor is copied before the launch, and where two arguments lie in one place, so that nobody can tell which is
    which.
    """
    planned: LaunchPlan = inspect.unwrap(run.func if isinstance(run, functools.partial) else run)(*args, **config)
    outputs = planned.outputs
    fresh = [outputs] if isinstance(outputs, Tensor) else list(outputs or ())
    positions = _positions(planned.tensors, [*args, *fresh])
    if positions is None:
        return None
    allocate = [functools.partial(torch.empty_strided, x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in fresh]
    kernel, programs, (first, *_), numbers, constants, *_ = planned
    assert first is not None
    relaunch = prepare_launch(kernel, programs, first.device, numbers, constants, warps=planned.warps, **planned.options)
    pick, single, nothing = operator.itemgetter(*positions), isinstance(outputs, Tensor), outputs is None

    def call(*args: Any) -> Any:
        outputs = [make() for make in allocate]
        if not relaunch(*pick((*args, *outputs, None))):
            return run(*args)
        return outputs[0] if single else None if nothing else tuple(outputs)

    return call


def _positions(tensors: tuple[Tensor | None, ...], among: list[Any]) -> list[int] | None:
    """Where each tensor is found in a list, by its address: -1 for None. None where that is not certain."""
    known = {i: x for i, x in enumerate(among) if isinstance(x, Tensor) and x.numel()}
    by_address = {x.data_ptr(): i for i, x in known.items()}
    if len(by_address) < len(known) or any(address & 15 for address in by_address):
        return None
    positions = [-1 if x is None else by_address.get(x.data_ptr()) for x in tensors]
    for x, i in zip(tensors, positions, strict=True):
        if x is not None and (i is None or x.dtype not in (known[i].dtype, known[i].dtype.to_real())):
            return None
    return positions  # pyright: ignore[reportReturnType]

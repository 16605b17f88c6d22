"""Launching Triton kernels at a third of the host time.

`kernel[grid](...)` works out at every call which compiled version fits, asks the driver about every pointer and calls hooks that nobody
hung there: 25 us on the H200's host. A compiled version fits whenever the numbers, dtypes and alignments are the same, so it is kept under
exactly those, and it is handed addresses and a stream, about which there is nothing to ask. Descriptors for TMA are encoded once for an
address: an allocator that keeps what is freed hands out the same ones again and again.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

_MOST_KEPT = 4096
_MOST_ENCODED = 256  # addresses of one kind of descriptor
_KNOWN_LAUNCHER = "iiiKKppOOOOOO"  # what the C launcher of Triton 3.6 takes before the kernel's own arguments
if torch.version.hip is not None:  # AMD's launcher takes other arguments
    _KNOWN_LAUNCHER = ""
_compiled: dict[tuple, Compiled] = {}
_hooks: list[Any] = []  # Triton's launch hooks, once it was needed


class Compiled(NamedTuple):
    """A kernel that was launched before. `launcher` is Triton's in C, without the Python in front of it; None where it is another one."""

    kernel: Any
    launcher: Callable[..., None] | None
    between: tuple = ()  # what the launcher takes between the stream and the kernel's own arguments


def launch(
    kernel: Any, programs: int, tensors: tuple[Any, ...], numbers: tuple, constants: Mapping[str, Any],
    *, warps: int, **options: Any,
) -> None:  # fmt: skip
    """Run `programs` programs of a kernel whose parameters are tensors, then numbers, then constants (in that order), on the current
    stream of the first tensor's device. A tensor that is not there is None. Descriptors made by `ops.tma` count as tensors."""
    first: Tensor = tensors[0] if isinstance(tensors[0], Tensor) else tensors[0].base
    device = first.device
    if device.index is not None and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, programs, tensors, numbers, constants, warps=warps, **options)
        return
    fixed = tuple(constants.values())
    kinds = tuple([(x.dtype, x.data_ptr() % 16) if isinstance(x, Tensor) else x and x.kind for x in tensors])
    key = (kernel.fn, device, kinds, numbers, fixed, warps, *options.items())
    compiled = _compiled.get(key)
    if compiled is None:
        _first_launch(key, kernel, programs, tensors, numbers, constants, warps, options)
        return
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    if compiled.launcher is not None and not any(hook.calls for hook in _hooks):
        compiled.launcher(programs, 1, 1, stream, *compiled.between, *_arguments(tensors, compiled.kernel), *numbers, *fixed)
        return
    addresses = [x.data_ptr() if isinstance(x, Tensor) else x for x in tensors]
    if any(hook.calls for hook in _hooks):  # a profiler listens
        compiled.kernel[(programs, 1, 1)](*addresses, *numbers, *fixed, stream=stream)
        return
    run, function, about = compiled.kernel.run, compiled.kernel.function, compiled.kernel.packed_metadata
    run(programs, 1, 1, stream, function, about, None, None, None, *addresses, *numbers, *fixed)


def repeated(
    kernel: Any, programs: int, device: torch.device, numbers: tuple, constants: Mapping[str, Any], *, warps: int, **options: Any
) -> Callable[..., bool]:  # fmt: skip
    """`launch` for tensors on one device that differ from time to time in nothing but their addresses: those alone are looked at. Says
    whether it has launched: not where 16 bytes do not divide all addresses. Complex tensors count as their real views."""
    cuda, index, rest = device.type == "cuda", device.index, (*numbers, *constants.values())
    ready = Compiled(None, None)

    def again(*tensors: Tensor | None) -> bool:
        nonlocal ready
        addresses = [0 if x is None else x.data_ptr() for x in tensors]
        if functools.reduce(operator.or_, addresses) & 15:
            return False
        here = cuda and torch._C._cuda_getDevice() == index
        if here and ready.launcher is not None:
            enter, leave = _hooks
            if not (enter.calls or leave.calls):
                ready.launcher(programs, 1, 1, torch._C._cuda_getCurrentRawStream(index), *ready.between, *addresses, *rest)
                return True
        real = tuple([torch.view_as_real(x) if x is not None and x.is_complex() else x for x in tensors])
        launch(kernel, programs, real, numbers, constants, warps=warps, **options)
        if here and ready.kernel is None:
            compiled = kernel.warmup(*real, *numbers, **constants, grid=(programs,), num_warps=warps, **options)  # what was just launched
            ready = ready if compiled is None else _in_short(compiled)
        return True

    return again


class Planned(NamedTuple):
    """The only launch of a route, as `launch` takes it, and what the route returns: fresh tensors which that launch fills, or None."""

    kernel: Any
    programs: int
    tensors: tuple[Tensor | None, ...]
    numbers: tuple
    constants: Mapping[str, Any]
    outputs: Tensor | tuple[Tensor, ...] | None
    warps: int
    options: Mapping[str, Any] = {}


def one_launch(plan: Callable[..., Planned]) -> Callable[..., Any]:
    """A route from what plans its only launch and allocates its outputs, and does nothing else."""

    @functools.wraps(plan)
    def run(*args: Any, **config: Any) -> Any:
        planned = plan(*args, **config)
        launch(*planned[:5], warps=planned.warps, **planned.options)
        return planned.outputs

    return run


def planned_once(run: Callable[..., Any], args: tuple, config: Mapping[str, Any]) -> Callable[..., Any] | None:
    """What binds a route of `one_launch`: one plan for all calls that differ in nothing but addresses. A plan may depend on whether 16
    bytes divide them, so a call where they do not has its own. None where a tensor is moved before the launch, and where it cannot be told
    which argument is which, as two lie in one place."""
    planned: Planned = inspect.unwrap(run.func if isinstance(run, functools.partial) else run)(*args, **config)
    outputs = planned.outputs
    fresh = [outputs] if isinstance(outputs, Tensor) else list(outputs or ())
    places = _places(planned.tensors, [*args, *fresh])
    if places is None:
        return None
    make = [functools.partial(torch.empty_strided, x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in fresh]
    kernel, programs, (first, *_), numbers, constants, *_ = planned
    assert first is not None
    again = repeated(kernel, programs, first.device, numbers, constants, warps=planned.warps, **planned.options)
    pick, single, nothing = operator.itemgetter(*places), isinstance(outputs, Tensor), outputs is None

    def call(*args: Any) -> Any:
        made = [one() for one in make]
        if not again(*pick((*args, *made, None))):
            return run(*args)
        return made[0] if single else None if nothing else tuple(made)

    return call


def _places(tensors: tuple[Tensor | None, ...], among: list[Any]) -> list[int] | None:
    """Where each of some tensors is found in a list, by its address: -1 for None. None where that is not certain."""
    known = {i: x for i, x in enumerate(among) if isinstance(x, Tensor) and x.numel()}
    at = {x.data_ptr(): i for i, x in known.items()}
    if len(at) < len(known) or any(address & 15 for address in at):
        return None
    places = [-1 if x is None else at.get(x.data_ptr()) for x in tensors]
    for x, i in zip(tensors, places, strict=True):
        if x is not None and (i is None or x.dtype not in (known[i].dtype, known[i].dtype.to_real())):
            return None
    return places  # pyright: ignore[reportReturnType]


def _arguments(tensors: tuple[Any, ...], kernel: Any) -> list[Any]:
    """Addresses of tensors; of descriptors what Triton makes of them, which is the same for the same address."""
    found: list[Any] = []
    for i, x in enumerate(tensors):
        if x is None:
            found.append(None)
        elif isinstance(x, Tensor):
            found.append(x.data_ptr())
        else:
            address = x.base.data_ptr()
            encoded = x.encoded.get(address)
            if encoded is None:
                if len(x.encoded) >= _MOST_ENCODED:
                    x.encoded.clear()
                encoded = x.encoded[address] = _encode(x, kernel, sum(isinstance(t, type(x)) for t in tensors[:i]))
            found += encoded
    return found


def _encode(descriptor: Any, kernel: Any, index: int) -> list[Any]:
    from triton.backends.nvidia.driver import make_tensordesc_arg

    return make_tensordesc_arg(descriptor, kernel.metadata.tensordesc_meta[index])


def _first_launch(key, kernel, programs, tensors, numbers, constants, warps, options) -> None:
    from triton import knobs

    compiled = kernel[(programs,)](*tensors, *numbers, **constants, num_warps=warps, **options)
    if compiled is not None:  # Triton's interpreter compiles nothing
        if len(_compiled) >= _MOST_KEPT:
            _compiled.clear()
        _hooks[:] = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        _compiled[key] = _in_short(compiled)


def _in_short(compiled: Any) -> Compiled:
    """The way past Triton's Python, where its launcher in C is the one we know and needs no memory of its own."""
    from triton.backends.nvidia import driver

    run, launcher = compiled.run, compiled.run.launch
    if getattr(driver, "_BASE_ARGS_FORMAT", None) != _KNOWN_LAUNCHER or run.global_scratch_size or run.profile_scratch_size:
        return Compiled(compiled, None)
    if hasattr(launcher, "__closure__"):  # it encodes descriptors, then calls what it closes over
        launcher = dict(zip(launcher.__code__.co_freevars, launcher.__closure__, strict=True))["launcher"].cell_contents
    between = (compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None, compiled.packed_metadata, None, None, None)
    return Compiled(compiled, launcher, between)

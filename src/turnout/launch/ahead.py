"""Compile launches ahead into Triton's cache on disk, look them up there, and intercept those that are
missing.

A `Spec` describes a launch by what its compiled code depends on, so that another process can compile it.
Triton specializes for properties of arguments (dtype, divisible by 16, equal to one), so a spec holds numbers
themselves, and of an address whether it is aligned.
"""
# pyright: reportMissingModuleSource=false, reportAttributeAccessIssue=false

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from turnout.launch import operands
from turnout.launch.crosscompile import compiling_for
from turnout.launch.descriptors import described, pattern
from turnout.launch.launcher import compile_options, watching
from turnout.launch.recording import Launch
from turnout.launch.specialization import names_of, unspecialized
from turnout.routing.device import Device


class Block(NamedTuple):
    """What compiled code knows of a descriptor for TMA."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    block: tuple[int, ...]


class Address(NamedTuple):
    """What compiled code knows of a tensor."""

    dtype: torch.dtype
    aligned: bool


class Spec(NamedTuple):
    """A launch as another process is told of it. kernel: "package.module:function". unspecialized: see
    `launch.specialization`."""

    kernel: str
    unspecialized: tuple[str, ...]
    operands: tuple[Address | Block | None, ...]
    numbers: tuple
    constants: tuple[tuple[str, Any], ...]
    warps: int
    options: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        """The kernel's own name, and the dtype it is for."""
        dtype = next((x.dtype for x in self.operands if x is not None), None)
        return f"{self.kernel.rpartition(':')[2]} {str(dtype).removeprefix('torch.')}"


def specs_of(launches: Iterable[Launch]) -> list[Spec]:
    """What to compile for these launches, each once, in their order."""
    return list(dict.fromkeys(map(_spec, launches)))


def _spec(launch: Launch) -> Spec:
    function = launch.kernel.fn
    return Spec(
        f"{function.__module__}:{function.__qualname__}",
        names_of(launch.kernel),
        tuple(map(_operand, launch.tensors)),
        tuple(launch.numbers),
        tuple(launch.constants.items()),
        launch.warps,
        tuple(launch.options.items()),
    )


def _operand(x: Any) -> Address | Block | None:
    if x is None:
        return None
    if isinstance(x, Tensor):
        return Address(x.dtype, x.data_ptr() % 16 == 0)
    return Block(tuple(x.shape), tuple(x.strides), x.base.dtype, tuple(x.block_shape))


def launch_of(spec: Spec) -> Launch:
    """A launch with the compiled code of this spec, on tensors that are nowhere."""
    module, _, name = spec.kernel.partition(":")
    kernel = unspecialized(getattr(importlib.import_module(module), name), *spec.unspecialized)
    tensors = tuple(map(_stand_in, spec.operands))
    return Launch(kernel, 1, tensors, spec.numbers, dict(spec.constants), spec.warps, dict(spec.options))


def _stand_in(operand: Address | Block | None) -> Any:
    if operand is None:
        return None
    stand_in = torch.empty(2, dtype=operand.dtype, device="meta")
    if isinstance(operand, Block):
        return described(stand_in, pattern(*operand))
    return stand_in if operand.aligned else stand_in[1:]


class _MissingError(Exception):
    """Triton would have to compile."""


class Found(NamedTuple):
    """What Triton's cache says of a launch: launches with the same key share their code. size: of the
    kernel's source, by which the longest compilations are begun first."""

    key: str
    present: bool
    size: int


def look_up(launch: Launch, device: Device) -> Found:
    """Ask Triton's cache on disk for the code of a launch on a device; nothing is compiled. Not for a process
    that launches kernels in another thread."""
    from triton.compiler import compile as compile_source

    hashes = []

    def only_look(source: Any, target: Any, options: Any, **more: Any) -> Any:
        hashes.append(f"{source.hash()} {sorted(options.items(), key=str)}")

        def stop(*args: Any) -> Any:
            raise _MissingError

        source.make_ir = stop
        return compile_source(source, target=target, options=options, **more)

    kernel = launch.kernel
    with compiling_for(device):
        _ = kernel.device_caches[_current_device()]  # makes `kernel.compile` what it is
        before, kernel.compile = kernel.compile, only_look
        try:
            key = _warm_up(launch, device).hash
            present = True
        except _MissingError:
            [key], present = hashes, False
        finally:
            kernel.compile = before
    return Found(f"{kernel.fn.__module__}:{kernel.fn.__qualname__} {key}", present, len(kernel.src))


def watch(kernel: Any) -> None:
    """Call the thread's `launcher.watching`, where one is set, before Triton compiles this kernel because it
    is not in the cache on disk.

    It is called with a function that looks in the cache again. If the kernel is there then, it is loaded;
    otherwise Triton compiles it. A kernel that is in the cache costs nothing more.
    """
    if not hasattr(kernel, "device_caches"):  # Triton's interpreter compiles nothing
        return
    _ = kernel.device_caches[_current_device()]  # makes `kernel.compile` what it is
    if not isinstance(kernel.compile, _Watched):
        kernel.compile = _Watched(kernel.compile)


class _Watched:
    """Replaces a kernel's `compile`. It holds no state, so threads may share it."""

    def __init__(self, compile: Callable[..., Any]):
        self.compile = compile

    def __call__(self, source: Any, *args: Any, **kwargs: Any) -> Any:
        before = watching.get()
        if before is not None:
            compiled = self._cached(source, *args, **kwargs)
            if compiled is not None:
                return compiled
            before(lambda: self._cached(source, *args, **kwargs) is None)
        return self.compile(source, *args, **kwargs)

    def _cached(self, source: Any, *args: Any, **kwargs: Any) -> Any:
        """The compiled kernel if it is in the cache on disk, else None."""

        def stop(*args: Any) -> Any:
            raise _MissingError

        source.make_ir = stop
        try:
            return self.compile(source, *args, **kwargs)
        except _MissingError:
            return None
        finally:
            del source.make_ir


def compile_ahead(launch: Launch, device: Device) -> None:
    """Compile a launch for a device into Triton's cache on disk."""
    with compiling_for(device):
        _warm_up(launch, device)


def _warm_up(launch: Launch, device: Device) -> Any:
    with operands.compiling(launch.options) as known_options:
        options = compile_options(launch.warps, known_options, device.backend or "cuda")
        arguments = (*launch.tensors, *launch.numbers)
        return launch.kernel.warmup(*arguments, **launch.constants, grid=(launch.programs,), **options)


def _current_device() -> Any:
    from triton.runtime import driver

    return driver.active.get_current_device()

"""Compile recorded launches for a card that need not be here, and read what the compiler made of them.

Triton asks its driver for the card it compiles for. Here a stand-in answers, so that everything else is as in
a real
launch: the same specialization of every argument, the same key in Triton's cache on disk.
"""
# pyright: reportMissingModuleSource=false, reportAttributeAccessIssue=false, reportArgumentType=false

from __future__ import annotations

import contextlib
import io
import re
import struct
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from turnout.launch import operands
from turnout.launch.launcher import Launch, compile_options
from turnout.routing.device import Device


class Resources(NamedTuple):
    """What a compiled kernel needs: registers of a thread, bytes of its stack (where registers are spilled
    to), bytes of shared memory of a block; and whether ptxas made wgmma instructions wait for one another."""

    registers: int
    stack: int
    shared: int
    serialized: bool


class Compiled(NamedTuple):
    """A launch, what Triton compiled for it, and what that needs."""

    launch: Launch
    kernel: Any
    resources: Resources


def target_of(device: Device) -> Any:
    """Triton's name for the processor of a device."""
    from triton.backends.compiler import GPUTarget

    if device.backend == "hip":
        return GPUTarget("hip", _GFX[device.name], 64)
    if device.backend != "cuda" or device.capability is None:
        raise ValueError(f"device {device.name}, kernels are compiled for NVIDIA's and AMD's cards")
    major, minor = device.capability
    return GPUTarget("cuda", 10 * major + minor, 32)


_GFX = {"AMD Instinct MI300X": "gfx942"}


class _Driver:
    """Stands in for Triton's driver while something is compiled. Each target has a device number of its own,
    under which Triton keeps compiled kernels."""

    def __init__(self, target: Any):
        self.target = target

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> Any:
        return ("turnout", self.target.backend, self.target.arch)

    def get_current_stream(self, device: Any) -> int:
        return 0


@contextlib.contextmanager
def compiling_for(device: Device) -> Iterator[None]:
    """While this is entered, Triton compiles for `device` and can launch nothing. For the whole process."""
    from triton.runtime import driver

    before = driver._active
    driver.set_active(_Driver(target_of(device)))
    try:
        yield
    finally:
        driver._active = before


def compile_launches(launches: Iterable[Launch], device: Device) -> list[Compiled]:
    """Compile each launch for a device; those that need the same code are compiled once."""
    compiled: dict[str, Compiled] = {}
    for launch in launches:
        with compiling_for(device):
            kernel, log = _compile(launch, device.backend or "cuda")
        if kernel.hash not in compiled:
            compiled[kernel.hash] = Compiled(launch, kernel, _resources(kernel, log))
    return list(compiled.values())


def _compile(launch: Launch, backend: str) -> tuple[Any, str]:
    """The compiled kernel of a launch, and what ptxas said; nothing if it was in Triton's cache already."""
    from triton import knobs

    ptxas_log = io.StringIO()
    with (
        operands.compiling(launch.options) as known,
        knobs.nvidia.scope(),
        contextlib.redirect_stdout(ptxas_log),
    ):
        knobs.nvidia.dump_ptxas_log = True
        options = compile_options(launch.warps, known, backend)
        arguments = (*launch.tensors, *launch.numbers)
        kernel = launch.kernel.warmup(*arguments, **launch.constants, grid=(launch.programs,), **options)
    return kernel, ptxas_log.getvalue()


def _resources(kernel: Any, log: str) -> Resources:
    if "cubin" in kernel.asm:
        attributes = cubin_attributes(kernel.asm["cubin"])
        return Resources(
            attributes["registers"],
            attributes["stack"],
            kernel.metadata.shared,
            "wgmma" in log and "serialized" in log,
        )
    text = kernel.asm["amdgcn"]
    registers, stack = (
        max(map(int, re.findall(rf"\.{name}:\s+(\d+)", text)))
        for name in ("vgpr_count", "private_segment_fixed_size")
    )
    return Resources(registers, stack, kernel.metadata.shared, False)


_REGISTERS, _FRAME = 0x2F, 0x11  # EIATTR_REGCOUNT, EIATTR_FRAME_SIZE
_VALUE_IN_PLACE, _VALUE_BEHIND = (0x01, 0x02, 0x03), 0x04  # EIFMT_NVAL, BVAL, HVAL; EIFMT_SVAL
_SECTION = struct.Struct("<IIQQQQIIQQ")  # Elf64_Shdr


def cubin_attributes(cubin: bytes) -> dict[str, int]:
    """Registers and stack bytes of a thread, the most of any function in a CUDA binary.

    They stand in the section .nv.info of the ELF file: pairs of a function's number and a value.
    """
    (sections_at,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [_SECTION.unpack_from(cubin, sections_at + i * size) for i in range(count)]
    names_at = headers[names_index][4]
    values = {_REGISTERS: [0], _FRAME: [0]}
    for name, _, _, _, at, length, *_ in headers:
        start = names_at + name
        if cubin[start : cubin.index(0, start)] != b".nv.info":
            continue
        end = at + length
        while at < end:
            form, attribute, inline = struct.unpack_from("<BBH", cubin, at)
            at += 4
            if form in _VALUE_IN_PLACE:
                continue
            if form != _VALUE_BEHIND:
                raise ValueError(f"form {form} of an attribute in .nv.info, this reads 1 to 4")
            if attribute in values:
                values[attribute].append(struct.unpack_from("<II", cubin, at)[1])
            at += inline
    return {"registers": max(values[_REGISTERS]), "stack": max(values[_FRAME])}

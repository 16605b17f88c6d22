"""Describe devices to costs and guards: peaks, limits and fitted constants, from `devices/`, with sources.

Costs and guards see a `Device`, never a `torch.device`, so a choice can be explained for a card that is not
in this machine.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from turnout.routing import device_files, machine, versions
from turnout.routing.names import device_here, not_known

KIB, MIB = 2**10, 2**20
FITTED_ON = "nvidia-h200"  # the device whose constants stand in for cards that have none of their own
# Packages that are taken to be missing beside a card that is named and not here.
OPTIONAL = frozenset(["flash_attn_interface", "flash_attn.cute"])


class Figure(NamedTuple):
    """A number and where it comes from."""

    value: float
    source: str


@dataclass(frozen=True)
class Device:
    """A device, as far as costs and guards depend on it.

    type: torch's name for its type ("cuda" for AMD's cards too). backend: Triton's name for it ("cuda",
    "hip"), None where Triton has no driver for it. bandwidth: bytes/s. flops: FLOP/s by dtype name ("tf32"
    for that mode). capability: NVIDIA's compute capability. units: multiprocessors or cores. cache, shared:
    bytes of the last-level cache, and of the shared memory that one block may use. sibling: the name of a
    card with the same processor, whose measured rows stand in where this card has none. triton, cudnn: the
    versions in use, such as (3, 6) and 91900; None for a card that is only named, for which the newest
    version with measured rows counts. fitted_on: the file in `devices/` with the constants of cost models.
    refitted: constants that replace some of those, by section and name. lacks: packages that routes need and
    that are missing; None means that this machine is searched for them.

    Only for a CPU: threads: how many torch uses. vectors: torch's name for its vector instructions. one_dnn:
    the dtypes that oneDNN has kernels for. native_halves: the half types that it has instructions for.
    one_dnn_limit: the newest instruction set that oneDNN is allowed to use, None for any. careful_loop:
    whether torch's own convolution loop loses fewer digits than oneDNN; None means that this is tried when
    first needed.

    >>> Device.named("h200").slug
    'nvidia-h200'
    """

    name: str
    type: str
    bandwidth: Figure | None = None
    flops: Mapping[str, Figure] = field(default_factory=dict, hash=False)
    capability: tuple[int, int] | None = None
    units: int = 1
    cache: int = 0
    shared: int = 0
    backend: str | None = None
    sibling: str | None = None
    triton: versions.Version | None = None
    cudnn: int | None = None
    fitted_on: str = FITTED_ON
    refitted: Mapping[str, Mapping[str, float]] = field(default_factory=dict, hash=False)
    lacks: frozenset[str] | None = OPTIONAL
    threads: int = 1
    vectors: str = ""
    one_dnn: frozenset[torch.dtype] = frozenset()
    native_halves: frozenset[torch.dtype] = frozenset()
    one_dnn_limit: str | None = None
    careful_loop: bool | None = None

    def fitted(self, section: str) -> device_files.Constants:
        """The constants that costs of one kind were fitted with, such as those of "dot.two-stage".

        >>> Device.named("a100").fitted("dot.two-stage").share
        0.9
        """
        values: Mapping[str, float] = device_files.sections(self.fitted_on).get(section, {})
        if self.refitted:
            values = {**values, **self.refitted.get(section, {})}
        return device_files.Constants(section, values)

    def has(self, package: str) -> bool:
        """Whether a package that a route needs is there.

        >>> Device.named("h200").has("triton"), Device.named("h200").has("flash_attn_interface")
        (True, False)
        """
        return machine.has_package(package) if self.lacks is None else package not in self.lacks

    @property
    def cores(self) -> int:
        """How many of a CPU's cores torch uses."""
        return min(self.units, self.threads)

    @property
    def has_avx512(self) -> bool:
        """Whether oneDNN uses AVX-512, told by its bfloat16 kernels: they exist only with it."""
        return torch.bfloat16 in self.one_dnn

    @property
    def loop_adds_carefully(self) -> bool:
        """Whether torch's own loop of a convolution on this CPU loses fewer digits than oneDNN."""
        return machine.loop_adds_carefully() if self.careful_loop is None else self.careful_loop

    @property
    def machine(self) -> dict[str, int | str]:
        """The settings of a CPU that a timing depends on, as rows store them; empty for a GPU."""
        if self.type != "cpu":
            return {}
        settings: dict[str, int | str] = {"threads": self.threads, "vectors": self.vectors}
        return settings | ({"one_dnn_limit": self.one_dnn_limit} if self.one_dnn_limit else {})

    @property
    def slug(self) -> str:
        """The name in file names: `NVIDIA H200` is `nvidia-h200`."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")

    def seconds(self, bytes: float, flops: float = 0, dtype: torch.dtype = torch.float32) -> float | None:
        """The roofline bound: the longer of moving the bytes and doing the arithmetic.

        None where a peak is unknown.
        """
        if self.bandwidth is None:
            return None
        moving = bytes / self.bandwidth.value
        if not flops:
            return moving
        peak = self.flops.get(str(dtype).removeprefix("torch."))
        return None if peak is None else max(moving, flops / peak.value)

    @staticmethod
    def named(name: str) -> Device:
        """The known device that people call `name`, whether or not this machine has it; "cuda" is the GPU
        that is here.

        Some words of the driver's name will do, with or without spaces and hyphens. Where they fit several
        cards and have a number in them ("h100"), the first in `known_cards()` is meant.

        >>> spellings = ("4090", "rtx4090", "rtx-4090", "RTX 4090", "GeForce RTX 4090")
        >>> {Device.named(name).name for name in spellings}
        {'NVIDIA GeForce RTX 4090'}
        """
        letters = _letters(name)
        if letters in ("cpu", "cpu0"):
            return cpu()
        if re.fullmatch(r"cuda\d*", letters):
            try:
                return Device.of(device_here(name))
            except ValueError as mistake:
                raise ValueError(f"{mistake}, or name a card, such as h200") from mistake
        matches = [device for device in known_cards() if letters and letters in _aliases(device)]
        has_number = any(letter.isdigit() for letter in letters)
        if not matches or (len(matches) > 1 and not has_number):
            slugs = ["cpu", *(device.slug for device in known_cards())]
            if not matches:
                spellings = {alias: device.slug for device in known_cards() for alias in _aliases(device)}
                raise not_known("device", name, slugs, spellings)
            fitting = ", ".join(device.slug for device in matches)
            raise ValueError(f"device {name!r} fits {fitting}; name one of: {', '.join(slugs)}")
        return next((device for device in matches if letters == _letters(device.name)), matches[0])

    @staticmethod
    def of(device: torch.device | str) -> Device:
        """The device behind a `torch.device`.

        A CUDA device without a driver has no peaks and no capability.
        """
        assumed_device = _assumed.get()
        if assumed_device is not None:
            return assumed_device
        cached = _cuda_devices.get(device)
        if cached is not None:
            return cached
        device = torch.device(device)
        if device.type == "cpu":
            return cpu()
        if device.type != "cuda":
            return _of_other(device.type)
        if not torch.cuda.is_available():
            return Device(name="unknown CUDA device", type="cuda", lacks=None)
        card = _of_cuda(torch.cuda.current_device() if device.index is None else device.index)
        if device.index is not None:
            _cuda_devices[device] = card
        return card


_cuda_devices: dict[Any, Device] = {}  # by `torch.device`: asking CUDA costs microseconds at every launch
_assumed: ContextVar[Device | None] = ContextVar("turnout_assumed_device", default=None)
_planning: ContextVar[bool] = ContextVar("turnout_planning", default=False)


@contextlib.contextmanager
def assumed(device: Device) -> Iterator[None]:
    """Inside this block every tensor counts as being on `device`: launches are planned for it, nothing runs.

    It is for finding out what a call would launch (`turnout.launch.recorded`). It holds for this thread
    only: what other threads compute stays on its own device.
    """
    token = _assumed.set(device)
    try:
        yield
    finally:
        _assumed.reset(token)


@contextlib.contextmanager
def planning_calls() -> Iterator[None]:
    """Inside this block calls of this thread are only planned: tensors have no memory, nothing is cached."""
    token = _planning.set(True)
    try:
        yield
    finally:
        _planning.reset(token)


def is_planning() -> bool:
    """Whether calls in this thread are only planned."""
    return _planning.get()


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "", name.lower())


@functools.cache
def _aliases(device: Device) -> frozenset[str]:
    """What people may call a card, in letters and digits: any of the words of its name, in their order."""
    words = [_letters(word) for word in re.split(r"[ -]", device.name)]
    if "hbm3" in words or "sxm4" in words:  # the driver names an H100 SXM by its memory
        words += ["sxm"]
    selections = itertools.product((False, True), repeat=len(words))
    return frozenset("".join(itertools.compress(words, selection)) for selection in selections)


@functools.cache
def _of_other(device_type: str) -> Device:
    """A device of another type than "cpu" and "cuda"; plain Triton routes take it if Triton drives it."""
    return Device(name=device_type, type=device_type, backend=_triton_backend(device_type), lacks=None)


def _triton_backend(device_type: str) -> str | None:
    """Triton's name for the kind of device that torch calls `device_type`, if Triton's driver is for it."""
    if versions.triton() is None:
        return None
    try:
        from triton.runtime import driver

        active: Any = driver.active
        return (
            active.get_current_target().backend
            if active.get_active_torch_device().type == device_type
            else None
        )
    except Exception:  # no driver is active: Triton raises whatever its backends raise
        return None


def with_software_here(card: Device) -> Device:
    """A card that is only named, with the Triton, cuDNN and packages of this machine."""
    return replace(card, **_software())


def _software() -> dict[str, Any]:
    return {"triton": versions.minor(versions.triton()), "cudnn": machine.cudnn(), "lacks": None}


@functools.cache
def _of_cuda(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    software = _software()
    card = {device.name: device for device in known_cards()}.get(properties.name)
    if card is not None:
        return replace(card, **software)
    # A card without a file in `devices/` gets the memory speed that its driver states, so that costs bound by
    # memory still mean something.
    clock = getattr(properties, "memory_clock_rate", 0)  # kHz
    width = getattr(properties, "memory_bus_width", 0)  # bits
    source = "memory clock and bus width as the driver states them"
    return Device(
        name=properties.name,
        type="cuda",
        bandwidth=Figure(2e3 * clock * width / 8, source) if clock and width else None,
        capability=(properties.major, properties.minor),
        units=properties.multi_processor_count,
        cache=properties.L2_cache_size,
        shared=getattr(properties, "shared_memory_per_block_optin", 0),
        backend=None if versions.triton() is None else "hip" if torch.version.hip else "cuda",
        **software,
    )


def cpu() -> Device:
    """This machine's CPU, with peaks that were measured on another one.

    They set the ratio of bytes to fixed costs in estimates; rows of `tune` replace those estimates.
    """
    return _cpu(torch.get_num_threads(), machine.one_dnn_limit())


@functools.cache
def _cpu(threads: int, one_dnn_limit: str | None) -> Device:
    file = device_files.load(device_files.CPU)
    peaks, cores = file["peaks"], os.cpu_count() or 1
    flops = {
        kind: Figure(peaks[kind] * cores / peaks["cores"], peaks["source"]) for kind in ("float32", "float64")
    }
    return Device(
        name="cpu",
        type="cpu",
        bandwidth=Figure(peaks["bytes"], peaks["source"]),
        units=cores,
        cache=file["cache_mib"] * MIB,
        flops=flops,
        fitted_on=device_files.CPU,
        lacks=None,
        threads=threads,
        vectors=torch.backends.cpu.get_cpu_capability(),
        one_dnn=machine.one_dnn_dtypes(),
        native_halves=machine.native_halves(),
        one_dnn_limit=one_dnn_limit,
    )


@functools.cache
def known_cards() -> tuple[Device, ...]:
    """The cards in `devices/`, in the order in which a name that fits several is resolved."""
    return tuple(map(_card, device_files.cards()))


def _card(file: Mapping[str, Any]) -> Device:
    peaks = file["peaks"]
    flops = {
        kind: Figure(peaks[kind] * 1e12, peaks["source"])
        for kind in ("bfloat16", "float16", "tf32", "float32")
    }
    major, minor = file["capability"]
    return Device(
        name=file["name"],
        type="cuda",
        backend=file["backend"],
        capability=(major, minor),
        units=file["units"],
        cache=int(file["cache_mib"] * MIB),
        shared=file["shared_kib"] * KIB,
        sibling=file.get("sibling"),
        flops=flops,
        bandwidth=Figure(peaks["terabytes"] * 1e12, peaks["source"]),
        fitted_on=file.get("fitted_on", FITTED_ON),
    )

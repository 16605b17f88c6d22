"""Devices: what costs and guards may know of one. Peaks and fitted constants come from `devices/`, each with
its source.

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
from turnout.routing.names import not_known

KIB, MIB = 2**10, 2**20
FITTED_ON = "nvidia-h200"  # whose constants hold for cards that have none of their own
OPTIONAL = frozenset(
    ["flash_attn_interface", "flash_attn.cute"]
)  # packages that a card asked for by name is without


class Figure(NamedTuple):
    """A number and where it comes from."""

    value: float
    source: str


@dataclass(frozen=True)
class Device:
    """What a cost or a guard may know of a device.

    type: torch's name of it ("cuda" for AMD's cards too). backend: Triton's name of it ("cuda", "hip"), None
    where Triton has no driver for it. bandwidth: bytes/s. flops: FLOP/s by dtype name ("tf32" for its mode).
    capability: NVIDIA's compute capability. units: multiprocessors or cores. cache, shared: bytes of the
    last-level cache, and of shared memory that one block may use. sibling: the name of a card with the same
    processor, whose measured rows stand in where this one has none. triton: the version that compiles for it,
    cudnn: torch's, such as 91900; None for a card that was asked for by name, of which nobody knows: the
    newest that was measured counts.
    fitted_on: the file in `devices/` whose constants costs take; refitted: constants in place of some of
    those, by section and name. lacks: packages that routes need and that are not there; None: this machine is
    asked.

    Of a CPU also: threads, that torch uses. vectors: torch's name of its instructions. one_dnn: the dtypes
    that oneDNN has kernels for. native_halves: the half types that it has instructions for. one_dnn_limit:
    the instruction set that oneDNN was told not to go beyond. careful_loop: whether torch's own loop of a
    convolution loses fewer digits than oneDNN; None: it is tried when first asked.

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
        """Whether oneDNN uses AVX-512: its bfloat16 kernels need it, and are gone where it was told to do
        without.
        """
        return torch.bfloat16 in self.one_dnn

    @property
    def loop_adds_carefully(self) -> bool:
        """Whether torch's own loop of a convolution on this CPU loses fewer digits than oneDNN."""
        return machine.loop_adds_carefully() if self.careful_loop is None else self.careful_loop

    @property
    def machine(self) -> dict[str, int | str]:
        """What a timing depends on besides the problem and the software, as rows keep it.

        A GPU's: on nothing else.
        """
        if self.type != "cpu":
            return {}
        found: dict[str, int | str] = {"threads": self.threads, "vectors": self.vectors}
        return found | ({"one_dnn_limit": self.one_dnn_limit} if self.one_dnn_limit else {})

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
        """The known device that people call `name`, whether or not this machine has it.

        Some words of the driver's name will do, with or without spaces and hyphens. Where they fit several
        cards and have a number in them ("h100"), the first in `known_cards()` is meant.

        >>> spellings = ("4090", "rtx4090", "rtx-4090", "RTX 4090", "GeForce RTX 4090")
        >>> {Device.named(name).name for name in spellings}
        {'NVIDIA GeForce RTX 4090'}
        """
        wanted = _letters(name)
        if wanted == "cpu":
            return cpu()
        matches = [device for device in known_cards() if wanted and wanted in _aliases(device)]
        has_number = any(letter.isdigit() for letter in wanted)
        if not matches or (len(matches) > 1 and not has_number):
            known = ["cpu", *(device.slug for device in known_cards())]
            if not matches:
                spellings = {alias: device.slug for device in known_cards() for alias in _aliases(device)}
                raise not_known("device", name, known, spellings)
            fitting = ", ".join(device.slug for device in matches)
            raise ValueError(f"device {name!r} fits {fitting}; name one of: {', '.join(known)}")
        return next((device for device in matches if wanted == _letters(device.name)), matches[0])

    @staticmethod
    def of(device: torch.device | str) -> Device:
        """The device behind a `torch.device`.

        A CUDA device without a driver has no peaks and no capability.
        """
        instead = _assumed.get()
        if instead is not None:
            return instead
        known = _seen.get(device)
        if known is not None:
            return known
        device = torch.device(device)
        if device.type == "cpu":
            return cpu()
        if device.type != "cuda":
            return _of_other(device.type)
        if not torch.cuda.is_available():
            return Device(name="unknown CUDA device", type="cuda", lacks=None)
        known = _of_cuda(torch.cuda.current_device() if device.index is None else device.index)
        if device.index is not None:
            _seen[device] = known
        return known


_seen: dict[Any, Device] = {}  # cards by `torch.device`: asking CUDA again costs microseconds at every launch
_assumed: ContextVar[Device | None] = ContextVar("turnout_assumed_device", default=None)
_planning: ContextVar[bool] = ContextVar("turnout_planning", default=False)


@contextlib.contextmanager
def assumed(device: Device) -> Iterator[None]:
    """While this is entered, every tensor is taken to be on `device`: launches are planned for it, nothing
    can run.

    For finding out what a call would launch (`turnout.launch.recorded`). It holds for this thread; what
    others compute meanwhile stays on its own device.
    """
    token = _assumed.set(device)
    try:
        yield
    finally:
        _assumed.reset(token)


@contextlib.contextmanager
def planning_calls() -> Iterator[None]:
    """While this is entered, calls in this thread are only planned: tensors have no memory, nothing is
    remembered.
    """
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
    """What people may call a card, in letters and digits: some of the words of its name, in their order."""
    words = [_letters(word) for word in re.split(r"[ -]", device.name)]
    if "hbm3" in words or "sxm4" in words:  # the driver names an H100 SXM by its memory
        words += ["sxm"]
    chosen = itertools.product((False, True), repeat=len(words))
    return frozenset("".join(itertools.compress(words, some)) for some in chosen)


@functools.cache
def _of_other(device_type: str) -> Device:
    """A device of neither NVIDIA, AMD nor a CPU: plain Triton routes may take it if Triton has a driver for
    it.
    """
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
    """A card that was named, as it would be with the software of this machine."""
    return replace(card, **_software())


def _software() -> dict[str, Any]:
    return {"triton": versions.minor(versions.triton()), "cudnn": machine.cudnn(), "lacks": None}


@functools.cache
def _of_cuda(index: int) -> Device:
    seen = torch.cuda.get_device_properties(index)
    here = _software()
    known = {device.name: device for device in known_cards()}.get(seen.name)
    if known is not None:
        return replace(known, **here)
    here["backend"] = None if versions.triton() is None else "hip" if torch.version.hip else "cuda"
    # Cards we have no datasheet for: memory speed as the driver states it, so that byte-bound costs still
    # mean something.
    clock, width = getattr(seen, "memory_clock_rate", 0), getattr(seen, "memory_bus_width", 0)
    bandwidth = (
        Figure(2e3 * clock * width / 8, "memory clock and bus width as the driver states them")
        if clock and width
        else None
    )
    return Device(
        name=seen.name,
        type="cuda",
        bandwidth=bandwidth,
        capability=(seen.major, seen.minor),
        units=seen.multi_processor_count,
        cache=seen.L2_cache_size,
        shared=getattr(seen, "shared_memory_per_block_optin", 0),
        **here,
    )


def cpu() -> Device:
    """This machine's CPU, with figures measured once on another. They set the ratio of bytes to fixed costs;
    `tune` replaces what depends on them."""
    return _cpu(torch.get_num_threads(), machine.one_dnn_limit())


@functools.cache
def _cpu(threads: int, one_dnn_limit: str | None) -> Device:
    known = device_files.load(device_files.CPU)
    peaks, cores = known["peaks"], os.cpu_count() or 1
    flops = {
        kind: Figure(peaks[kind] * cores / peaks["cores"], peaks["source"]) for kind in ("float32", "float64")
    }
    return Device(
        name="cpu",
        type="cpu",
        bandwidth=Figure(peaks["bytes"], peaks["source"]),
        units=cores,
        cache=known["cache_mib"] * MIB,
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
    """The cards in `devices/`; of those that fit a name, the first is meant."""
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

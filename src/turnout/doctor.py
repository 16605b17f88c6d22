"""doctor: what is installed, what is known to be bad, and one tiny correctness check for every route that can run here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
from typing import Any, NamedTuple

import torch

import turnout
from turnout.routing.device import Device
from turnout.routing.op import OPS, Op, Route
from turnout.routing.table import Tables, folder
from turnout.routing.verify import Trial

_SMALL_CASES = 4  # cases come small ones first; a check that takes a minute is no check
_PACKAGES = ("torch", "triton", "numba", "diffusers", "transformers", "flash_attn", "causal_conv1d")


class Check(NamedTuple):
    """One finding: `ok`, `warning`, `failed` or `refused`."""

    what: str
    state: str
    note: str


def environment() -> dict[str, Any]:
    """Versions and devices of this machine."""
    found: dict[str, Any] = {"turnout": turnout.__version__, "python": platform.python_version(), "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    found["cuda"] = torch.version.cuda
    found["cudnn"] = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    found["devices"] = [Device.of(d).name for d in _devices()]
    found["entries"] = {Device.of(d).name: str(folder(Device.of(d))) for d in _devices()}
    return found


def _devices() -> list[torch.device]:
    return [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]


def known_bad() -> list[Check]:
    """Pairs of versions and settings that are known to be slow or wrong."""
    found = []
    pair = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2]))
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    if pair in ((2, 9), (2, 10)) and cudnn and 90800 <= cudnn < 91500:
        slow = "runs half-precision conv3d without cuDNN: 4x slower, several times the memory (pytorch #166122)"
        found.append(
            Check("cuDNN", "warning", f"torch {torch.__version__} with cuDNN {cudnn} {slow}; take nvidia-cudnn 9.15 or torch 2.11")
        )
    if torch.version.hip and torch.backends.cudnn.benchmark:
        found.append(Check("cudnn.benchmark", "warning", "on ROCm it searches for minutes at each new shape; set it to False"))
    triton = _version("triton")
    if triton is None:
        found.append(Check("triton", "warning", "not installed: GPU routes of our own are refused; pip install triton"))
    elif not (3, 6) <= triton < (3, 8):
        found.append(Check("triton", "warning", f"version {'.'.join(map(str, triton))}, tested are 3.6 and 3.7"))
    if importlib.util.find_spec("numba") is None:
        found.append(Check("numba", "warning", "not installed: CPU routes of our own are refused; pip install 'turnout[cpu]'"))
    return found or [Check("known-bad pairs", "ok", "none")]


def _version(package: str) -> tuple[int, ...] | None:
    try:
        return tuple(map(int, importlib.metadata.version(package).split(".")[:2]))
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None


def tables() -> list[Check]:
    """What was measured for the devices of this machine."""
    found = []
    for where in _devices():
        device = Device.of(where)
        known = Tables.for_device(device)
        found.append(
            Check(f"tables for {device.name}", "ok", f"{len(known.here.rows)} rows measured here, {len(known.shipped.rows)} shipped")
        )
    return found


def routes() -> list[Check]:
    """Run every route on the first of the op's small cases that it takes, on every device here."""
    found = []
    for where in _devices():
        for op in OPS.values():
            calls = [op.arguments(*case.make(where, 0)) for case in op.cases()[:_SMALL_CASES]]
            for route in op.routes.values():
                reasons = [list(route.refuses(op.problem(*args), Device.of(where))) for args in calls]
                taken = next((args for args, why in zip(calls, reasons, strict=True) if not why), None)
                what = f"{op.name} {route.name} on {where}"
                found.append(Check(what, "refused", "; ".join(reasons[0])) if taken is None else _check(op, route, taken, what))
    return found


def _check(op: Op, route: Route, args: tuple, what: str) -> Check:
    try:
        why = Trial(op, args).complaint(route.numerics, route.run)
    except Exception as failure:  # a broken install must not end the report
        why = f"{type(failure).__name__}: {failure}"
    return Check(what, "ok" if why is None else "failed", why or "agrees with the reference")

"""Versions of the software that timings depend on: what is installed, and what is supported."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path

import torch

from turnout._version import __version__

Version = tuple[int, int]

TORCH: tuple[Version, Version] = ((2, 11), (2, 15))  # oldest and newest that the tests have run with
TRITON: tuple[Version, Version] = ((3, 6), (3, 9))


def minor(version: str | None) -> Version | None:
    """The first two numbers of a version, or None where there are no two.

    >>> minor("2.11.0+cu130"), minor("3.9.0"), minor(None)
    ((2, 11), (3, 9), None)
    """
    numbers = re.match(
        r"(\d{1,9})\.(\d{1,9})(?!\d)", version or ""
    )  # Python converts no number of 5000 digits
    return None if numbers is None else (int(numbers[1]), int(numbers[2]))


def installed(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def triton() -> str | None:
    """The version of the Triton that `import triton` gives, without importing it; None where there is none.

    Read from the package itself: metadata of another copy may be found first where two are installed.
    """
    if "triton" in sys.modules:
        return getattr(sys.modules["triton"], "__version__", None)
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None or not Path(spec.origin).exists():
        return None
    text = Path(spec.origin).read_text(encoding="utf-8")
    match = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    return match[1] if match else installed("triton")


@functools.cache
def driver() -> str | None:
    """The version of NVIDIA's kernel driver, such as "580.159.04"; None if there is none to be read."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return match[1] if match else None


@functools.cache
def for_device(device_type: str) -> dict[str, str]:
    """The versions that a timing on a GPU ("cuda") or on a CPU depends on, by name."""
    if device_type == "cpu":
        versions = {"numba": installed("numba")}
    else:
        cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
        versions = {
            "triton": triton(),
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "cudnn": None if cudnn is None else str(cudnn),
            "driver": driver(),
        }
    versions = {"turnout": __version__, "torch": torch.__version__, **versions}
    return {name: version for name, version in versions.items() if version is not None}


def in_words(versions: dict[str, str]) -> str:
    """Write the versions that a person needs to know to judge a measured row.

    >>> in_words({"turnout": "0.1.0", "torch": "2.11.0+cu130", "triton": "3.6.0", "driver": "580.159"})
    'torch 2.11.0, triton 3.6.0'
    """
    return ", ".join(
        f"{name} {versions[name].split('+')[0]}" for name in ("torch", "triton", "numba") if name in versions
    )


def refuse_unsupported() -> None:
    """Raise ImportError if torch or Triton is older than supported.

    Newer versions are tried, and `doctor` warns about them.
    """
    for name, version, (oldest, newest) in (
        ("torch", torch.__version__, TORCH),
        ("triton", triton(), TRITON),
    ):
        installed_minor = minor(version)
        if installed_minor is not None and installed_minor < oldest:
            least, most = (".".join(map(str, limit)) for limit in (oldest, newest))
            raise ImportError(
                f"turnout: {name} {version} is installed, {name} {least} or newer is needed "
                f"(tested up to {most}); pip install '{name}>={least}'"
            )

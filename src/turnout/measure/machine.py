"""Describe what a race ran on: processor, cores, card, driver, date and commit."""

from __future__ import annotations

import datetime
import functools
import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

from turnout.routing import versions


@functools.cache
def processor() -> str:
    """The processor's name, such as "AMD EPYC 9R14"; its architecture if it has none."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    match = re.search(r"^(?:model name|Model|cpu model)\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine(device: torch.device) -> dict[str, Any]:
    """The machine, for a row: `cpu`, `cores`, `threads` of torch, `card` and `driver` (None on a CPU)."""
    on_gpu = device.type == "cuda"
    return {
        "cpu": processor(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "card": torch.cuda.get_device_name(device) if on_gpu else None,
        "driver": versions.driver() if on_gpu else None,
    }


def now() -> str:
    """The date and time, in UTC, to the minute: "2026-03-01 14:05 UTC"."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def in_words(host: dict[str, Any], software: dict[str, str], date: str, code: str | None) -> str:
    """Describe machine, software, date and commit in one line.

    >>> host = {"cpu": "EPYC", "cores": 2, "threads": 1, "card": None, "driver": None}
    >>> in_words(host, {"torch": "2.13.0"}, "2026-03-01", "abc")
    'EPYC, 2 cores, 1 thread; torch 2.13.0; 2026-03-01; commit abc'
    """
    threads = f"{host['threads']} thread{'s' * (host['threads'] != 1)}"
    cpu = f"{host['cpu']}, {host['cores']} core{'s' * (host['cores'] != 1)}, {threads}"
    card = [f"{host['card']}, driver {host['driver'] or 'unknown'}"] if host["card"] else []
    packages = ", ".join(f"{name} {version}" for name, version in software.items() if name != "driver")
    return "; ".join([*card, cpu, packages, date, f"commit {code}" if code else "installed package"])

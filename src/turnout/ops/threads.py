"""Threads for CPU kernels that release the GIL: those of torch, or a pool where they cannot be had.

torch's OpenMP threads go on spinning for a while after each of its ops, so a pool beside them finds the cores taken: rms_norm_silu behind
an op of torch took 3.7 ms by a pool of two, 3.5 by one thread alone, 2.1 by torch's two. They are asked through the runtime that torch has
loaded. Numba's own layers would be a second set of threads too, and are not safe to enter from two Python threads; this is.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

_Share = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="turnout")


@functools.cache
def _runtime() -> Any:
    """torch's OpenMP runtime. GNU's, LLVM's and Intel's all have GNU's entry. None where it is not found, or could be one of several."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    loaded = {line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines() if re.search(r"/lib(gomp|omp|iomp5)\b[^/]*$", line)}
    home = str(Path(torch.__file__).parent)  # wheels bring theirs along, in torch/lib or torch.libs
    candidates = [path for path in loaded if path.startswith(home)] or list(loaded)
    if len(candidates) != 1:
        return None
    library = ctypes.CDLL(candidates[0])
    return library if all(hasattr(library, name) for name in ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")) else None


def in_shares(work: Callable[[int, int], object], parts: int) -> None:
    """Call `work(first, last)` over parts 0 to `parts`, in as many even shares as torch has threads, on torch's threads."""
    threads = min(torch.get_num_threads(), parts)
    runtime = _runtime() if threads > 1 else None
    if runtime is None:
        split(work, parts)
        return
    failures: list[BaseException] = []

    def share(_: Any) -> None:
        i, count = runtime.omp_get_thread_num(), runtime.omp_get_num_threads()
        try:
            work(parts * i // count, parts * (i + 1) // count)
        except BaseException as failure:  # C has no way to pass it on
            failures.append(failure)

    runtime.GOMP_parallel(_Share(share), None, threads, 0)
    if failures:
        raise failures[0]


def split(work: Callable[[int, int], object], parts: int) -> None:
    """The same on a pool of our own; the caller takes the last share."""
    threads = min(torch.get_num_threads(), parts)
    if threads <= 1:
        work(0, parts)
        return
    bounds = [parts * i // threads for i in range(threads + 1)]
    others = [_pool(threads).submit(work, bounds[i], bounds[i + 1]) for i in range(threads - 1)]
    work(bounds[-2], bounds[-1])
    for other in others:
        other.result()

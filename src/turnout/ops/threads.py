"""Threads for CPU kernels that release the GIL. Numba's own layers are not safe to enter from two Python threads; this is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="turnout")


def split(work: Callable[[int, int], object], parts: int) -> None:
    """Call `work(first, last)` over parts 0 to `parts`, in as many even shares as torch has threads; the caller takes the last one."""
    threads = min(torch.get_num_threads(), parts)
    if threads <= 1:
        work(0, parts)
        return
    bounds = [parts * i // threads for i in range(threads + 1)]
    others = [_pool(threads).submit(work, bounds[i], bounds[i + 1]) for i in range(threads - 1)]
    work(bounds[-2], bounds[-1])
    for other in others:
        other.result()

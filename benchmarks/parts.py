"""What fused parts of known models take a host more than stock code: python benchmarks/parts.py [MODEL ...]

Every kind of part of the small models of the tests, with what its model calls it with, on a CPU in one
thread: there is hardly any work, so the difference is the host's. us of the thread's own time, the median of
rounds that take turns; an op of a part asks the router for each call.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import turnout
from turnout.models import patch

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

ROUNDS, REPEATS = 11, 20


class Call(NamedTuple):
    """Of one part: the modules of the accelerated and of the stock model that are called, and with what."""

    module: nn.Module
    stock: nn.Module
    args: tuple
    kwargs: dict[str, Any]


def calls_of(model: nn.Module, stock: nn.Module, call: Any) -> dict[str, Call]:
    """A call of each kind of fused part, by kind and shape of its input."""
    found: dict[str, Call] = {}
    for path, module in model.named_modules():
        for instance in (module, vars(module).get("processor")):
            patched_class = patch.patched(instance)
            if patched_class is None or patched_class.adapter.__module__.endswith(".layers"):
                continue

            def note(module: nn.Module, args: tuple, kwargs: dict, part: Any = (instance, path)) -> None:
                x = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
                if x is not None:
                    kept = {name: fresh(x) for name, x in kwargs.items()}
                    each = Call(module, stock.get_submodule(part[1]), tuple(map(fresh, args)), kept)
                    found.setdefault(f"{type(part[0]).__name__} {list(x.shape)}", each)

            with_hook = module.register_forward_pre_hook(note, with_kwargs=True)
            with torch.no_grad():
                call(model)
            with_hook.remove()
    return found


def fresh(value: Any) -> Any:
    """Lists are written to: each call gets its own."""
    return list(value) if isinstance(value, list) else value


def compare(each: Call) -> tuple[float, float]:
    """us of the stock model's part and of the fused one."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for module, samples in zip((each.stock, each.module), times, strict=True):
            start = time.thread_time()
            for _ in range(REPEATS):
                module(*map(fresh, each.args), **{name: fresh(x) for name, x in each.kwargs.items()})
            samples.append((time.thread_time() - start) / REPEATS * 1e6)
    stock, fused = map(statistics.median, times)
    return stock, fused


def main() -> None:
    from tests.models.zoo import ZOO

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(f"{'':60s} {'stock':>8s} {'fused':>8s} {'more':>8s}  us")
    for name in sys.argv[1:] or ZOO:
        make, call, _ = ZOO[name]
        stock_model, model = make().eval(), make().eval()
        turnout.accelerate(model)
        for part, each in calls_of(model, stock_model, call).items():
            with torch.no_grad():
                stock, fused = compare(each)
            print(f"{name + ' ' + part:60s} {stock:8.1f} {fused:8.1f} {fused - stock:8.1f}", flush=True)


if __name__ == "__main__":
    main()

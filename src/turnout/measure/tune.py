"""Tune: measure every route that can take a call, and remember the times of those with a right output.

It happens only when it is asked for, and within a budget of seconds.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from turnout.measure.timer import Timing, time_variants
from turnout.measure.verify import Verifier
from turnout.routing import versions
from turnout.routing.case import Case, copies
from turnout.routing.choose import REFERENCE, plain
from turnout.routing.device import Device
from turnout.routing.dispatch_cache import forget_choices
from turnout.routing.fallback import Blocked, blocked
from turnout.routing.names import device_here as torch_device_named
from turnout.routing.op import OPS, Op, TurnoutWarning, watched, without_autocast
from turnout.routing.public import Lowered, lower, op_named
from turnout.routing.route import Config, Route
from turnout.routing.row import Row
from turnout.routing.store import publish
from turnout.routing.table import Tables, forget_tables

SECONDS = 1.0  # for each call of `during`: how many there will be is not known beforehand


def tune(
    op: str | Callable[..., Any] | Sequence[str] | None = None,
    *args: Any,
    during: Callable[[], Any] | None = None,
    again: bool = False,
    budget: float = 60.0,
    device: str | torch.device | None = None,
    save: bool = True,
    progress: bool = True,
    **kwargs: Any,
) -> list[Row]:
    """Measure the routes of calls, and keep the times for this machine. Returns a row for each problem.

    - `tune("dot", a, b)` measures that call.
    - `tune("dot")` measures the cases of dot, `tune(["dot", "inner"])` those of both, `tune()` all cases.
    - `tune(during=lambda: vae.decode(z))` runs that function once, and measures each new call of an op, or of
      the ops that are named, with the arguments it has. Calls that were measured before are skipped, unless
      `again=True`.

    budget: seconds after which nothing more is measured; the times measured until then are kept. save:
    `False` keeps nothing. A route whose output is wrong is not timed, with a warning.

    >>> import torch, turnout
    >>> [row] = turnout.tune("dot", torch.ones(4096), torch.ones(4096), budget=1, save=False, progress=False)
    >>> sorted(row.us)[-1]
    'reference'
    >>> model, x = torch.nn.Conv2d(3, 8, 3, padding=1), torch.ones(1, 3, 16, 16)
    >>> with turnout.accelerated(model), torch.no_grad():
    ...     rows = turnout.tune(during=lambda: model(x), budget=1, save=False, progress=False)
    >>> [row.op for row in rows]
    ['conv2d']
    """
    if not isinstance(budget, (int, float)) or not budget > 0:  # nor NaN
        raise ValueError(f"budget {budget!r} seconds, it needs to be more than 0")
    if op is None and (args or kwargs):
        raise TypeError("tune was given the arguments of a call and no op: tune('dot', a, b)")
    if during is not None and not callable(during):
        raise TypeError(f"during is {during!r}, it needs to be a function: during=lambda: model(x)")
    if during is not None:
        if args or kwargs:
            raise TypeError(
                "tune was given the arguments of a call and during=; "
                "it measures either that call or those of a function"
            )
        names = {called.name for called in _ops_named(op)}
        return _tune_during(during, names, budget, again=again, save=save, progress=progress)
    if op is not None and (args or kwargs):
        called, call_args = _as_run(lower(op, *args, **kwargs))  # pyright: ignore[reportArgumentType]
        calls = [(called, called.name, lambda: call_args)]
    else:
        place = torch_device_named(None if device is None else str(device))
        cases = [(o, case) for o in _ops_named(op) for case in o.cases()]
        calls = [(o, f"{o.name} {case}", functools.partial(_case_args, o, case, place)) for o, case in cases]
    rows: list[Row] = []
    end = time.perf_counter() + budget
    with _progress(len(calls), progress) as step:
        for called, label, make_args in calls:
            seconds_left = end - time.perf_counter()
            if rows and seconds_left <= 0:
                warnings.warn(
                    f"turnout.tune: {budget:g} s are over, {len(rows)} of {len(calls)} calls were measured",
                    TurnoutWarning,
                    stacklevel=2,
                )
                break
            step(label)
            seconds = max(0.3, seconds_left / (len(calls) - len(rows)))
            row, device_of_row = measure(called, make_args(), seconds=seconds)
            rows.append(row)
            if save:
                remember(row, device_of_row)
    return rows


def _case_args(op: Op, case: Case, device: torch.device) -> tuple:
    return op.arguments(*case.make(device, 0))


def _as_run(call: Lowered) -> Lowered:
    """The call as routes would get it, under this autocast; raise where none may take it (a subclass)."""
    call.op.check_kinds(call.args)
    why = blocked(call.args, call.op.autocast == "reference")
    if why is None and any(x.is_meta for x in call.args if isinstance(x, torch.Tensor)):
        why = Blocked("a tensor on meta, which has no values", True)
    if why is not None:
        raise ValueError(f"turnout.tune: {call.op.name} cannot be measured here: {why.reason}")
    return Lowered(call.op, call.op.cast(call.args, torch.Tensor.to))


def _ops_named(op: str | Callable[..., Any] | Sequence[str] | None) -> list[Op]:
    """The op of a name or function, those of several names, or all ops for None."""
    if op is None:
        return list(OPS.values())
    return [op_named(name) for name in ([op] if isinstance(op, str) or callable(op) else op)]


def _tune_during(
    run: Callable[[], Any], ops: set[str], budget: float, *, again: bool, save: bool, progress: bool
) -> list[Row]:
    """Call `run`, and measure each new call of these ops at the moment it comes, with its own arguments."""
    rows: list[Row] = []
    seen_calls: set[Any] = set()
    left_out = 0
    end, busy = time.perf_counter() + budget, threading.Lock()

    def new_call(op: Op, args: tuple) -> None:
        nonlocal left_out
        # Busy: this call comes from a route that is being measured.
        if op.name not in ops or not busy.acquire(blocking=False):
            return
        try:
            device_here = next(x.device for x in args if isinstance(x, torch.Tensor))
            call = (op.name, op.problem(*args), device_here)
            if call in seen_calls or (
                device_here.type == "cuda" and torch.cuda.is_current_stream_capturing()
            ):
                return
            seen_calls.add(call)
            seconds_left = end - time.perf_counter()
            device = Device.of(device_here)
            if not _candidates(op, call[1], device):
                return
            if not again and Tables.for_device(device).has(op, call[1]):
                return
            if rows and seconds_left <= 0:
                left_out += 1
                return
            step(f"{op.name} {[list(x.shape) for x in args if isinstance(x, torch.Tensor)]}")
            row, device = measure(op, args, seconds=max(0.3, min(SECONDS, seconds_left)))
            rows.append(row)
            if save:
                publish(row, device)
        except (RuntimeError, MemoryError) as failure:
            why = (str(failure).strip() or type(failure).__name__).splitlines()[0]
            warnings.warn(
                f"turnout.tune: a call of {op.name} is left out: {why}", TurnoutWarning, stacklevel=2
            )
        finally:
            busy.release()

    try:
        with _progress(None, progress) as step, watched(new_call):
            run()
    finally:  # the times measured so far count, also where the run failed
        forget_tables()
        forget_choices()
    if left_out:
        message = (
            f"turnout.tune: {budget:g} s are over, {len(rows)} calls were measured and {left_out} were not; "
            "the same tune(during=...) again measures those"
        )
        warnings.warn(message, TurnoutWarning, stacklevel=3)
    return rows


def remember(row: Row, device: Device) -> None:
    """Keep a row for this machine; calls use it from now on."""
    publish(row, device)
    forget_tables()
    forget_choices()


@torch.no_grad()
@without_autocast()
def measure(
    op: Op, args: tuple, *, seconds: float = 5.0, verifier: Verifier | None = None
) -> tuple[Row, Device]:
    """Verify and time the reference and every route that takes these arguments, in its best configuration."""
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    device_here = tensors[0].device
    device, problem = Device.of(device_here), op.problem(*args)
    candidates = _candidates(op, problem, device)
    # Calls that write get copies: the verifier still needs the arguments as they are.
    inputs = rotating(args, device) if not op.mutates else copies(args, 3)[1:]
    verifier = verifier or Verifier(op, args)
    runs: dict[str, Callable[..., Any]] = {REFERENCE: op.reference}
    best: dict[str, dict[str, Any]] = {}
    for route in candidates:
        verified = {
            str(config): (run, config) for config, run in _verified(op, route, args, device, verifier)
        }
        if not verified:
            continue
        fastest = next(iter(verified))
        if len(verified) > 1:
            share, rounds = seconds / (2 * len(candidates)), max(6, int(seconds))
            variants = {name: run for name, (run, _) in verified.items()}
            times = time_variants(
                variants, inputs, device_here, cache=device.cache, rounds=rounds, seconds=share
            )
            # By GPU time: host time is the same for all configurations, so only its noise would differ.
            fastest = min(times, key=lambda name, t=times: t[name].device_us)
        run, best[route.name] = verified[fastest]
        runs[route.name] = op.with_runtime_checks(run, args)  # as the router runs it
    errors = {name: float(f"{verifier.error(run):.3g}") for name, run in runs.items()}
    timings = time_variants(
        runs, inputs, device_here, cache=device.cache, rounds=max(20, int(4 * seconds)), seconds=seconds / 2
    )
    row = Row(
        op=op.name,
        problem={name: plain(value) for name, value in problem._asdict().items()},
        us=_rounded(timings, "us"),
        iqr=_rounded(timings, "iqr"),
        error=errors,
        peak_mib={name: peak_mib(run, inputs[0]) for name, run in runs.items()}
        if device_here.type == "cuda"
        else {},
        config=best,
        version={name: op.routes[name].version for name in best},
        code_hash={name: op.routes[name].code_hash for name in best},
        versions=versions.for_device(device.type),
        machine=device.machine,
    )
    return row, device


def _candidates(op: Op, problem: Any, device: Device) -> list[Route]:
    return [
        route
        for route in op.routes.values()
        if route.numerics != "lossy" and not any(route.refuses(problem, device))
    ]


def _verified(
    op: Op, route: Route, args: tuple, device: Device, verifier: Verifier
) -> Iterator[tuple[Config, Callable]]:
    """The configurations of a route that run and give the right output, each with its function."""
    for config in route.configs(op.problem(*args), device):
        run = route.prepared(args, config).call
        try:
            why = verifier.mismatch(route.numerics, run)
        except Exception as failure:  # of any kind: tuning goes on with the other configurations
            why = f"it failed: {type(failure).__name__}: {failure}"
        if why is None:
            yield config, run
        else:
            warnings.warn(
                f"turnout.tune: {op.name} route {route.name!r} {config} is left out: {why}",
                TurnoutWarning,
                stacklevel=4,
            )


def rotating(args: tuple, device: Device) -> list[tuple]:
    """Copy the arguments until all sets outgrow the cache; few times on a GPU, where the timer empties it."""
    size = sum(x.numel() * x.element_size() for x in args if isinstance(x, torch.Tensor))
    most = 64 if device.type == "cpu" else 4
    return copies(args, max(2, min(most, math.ceil(3 * device.cache / max(size, 1)))))


def peak_mib(run: Callable[..., Any], args: tuple) -> float:
    """The most CUDA memory that a call has in use at once beyond what was in use before, in MiB."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(*args)
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 3)


def _rounded(timings: dict[str, Timing], field: str) -> dict[str, float]:
    return {name: round(getattr(timing, field), 3) for name, timing in timings.items()}


class _progress:
    """A progress bar, if `shown`; inside the block, a function that takes the label of the next step."""

    def __init__(self, total: int | None, shown: bool):
        self.total, self.shown = total, shown

    def __enter__(self) -> Callable[[str], None]:
        self.bar = None
        if not self.shown:
            return lambda label: None
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self.bar = Progress(
            TextColumn("tuning"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=Console(stderr=True),
        )
        self.bar.start()
        task = self.bar.add_task("", total=self.total)
        steps = itertools.count()
        bar = self.bar
        return lambda label: bar.update(task, completed=next(steps), description=label)

    def __exit__(self, *error: Iterable[Any]) -> None:
        if self.bar is not None:
            self.bar.stop()

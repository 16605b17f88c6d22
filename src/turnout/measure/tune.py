"""tune: measure every route that can take a call, keep what is right, remember what is fast.

Only when asked, within a budget.
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
from turnout.measure.verify import Trial
from turnout.routing import versions
from turnout.routing.case import Case, copies
from turnout.routing.choose import REFERENCE, plain
from turnout.routing.device import Device
from turnout.routing.fallback import blocked
from turnout.routing.op import (
    OPS,
    Config,
    Op,
    Route,
    TurnoutWarning,
    forget_choices,
    watched,
    without_autocast,
)
from turnout.routing.public import Lowered, lower, op_named
from turnout.routing.row import Row
from turnout.routing.store import publish
from turnout.routing.table import Tables, forget_tables

SECONDS = 1.0  # for a call of a model, of which nobody knows beforehand how many there are


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
    """Measure the routes of one call, of what a model calls, of an op's cases, or of every op's cases, and
    keep the times for this machine.

    `tune("dot", a, b)` measures that call; `tune("dot")` the cases of dot; `tune(["dot", "inner"])` those of
    both; `tune()` all cases. `tune(during=lambda: vae.decode(z))` runs that function once and measures what
    it asks of ops, or of the ops that are named, each call when it first comes and with the arguments it
    comes with; calls that were measured before are not, unless `again`. It stops measuring when `budget`
    seconds are over; what was measured until then is kept. A route whose output is wrong is not timed, with a
    warning. `save=False` keeps nothing. Returns a row for each problem measured.

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
    if budget <= 0:
        raise ValueError(f"budget {budget} seconds, it needs to be more than 0")
    if during is not None:
        if args or kwargs:
            raise TypeError(
                "tune was given the arguments of a call and during=; "
                "it measures either that call or those of a function"
            )
        return _during(
            during, {known.name for known in _named(op)}, budget, again=again, save=save, progress=progress
        )
    if op is not None and (args or kwargs):
        known, call_args = _as_run(lower(op, *args, **kwargs))  # pyright: ignore[reportArgumentType]
        calls = [(known, known.name, lambda: call_args)]
    else:
        where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        cases = [(o, case) for o in _named(op) for case in o.cases()]
        calls = [(o, f"{o.name} {case}", functools.partial(_of_case, o, case, where)) for o, case in cases]
    rows: list[Row] = []
    end = time.perf_counter() + budget
    with _progress(len(calls), progress) as step:
        for known, label, make in calls:
            left = end - time.perf_counter()
            if rows and left <= 0:
                warnings.warn(
                    f"turnout.tune: {budget:g} s are over, {len(rows)} of {len(calls)} calls were measured",
                    TurnoutWarning,
                    stacklevel=2,
                )
                break
            step(label)
            row, where = measure(known, make(), seconds=max(0.3, left / (len(calls) - len(rows))))
            rows.append(row)
            if save:
                remember(row, where)
    return rows


def _of_case(op: Op, case: Case, device: torch.device) -> tuple:
    return op.arguments(*case.make(device, 0))


def _as_run(call: Lowered) -> Lowered:
    """A call with the arguments that routes would be given. Raise where none may take it (a subclass)."""
    why = blocked(call.args, call.op.autocast == "reference")
    if why is not None:
        raise ValueError(f"turnout.tune: {call.op.name} cannot be measured here: {why.reason}")
    return Lowered(call.op, call.op.cast(call.args, torch.Tensor.to))


def _named(op: str | Callable[..., Any] | Sequence[str] | None) -> list[Op]:
    return (
        list(OPS.values())
        if op is None
        else [op_named(o) for o in ([op] if isinstance(op, str) or callable(op) else op)]
    )


def _during(
    run: Callable[[], Any], ops: set[str], budget: float, *, again: bool, save: bool, progress: bool
) -> list[Row]:
    """Measure while it runs: the arguments are there, as they are, and are not kept."""
    rows: list[Row] = []
    seen: set[Any] = set()
    left_out = 0
    end, busy = time.perf_counter() + budget, threading.Lock()

    def new_call(op: Op, args: tuple) -> None:
        nonlocal left_out
        if op.name not in ops or not busy.acquire(
            blocking=False
        ):  # a route may ask other ops, and has been asked already
            return
        try:
            where = next(x.device for x in args if isinstance(x, torch.Tensor))
            call = (op.name, op.problem(*args), where)
            if call in seen or (where.type == "cuda" and torch.cuda.is_current_stream_capturing()):
                return
            seen.add(call)
            left = end - time.perf_counter()
            known = Device.of(where)
            if not _candidates(op, call[1], known) or (
                not again and Tables.for_device(known).has(op, call[1])
            ):
                return
            if rows and left <= 0:
                left_out += 1
                return
            step(f"{op.name} {[list(x.shape) for x in args if isinstance(x, torch.Tensor)]}")
            row, device = measure(op, args, seconds=max(0.3, min(SECONDS, left)))
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
    finally:  # what was measured counts, whatever became of the run
        forget_tables()
        forget_choices()
    if left_out:
        message = (
            f"turnout.tune: {budget:g} s are over, {len(rows)} calls were measured and {left_out} were not; "
            "asked again, it goes on with those"
        )
        warnings.warn(message, TurnoutWarning, stacklevel=3)
    return rows


def remember(row: Row, device: Device) -> None:
    """Keep a row for this machine; calls from now on know of it."""
    publish(row, device)
    forget_tables()
    forget_choices()


@torch.no_grad()
@without_autocast()
def measure(op: Op, args: tuple, *, seconds: float = 5.0, trial: Trial | None = None) -> tuple[Row, Device]:
    """Verify and time every route that takes these arguments, each in its best configuration, and the
    reference.
    """
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    where = tensors[0].device
    device, problem = Device.of(where), op.problem(*args)
    candidates = _candidates(op, problem, device)
    inputs = (
        rotating(args, device) if not op.mutates else copies(args, 3)[1:]
    )  # the trial's own arguments stay as they are
    trial = trial or Trial(op, args)
    runs: dict[str, Callable[..., Any]] = {REFERENCE: op.reference}
    best: dict[str, dict[str, Any]] = {}
    for route in candidates:
        sound = {str(config): (run, config) for config, run in _sound(op, route, args, device, trial)}
        if not sound:
            continue
        share, rounds = seconds / (2 * len(candidates)), max(6, int(seconds))
        variants = {name: run for name, (run, _) in sound.items()}
        timings = (
            time_variants(variants, inputs, where, cache=device.cache, rounds=rounds, seconds=share)
            if len(sound) > 1
            else None
        )
        # By GPU time: host time is the same for all configurations, so only its noise would differ.
        name = min(timings, key=lambda n, t=timings: t[n].device_us) if timings else next(iter(sound))
        run, best[route.name] = sound[name]
        runs[route.name] = op.with_runtime_checks(
            run, args
        )  # with what the router asks before it runs a route
    errors = {name: float(f"{trial.error(run):.3g}") for name, run in runs.items()}
    timings = time_variants(
        runs, inputs, where, cache=device.cache, rounds=max(20, int(4 * seconds)), seconds=seconds / 2
    )
    row = Row(
        op=op.name,
        problem={name: plain(value) for name, value in problem._asdict().items()},
        us=_rounded(timings, "us"),
        iqr=_rounded(timings, "iqr"),
        error=errors,
        peak_mib={name: peak_mib(run, inputs[0]) for name, run in runs.items()}
        if where.type == "cuda"
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


def _sound(
    op: Op, route: Route, args: tuple, device: Device, trial: Trial
) -> Iterator[tuple[Config, Callable]]:
    """The configurations of a route that launch and give the right output, each with what runs it."""
    for config in route.configs(op.problem(*args), device):
        run = route.prepared(args, config).call
        try:
            why = trial.complaint(route.numerics, run)
        except Exception as failure:  # whatever a candidate does, tuning goes on with the others
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
    """Enough sets of the arguments to outgrow the cache, within reason: on a GPU the timer empties the cache
    besides.
    """
    size = sum(x.numel() * x.element_size() for x in args if isinstance(x, torch.Tensor))
    most = 64 if device.type == "cpu" else 4
    return copies(args, max(2, min(most, math.ceil(3 * device.cache / max(size, 1)))))


def peak_mib(run: Callable[..., Any], args: tuple) -> float:
    """The most CUDA memory in use above what was in use before, in MiB."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(*args)
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 3)


def _rounded(timings: dict[str, Timing], field: str) -> dict[str, float]:
    return {name: round(getattr(timing, field), 3) for name, timing in timings.items()}


class _progress:
    """A rich progress bar, or nothing."""

    def __init__(self, total: int | None, wanted: bool):
        self.total, self.wanted = total, wanted

    def __enter__(self) -> Callable[[str], None]:
        self.bar = None
        if not self.wanted:
            return lambda label: None
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self.bar = Progress(
            TextColumn("tuning"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
        )
        self.bar.start()
        task = self.bar.add_task("", total=self.total)
        seen = itertools.count()
        bar = self.bar
        return lambda label: bar.update(task, completed=next(seen), description=label)

    def __exit__(self, *error: Iterable[Any]) -> None:
        if self.bar is not None:
            self.bar.stop()

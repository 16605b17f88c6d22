"""Random calls of every op, down every route that takes them, held against float64: `make fuzz`.

    python -m tests.fuzz --calls 100000         # goes on where the last run stopped
    python -m tests.fuzz --only conv2d:1234567  # one call again, with what is wrong about it

A call begins as one of the op's own random calls (`random_call` in its cases: shapes, dtypes, layouts, empty
tensors, odd sizes). Then something about it is changed at random: the values (normal, large, denormal, NaN
and Inf among others), the layout (any order of dimensions, gaps, an offset, repeated elements), the dtypes,
the batch (of none, of one). A changed call that the reference takes is a call; one that it refuses must be
refused by the op too.

A route is right if it keeps the promise of its numerics class (`turnout.measure.verify`). Where there are
values that are not finite, it must have them where float64 has them, or float64 rounded to the output's
dtype, or the reference, and be close everywhere else. Differences below the smallest normal number do not
count. No route may change its arguments, or what lies between their elements.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import random
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.walk import OPS, random_call
from turnout.bench.sweep import commit, keep_row, versions
from turnout.measure.verify import Verifier, outputs, relative_error, rolled, truth
from turnout.routing.case import laid_like
from turnout.routing.choose import REFERENCE
from turnout.routing.device import Device
from turnout.routing.op import Op
from turnout.routing.store import write_json

HOME = Path(__file__).parents[1]
ROUTED = "as routed"
EDGES = "some at the edges"
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MANY = 256  # times that a call with a small output is tried before it counts as wrong
# So many roundings are allowed where one product outweighs all others, as a plain sum then rounds only once,
# and in float32 where few numbers are left to judge.
ROUNDINGS = 4
FEW = (
    8  # different numbers: the reference's error in one may be small by luck, and no draw brings another one
)
NUDGE = 2.0**-50  # of a value: four of float64's last places; what this changes, float32 cannot compute
EVERY = 20.0  # seconds between two states on disk


class Call(NamedTuple):
    """The reference's arguments, and what was changed about the op's own random call."""

    args: tuple
    changes: tuple[str, ...]


def call_of(op: Op, seed: int, device: torch.device) -> Call:
    """The random call of a seed."""
    draw = random.Random(seed)
    args = random_call(op, draw.randrange(2**32), device)
    changes = []
    for change in (take_batch, cast, fill, lay_out, sprinkle):
        if draw.random() < 0.35:
            args, name = change(op, draw, args)
            changes.append(name)
    return Call(args, tuple(changes))


def _of_floats(args: tuple, change: Callable[[int, Tensor], Tensor]) -> tuple:
    """Arguments with a change to those that are floating-point or complex tensors."""

    def is_float(x: Any) -> bool:
        return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())

    return tuple(change(i, x) if is_float(x) else x for i, x in enumerate(args))


def take_batch(op: Op, draw: random.Random, args: tuple) -> tuple[tuple, str]:
    """Leave nothing of the first dimension, or its first entry, or all of it."""
    share = draw.random()
    if share > 0.6 or not args[0].dim():
        return args, "batch as it was"
    left, batch = 0 if share < 0.25 else 1, args[0].shape[0]

    def take(name: str, x: Any) -> Any:
        if isinstance(x, Tensor):
            return x[:left] if x.dim() > 1 and x.shape[0] == batch else x
        return x[: 2 * left] if name == "lengths" else x  # of attention: keys at the front and at the end

    return tuple(map(take, op.signature.parameters, args)), f"batch of {left}"


def cast(op: Op, draw: random.Random, args: tuple) -> tuple[tuple, str]:
    """Give all tensors another dtype, or each one its own."""
    kind, mixed = draw.choice(FLOATS), draw.random() < 0.3

    def change(i: int, x: Tensor) -> Tensor:
        return x if x.is_complex() else x.to(draw.choice(FLOATS) if mixed else kind)

    return _of_floats(args, change), "mixed dtypes" if mixed else str(kind).removeprefix("torch.")


def fill(op: Op, draw: random.Random, args: tuple) -> tuple[tuple, str]:
    """Give tensors other values: normal, denormal, or so large that some sums overflow."""
    kind = draw.choice(("normal", "normal", "normal", "denormal", "large"))
    generator = torch.Generator().manual_seed(draw.randrange(2**31))

    def change(i: int, x: Tensor) -> Tensor:
        limits = torch.finfo(x.dtype)
        scales = {"normal": 1.0, "denormal": limits.tiny / 4, "large": limits.max**0.5 / 64}
        scale = scales[kind if i in chosen else "normal"]
        wide = torch.complex128 if x.is_complex() else torch.float64
        values = torch.randn(x.shape, dtype=wide, generator=generator)
        return laid_like(x, (values * scale).to(x.dtype).to(x.device))

    tensors = [i for i, x in enumerate(args) if isinstance(x, Tensor)]
    chosen = set(draw.sample(tensors, draw.randint(1, len(tensors))))
    return _of_floats(args, change), f"{kind} values"


def _largest(dtype: torch.dtype) -> float:
    """The largest value that calls have. Its square is finite in what is computed in, float32 or wider:
    beyond that the reference's own sums overflow, and each route's at its own place."""
    return torch.finfo(dtype).max if dtype is torch.float16 else torch.finfo(dtype).max ** 0.5 / 64


def lay_out(op: Op, draw: random.Random, args: tuple) -> tuple[tuple, str]:
    """Lay tensors out anew: dimensions in any order, gaps, an offset, sometimes one entry repeated."""
    written = {i for i, name in enumerate(op.signature.parameters) if name in op.mutates}
    repeats = draw.random() < 0.2

    def change(i: int, x: Tensor) -> Tensor:
        if draw.random() < 0.3:
            return x
        order = draw.sample(range(x.dim()), x.dim())
        sizes = [x.shape[axis] for axis in order]
        padded = [size + draw.choice((0, 0, 0, 1, 2, 8)) for size in sizes]
        offset, count = draw.choice((0, 0, 1, 3, 8)), int(torch.Size(padded).numel())
        whole = torch.empty(offset + count, dtype=x.dtype, device=x.device)[offset:].view(padded)
        for axis, size in enumerate(sizes):
            whole = whole.narrow(axis, 0, size)
        laid = whole.permute([order.index(axis) for axis in range(x.dim())]).copy_(x)
        wide = [axis for axis in range(x.dim()) if x.shape[axis] > 1]
        if repeats and wide and i not in written:
            laid = laid.narrow(draw.choice(wide), 0, 1).expand(x.shape)
        return laid

    return _of_floats(args, change), "repeated elements" if repeats else "another layout"


def sprinkle(op: Op, draw: random.Random, args: tuple) -> tuple[tuple, str]:
    """Put a few values into tensors that are not finite, or at the edge of what their dtype holds.

    An op's cases may list arguments that stay `ordinary`, as torch's own kernels are of two minds about
    others: an infinite weight that meets the zeros of the padding, an infinite key that a query does not see.
    What a huge weight leaves of the digits of others differs too, between sums and Winograd's.
    """
    kind = draw.choice(("NaN", "Inf", "NaN and Inf", "edges"))
    ordinary, names = op.declared_cases.ordinary, list(op.signature.parameters)
    tensors = [i for i, x in enumerate(args) if isinstance(x, Tensor) and names[i] not in ordinary]
    if not tensors:
        return args, "no place for others"
    chosen = set(draw.sample(tensors, draw.randint(1, min(2, len(tensors)))))

    def change(i: int, x: Tensor) -> Tensor:
        if i not in chosen or not x.numel():
            return x
        limits, inf, nan = torch.finfo(x.dtype), float("inf"), float("nan")
        largest = _largest(x.dtype)
        edges = (largest, -largest, limits.tiny, limits.tiny / 4, -limits.tiny / 4, -0.0)
        values = {"NaN": (nan,), "Inf": (inf, -inf), "NaN and Inf": (nan, inf, -inf), "edges": edges}[kind]
        changed = laid_like(x, x)
        for _ in range(draw.randint(1, 4)):
            changed[tuple(draw.randrange(size) for size in x.shape)] = draw.choice(values)
        return changed

    return _of_floats(args, change), EDGES if kind == "edges" else f"some {kind}"


class Fuzzed(Verifier):
    """A trial of values that need not be finite; with `outliers`, some are far larger than the rest."""

    def __init__(self, op: Op, args: tuple, *, outliers: bool, draws: int | None = None):
        self.outliers = outliers
        super().__init__(op, args, draws)
        if outliers and args[0].is_floating_point():
            self.true = [self._certain(i) for i in range(self.draws)]

    def _certain(self, i: int) -> tuple[Tensor, ...]:
        """The truth of a draw, NaN where float64 does not know it: where the last digits of the first tensor
        decide. So it is in a norm over one huge value, whose distance to its mean should be zero."""
        first, *others = self._drawn(i)
        nudged = truth(self.op, (first.double() * (1 + NUDGE), *others))
        certain = []
        for reference, true, moved in zip(self.expected[i], self.true[i], nudged, strict=True):
            if reference.is_floating_point() and reference.element_size() < 8:
                limit = torch.finfo(reference.dtype).eps * true.abs()
                true = torch.where((moved - true).abs() > limit, float("nan"), true)
            certain.append(true)
        return tuple(certain)

    def _drawn(self, i: int) -> tuple:
        """The first tensor rolled too: the others may be constant."""
        args = super()._drawn(i)
        first = args[0]
        return args if i == 0 or not first.dim() else (laid_like(first, rolled(first, i * 61)), *args[1:])

    def error_mismatch(self, output: Tensor, reference: Tensor, true: Tensor) -> str | None:
        if not (true.is_floating_point() or true.is_complex()):
            return super().error_mismatch(output, reference, true)
        ours = output.isfinite()
        allowed = (true.isfinite(), true.to(output.dtype).isfinite(), reference.isfinite())
        astray = torch.stack([ours != finite for finite in allowed]).all(0)
        if astray.any():
            count = f"{int(astray.sum())} of {astray.numel()} numbers"
            return f"{count} are finite where they should not be, or not where they should"
        if (allowed[0] & ~allowed[1]).any():
            return None  # numbers overflow the dtype, and what is left are those that happened to cancel
        finite = torch.stack([ours, *allowed]).all(0)
        output, reference, true = output[finite], reference[finite], true[finite]
        if output.dtype.itemsize >= 8 and true.numel():  # squares in the norms of errors would overflow
            size = float(true.abs().max())
            output, reference, true = (x / size if size > 1e100 else x for x in (output, reference, true))
        smallest = torch.finfo(output.dtype).tiny
        wide = output.to(true.dtype)
        wide = torch.where((wide - true).abs() <= smallest, true, wide)
        why = super().error_mismatch(wide, reference, true)
        if why is None:
            return None
        alone = output.dtype is torch.float32 and true.unique().numel() <= FEW
        most = ROUNDINGS * torch.finfo(reference.dtype).eps if self.outliers or alone else 0.0
        return None if relative_error(wide, true) <= most else why


def mismatches(op: Op, call: Call) -> Iterator[tuple[str, str | None]]:
    """Each route that takes a call, in one of its configurations, and what is wrong with it, or None."""
    args, outliers = call.args, EDGES in call.changes
    before, device = _memory(args), Device.of(args[0].device)
    try:
        problem = op.problem(*args)
    except Exception as refusal:
        yield (
            REFERENCE,
            f"the op refuses a call that the reference takes: {type(refusal).__name__}: {refusal}",
        )
        return
    trial = Fuzzed(op, args, outliers=outliers)
    runs: dict[str, tuple[str, Callable[..., Any]]] = {ROUTED: ("close", op)}
    for route in op.routes.values():
        if any(route.refuses(problem, device)):
            continue
        configs = list(route.configs(problem, device))
        config = configs[zlib.crc32(repr(problem).encode()) % len(configs)] if configs else {}
        runs[route.name] = (route.numerics, functools.partial(route.run, **config))
    for name, (numerics, run) in runs.items():
        try:
            why = trial.mismatch(numerics, run)
            if why is not None:  # a few numbers may be off by luck, and many may be the same one
                why = Fuzzed(op, args, outliers=outliers, draws=MANY).mismatch(numerics, run)
        except Exception as failure:
            why = f"it raised {type(failure).__name__}: {failure}"
        if why is None and not all(map(torch.equal, before, _memory(args))):
            why = "it changed its arguments, or what lies between their elements"
        yield name, why


def _memory(args: tuple) -> list[Tensor]:
    """All bytes behind tensors, those between their elements too."""
    storages = [x.untyped_storage() for x in args if isinstance(x, Tensor)]
    return [torch.empty(0, dtype=torch.uint8, device=s.device).set_(s).clone() for s in storages]


def refused_by_both(op: Op, args: tuple) -> tuple[bool, str | None]:
    """Whether the reference refuses a call, and what is wrong if the op takes it all the same."""
    try:
        outputs(op, op.reference, args)
        return False, None
    except Exception as failure:
        refusal = failure
    try:
        op(*args)
    except Exception:
        return True, None
    return True, f"the op takes a call that the reference refuses: {type(refusal).__name__}: {refusal}"


class Counts:
    """What was counted so far, of one seed on one device, kept in a file: the next run goes on from there."""

    def __init__(self, file: Path, seed: int):
        self.file, self.seed = file, seed
        content = json.loads(file.read_text()) if file.exists() else {}
        self.cases: int = content.get("cases", 0)
        self.seconds: float = content.get("seconds", 0.0)
        self.commits: list[str] = content.get("commits", [])
        self.ops: dict[str, dict[str, Any]] = content.get("ops", {})
        if (now := commit() or "unknown") not in self.commits:
            self.commits.append(now)

    def of(self, op: str) -> dict[str, Any]:
        numbers = dict.fromkeys(("cases", "refused", "calls", "empty", "odd"), 0)
        return self.ops.setdefault(op, {**numbers, "routes": {}, "changes": {}, "dtypes": {}, "wrong": []})

    @property
    def calls(self) -> int:
        return sum(result["calls"] for result in self.ops.values())

    @property
    def wrong(self) -> int:
        return sum(len(result["wrong"]) for result in self.ops.values())

    def save(self) -> None:
        content = {
            "cases": self.cases,
            "seconds": round(self.seconds, 1),
            "commits": self.commits,
            "ops": self.ops,
        }
        if not write_json(self.file, content):
            sys.exit(f"{self.file} cannot be written; --state names another folder")


def try_case(op: Op, seed: int, device: torch.device, result: dict[str, Any]) -> Iterator[str]:
    """Run one case and count it. Gives a line for each thing that is wrong."""
    call = call_of(op, seed, device)
    args, changes = call
    refused, why = refused_by_both(op, args)
    result["cases"] += 1
    result["refused"] += refused
    verdicts = iter([(REFERENCE, why)] if why else []) if refused else mismatches(op, call)
    tensors = [x for x in args if isinstance(x, Tensor)]
    if not refused:
        result["empty"] += any(not x.numel() for x in tensors)
        result["odd"] += any(size % 2 for x in tensors for size in x.shape)
        for kind in dict.fromkeys(str(x.dtype).removeprefix("torch.") for x in tensors):
            result["dtypes"][kind] = result["dtypes"].get(kind, 0) + 1
        for change in changes:
            result["changes"][change] = result["changes"].get(change, 0) + 1
    for name, why in verdicts:
        result["calls"] += 1
        result["routes"][name] = result["routes"].get(name, 0) + 1
        if why is not None:
            case = f"{op.name}:{seed}"
            result["wrong"].append({"case": case, "route": name, "why": why, "changes": list(changes)})
            yield f"wrong: {op.name} {name}, --only {case}: {why} ({', '.join(changes) or 'as it was'})"


def run(counts: Counts, calls: int, device: torch.device, ops: list[Op], say: Callable[[str], None]) -> None:
    """Go on until so many calls have been made."""
    began, saved = time.monotonic() - counts.seconds, time.monotonic()
    try:
        while counts.calls < calls:
            op = ops[counts.cases % len(ops)]
            case = random.Random(f"{counts.seed} {counts.cases}").randrange(2**40)
            for line in try_case(op, case, device, counts.of(op.name)):
                say(line)
            counts.cases += 1
            counts.seconds = time.monotonic() - began
            if time.monotonic() - saved > EVERY:
                saved = time.monotonic()
                counts.save()
                pace = counts.calls / max(counts.seconds, 1e-9)
                left = max(0, calls - counts.calls) / max(pace, 1e-9) / 60
                progress = f"{counts.calls} of {calls} calls, {counts.wrong} wrong"
                say(f"{progress}, {pace:.0f} a second, {left:.0f} min to go")
    finally:
        counts.seconds = time.monotonic() - began
        counts.save()


def keep(counts: Counts, device: torch.device, path: Path) -> None:
    """A line for each op among the results."""
    for name, result in sorted(counts.ops.items()):
        row = {
            "op": name,
            **result,
            "seed": counts.seed,
            "device": Device.of(device).name,
            "commits": counts.commits,
        }
        keep_row({**row, "versions": versions(device.type)}, path, "op")


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument(
        "--calls",
        type=int,
        default=10_000,
        help="how many calls of routes there are to be, all runs together",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--op", action="append", help="this op only; may be given more than once")
    parser.add_argument("--only", help="one case again: OP:SEED, as a mismatch names it")
    parser.add_argument("--state", type=Path, default=HOME / ".fuzz", help="where the state of runs is kept")
    parser.add_argument("--out", type=Path, help="a folder of results: counts are written to its fuzz.jsonl")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads on a CPU")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.set_num_threads(arguments.threads)
    # Fresh memory is full of NaN. Only a warning, as not every op of torch has a deterministic form on a GPU.
    torch.use_deterministic_algorithms(True, warn_only=True)
    warnings.filterwarnings("ignore")

    def say(line: str) -> None:
        print(line, flush=True)

    if arguments.only:
        name, _, seed = arguments.only.partition(":")
        lines = list(
            try_case(
                OPS[name],
                int(seed),
                device,
                collections.defaultdict(int, routes={}, changes={}, dtypes={}, wrong=[]),
            )
        )
        say("\n".join(lines) or f"{arguments.only}: nothing is wrong")
        return 1 if lines else 0
    ops = [OPS[name] for name in arguments.op or OPS]
    chosen = "-".join(sorted(arguments.op or ["all"]))
    counts = Counts(
        arguments.state
        / f"{Device.of(device).slug}-torch-{torch.__version__}-{chosen}-{arguments.seed}.json",
        arguments.seed,
    )
    if counts.cases:
        say(f"going on after {counts.calls} calls of {counts.file}")
    try:
        with torch.no_grad():
            run(counts, arguments.calls, device, ops, say)
    except KeyboardInterrupt:
        say(f"stopped; the same command goes on from {counts.calls} calls")
    for name, result in sorted(counts.ops.items()):
        routes = ", ".join(f"{route} {count}" for route, count in sorted(result["routes"].items()))
        cases = result["cases"] - result["refused"]
        say(f"{name}: {result['calls']} calls of {cases} cases, {len(result['wrong'])} wrong ({routes})")
    say(f"{counts.calls} calls, {counts.wrong} wrong, {counts.seconds:.0f} s")
    if arguments.out:
        keep(counts, device, arguments.out / "fuzz.jsonl")
    return 1 if counts.wrong else 0


if __name__ == "__main__":
    sys.exit(main())

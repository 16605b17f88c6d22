"""The command line: doctor, explain, bench, tune, race."""

from __future__ import annotations

import json as json_format
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import track

app = typer.Typer(
    help="Every op down the fastest route that is right for its shape, dtype, layout and device: ask, measure, tune.",
    no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False,
)  # fmt: skip
console = Console(width=None if sys.stdout.isatty() else 200)
errors = Console(stderr=True, soft_wrap=True)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Where = Annotated[str | None, typer.Option("--device", help="cpu, cuda or cuda:1; default: the first GPU, else the CPU.")]


def main() -> None:
    """Run the command line; a mistake in what was asked ends with one line and exit code 2."""
    try:
        app()
    except (ValueError, RuntimeError, TypeError) as mistake:
        errors.print(f"[red]error:[/red] {escape(str(mistake))}", highlight=False, markup=True)
        raise SystemExit(2) from mistake


def _device(name: str | None) -> Any:
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r} was asked for, this machine has no CUDA GPU; use --device cpu")
    return device


@app.command()
def doctor(json: Json = False) -> None:
    """What is installed and loaded, known-bad pairs, and one tiny correctness check for every route.

    Ends with exit code 1 when a check failed.

    [bold]Example[/bold]  turnout doctor --json > report.json
    """
    from turnout import doctor as checks
    from turnout.bench import report

    environment = checks.environment()
    findings = [*checks.compilers(), *checks.known_bad(), *checks.tables(), *checks.shipped_tables(), *checks.routes()]
    failed = any(finding.state == "failed" for finding in findings)
    if json:
        print(json_format.dumps({"environment": environment, "checks": [finding._asdict() for finding in findings]}))
    else:
        for name, value in environment.items():
            console.print(f"{name:>12}  {value}", highlight=False, markup=False)
        table = report.table("check", "state", "note")
        colours = {"ok": "green", "warning": "yellow", "failed": "red", "refused": "dim"}
        for finding in findings:
            state = f"[{colours[finding.state]}]{finding.state}"
            table.add_row(escape(finding.what), state, escape(finding.note))
        console.print(table)
    raise typer.Exit(1 if failed else 0)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def explain(
    context: typer.Context,
    op: Annotated[str, typer.Argument(help="The op, e.g. matmul.")],
    dtype: Annotated[str, typer.Option(help="float32, float16, bfloat16 (fp32, fp16, bf16), complex64 ...")] = "float32",
    device: Annotated[str | None, typer.Option(help="A device by name, present or not: h200, a100, mi300x, cpu ...")] = None,
    json: Json = False,
) -> None:
    """Which route a call would take and why, also for a GPU that is not here.

    Pass each argument of the function as --name VALUE: a shape for a tensor (add :dtype to override --dtype),
    else a number, a list, a string, true, false or none. Semicolons separate several tensors or lists.
    Numbers are a list where the function takes lists as well as tensors (kv_lengths). Omitted arguments take
    their defaults.

    [bold]Example[/bold]  turnout explain matmul --a 1,50000000 --b 50000000,1 --dtype bf16 --device h200

    [bold]Example[/bold]  turnout explain norm_rope_qk --q "1,512,8,64;1,64,8,64" --k "1,512,8,64;1,64,8,64"
    """
    from turnout.asking import explain as ask
    from turnout.routing.device import Device
    from turnout.routing.public import public_named

    parameters = public_named(op).signature.parameters
    given = _options(context.args)
    unknown = set(given) - set(parameters)
    if unknown:
        names = ", ".join(sorted(unknown))
        raise ValueError(f"{op} has no argument {names}; it has: {', '.join(parameters)}")
    arguments = {name: _argument(parameters[name].annotation, text, dtype) for name, text in given.items()}
    try:
        verdict = ask(op, **arguments, device=Device.named(device) if device else Device.of(_device(None)))
    except TypeError as mistake:
        raise ValueError(f"{op}: {mistake}; for example: turnout explain matmul --a 1,4096 --b 4096,1") from mistake
    print(verdict.json() if json else verdict)


def _options(words: list[str]) -> dict[str, str]:
    """--a 1,2 --b=3 as {"a": "1,2", "b": "3"}."""
    flat = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    if len(flat) % 2 or not all(name.startswith("--") for name in flat[::2]):
        raise ValueError(f"{' '.join(words)!r} cannot be read; give each argument as --name and a shape: --a 1,4096 --b 4096,1")
    return {name[2:].replace("-", "_"): value for name, value in zip(flat[::2], flat[1::2], strict=True)}


def _argument(annotation: Any, text: str, dtype: str) -> Any:
    """The value that a word on the command line has for a parameter of this type."""
    import torch

    kinds = [kind.strip() for kind in str(annotation).split("|")]
    several = any("Sequence" in kind or "list" in kind for kind in kinds)
    if text == "none" and "None" in kinds:
        return None
    if any("bool" in kind for kind in kinds):
        if text not in ("true", "false"):
            raise ValueError(f"{text!r} is neither true nor false")
        return text == "true"
    if ";" in text and several:
        return [_argument(annotation, part, dtype) for part in text.split(";")]
    shape, _, other = text.partition(":")
    try:
        numbers = [int(n) for n in shape.split(",") if n]
    except ValueError as mistake:
        if any("str" in kind for kind in kinds):
            return text
        if any("float" in kind for kind in kinds):
            return float(text)
        raise ValueError(f"{text!r}: shapes are whole numbers with commas between, like 1,4096") from mistake
    takes_lists = any(kind.endswith(("[int]", "[int]]")) for kind in kinds)
    if any("Tensor" in kind for kind in kinds) and (other or not takes_lists):
        return torch.empty(numbers, dtype=_dtype(other or dtype), device="meta")
    one = len(numbers) == 1 and (not takes_lists or any("int" in kind and "[" not in kind for kind in kinds))
    return numbers[0] if one else numbers


def _dtype(name: str) -> Any:
    import torch

    short = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "fp64": "float64"}
    found = getattr(torch, short.get(name, name), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype {name!r} is not known; one of: float32, float16, bfloat16, float64, complex64, int32 ...")
    return found


@app.command()
def bench(
    ops: Annotated[list[str] | None, typer.Argument(help="Ops, or [bold]router[/bold]: what routing costs; default: every op.")] = None,
    device: Where = None,
    only: Annotated[str, typer.Option(help="Only cases whose name contains this.")] = "",
    missing: Annotated[bool, typer.Option("--missing", help="Only cases that no table has; of a card elsewhere: list them.")] = False,
    seconds: Annotated[float, typer.Option(help="At most this long for each case.")] = 1.0,
    out: Annotated[Path | None, typer.Option(help="A folder for <device>/<op>.jsonl, where rows of other cases stay.")] = None,
    roofline: Annotated[Path | None, typer.Option(help="Draw the roofline into this PNG.")] = None,
    tuned: Annotated[bool, typer.Option("--tune", help="Tune each case first, and remember it for this machine.")] = False,
    export: Annotated[Path | None, typer.Option(help="With --tune: also write what was found into this table to ship.")] = None,
    peers: Annotated[bool, typer.Option(help="Time other implementations too; torch.compile takes seconds for each case.")] = True,
    json: Json = False,
) -> None:  # fmt: skip
    """Time an op's cases: the routed call, every route, and the peers, in one run. A wrong output gets no time.
    Cases called tiny are for tests, and timed only where `--only` asks for them.

    [bold]Example[/bold]  turnout bench dot --only bfloat16 --roofline dot.png
    """
    from turnout.bench import report, sweep
    from turnout.bench import roofline as picture
    from turnout.bench.router import measure_router
    from turnout.routing.device import Device
    from turnout.routing.op import OPS
    from turnout.routing.public import op_named
    from turnout.routing.row import Row
    from turnout.routing.store import export as write

    if export is not None and not tuned:
        raise ValueError("--export writes what --tune finds; give both")
    if ops == ["router"]:
        return _show_router(measure_router(), json)
    chosen = [op_named(op) for op in ops] if ops else list(OPS.values())
    if missing and device is not None and (absent := _absent(device)) is not None:
        return _show_missing(chosen, absent, only, json)
    where = _device(device)
    for known in chosen:
        if not sweep.timed(known, where, only):
            names = ", ".join(map(str, sweep.timed(known, where)))
            raise ValueError(f"no case of {known.name} contains {only!r}; the cases are: {names}")
    ceiling = sweep.ceilings(where)
    rows: list[dict[str, Any]] = []
    entries: list[Row] | None = [] if tuned else None
    for known in chosen:
        path = None if out is None else out / Device.of(where).slug / f"{known.name}.jsonl"
        found = []
        with errors.status(f"{known.name}: looking for cases"):
            cases = [case for case in sweep.timed(known, where, only) if not missing or sweep.missing(known, case, where)]
        steps = sweep.sweep(known, cases, where, ceiling, seconds=seconds, tuned=entries, with_peers=peers)
        for row in track(steps, known.name, total=len(cases), console=errors, disable=json):
            found.append(row)
            if path is not None:
                sweep.keep_row(row, path, "case", "dtype")
            if export is not None and entries:
                write(entries, Device.of(where), export)
        rows += found
        if found and not json:
            report.show(found, console)
    if missing and not rows:
        errors.print("nothing to measure: a table has every case with the code as it is")
    if json:
        for row in rows:
            print(json_format.dumps(row))
    if roofline is not None:
        picture.draw(rows, roofline)
    if any("wrong" in row for row in rows):
        raise typer.Exit(1)
    return None


def _absent(name: str) -> Any:
    """The card of a name that torch has no device for: it is asked about, not measured."""
    from turnout.routing.device import Device

    try:
        _device(name)
    except (RuntimeError, ValueError):
        return Device.named(name)
    return None


def _show_missing(ops: list[Any], device: Any, only: str, json: bool) -> None:
    """List the cases whose times no table of a card has with the code as it is."""
    from turnout.bench.sweep import absent_cases

    rows = [{"op": op.name, "case": str(case)} for op in ops for case in absent_cases(op, device, only)]
    if json:
        print(json_format.dumps(rows))
        return
    for row in rows:
        console.print(f"{row['op']}  {row['case']}", markup=False, highlight=False)
    errors.print(f"{len(rows)} cases that no table of {device.name} has with the code as it is")


def _show_router(found: dict[str, dict[str, float]], json: bool) -> None:
    from turnout.bench import report

    if json:
        print(json_format.dumps(found))
        return
    table = report.table("call", "torch, us", "turnout, us", "added, us", title="what the router adds to a call")
    for name, row in found.items():
        table.add_row(name, *(f"{row[key]:.2f}" for key in ("torch_us", "turnout_us", "added_us")))
    console.print(table)


@app.command()
def tune(
    ops: Annotated[list[str] | None, typer.Argument(help="Ops; default: every op.")] = None,
    budget: Annotated[float, typer.Option(help="Stop after this many seconds; what was measured is kept.")] = 60.0,
    device: Where = None,
    export: Annotated[Path | None, typer.Option(help="Write the rows into this table to ship, instead of keeping them here.")] = None,
    model: Annotated[str, typer.Option("--race", help="Instead of cases, what this model of `turnout race` calls, accelerated.")] = "",
    size: Annotated[str, typer.Option(help="With --race: tiny, small or full; default: full on a GPU, small on a CPU.")] = "",
    dtype: Annotated[str, typer.Option(help="With --race: bfloat16, float16 or float32.")] = "bfloat16",
    again: Annotated[bool, typer.Option("--again", help="With --race: also calls that were measured before.")] = False,
    json: Json = False,
) -> None:
    """Measure the routes of an op's cases, or of what a model calls, and remember the fastest for this machine.

    A model of your own: [bold]turnout.tune(during=lambda: model(x))[/bold] in Python.

    [bold]Example[/bold]  turnout tune matmul --budget 120

    [bold]Example[/bold]  turnout tune --race wan-vae --budget 300
    """
    import torch

    import turnout
    from turnout.bench import report
    from turnout.race.models import racer_named, size_named
    from turnout.routing.choose import in_short
    from turnout.routing.device import Device
    from turnout.routing.public import op_named
    from turnout.routing.row import decode
    from turnout.routing.store import export as write
    from turnout.routing.store import folder

    where = _device(device)
    measured: dict[str, Any] = {"budget": budget, "save": export is None, "progress": not json}
    if model:
        racer, size = racer_named(model), size_named(model, size, where)
        with torch.no_grad():
            with errors.status(f"{racer.describe(size)}: building"):
                made, call = racer.make(size, _dtype(dtype), where)
                turnout.accelerate(made)
            rows = turnout.tune(ops, during=lambda: call(made), again=again, **measured)
    else:
        rows = turnout.tune(ops, device=where, **measured)
    if export is not None:
        write(rows, Device.of(where), export)
    if json:
        print(json_format.dumps([{"op": row.op, "problem": row.problem, "us": row.us, "error": row.error} for row in rows]))
        return
    table = report.table("op", "problem", "fastest", "us", "reference, us")
    for row in rows:
        best = min(row.us, key=row.us.__getitem__)
        table.add_row(
            row.op,
            in_short(decode(op_named(row.op), row.problem)),
            best,
            f"{row.us[best]:.1f}",
            f"{row.us['reference']:.1f}",
        )
    console.print(table)
    console.print(f"{len(rows)} rows in {export or folder(Device.of(where))}", highlight=False)


@app.command()
def race(
    models: Annotated[list[str] | None, typer.Argument(help="Models by name (see --list), or [bold]all[/bold].")] = None,
    listed: Annotated[bool, typer.Option("--list", help="List the models and their sizes, and end.")] = False,
    size: Annotated[str, typer.Option(help="tiny, small or full; default: full on a GPU, small on a CPU.")] = "",
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float16 or float32; default: the model's own, see --list.")] = None,
    device: Where = None,
    weights: Annotated[Path | None, typer.Option(help="A folder with a model or a pipeline; default: random weights.")] = None,
    numerics: Annotated[str | None, typer.Option(help="exact, close or lossy; default: close.")] = None,
    compile: Annotated[bool, typer.Option("--compile", help="torch.compile of the part that the call runs races too.")] = False,
    rounds: Annotated[int, typer.Option(help="At most this many calls of each, 2 at least.")] = 10,
    seconds: Annotated[float, typer.Option(help="No new round of a model after this long.")] = 20.0,
    budget: Annotated[float | None, typer.Option(help="No new model after this many seconds in all.")] = None,
    missing: Annotated[bool, typer.Option("--missing", help="Leave out models that --out has a row of with this code.")] = False,
    profile: Annotated[
        bool,
        typer.Option(help="One more call under the profiler: kinds of kernels, routes. Of several models, of the accelerated one only."),
    ] = True,
    out: Annotated[Path | None, typer.Option(help="A folder for a row in <device>/race.jsonl, e.g. benchmarks/results.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write one HTML file with everything, and the first frames beside it as PNG.")] = None,
    json: Json = False,
) -> None:
    """A real model, stock and accelerated in turns: time, first call, peak memory, likeness, and the routes taken.

    Several models, or [bold]all[/bold] of them, run one after the other; each has its row in --out as soon as it is
    done, so that a run that is cut off loses nothing. Ends with exit code 1 when one of them failed.

    [bold]Example[/bold]  turnout race wan-vae --report wan.html

    [bold]Example[/bold]  turnout race all --budget 600 --rounds 4 --seconds 5 --missing --out benchmarks/results
    """
    from turnout.race import many, page
    from turnout.race.models import RACERS

    if listed:
        return _show_racers(json)
    if not models:
        raise ValueError(f"no model was named; give some of these, or all: {', '.join(RACERS)}")
    where = _device(device)
    names = list(RACERS) if "all" in models else models
    if report is not None and len(names) > 1:
        raise ValueError(f"--report is one page, {len(names)} models were named; race one, or use --out for rows of all")
    if missing and out is None:
        raise ValueError("--missing needs --out, the folder whose rows are asked")
    entries = many.entries(names, size, dtype, where, _dtype, weights)
    if report is not None:
        page.check_path(report)
    if out is not None:
        many.check_folder(out)
    plan = many.Plan(entries, where, weights, numerics, compile, rounds, seconds, budget, profile, out, missing)
    failed = 0
    with errors.status(entries[0].title) as status:
        for i, outcome in enumerate(plan.run(_progress(status, steps=errors.is_terminal))):
            failed += outcome.race is None or outcome.race.verdict == "wrong"
            if outcome.race is None and len(entries) == 1:
                raise ValueError(outcome.said)
            if json:
                print(json_format.dumps(outcome.row()))
            elif outcome.race is not None and len(entries) == 1:
                page.show(outcome.race, console)
            else:
                console.print(f"{i + 1:3} of {len(entries)}  {outcome.title}: {outcome.said}", highlight=False, markup=False)
            if report is not None and outcome.race is not None:
                page.write(outcome.race, report)
    if plan.left and not json:
        errors.print(f"{len(plan.left)} left when the budget was spent: {', '.join(plan.left)}", highlight=False)
    if failed:
        raise typer.Exit(1)
    return None


def _progress(status: Any, *, steps: bool) -> Any:
    """Tells how far races are: every step in one line of a terminal, else a line for each model."""
    told: set[str] = set()

    def tell(race: str, step: str) -> None:
        if steps:
            status.update(f"{race}: {step}")
        elif race not in told:
            told.add(race)
            errors.print(race, highlight=False, markup=False)

    return tell


def _show_racers(json: bool) -> None:
    """List the models that may race."""
    from turnout.bench import report
    from turnout.race.models import RACERS

    if json:
        rows = [
            {"model": name, "title": r.title, "class": r.model, "sizes": r.sizes, "dtypes": r.dtypes, "note": r.note}
            for name, r in RACERS.items()
        ]
        print(json_format.dumps(rows))
        return
    table = report.table("model", "what", "dtypes", "note")
    for name, racer in RACERS.items():
        table.add_row(name, racer.describe("full"), ", ".join(racer.dtypes), racer.note)
    console.print(table)

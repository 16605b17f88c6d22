"""`turnout race`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from turnout.cli.common import DeviceHere, Json, console, errors, print_json


def race(
    models: Annotated[
        list[str] | None, typer.Argument(help="Models by name (see --list), or [bold]all[/bold].")
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="List the models and their sizes, and end.")] = False,
    size: Annotated[
        str, typer.Option(help="tiny, small or full; default: full on a GPU, small on a CPU.")
    ] = "",
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16, float16 or float32; default: the model's own, see --list.")
    ] = None,
    device: DeviceHere = None,
    weights: Annotated[
        Path | None, typer.Option(help="A folder with a model or a pipeline; default: random weights.")
    ] = None,
    numerics: Annotated[str | None, typer.Option(help="exact, close or lossy; default: close.")] = None,
    compile: Annotated[
        bool, typer.Option("--compile", help="torch.compile of the part that the call runs races too.")
    ] = False,
    graph: Annotated[
        bool, typer.Option("--graph", help="The accelerated model with CUDA graphs of its calls races too.")
    ] = False,
    rounds: Annotated[int, typer.Option(help="At most this many calls of each, 2 at least.")] = 10,
    seconds: Annotated[float, typer.Option(help="No new round of a model after this long.")] = 20.0,
    budget: Annotated[float | None, typer.Option(help="No new model after this many seconds in all.")] = None,
    missing: Annotated[
        bool, typer.Option("--missing", help="Leave out models that --out has a row of with this code.")
    ] = False,
    profile: Annotated[
        bool,
        typer.Option(
            help="One more call under the profiler: kinds of kernels, routes. "
            "Of several models, of the accelerated one only."
        ),
    ] = True,
    out: Annotated[
        Path | None, typer.Option(help="A folder for a row in <device>/race.jsonl, e.g. benchmarks/results.")
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(help="Write one HTML file with everything, and the first frames beside it as PNG."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write the kernels of the profiled calls as a JSON file for ui.perfetto.dev."),
    ] = None,
    ranks: Annotated[
        int,
        typer.Option(
            help="Of a VAE's decode: on so many ranks, see --engine. A row goes to ranks.jsonl of --out."
        ),
    ] = 0,
    engine: Annotated[
        str, typer.Option(help="fake: each rank's compute by itself; lockstep: all in turns, bits compared.")
    ] = "fake",
    links: Annotated[
        Path | None, typer.Option(help="Latencies for --engine fake: a JSON object of bytes to microseconds.")
    ] = None,
    first_call: Annotated[
        bool,
        typer.Option(
            "--first-call",
            help="How long the first call takes, in a new process without compiled kernels, in another size, "
            "and after turnout warm. A row goes to first-call.jsonl of --out.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """A real model, stock and accelerated in turns: time, first call, peak memory, likeness, and the routes
    taken.

    Several models, or [bold]all[/bold] of them, run one after the other; each has its row in --out as soon as
    it is done, so that a run that is cut off loses nothing. Ends with exit code 1 when one of them failed.

    [bold]Example[/bold]  turnout race wan-vae --report wan.html

    [bold]Example[/bold]  turnout race all --budget 600 --rounds 4 --seconds 5 --missing --out
    benchmarks/results
    """
    from turnout.bench.writable import check_file, check_folder
    from turnout.race import many, page, perfetto
    from turnout.race.models import RACERS
    from turnout.routing.names import device_here

    if listed:
        return _show_racers(json)
    if not models:
        raise ValueError(f"no model was named; give some of these, or all: {', '.join(RACERS)}")
    here = device_here(device)
    names = list(RACERS) if "all" in models else models
    if missing and out is None:
        raise ValueError("--missing needs --out, the folder whose rows are asked")
    if ranks:
        return _race_ranks(names, size, dtype, here, ranks, engine, links, rounds, out, missing, json)
    if first_call:
        return _first_calls(names, size, dtype, here, out, missing, json)
    for option, path in (("--report", report), ("--trace", trace)):
        if path is not None and len(names) > 1:
            raise ValueError(
                f"{option} is of one race, {len(names)} models were named; race one, or use --out for rows"
            )
    if trace is not None and not profile:
        raise ValueError("--trace has what the profiler saw; leave --no-profile out")
    if report is not None:
        page.load()
    entries = many.entries(names, size, dtype, here, weights)
    for option, path in (("--report", report), ("--trace", trace)):
        if path is not None:
            check_file(option, path)
    if out is not None:
        check_folder("--out", out)
    plan = many.Plan(
        entries, here, weights, numerics, compile, rounds, seconds, budget, profile, out, missing, graph
    )
    failed = 0
    with errors.status(Text(entries[0].title)) as status:
        for i, outcome in enumerate(plan.run(_progress(status, steps=errors.is_terminal))):
            failed += outcome.race is None or outcome.race.verdict == "wrong"
            if outcome.race is None and len(entries) == 1:
                raise ValueError(outcome.said)
            if json:
                print_json(outcome.row())
            elif outcome.race is not None and len(entries) == 1:
                page.show(outcome.race, console)
            else:
                console.print(f"{i + 1:3} of {len(entries)}  {outcome.title}: {outcome.said}")
            if report is not None and outcome.race is not None:
                page.write(outcome.race, report)
            if trace is not None and outcome.race is not None:
                perfetto.write(outcome.race, trace)
    if plan.left and not json:
        errors.print(f"{len(plan.left)} left when the budget was spent: {', '.join(plan.left)}")
    if failed:
        raise typer.Exit(1)
    return None


def _race_ranks(
    names: list[str],
    size: str,
    dtype: str | None,
    device: Any,
    ranks: int,
    engine: str,
    links: Path | None,
    rounds: int,
    out: Path | None,
    missing: bool,
    json: bool,
) -> None:
    """Each model on several ranks of one device."""
    from turnout.race.ranks import in_words, race_ranks, read_links

    table = read_links(links)
    kept = _Kept(out, device, "ranks.jsonl", ("model", "size", "dtype", "ranks", "engine"), missing)
    others = {"ranks": ranks, "engine": engine}
    for name in names:
        if kept.has(name, size, dtype, **others):
            continue
        row = race_ranks(name, size, dtype, device, ranks, engine, table, rounds)
        kept.show(row, in_words(row), json, wrong=row.get("same_bits") is False)
    kept.end()


def _first_calls(
    names: list[str], size: str, dtype: str | None, device: Any, out: Path | None, missing: bool, json: bool
) -> None:
    """The first call of each model."""
    from turnout.race import first_call

    kept = _Kept(out, device, first_call.FILE, first_call.KEY, missing)
    with errors.status("") as status:
        for name in names:
            if kept.has(name, size, dtype):
                continue
            row = first_call.measure(
                name,
                size,
                dtype,
                device,
                lambda step, name=name: status.update(Text(f"{name}: {step}")),
            )
            kept.show(row, first_call.in_words(row), json)


class _Kept:
    """Where rows of one kind go: shown, and written as soon as they are there. key: the fields of rows that
    replace each other.
    """

    def __init__(self, out: Path | None, device: Any, file: str, key: tuple[str, ...], missing: bool):
        from turnout.bench.sweep import rows_of_this_code
        from turnout.bench.writable import check_folder
        from turnout.routing.device import Device

        if out is not None:
            check_folder("--out", out)
        self.device, self.key, self.failed = device, key, False
        self.path = None if out is None else out / Device.of(device).slug / file
        self.rows = rows_of_this_code(self.path, device) if missing and self.path is not None else []

    def has(self, name: str, size: str, dtype: str | None, **others: Any) -> bool:
        """Whether there is a row of this code already, which is to be left."""
        from turnout.race.models import racer_named, size_named

        wanted = {
            "model": name,
            "size": size_named(name, size, self.device),
            "dtype": dtype or racer_named(name).default_dtype(self.device),
            **others,
        }
        return any(all(row.get(field) == value for field, value in wanted.items()) for row in self.rows)

    def show(self, row: dict[str, Any], said: str, json: bool, *, wrong: bool = False) -> None:
        """Print a row and write it."""
        from turnout.bench.sweep import keep_row

        self.failed |= wrong
        if json:
            print_json(row)
        else:
            console.print(Text(said))
        if self.path is not None:
            keep_row(row, self.path, *self.key)

    def end(self) -> None:
        """Exit code 1 where a row was wrong."""
        if self.failed:
            raise typer.Exit(1)


def _progress(status: Any, *, steps: bool) -> Any:
    """Tells how far races are: every step in one line of a terminal, else a line for each model."""
    told: set[str] = set()

    def tell(race: str, step: str) -> None:
        if steps:
            status.update(Text(f"{race}: {step}"))
        elif race not in told:
            told.add(race)
            errors.print(race)

    return tell


def _show_racers(json: bool) -> None:
    """List the models that may race."""
    from turnout.bench import report
    from turnout.race.models import RACERS

    if json:
        return print_json(
            [
                {
                    "model": name,
                    "title": r.title,
                    "class": r.model,
                    "sizes": r.sizes,
                    "dtypes": r.dtypes,
                    "note": r.note,
                }
                for name, r in RACERS.items()
            ]
        )
    table = report.table("model", "what", "dtypes", "note")
    for name, racer in RACERS.items():
        table.add_row(name, racer.describe("full"), ", ".join(racer.dtypes), racer.note)
    return console.print(table)

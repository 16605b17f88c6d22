"""`turnout race`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from turnout.cli.common import DeviceHere, Json, check_least, console, errors, print_json


def race(
    models: Annotated[
        list[str] | None, typer.Argument(help="Models by name (see --list), or [bold]all[/bold].")
    ] = None,
    listed: Annotated[
        bool, typer.Option("--list", help="List the models and their sizes, and exit.")
    ] = False,
    size: Annotated[
        str,
        typer.Option(
            help="tiny, small or full; default: full on a GPU, small on a CPU. With --ranks and --first-call "
            "also the numbers of one: 480x832x81."
        ),
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
        bool, typer.Option("--compile", help="Also race torch.compile of the part that the call runs.")
    ] = False,
    graph: Annotated[
        bool, typer.Option("--graph", help="Also race the accelerated model with CUDA graphs of its calls.")
    ] = False,
    rounds: Annotated[int, typer.Option(help="Run each at most this many times, 2 at least.")] = 10,
    seconds: Annotated[float, typer.Option(help="Begin no new round of a model after this time.")] = 20.0,
    budget: Annotated[
        float | None, typer.Option(help="Begin no new model after this many seconds in all.")
    ] = None,
    missing: Annotated[
        bool, typer.Option("--missing", help="Leave out models that have a row of this code in --out.")
    ] = False,
    profile: Annotated[
        bool,
        typer.Option(
            help="Run one more call under the profiler, for kinds of kernels and routes; "
            "with several models, only of the accelerated ones."
        ),
    ] = True,
    out: Annotated[
        Path | None,
        typer.Option(help="Write rows to <device>/race.jsonl in this folder, such as benchmarks/results."),
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
        int | None,
        typer.Option(
            help="Decode a VAE on this many ranks, see --engine; rows go to <device>/ranks.jsonl in --out."
        ),
    ] = None,
    engine: Annotated[
        str,
        typer.Option(help="fake: time each rank's compute alone; lockstep: run all in turns, compare bits."),
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
    """Race a real model, stock and accelerated in turns: time, first call, peak memory, likeness, routes.

    Several models, or [bold]all[/bold] of them, run one after the other. Each has its row in --out as soon as
    it is done, so that a run that is cut off loses nothing. The exit code is 1 if one of them failed.

    [bold]Example[/bold]  turnout race wan-vae --report wan.html

    [bold]Example[/bold]  turnout race all --budget 600 --rounds 4 --seconds 5 --missing --out
    benchmarks/results
    """
    from turnout.bench.writable import check_file, check_folder
    from turnout.race import many, page, perfetto
    from turnout.race.models import RACERS, names_of
    from turnout.routing.names import device_here
    from turnout.routing.settings import check_level

    if listed:
        return _show_racers(json)
    if not models:
        raise ValueError(f"no model was given; give one or more of these, or all: {', '.join(RACERS)}")
    limits = (
        ("--rounds", rounds, 2),
        ("--seconds", seconds, 0),
        ("--budget", budget, 0),
        ("--ranks", ranks, 1),
    )
    for option, value, least in limits:
        check_least(option, value, least)
    if numerics is not None:
        check_level(numerics)
    if ranks is None and (links is not None or engine != "fake"):
        raise ValueError(f"--{'engine' if links is None else 'links'} was given without --ranks; give both")
    of_a_race = {
        "--weights": weights, "--numerics": numerics, "--compile": compile, "--graph": graph,
        "--budget": budget, "--report": report, "--trace": trace,
    }  # fmt: skip
    for mode, chosen in (("--ranks", ranks is not None), ("--first-call", first_call)):
        unused = [option for option, value in of_a_race.items() if chosen and value not in (None, False)]
        if unused:
            raise ValueError(f"{unused[0]} was given with {mode}, which makes no use of it; leave one out")
    if first_call and ranks is not None:
        raise ValueError("--ranks was given with --first-call; give one of them")
    torch_device = device_here(device)
    names = names_of(models)
    if missing and out is None:
        raise ValueError("--missing was given without --out, where it looks for rows; give both")
    if ranks is not None:
        return _race_ranks(names, size, dtype, torch_device, ranks, engine, links, rounds, out, missing, json)
    if first_call:
        return _first_calls(names, size, dtype, torch_device, out, missing, json)
    for option, path in (("--report", report), ("--trace", trace)):
        if path is not None and len(names) > 1:
            raise ValueError(
                f"{option} shows one race, {len(names)} models were given; give one, or use --out for rows"
            )
    if trace is not None and not profile:
        raise ValueError("--trace was given with --no-profile; it holds the profiled calls: leave one out")
    if report is not None:
        page.load()
    entries = many.entries(names, size, dtype, torch_device, weights)
    for option, path in (("--report", report), ("--trace", trace)):
        if path is not None:
            check_file(option, path)
    if out is not None:
        check_folder("--out", out)
    plan = many.Plan(
        entries,
        torch_device,
        weights,
        numerics,
        compile,
        rounds,
        seconds,
        budget,
        profile,
        out,
        missing,
        graph,
    )
    failed = 0
    with errors.status(Text(entries[0].title)) as status:
        for i, outcome in enumerate(plan.run(_progress(status, steps=errors.is_terminal))):
            failed += outcome.race is None or outcome.race.verdict == "wrong"
            if outcome.race is None and len(entries) == 1:
                raise ValueError(outcome.message)
            if json:
                print_json(outcome.row())
            elif outcome.race is not None and len(entries) == 1:
                page.show(outcome.race, console)
            else:
                console.print(f"{i + 1:3} of {len(entries)}  {outcome.title}: {outcome.message}")
            if report is not None and outcome.race is not None:
                page.write(outcome.race, report)
            if trace is not None and outcome.race is not None:
                perfetto.write(outcome.race, trace)
    if plan.left and not json:
        errors.print(f"the budget is spent, {len(plan.left)} races were not run: {', '.join(plan.left)}")
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
    """Shows rows of one kind, and writes each as soon as it is there.

    key: the fields that tell rows apart; a row replaces an older one with the same values.
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
        """Whether there is a row of this code already, so that nothing has to be measured."""
        from turnout.race.ahead import sized
        from turnout.race.models import racer_named

        wanted = {
            "model": name,
            "size": sized(name, size, self.device),
            "dtype": dtype or racer_named(name).default_dtype(self.device),
            **others,
        }
        return any(all(row.get(field) == value for field, value in wanted.items()) for row in self.rows)

    def show(self, row: dict[str, Any], text: str, json: bool, *, wrong: bool = False) -> None:
        """Print a row, as text or as JSON, and write it."""
        from turnout.bench.sweep import keep_row

        self.failed |= wrong
        if json:
            print_json(row)
        else:
            console.print(Text(text))
        if self.path is not None:
            keep_row(row, self.path, *self.key)

    def end(self) -> None:
        """End with exit code 1 if a row was wrong."""
        if self.failed:
            raise typer.Exit(1)


def _progress(status: Any, *, steps: bool) -> Any:
    """A function that reports the progress of races: each step on a terminal, otherwise a line for each."""
    reported: set[str] = set()

    def report_step(race: str, step: str) -> None:
        if steps:
            status.update(Text(f"{race}: {step}"))
        elif race not in reported:
            reported.add(race)
            errors.print(race)

    return report_step


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
    table = report.table("model", "full size", "dtypes", "note")
    for name, racer in RACERS.items():
        table.add_row(name, racer.describe("full"), ", ".join(racer.dtypes), racer.note)
    return console.print(table)

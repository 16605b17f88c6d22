"""`turnout bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track

from turnout.cli.common import DeviceHere, Json, check_least, console, errors, print_json


def bench(
    ops: Annotated[
        list[str] | None,
        typer.Argument(
            help="Ops by name; default: all. Or [bold]router[/bold]: measure what routing adds to a call. Or "
            "[bold]refit[/bold]: fit the constants of a device's cost models to its rows."
        ),
    ] = None,
    device: DeviceHere = None,
    only: Annotated[str, typer.Option(help="Only cases whose name contains this.")] = "",
    missing: Annotated[
        bool,
        typer.Option("--missing", help="Only cases without a row; for a card that is not here, list them."),
    ] = False,
    seconds: Annotated[float, typer.Option(help="Measure each case for at most this many seconds.")] = 1.0,
    out: Annotated[
        Path | None,
        typer.Option(help="Write rows to <device>/<op>.jsonl in this folder; rows of other cases stay."),
    ] = None,
    roofline: Annotated[Path | None, typer.Option(help="Draw the roofline into this PNG.")] = None,
    tuned: Annotated[
        bool, typer.Option("--tune", help="Tune each case first, and keep its row for this machine.")
    ] = False,
    export: Annotated[
        Path | None, typer.Option(help="With --tune: also write the rows into this table, to be shipped.")
    ] = None,
    peers: Annotated[
        bool, typer.Option(help="Time other implementations too; torch.compile takes seconds for each case.")
    ] = True,
    results: Annotated[Path, typer.Option(help="With refit: the folder with the rows.")] = Path(
        "benchmarks/results"
    ),
    write: Annotated[
        bool, typer.Option("--write", help="With refit: write the new constants into the device's file.")
    ] = False,
    json: Json = False,
) -> None:
    """Time an op's cases: the routed call, every route, and other implementations (peers), in one run.

    A wrong output gets no time, and the exit code is then 1. Cases called tiny are for tests, and timed only
    if --only names them.

    [bold]Example[/bold]  turnout bench dot --only bfloat16 --roofline dot.png
    """
    from turnout.bench import roofline as picture
    from turnout.bench.writable import check_file, check_folder
    from turnout.routing.names import device_here
    from turnout.routing.op import OPS
    from turnout.routing.public import op_named

    if export is not None and not tuned:
        raise ValueError("--export was given without --tune, whose rows it writes; give both")
    if ops == ["router"]:
        return _router(device, only, missing, out, json)
    if ops == ["refit"]:
        return _refit(device, results, write, json)
    if write:
        raise ValueError(
            "--write was given without refit, whose constants it writes: turnout bench refit --write"
        )
    check_least("--seconds", seconds, 0)
    selected = [op_named(op) for op in ops] if ops else list(OPS.values())
    if missing and device is not None and (absent := _absent_card(device)) is not None:
        return _show_missing(selected, absent, only, json)
    torch_device = device_here(device)
    if out is not None:
        check_folder("--out", out)
    if export is not None:
        check_file("--export", export)
    if roofline is not None:
        check_file("--roofline", roofline)
        picture.check_format(roofline)
    rows = _measure(selected, torch_device, only, missing, seconds, out, tuned, export, peers, json)
    if missing and not rows:
        errors.print("nothing to measure: a table has a row of every case with the kernels as they are")
    if json:
        for row in rows:
            print_json(row)
    if roofline is not None:
        picture.draw(rows, roofline)
    if any("wrong" in row for row in rows):
        raise typer.Exit(1)
    return None


def _measure(
    ops: list[Any],
    device: Any,
    only: str,
    missing: bool,
    seconds: float,
    out: Path | None,
    tuned: bool,
    export: Path | None,
    peers: bool,
    json: bool,
) -> list[dict[str, Any]]:
    """Measure the ops' cases. Each row is written as soon as it is there, and shown with those of its op."""
    from turnout.bench import report, sweep
    from turnout.routing.device import Device
    from turnout.routing.row import Row
    from turnout.routing.store import export as write

    for op in ops:
        if not sweep.timed(op, device, only):
            names = ", ".join(map(str, sweep.timed(op, device)))
            raise ValueError(f"--only {only!r}: no case of {op.name} contains it; the cases are: {names}")
    ceiling = sweep.ceilings(device)
    rows: list[dict[str, Any]] = []
    entries: list[Row] | None = [] if tuned else None
    for op in ops:
        path = None if out is None else out / Device.of(device).slug / f"{op.name}.jsonl"
        op_rows = []
        with errors.status(f"{op.name}: looking for cases"):
            timed = sweep.timed(op, device, only)
            cases = [case for case in timed if not missing or sweep.missing(op, case, device)]
        steps = sweep.sweep(op, cases, device, ceiling, seconds=seconds, tuned=entries, with_peers=peers)
        for row in track(steps, op.name, total=len(cases), console=errors, disable=json):
            op_rows.append(row)
            if path is not None:
                sweep.keep_row(row, path, "case", "dtype")
            if export is not None and entries:
                write(entries, Device.of(device), export)
        rows += op_rows
        if op_rows and not json:
            report.show(op_rows, console)
    return rows


def _absent_card(name: str) -> Any:
    """The card of a name that is none of torch's devices here; None if it is one."""
    from turnout.routing.device import Device
    from turnout.routing.names import device_here

    try:
        device_here(name)
    except ValueError:
        return Device.named(name)
    return None


def _show_missing(ops: list[Any], device: Any, only: str, json: bool) -> None:
    """List the cases that no table of a card has a row of with the kernels as they are."""
    from turnout.bench.sweep import absent_cases

    if not any(only in str(case) for op in ops for case in op.cases()):
        raise ValueError(f"--only {only!r}: no case of {', '.join(op.name for op in ops)} contains it")
    rows = [{"op": op.name, "case": str(case)} for op in ops for case in absent_cases(op, device, only)]
    if json:
        return print_json(rows)
    for row in rows:
        console.print(f"{row['op']}  {row['case']}")
    return errors.print(f"{len(rows)} cases without a row for {device.name} with the kernels as they are")


def _router(name: str | None, only: str, missing: bool, out: Path | None, json: bool) -> None:
    """Show what routing adds to a call, and on a GPU what the host takes for each call of some ops; rows of
    these go to router.jsonl of --out.
    """
    from turnout.bench import report, router
    from turnout.bench.sweep import keep_row, rows_of_this_code
    from turnout.bench.writable import check_folder
    from turnout.routing.device import Device
    from turnout.routing.names import device_here

    here = device_here(name)
    if missing and out is None:
        raise ValueError("--missing was given without --out, where it looks for rows; give both")
    if out is not None:
        check_folder("--out", out)
    path = None if out is None else out / Device.of(here).slug / router.FILE
    calls = {} if missing or only else router.measure_router()
    rows = []
    if here.type == "cuda":
        kept = rows_of_this_code(path, here) if missing and path is not None else []
        done = {tuple(row[field] for field in router.KEY) for row in kept}
        for row in router.measure_hosts(here, only, done):
            rows.append(row)
            if path is not None:
                keep_row(row, path, *router.KEY)
    calls |= {
        f"{row['op']} {row['case']} {row['dtype']}, host": {
            key: row[key] for key in ("torch_us", "turnout_us", "added_us")
        }
        for row in rows
    }
    if json:
        return print_json(calls)
    table = report.table(
        "call", "torch, us", "turnout, us", "added, us", title="time that the router adds to a call"
    )
    for call, row in calls.items():
        table.add_row(call, *(f"{row[key]:.2f}" for key in ("torch_us", "turnout_us", "added_us")))
    return console.print(table)


def _refit(name: str | None, results: Path, write: bool, json: bool) -> None:
    """Show the constants of cost models, as they are and as they fit best; with `write`, write the latter."""
    from turnout.bench import refit, report
    from turnout.routing.device import Device

    if name is None:
        raise ValueError("refit needs a device: turnout bench refit --device h200")
    device = Device.named(name)
    rows = refit.load_rows(results, device)
    with errors.status(f"{device.name}: fitting constants"):
        fits = refit.refit(device, refit.samples_of(rows))
    if write:
        path = refit.write(device, fits)
        errors.print(f"wrote {path}; cost models may choose other routes now")
    if json:
        return print_json([fit._asdict() for fit in fits])
    columns = ("section", "constant", "old", "new", "old off by a factor of", "new off by", "samples")
    table = report.table(*columns, title=f"constants of cost models, {device.name}")
    for fit in fits:
        off = (f"{fit.off_before:.2f}", f"{fit.off_after:.2f}", str(fit.samples))
        table.add_row(fit.section, fit.name, f"{fit.old:g}", f"{fit.new:g}", *off)
    return console.print(table)

"""`turnout tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from turnout.cli.common import DeviceHere, Json, console, errors, print_json


def tune(
    ops: Annotated[list[str] | None, typer.Argument(help="Ops; default: every op.")] = None,
    budget: Annotated[
        float, typer.Option(help="Stop after this many seconds; what was measured is kept.")
    ] = 60.0,
    device: DeviceHere = None,
    export: Annotated[
        Path | None,
        typer.Option(help="Write the rows into this table to ship, instead of keeping them here."),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            "--race", help="Instead of cases, what this model of `turnout race` calls, accelerated."
        ),
    ] = "",
    size: Annotated[
        str, typer.Option(help="With --race: tiny, small or full; default: full on a GPU, small on a CPU.")
    ] = "",
    dtype: Annotated[str, typer.Option(help="With --race: bfloat16, float16 or float32.")] = "bfloat16",
    again: Annotated[
        bool, typer.Option("--again", help="With --race: also calls that were measured before.")
    ] = False,
    json: Json = False,
) -> None:
    """Measure the routes of an op's cases, or of what a model calls, and remember the fastest for this
    machine.

    A model of your own: [bold]turnout.tune(during=lambda: model(x))[/bold] in Python.

    [bold]Example[/bold]  turnout tune matmul --budget 120

    [bold]Example[/bold]  turnout tune --race wan-vae --budget 300
    """
    import turnout
    from turnout.bench.writable import check_file, check_folder
    from turnout.race.models import prepare_accelerated
    from turnout.routing.device import Device
    from turnout.routing.names import device_here, dtype_named
    from turnout.routing.public import op_named
    from turnout.routing.store import export as write
    from turnout.routing.store import folder

    here = device_here(device)
    for op in ops or ():
        op_named(op)
    if export is not None:
        check_file("--export", export)
    else:
        check_folder("TURNOUT_CACHE_DIR, rows are kept in", folder(Device.of(here)))
    options: dict[str, Any] = {"budget": budget, "save": export is None, "progress": not json}
    if model:
        with errors.status(Text(f"{model}: building")):
            call = prepare_accelerated(model, size, dtype_named(dtype), here)
        rows = turnout.tune(ops, during=call, again=again, **options)
    else:
        rows = turnout.tune(ops, device=here, **options)
    if export is not None:
        write(rows, Device.of(here), export)
    if json:
        print_json([{"op": row.op, "problem": row.problem, "us": row.us, "error": row.error} for row in rows])
    else:
        _show(rows, export or folder(Device.of(here)))


def _show(rows: list[Any], place: Path) -> None:
    from turnout.bench import report
    from turnout.routing.choose import in_short
    from turnout.routing.public import op_named
    from turnout.routing.row import decode

    table = report.table("op", "problem", "fastest", "us", "reference, us")
    for row in rows:
        fastest = min(row.us, key=row.us.__getitem__)
        problem = in_short(decode(op_named(row.op), row.problem))
        table.add_row(row.op, problem, fastest, f"{row.us[fastest]:.1f}", f"{row.us['reference']:.1f}")
    console.print(table)
    console.print(f"{len(rows)} rows in {place}")

"""`turnout tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from turnout.cli.common import DeviceHere, Json, console, errors, print_json


def tune(
    ops: Annotated[list[str] | None, typer.Argument(help="Ops by name; default: all.")] = None,
    budget: Annotated[
        float, typer.Option(help="Stop after this many seconds, and keep what was measured.")
    ] = 60.0,
    device: DeviceHere = None,
    export: Annotated[
        Path | None,
        typer.Option(help="Write the rows into this table, to be shipped, and keep none for this machine."),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            "--race", help="Instead of cases, measure what this model of `turnout race` calls, accelerated."
        ),
    ] = "",
    size: Annotated[
        str, typer.Option(help="With --race: tiny, small or full; default: full on a GPU, small on a CPU.")
    ] = "",
    dtype: Annotated[str, typer.Option(help="With --race: bfloat16, float16 or float32.")] = "bfloat16",
    again: Annotated[
        bool, typer.Option("--again", help="With --race: measure also calls that were measured before.")
    ] = False,
    json: Json = False,
) -> None:
    """Measure the routes of ops' cases, or of a model's calls, and keep the times for this machine.

    For a model of your own: [bold]turnout.tune(during=lambda: model(x))[/bold] in Python.

    [bold]Example[/bold]  turnout tune matmul --budget 120

    [bold]Example[/bold]  turnout tune --race wan-vae --budget 300
    """
    import turnout
    from turnout.bench.writable import check_file, check_folder
    from turnout.race.models import prepare_accelerated
    from turnout.routing.device import Device
    from turnout.routing.names import device_here, model_dtype_named
    from turnout.routing.public import op_named
    from turnout.routing.store import export as write
    from turnout.routing.store import folder

    for option, given in (("--size", bool(size)), ("--dtype", dtype != "bfloat16"), ("--again", again)):
        if given and not model:
            raise ValueError(f"{option} was given without --race, whose model it is about; give both")
    torch_device = device_here(device)
    spec = Device.of(torch_device)
    for op in ops or ():
        op_named(op)
    if export is not None:
        check_file("--export", export)
    else:
        check_folder("rows are kept in", folder(spec), remedy="set TURNOUT_CACHE_DIR to another")
    options: dict[str, Any] = {"budget": budget, "save": export is None, "progress": not json}
    if model:
        with errors.status(Text(f"{model}: building")):
            call = prepare_accelerated(model, size, model_dtype_named(dtype), torch_device)
        rows = turnout.tune(ops, during=call, again=again, **options)
    else:
        rows = turnout.tune(ops, device=torch_device, **options)
    if export is not None:
        write(rows, spec, export)
    if json:
        print_json([{"op": row.op, "problem": row.problem, "us": row.us, "error": row.error} for row in rows])
    else:
        _show(rows, export or folder(spec))


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

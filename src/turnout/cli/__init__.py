"""The command line. The module of a command reads its options, calls the library and prints the answer."""

from __future__ import annotations

from typing import Annotated

import typer

from turnout._version import __version__
from turnout.cli import bench, doctor, explain, race, tune, warm
from turnout.cli.common import Commands, console

app = typer.Typer(
    cls=Commands,
    help=(
        "Make generative models in PyTorch faster: each op takes the fastest route that is right for its "
        "shape, dtype, layout and device. Ask which one and why, measure, tune, race whole models."
    ),
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

app.command()(doctor.doctor)
app.command(context_settings=explain.TAKES_ANY_OPTION)(explain.explain)
app.command()(bench.bench)
app.command()(tune.tune)
app.command()(race.race)
app.command()(warm.warm)


def _version(wanted: bool) -> None:
    if wanted:
        console.print(f"turnout {__version__}")
        raise typer.Exit


@app.callback()
def _turnout(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line."""
    app()

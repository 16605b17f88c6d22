"""What the commands share: consoles, options, and how errors end a command."""

from __future__ import annotations

import functools
import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from turnout.routing.op import TurnoutWarning

for _stream in ("stdout", "stderr"):
    if getattr(sys, _stream) is None:  # it was closed by the caller: `turnout ... >&-`
        setattr(sys, _stream, open(os.devnull, "w"))  # noqa: SIM115

# Nothing that is printed is markup: names, reasons and paths may have brackets. Colours are given as `Text`.
console = Console(width=None if sys.stdout.isatty() else 200, markup=False, highlight=False)
errors = Console(stderr=True, soft_wrap=True, markup=False, highlight=False)

_UsageError: Any = typer.BadParameter.__base__  # click's, or that of Typer's own copy of it
INTERRUPTED = 130  # 128 and the number of SIGINT, as shells have it

Json = Annotated[
    bool, typer.Option("--json", help="Print JSON instead of a table; docs/reference/json.md has the keys.")
]
DeviceHere = Annotated[
    str | None,
    typer.Option("--device", help="cpu, cuda, or cuda:1 and so on; default: the first GPU, else the CPU."),
]


class Commands(TyperGroup):
    """The group of commands: an error in one ends with one line and exit code 2, Ctrl-C with one and 130.

    Wrong options, missing packages and files that cannot be read or written are told from faults of the
    program by their class only. TURNOUT_TRACEBACK=1 shows the traceback of all of them.
    """

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Run the command line; a word that no command takes is one line too."""
        if not standalone_mode:
            return super().main(*args, standalone_mode=False, **extra)
        try:
            code = super().main(*args, standalone_mode=False, **extra)
        except _UsageError as mistake:
            if type(mistake).__name__ != "NoArgsIsHelpError":  # whose help has been printed
                errors.print(Text("error:", "red"), _of_usage(mistake))
            sys.exit(2)
        sys.exit(code if isinstance(code, int) else 0)

    def invoke(self, ctx: Any) -> Any:
        shown_by_default = warnings.showwarning
        warnings.showwarning = functools.partial(_show_warning, shown_by_default)
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            errors.print("interrupted; what was written so far stays")
            raise typer.Exit(INTERRUPTED) from stop
        except (ValueError, TypeError, RuntimeError, OSError, ImportError) as mistake:
            if isinstance(mistake, (typer.Exit, typer.Abort)) or os.environ.get("TURNOUT_TRACEBACK") == "1":
                raise
            if isinstance(mistake, BrokenPipeError):  # nobody reads the output any more: typer exits quietly
                raise
            errors.print(Text("error:", "red"), in_a_line(mistake))
            raise typer.Exit(2) from mistake
        finally:
            warnings.showwarning = shown_by_default


def _show_warning(
    otherwise: Callable[..., None], message: Warning | str, category: type[Warning], *place: Any, **more: Any
) -> None:
    """Show a warning of turnout's in a line, without the place in turnout where it was given."""
    if issubclass(category, TurnoutWarning):
        errors.print(Text("warning:", "yellow"), in_a_line(Exception(message)))
    else:
        otherwise(message, category, *place, **more)


def _of_usage(mistake: Any) -> str:
    """What is wrong with the words of a command, and where to look."""
    text = in_a_line(Exception(mistake.format_message())).rstrip(".")
    where = mistake.ctx.command_path if mistake.ctx is not None else "turnout"
    return (
        f"{text[:1].lower()}{text[1:]}{'' if text.endswith('?') else ';'} {where} --help lists what it takes"
    )


def check_least(option: str, value: float | None, least: int) -> None:
    """Raise ValueError if the value of an option, where one is given, is below the least, or no number.

    >>> check_least("--seconds", 2.5, 0)
    """
    if value is not None and not value >= least:  # NaN is not
        raise ValueError(f"{option} {value}: it needs to be at least {least}")


def in_a_line(mistake: BaseException) -> str:
    """The message of an error in one line, with what to do if that follows from its class."""
    if isinstance(mistake, ModuleNotFoundError) and mistake.name:
        return f"the package {mistake.name} is not installed; pip install {mistake.name}"
    if isinstance(mistake, OSError) and mistake.filename is not None:
        return f"{mistake.filename}: {mistake.strerror}"
    notes = "; ".join(getattr(mistake, "__notes__", ()))  # of Python 3.11
    return " ".join(f"{mistake}{'; ' if notes else ''}{notes}".split()) or type(mistake).__name__


def print_json(value: Any) -> None:
    """Print a JSON value on a line of its own."""
    print(json.dumps(value))

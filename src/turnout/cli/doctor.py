"""`turnout doctor`."""

from __future__ import annotations

import typer
from rich.text import Text

from turnout.cli.common import Json, console, print_json

COLOURS = {"ok": "green", "warning": "yellow", "failed": "red", "refused": "dim"}


def doctor(json: Json = False) -> None:
    """Examine this machine: versions, known-bad pairs, measured rows, and a small check of every route.

    A route is ok (its output agrees with the reference), refused (it cannot run here, with the reason) or
    failed. The exit code is 1 if a check failed.

    [bold]Example[/bold]  turnout doctor --json > report.json
    """
    from turnout import doctor as checks
    from turnout.bench import report

    environment = checks.environment()
    findings = checks.findings()
    if json:
        print_json({"environment": environment, "checks": [finding._asdict() for finding in findings]})
    else:
        for name, value in environment.items():
            console.print(f"{name:>12}  {value}")
        table = report.table("check", "state", "note")
        for finding in findings:
            table.add_row(finding.what, Text(finding.state, COLOURS[finding.state]), finding.note)
        console.print(table)
    raise typer.Exit(1 if any(finding.state == "failed" for finding in findings) else 0)

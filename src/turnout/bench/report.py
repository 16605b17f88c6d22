"""Print rows for people: a line for each case, the routed call beside the best peer and the bound."""

from __future__ import annotations

import sys
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table


def gain(row: dict[str, Any]) -> float | None:
    """How many times faster the routed call is than the best peer; None where an output was wrong."""
    if "us" not in row:
        return None
    peers = [us for name, us in row["us"].items() if name.startswith("peer:")]
    return min(peers) / row["us"]["turnout"] if peers else None


def of_bound(row: dict[str, Any]) -> float:
    """The share of the roofline bound that the device reaches while it works on the call."""
    us = row["device_us"]["turnout"]
    return row["bound_us"] / us if us else 0.0


def table(*columns: str, title: str | None = None) -> Table:
    """A table with borders on a terminal, without them in a pipe."""
    return Table(
        *columns, title=title, box=box.HEAVY_HEAD if sys.stdout.isatty() else box.SIMPLE, title_justify="left"
    )


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """Print rows as a table."""
    lines = table(title=f"{rows[0]['op']} on {rows[0].get('device', '?')}" if rows else None)
    texts, numbers = ("case", "dtype", "route", "best peer"), ("us", "gain", "of bound", "error")
    for name in (*texts[:3], "us", texts[3], *numbers, "torch's error"):
        lines.add_column(name, justify="left" if name in texts else "right", no_wrap=True)
    for row in rows:
        if "us" not in row:
            lines.add_row(
                row["case"],
                row["dtype"],
                row["chosen"],
                "wrong: " + "; ".join(row["wrong"].values()),
                *[""] * 6,
            )
            continue
        peers = {name.removeprefix("peer:"): us for name, us in row["us"].items() if name.startswith("peer:")}
        best = min(peers, key=peers.__getitem__)
        lines.add_row(
            row["case"],
            row["dtype"],
            row["chosen"],
            f"{row['us']['turnout']:.1f}",
            best,
            f"{peers[best]:.1f}",
            f"{gain(row):.2f}x",
            f"{of_bound(row):.0%}",
            f"{row['error']:.1e}",
            f"{row['reference_error']:.1e}",
        )
    console.print(lines)

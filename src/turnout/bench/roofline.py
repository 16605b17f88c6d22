"""Draw the roofline picture: what each case reaches, below the ceilings measured in the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from turnout.routing.op import OPS
from turnout.routing.row import decode


def load() -> Any:
    """matplotlib's pyplot, drawing into files; raise ValueError if it is not installed."""
    try:
        import matplotlib
    except ImportError as missing:
        raise ValueError(
            "matplotlib is not installed, --roofline needs it: pip install 'turnout[plot]'"
        ) from missing
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def check_format(path: Path) -> None:
    """Raise ValueError if the file's name ends in no format that matplotlib writes."""
    formats = load().gcf().canvas.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in formats:
        raise ValueError(f"--roofline {path}: pictures end in one of: {', '.join(sorted(formats))}")


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Write a PNG with the routed calls and their best peers: operations per byte, operations per second."""
    pyplot = load()
    rows = [row for row in rows if "us" in row]
    if not rows:
        raise ValueError("--roofline: no case has a time, so there is nothing to draw")
    ceiling = rows[0]["ceilings"]
    figure, axes = pyplot.subplots(figsize=(9, 6))
    points = {"turnout": ([], []), "best peer": ([], [])}
    for row in rows:
        op = OPS[row["op"]]
        work = op.work(decode(op, row["problem"]))
        peer = min(us for name, us in row["device_us"].items() if name.startswith("peer:"))
        for name, us in (("best peer", peer), ("turnout", row["device_us"]["turnout"])):
            if us > 0:
                points[name][0].append(work.flops / work.bytes)
                points[name][1].append(1e6 * work.flops / us)
    most = ceiling["matmul"]
    intensities = [2.0**e for e in range(-4, 14)]
    axes.plot(
        intensities,
        [min(most, i * ceiling["read"]) for i in intensities],
        color="0.3",
        label="bound measured in this run",
    )
    axes.scatter(*points["best peer"], marker="x", color="tab:gray", label="best peer")
    axes.scatter(*points["turnout"], color="tab:blue", alpha=0.7, label="turnout")
    axes.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="operations per second")
    axes.set_title(f"{rows[0]['op']} on {rows[0]['device']}")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)

"""Write a race as one HTML file that loads nothing else: the result and how sure it is, times, pictures.

The template is `templates/report.html`; this module computes the values in it. Jinja2 and Pillow are imported
when a page is made, so that a race without one needs neither.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text
from torch import Tensor

from turnout.bench import report
from turnout.measure.machine import in_words
from turnout.race.looks import LOOKS
from turnout.race.pictures import frame, load_pillow, png, side_by_side
from turnout.race.run import ACCELERATED, COMPILED, STOCK, Lane, Race, in_ms

FEW_PIXELS = 240  # a picture of a smaller width is enlarged
SAME = 0.03  # a smaller relative difference gets no colour
TIMES, ARROW, PLUS_MINUS = "\N{MULTIPLICATION SIGN}", "\N{RIGHTWARDS ARROW}", "\N{PLUS-MINUS SIGN}"
DASH, MINUS = "\N{EN DASH}", "\N{MINUS SIGN}"
WAITING = "waiting"  # the share of a card's time in which no kernel ran
TEMPLATES = Path(__file__).parent / "templates"


def load() -> Any:
    """Load the template; raise ValueError if Jinja2 or Pillow is not installed."""
    try:
        import jinja2
    except ImportError as missing:
        raise ValueError(
            "Jinja2 is not installed, --report needs it: pip install 'turnout[race]'"
        ) from missing
    load_pillow()
    loader = jinja2.FileSystemLoader(TEMPLATES)
    options: dict[str, Any] = {"autoescape": True, "undefined": jinja2.StrictUndefined}
    return jinja2.Environment(loader=loader, **options).get_template("report.html")


def page(race: Race) -> str:
    """The text of the HTML file."""
    template = load()
    bars = _bars(race)
    shown = {part["kind"] for bar in bars for part in bar["parts"]}
    values = {
        "race": race,
        "looks": LOOKS,
        "unit": "op" if race.machine["card"] is None else "kernel",
        "ran_on": in_words(race.machine, race.versions, race.date, race.commit),
        "tiles": _tiles(race),
        "bars": bars,
        "waits": WAITING in shown,
        "kinds": [kind for kind in LOOKS if kind in shown],
        "times": _times(race),
        "figures": _figures(race),
        "few_pixels": FEW_PIXELS,
        "routes": None if race.lanes[ACCELERATED].trace is None else race.routes(),
    }
    return template.render(values | _frames(race)) + "\n"


def write(race: Race, path: Path) -> None:
    """Write the page, and the first frames beside it as a PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(race), encoding="utf-8")
    frames = _first_frames(race)
    if frames:
        path.with_suffix(".png").write_bytes(png(side_by_side(*frames.values())))


def show(race: Race, console: Console) -> None:
    """Print the figures and the routes on a terminal."""
    columns = (
        "",
        "ms",
        "spread",
        "first call",
        "host ms",
        "extra MiB",
        "dB to float32",
        "dB to stock",
        "max error",
    )
    table = report.table(*columns, title=f"{race.what}, {race.dtype}")
    for name, lane in race.lanes.items():
        cells = [
            f"{lane.ms:.2f}",
            f"{lane.spread:.2f}",
            _first(lane),
            _host(lane),
            _mib(lane),
            *_likeness(lane),
        ]
        table.add_row(*([_lane_name(race, name), *cells] if lane.failed is None else [name, "failed"]))
    console.print(table)
    for name, lane in race.lanes.items():
        if lane.failed is not None:
            console.print(Text(f"{name}: {lane.failed}"))
    if race.lanes[ACCELERATED].trace is not None:
        title = "routes of the accelerated model"
        routes = report.table("op", "route", "calls", "ms", "share", "why", title=title)
        for s in race.routes():
            routes.add_row(s.op, s.route, str(s.calls), f"{s.ms:.1f}", f"{100 * s.share:.0f} %", s.why)
        console.print(routes)
    console.print(Text(in_words(race.machine, race.versions, race.date, race.commit)))
    patched = Text(f", {len(race.report.patched)} instances patched")
    console.print(Text(race.headline(), "bold") + patched)


def _lane_name(race: Race, name: str) -> str:
    return f"{name} of the {race.compiled or 'model'}" if name == COMPILED else name


def _or_blank(value: float | None, shown: Callable[[float], str]) -> str:
    return "" if value is None or math.isnan(value) else shown(value)


def _first(lane: Lane) -> str:
    return _or_blank(lane.first_ms, lambda ms: f"{ms / 1e3:.1f} s")


def _host(lane: Lane) -> str:
    return _or_blank(lane.host_ms, lambda ms: f"{ms:,.2f}")


def _mib(lane: Lane) -> str:
    return _or_blank(lane.peak_mib, lambda mib: f"{mib:,.0f}")


def _decibels(value: float) -> str:
    return _or_blank(value, lambda decibels: "exact" if math.isinf(decibels) else f"{decibels:.2f}")


def _likeness(lane: Lane) -> tuple[str, str, str]:
    errors = _or_blank(lane.max_error, lambda error: f"{error:.2g}")
    return _decibels(lane.psnr), _decibels(lane.psnr_stock), errors


def _tile(name: str, value: str, note: str, rating: str = "") -> dict[str, str]:
    return {"name": name, "value": value, "note": note, "rating": rating}


def _tiles(race: Race) -> list[dict[str, str]]:
    """The results at the top of the page: speed and how sure it is, memory, likeness."""
    stock, fast = race.lanes[STOCK], race.lanes[ACCELERATED]
    if fast.failed is not None:
        return [_tile("Speed", "none", fast.failed, "bad")]
    low, high = race.bounds
    before, after = (f"{in_ms(lane.ms)} {PLUS_MINUS} {in_ms(lane.spread)}" for lane in (stock, fast))
    rounds = f"{len(fast.samples)} rounds, {low:.2f}{TIMES} to {high:.2f}{TIMES}"
    note = f"{race.verdict}: {before} {ARROW} {after} ms; {rounds}"
    rating = {"faster": "good", "slower": "bad"}.get(race.verdict, "")
    return [
        _tile("Speed", f"{race.speedup:.2f}{TIMES}", note, rating),
        _memory_tile("Memory beside the weights", stock, fast),
        _likeness_tile("Likeness to float32 (PSNR)", race, stock, fast),
    ]


def _memory_tile(name: str, stock: Lane, fast: Lane) -> dict[str, str]:
    if stock.peak_mib is None or fast.peak_mib is None:
        return _tile(name, DASH, "not counted on a CPU")
    change = fast.peak_mib / stock.peak_mib - 1 if stock.peak_mib else 0.0
    rating = "good" if change < -SAME else "bad" if change > SAME else ""
    value = f"{100 * change:+.0f} %".replace("-", MINUS)
    return _tile(name, value, f"{_mib(stock)} {ARROW} {_mib(fast)} MiB at the peak", rating)


def _likeness_tile(name: str, race: Race, stock: Lane, fast: Lane) -> dict[str, str]:
    if math.isnan(fast.psnr):
        return _tile(name, DASH, f"not measured: {race.no_truth}")
    value, other = (
        _decibels(lane.psnr) + (" dB" if math.isfinite(lane.psnr) else "") for lane in (fast, stock)
    )
    return _tile(name, value, f"stock: {other}; more is closer")


def shares(race: Race, lane: str) -> dict[str, float]:
    """The shares of a lane's median call by kind of kernel, on a card also of waiting; their sum is 1."""
    times, whole = race.kinds_ms(lane), race.lanes[lane].ms
    waited = max(0.0, whole - sum(times.values())) if race.machine["card"] is not None else 0.0
    total = sum(times.values()) + waited
    by_kind = {kind: times[kind] / total for kind in LOOKS if kind in times}
    return by_kind | ({WAITING: waited / total} if waited else {})


def _bars(race: Race) -> list[dict[str, Any]]:
    """One bar for each lane, as long as its median, divided by the shares of kinds."""
    profiled = [name for name, lane in race.lanes.items() if lane.trace is not None and lane.trace.kernels]
    longest = max((race.lanes[name].ms for name in profiled), default=1.0)
    bars = []
    for name in profiled:
        parts, lane = shares(race, name), race.lanes[name]
        width, at, drawn = 100 * lane.ms / longest, 0.0, []
        for kind, share in parts.items():
            note = f"{kind}: {100 * share:.1f} %, {in_ms(share * lane.ms)} ms"
            drawn.append({"kind": kind, "start": f"{at:.3f}", "width": f"{width * share:.3f}", "note": note})
            at += width * share
        most = sorted(parts.items(), key=lambda item: -item[1])[:4]
        mostly = ", ".join(f"{kind} {100 * share:.0f} %" for kind, share in most)
        bars.append({"lane": _lane_name(race, name), "ms": in_ms(lane.ms), "mostly": mostly, "parts": drawn})
    return bars


def _times(race: Race) -> dict[str, Any] | None:
    """Milliseconds by kind of kernel, in each lane."""
    by_lane = {name: race.kinds_ms(name) for name, lane in race.lanes.items() if lane.trace}
    if not by_lane:
        return None
    every = {kind for times in by_lane.values() for kind in times}
    kinds = sorted(every, key=lambda kind: -max(times.get(kind, 0) for times in by_lane.values()))
    most = max((ms for times in by_lane.values() for ms in times.values()), default=1.0)

    def cell(ms: float | None) -> dict[str, str] | None:
        return None if ms is None else {"ms": f"{ms:,.1f}", "share": f"{ms / most:.3f}"}

    rows = [{"kind": kind, "cells": [cell(times.get(kind)) for times in by_lane.values()]} for kind in kinds]
    totals = [f"{sum(times.values()):,.1f}" for times in by_lane.values()]
    return {"lanes": list(by_lane), "rows": rows, "totals": totals}


def _figures(race: Race) -> dict[str, Any]:
    """Every figure of every lane, with its meaning; figures that no lane has are left out."""
    lanes = {name: lane for name, lane in race.lanes.items() if lane.failed is None}
    every = lanes.values()
    unit = "op" if race.machine["card"] is None else "kernel"
    spread = "interquartile range of the calls; of fewer than four, slowest less fastest"
    host = "until everything was launched; close to the time above if the card waits for its host"
    rows = [
        ("time, ms", "median of calls that took turns", [f"{lane.ms:,.2f}" for lane in every]),
        ("spread, ms", spread, [f"{lane.spread:,.2f}" for lane in every]),
        ("rounds", "every lane ran in each", [str(len(lane.samples)) for lane in every]),
        ("first call", "with everything that is compiled or loaded", [_first(lane) for lane in every]),
        ("host, ms", host, [_host(lane) for lane in every]),
        ("memory, MiB", "beside the weights, at the peak", [_mib(lane) for lane in every]),
        ("PSNR, dB", "against the stock model in float32", [_likeness(lane)[0] for lane in every]),
        ("PSNR, dB", "against stock in the same dtype", [_likeness(lane)[1] for lane in every]),
        ("largest difference", "from stock in the same dtype", [_likeness(lane)[2] for lane in every]),
        (
            f"{unit}s",
            "in one run",
            ["" if lane.trace is None else f"{len(lane.trace.kernels):,}" for lane in every],
        ),
    ]
    named = [
        {"name": name, "meaning": meaning, "cells": cells} for name, meaning, cells in rows if any(cells)
    ]
    return {"lanes": [_lane_name(race, name) for name in lanes], "rows": named}


def _first_frames(race: Race) -> dict[str, Tensor]:
    """The first frames of stock and accelerated, if the model makes pictures."""
    outputs = {name: race.lanes[name].output for name in (STOCK, ACCELERATED)}
    return {name: frame(output) for name, output in outputs.items() if output is not None}


def _frames(race: Race) -> dict[str, Any]:
    """The first frames for the template, and how far they differ."""
    frames = _first_frames(race)
    if len(frames) < 2:
        return {"frames": []}
    stock, fast = frames.values()
    difference = (stock.int() - fast.int()).abs().float()
    shown = []
    for name, picture in frames.items():
        height, width, _ = picture.shape
        data = base64.b64encode(png(picture)).decode()
        shown.append({"lane": name, "width": width, "height": height, "png": data})
    apart = {"apart_mean": f"{difference.mean():.2f}", "apart_most": f"{difference.max():.0f}"}
    return {"frames": shown, **apart}

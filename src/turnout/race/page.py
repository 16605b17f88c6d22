"""The race as one HTML file with nothing outside it: who won, what the time went into, when each kernel ran, what came out."""

from __future__ import annotations

import base64
from html import escape
from pathlib import Path

from rich.console import Console

from turnout.bench import report
from turnout.race.kernels import KINDS, Trace, kind_of
from turnout.race.pictures import frame, png, side_by_side
from turnout.race.run import ACCELERATED, STOCK, Race

COLOURS = {
    "conv": "#2f6fde", "gemm": "#5b8def", "attention": "#7a4fd0", "scan": "#9b6be0", "norm": "#1f9d7a", "elementwise": "#e8a33d",
    "copy": "#d6453d", "layout": "#f07a6a", "fill": "#f3b6ad", "resample": "#c9862b", "reduce": "#64b79c", "other": "#a9adb5",
}  # fmt: skip
BINS = 480
WIDTH, HEIGHT = 960, 56

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1f24; background: #fff; max-width: 1020px; margin: 32px auto; padding: 0 20px; }
h1 { font-size: 24px; margin: 0; }
h2 { font-size: 17px; margin: 34px 0 8px; }
.note { color: #5b6370; }
.big { font-size: 46px; font-weight: 650; margin: 14px 0 0; }
table { border-collapse: collapse; width: 100%; }
th { text-align: left; color: #5b6370; font-weight: 500; }
td, th { padding: 4px 14px 4px 0; border-bottom: 1px solid #e6e8ec; vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
.key { display: inline-block; margin-right: 16px; white-space: nowrap; }
.key i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 5px; }
svg { display: block; width: 100%; height: auto; }
img { max-width: 100%; }
code { font-size: 13px; }
"""


def page(race: Race) -> str:
    """The whole file."""
    stock, fast = race.lanes[STOCK], race.lanes[ACCELERATED]
    versions = ", ".join(f"{name} {version}" for name, version in race.versions.items())
    parts = [
        f"<h1>{escape(race.what)}</h1>",
        f"<div class=note>{escape(race.dtype)} on {escape(race.device)} · {escape(versions)}</div>",
        f"<div class=big>{race.speedup:.2f}&times; faster</div>",
        f"<div class=note>{stock.ms:.1f} ms stock, {fast.ms:.1f} ms accelerated, medians of calls that took turns</div>",
        _lanes(race), "<h2>When each kernel ran</h2>", _legend(race), _timelines(race), "<h2>Where the time went</h2>", _kinds(race),
        "<h2>Which routes were taken</h2>", _routes(fast.trace), "<h2>What was patched</h2>", f"<pre>{escape(str(race.report))}</pre>",
        _pictures(race),
    ]  # fmt: skip
    title = f"{escape(race.model)}: {race.speedup:.2f}&times;"
    return f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{STYLE}</style>{''.join(parts)}</html>\n"


def write(race: Race, path: Path) -> None:
    """The page, and the first frames beside it as a picture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(race), encoding="utf-8")
    picture = _first_frames(race)
    if picture is not None:
        path.with_suffix(".png").write_bytes(picture)


def show(race: Race, console: Console) -> None:
    """The figures and the routes, for a terminal."""
    table = report.table("", "ms", "iqr", "extra MiB", "dB against float32", title=f"{race.what}, {race.dtype}, {race.device}")
    for name, lane in race.lanes.items():
        peak, quality = ("" if lane.peak_mib is None else f"{lane.peak_mib:,.0f}"), ("" if lane.psnr != lane.psnr else f"{lane.psnr:.2f}")
        table.add_row(name, f"{lane.ms:.2f}", f"{lane.iqr:.2f}", peak, quality)
    console.print(table)
    routes = report.table("op", "route", "calls", "ms", "share", "why", title="routes of the accelerated model")
    trace = race.lanes[ACCELERATED].trace
    for s in trace.routes if trace else []:
        routes.add_row(s.op, s.route, str(s.calls), f"{s.ms:.1f}", f"{100 * s.share:.0f} %", s.why)
    console.print(routes)
    console.print(f"[bold]{race.speedup:.2f}x[/bold] stock, {len(race.report.patched)} instances patched", highlight=False)


def _table(head: list[str], rows: list[list[str]], numbers: set[int]) -> str:
    def cells(tag: str, row: list[str]) -> str:
        return "<tr>" + "".join(f"<{tag}{' class=n' if i in numbers else ''}>{cell}</{tag}>" for i, cell in enumerate(row)) + "</tr>"

    return f"<table>{cells('th', head)}{''.join(cells('td', row) for row in rows)}</table>"


def _lanes(race: Race) -> str:
    rows = []
    for name, lane in race.lanes.items():
        peak = "" if lane.peak_mib is None else f"{lane.peak_mib:,.0f}"
        quality = "" if lane.psnr != lane.psnr else f"{lane.psnr:.2f}"
        kernels = "" if lane.trace is None else f"{len(lane.trace.kernels):,}"
        rows.append([escape(name), f"{lane.ms:.2f}", f"{lane.iqr:.2f}", peak, quality, kernels])
    return _table(["", "ms", "iqr", "extra MiB at the peak", "dB against float32", "kernels"], rows, {1, 2, 3, 4, 5})


def _legend(race: Race) -> str:
    seen = {kind for lane in race.lanes.values() if lane.trace for kind in lane.trace.by_kind()}
    keys = (f"<span class=key><i style='background:{COLOURS[kind]}'></i>{kind}</span>" for kind in [*KINDS, "other"] if kind in seen)
    return f"<div>{''.join(keys)}</div>"


def _timelines(race: Race) -> str:
    """One band for each lane on one scale: each column is a slice of time, filled by what ran in it."""
    spans = {name: _span(lane.trace) for name, lane in race.lanes.items() if lane.trace and lane.trace.kernels}
    longest = max((end - start for start, end in spans.values()), default=1.0)
    bands = []
    for i, (name, (start, end)) in enumerate(spans.items()):
        top = i * (HEIGHT + 30) + 18
        length = end - start
        bands.append(f"<text x=0 y={top - 5} font-size=13 fill='#5b6370'>{escape(name)}, {length:.1f} ms under the profiler</text>")
        trace = race.lanes[name].trace
        assert trace is not None
        bands += _columns(trace, start, longest, top)
    return f"<svg viewBox='0 0 {WIDTH} {len(spans) * (HEIGHT + 30)}' role=img aria-label='kernels over time'>{''.join(bands)}</svg>"


def _span(trace: Trace | None) -> tuple[float, float]:
    assert trace is not None
    return trace.kernels[0].start, max(kernel.start + kernel.length for kernel in trace.kernels)


def _columns(trace: Trace, start: float, longest: float, top: float) -> list[str]:
    step = longest / BINS
    filled: list[dict[str, float]] = [{} for _ in range(BINS)]
    for kernel in trace.kernels:
        kind, at, left = kind_of(kernel.name), kernel.start - start, kernel.length
        while left > 0:
            column = min(int(at / step), BINS - 1)
            part = min(left, max((column + 1) * step - at, step * 1e-6))
            filled[column][kind] = filled[column].get(kind, 0.0) + part
            at, left = at + part, left - part
    wide, drawn = WIDTH / BINS, []
    for column, kinds in enumerate(filled):
        y = top + HEIGHT
        for kind in [*KINDS, "other"]:
            if kind in kinds:
                tall = HEIGHT * min(1.0, kinds[kind] / step)
                y -= tall
                drawn.append(f"<rect x={column * wide:g} y={y:.1f} width={wide:g} height={tall:.1f} fill='{COLOURS[kind]}'/>")
    return drawn


def _kinds(race: Race) -> str:
    found = {name: lane.trace.by_kind() for name, lane in race.lanes.items() if lane.trace}
    kinds = sorted({kind for times in found.values() for kind in times}, key=lambda kind: -max(t.get(kind, 0) for t in found.values()))
    rows = [[kind, *(f"{times.get(kind, 0):.1f}" for times in found.values())] for kind in kinds]
    rows.append(["<b>all</b>", *(f"<b>{sum(times.values()):.1f}</b>" for times in found.values())])
    return _table(["kind", *(f"{escape(name)}, ms" for name in found)], rows, set(range(1, len(found) + 1)))


def _routes(trace: Trace | None) -> str:
    if trace is None or not trace.routes:
        return "<p>No routed op was called.</p>"
    rows = [
        [escape(s.op), escape(s.route), str(s.calls), f"{s.ms:.1f}", f"{100 * s.share:.1f} %", f"<code>{escape(s.why)}</code>"]
        for s in trace.routes
    ]
    return _table(["op", "route", "calls", "ms", "of the time", "why"], rows, {2, 3, 4})


def _first_frames(race: Race) -> bytes | None:
    """Stock and accelerated side by side."""
    shown = [lane.output for name, lane in race.lanes.items() if lane.output is not None and name in (STOCK, ACCELERATED)]
    return png(side_by_side(*(frame(output) for output in shown))) if shown else None


def _pictures(race: Race) -> str:
    picture = _first_frames(race)
    if picture is None:
        return ""
    data = base64.b64encode(picture).decode()
    return f"<h2>First frame: stock, accelerated</h2><img alt='stock and accelerated' src='data:image/png;base64,{data}'>"

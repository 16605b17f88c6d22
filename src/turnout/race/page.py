"""The race as one HTML file with nothing outside it: who won, what the time went into, when each kernel ran, what came out."""

from __future__ import annotations

import base64
import collections
import math
from collections.abc import Iterator
from html import escape
from pathlib import Path

from rich.console import Console
from torch import Tensor

from turnout.bench import report
from turnout.race.kernels import Trace, kind_of
from turnout.race.looks import LOOKS, STYLE
from turnout.race.pictures import frame, png, side_by_side
from turnout.race.run import ACCELERATED, STOCK, Lane, Race

SLICES = 480  # of time, each one column of a timeline
FEW_PIXELS = 240  # across: a picture with fewer is enlarged
SAME = 0.03  # of a figure: less is not worth a colour


def page(race: Race) -> str:
    """The whole file."""
    unit = "op" if race.device == "cpu" else "kernel"
    versions = ", ".join(f"{name} {version}" for name, version in race.versions.items())
    said = f"The stock model against itself after <code>turnout.accelerate</code>, {escape(race.dtype)} on {escape(race.device)}"
    parts = [
        f"<h1>{escape(race.what)}</h1><p class=note>{said}. {escape(versions)}.</p>", _tiles(race), _timelines(race, unit), _frames(race),
        _kinds(race, unit), _routes(race.lanes[ACCELERATED].trace), _figures(race, unit),
        f"<h2>What was patched</h2><pre>{escape(str(race.report))}</pre>",
    ]  # fmt: skip
    head = (
        "<meta charset=utf-8><meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<title>{escape(race.model)}: {race.speedup:.2f}&times;</title><style>{STYLE}</style>"
    )
    return f"<!doctype html><html lang=en><head>{head}</head><body><main>{''.join(parts)}</main></body></html>\n"


def write(race: Race, path: Path) -> None:
    """The page, and the first frames beside it as a picture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(race), encoding="utf-8")
    frames = _first_frames(race)
    if frames:
        path.with_suffix(".png").write_bytes(png(side_by_side(*frames.values())))


def show(race: Race, console: Console) -> None:
    """The figures and the routes, for a terminal."""
    table = report.table("", "ms", "iqr", "host ms", "extra MiB", "dB against float32", title=f"{race.what}, {race.dtype}, {race.device}")
    for name, lane in race.lanes.items():
        table.add_row(name, f"{lane.ms:.2f}", f"{lane.iqr:.2f}", _host(lane), _mib(lane), _decibels(lane))
    console.print(table)
    routes = report.table("op", "route", "calls", "ms", "share", "why", title="routes of the accelerated model")
    trace = race.lanes[ACCELERATED].trace
    for s in trace.routes if trace else []:
        routes.add_row(s.op, s.route, str(s.calls), f"{s.ms:.1f}", f"{100 * s.share:.0f} %", s.why)
    console.print(routes)
    console.print(f"[bold]{race.speedup:.2f}x[/bold] stock, {len(race.report.patched)} instances patched", highlight=False)


def _host(lane: Lane) -> str:
    return "" if lane.host_ms is None else f"{lane.host_ms:,.2f}"


def _mib(lane: Lane) -> str:
    return "" if lane.peak_mib is None else f"{lane.peak_mib:,.0f}"


def _decibels(lane: Lane) -> str:
    return "" if math.isnan(lane.psnr) else "exact" if math.isinf(lane.psnr) else f"{lane.psnr:.2f}"


def _ms(value: float) -> str:
    """Three digits at least."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def _tiles(race: Race) -> str:
    """What a reader wants to know first: speed, memory, likeness."""
    stock, fast = race.lanes[STOCK], race.lanes[ACCELERATED]
    mood, verdict = _mood(1 / race.speedup - 1, ("faster", "slower", "about as fast"))
    tiles = [("Speed", f"{race.speedup:.2f}&times;", f"{verdict}: {_ms(stock.ms)} &rarr; {_ms(fast.ms)} ms", mood)]
    memory, likeness = "Memory beside the weights", "Likeness to float32 (PSNR)"
    if stock.peak_mib is None or fast.peak_mib is None:
        tiles.append((memory, "&ndash;", "not counted on a CPU", ""))
    else:
        change = fast.peak_mib / stock.peak_mib - 1 if stock.peak_mib else 0.0
        mood, _ = _mood(change, ("", "", ""))
        tiles.append((memory, f"{100 * change:+.0f} %".replace("-", "&minus;"), f"{_mib(stock)} &rarr; {_mib(fast)} MiB at the peak", mood))
    if math.isnan(fast.psnr):
        tiles.append((likeness, "&ndash;", "not measured: this race is in float32", ""))
    else:
        value, other = (_decibels(lane) + (" dB" if math.isfinite(lane.psnr) else "") for lane in (fast, stock))
        tiles.append((likeness, value, f"stock: {other}; more is closer", ""))
    cells = (f"<div><dt>{name}</dt><dd class='big {mood}'>{value}</dd><dd>{said}</dd></div>" for name, value, said, mood in tiles)
    return f"<dl class=tiles>{''.join(cells)}</dl>"


def _mood(change: float, words: tuple[str, str, str]) -> tuple[str, str]:
    """Colour and word of a cost that became less, more, or stayed."""
    return ("good", words[0]) if change < -SAME else ("bad", words[1]) if change > SAME else ("", words[2])


def _key(kind: str) -> str:
    return f"<span class=key title='{LOOKS[kind].meaning}'><span class='swatch {kind}'></span>{kind}</span>"


def _timelines(race: Race, unit: str) -> str:
    """One band for each lane on one scale: each column is a slice of time, filled by what ran in it."""
    traces = {name: lane.trace for name, lane in race.lanes.items() if lane.trace and lane.trace.kernels}
    if not traces:
        return ""
    seen = {kind for trace in traces.values() for kind in trace.by_kind()}
    keys = "".join(_key(kind) for kind in LOOKS if kind in seen)
    longest = max(_span(trace) for trace in traces.values())
    bands = []
    for name, trace in traces.items():
        most = ", ".join(f"{kind} {_ms(ms)} ms" for kind, ms in list(trace.by_kind().items())[:4])
        recorded = f"{len(trace.kernels):,} {unit}s in {_ms(_span(trace))} ms under the profiler"
        bands.append(
            f"<p class=lane><b>{escape(name)}</b> {_ms(race.lanes[name].ms)} ms <span class=note>&middot; {recorded}</span></p>"
            f"<svg class=band viewBox='0 0 {SLICES} 100' preserveAspectRatio=none role=img aria-label='{escape(name)}, mostly {most}'>"
            f"{''.join(_columns(trace, longest / SLICES))}</svg>"
        )
    note = (
        "One more run of each, on one scale: a shorter band is a faster run. The profiler slows both down. Where a column is not filled,"
        f" no {unit} ran. Point at it to see what did."
    )
    return f"<h2>When each {unit} ran</h2><p class=note>{note}</p><p class=keys>{keys}</p>{''.join(bands)}{_axis(longest)}"


def _span(trace: Trace) -> float:
    """Milliseconds from the first start to the last end."""
    return max(kernel.start + kernel.length for kernel in trace.kernels) - trace.kernels[0].start


def _axis(longest: float) -> str:
    """Round times, two to five of them, none so far right that its label would not fit."""
    rough = 10 ** math.floor(math.log10(longest))
    step = next(rough * factor for factor in (2, 1, 0.5, 0.2) if longest / (rough * factor) >= 2.5)
    marks = (
        f"<span style='left:{100 * i * step / longest:.2f}%'>{i * step:,.6g} ms</span>"
        for i in range(int(longest / step) + 1)
        if i * step < 0.85 * longest
    )
    return f"<div class=axis aria-hidden=true>{''.join(marks)}</div>"


def _columns(trace: Trace, step: float) -> Iterator[str]:
    """Each slice of time in which something ran: kinds one above the other, and in words for who points at them."""
    for x, ran in enumerate(_slices(trace, step)):
        if not ran:
            continue
        times: dict[str, float] = collections.defaultdict(float)
        for name, ms in ran:
            times[kind_of(name)] += ms
        scale = 100 / max(step, sum(times.values()))  # kernels of two streams may run at the same time
        shares = ", ".join(f"{kind} {scale * ms:.0f} %" for kind, ms in sorted(times.items(), key=lambda item: -item[1]))
        longest = max(ran, key=lambda item: item[1])[0]
        drawn, top = [], 100.0
        for kind in [kind for kind in LOOKS if kind in times]:
            top -= scale * times[kind]
            drawn.append(f"<rect class={kind} x={x} y={max(top, 0):.1f} width=1 height=100 />")
        drawn.reverse()  # each reaches to the ground behind those below it: no seams where heights are rounded to pixels
        said = f"{x * step:,.6g} to {(x + 1) * step:,.6g} ms: {shares}\nlongest: {escape(longest[:70])}"
        yield f"<g><title>{said}</title>{''.join(drawn)}</g>"


def _slices(trace: Trace, step: float) -> list[list[tuple[str, float]]]:
    """What ran in each slice of time: names of kernels, and how many milliseconds of each."""
    ran: list[list[tuple[str, float]]] = [[] for _ in range(SLICES)]
    for kernel in trace.kernels:
        at, left = kernel.start - trace.kernels[0].start, kernel.length
        while left > 0:
            column = min(int(at / step), SLICES - 1)
            part = min(left, max((column + 1) * step - at, step * 1e-6))
            ran[column].append((kernel.name, part))
            at, left = at + part, left - part
    return ran


def _table(head: list[str], rows: list[list[str]]) -> str:
    """The first cell of a row names it, all others are numbers."""
    titles = "".join(f"<th scope=col{' class=n' if i else ''}>{cell}</th>" for i, cell in enumerate(head))
    body = "".join(f"<tr><th scope=row>{name}</th>{''.join(f'<td class=n>{cell}</td>' for cell in cells)}</tr>" for name, *cells in rows)
    return f"<div class=table><table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>"


def _kinds(race: Race, unit: str) -> str:
    found = {name: lane.trace.by_kind() for name, lane in race.lanes.items() if lane.trace}
    kinds = sorted({kind for times in found.values() for kind in times}, key=lambda kind: -max(t.get(kind, 0) for t in found.values()))
    most = max((ms for times in found.values() for ms in times.values()), default=1.0)

    def cell(kind: str, ms: float | None) -> str:
        return "&ndash;" if ms is None else f"{ms:,.1f}<div class='bar {kind}' style='width:calc(var(--bar)*{ms / most:.3f})'></div>"

    rows = [
        [f"{_key(kind)} <span class='note wide'>{LOOKS[kind].meaning}</span>", *(cell(kind, times.get(kind)) for times in found.values())]
        for kind in kinds
    ]
    rows.append(["<b>all</b>", *(f"<b>{sum(times.values()):,.1f}</b>" for times in found.values())])
    return "<h2>Where the time went</h2>" + _table([f"ms by kind of {unit}", *map(escape, found)], rows)


def _routes(trace: Trace | None) -> str:
    title = "<h2>Which routes were taken</h2>"
    if trace is None or not trace.routes:
        return f"{title}<p>No routed op was called.</p>"
    rows = []
    for s in trace.routes:
        name = f"{escape(s.op)} &rarr; <b>{escape(s.route)}</b><div class=note>{escape(s.why)}</div>"
        rows.append([name, f"{s.calls:,}", f"{s.ms:,.1f}", f"{100 * s.share:.1f}&nbsp;%"])
    note = "<p class=note>What each op of turnout was sent down in the accelerated model, and why.</p>"
    return title + note + _table(["op &rarr; route", "calls", "ms", "of the time"], rows)


def _figures(race: Race, unit: str) -> str:
    lanes = race.lanes.values()
    rows = [
        ["time, ms", "median of calls that took turns", *(f"{lane.ms:,.2f}" for lane in lanes)],
        ["spread, ms", "interquartile range of the calls", *(f"{lane.iqr:,.2f}" for lane in lanes)],
        ["host, ms", "until all was asked for; as long as the time itself where the card waits for its host", *map(_host, lanes)],
        ["memory, MiB", "beside the weights, at the peak", *map(_mib, lanes)],
        ["PSNR, dB", "against the stock model in float32", *map(_decibels, lanes)],
        [f"{unit}s", "in one run", *("" if lane.trace is None else f"{len(lane.trace.kernels):,}" for lane in lanes)],
    ]
    named = [[f"{name} <span class='note wide'>{what}</span>", *cells] for name, what, *cells in rows if any(cells)]
    return "<h2>All figures</h2>" + _table(["", *map(escape, race.lanes)], named)


def _first_frames(race: Race) -> dict[str, Tensor]:
    """Of stock and accelerated, where the model makes pictures."""
    outputs = {name: race.lanes[name].output for name in (STOCK, ACCELERATED)}
    return {name: frame(output) for name, output in outputs.items() if output is not None}


def _frames(race: Race) -> str:
    frames = _first_frames(race)
    if len(frames) < 2:
        return ""
    stock, fast = frames.values()
    apart = (stock.int() - fast.int()).abs().float()
    shown = []
    for name, picture in frames.items():
        height, width, _ = picture.shape
        data = base64.b64encode(png(picture)).decode()
        size = f"width={width} height={height}{' class=enlarged' if width < FEW_PIXELS else ''}"
        image = f"<img {size} alt='first frame of the {name} model' src='data:image/png;base64,{data}'>"
        shown.append(f"<figure><figcaption>{name}</figcaption>{image}</figure>")
    note = (
        f"Of 255 steps of brightness the two differ by {apart.mean():.2f} on average and by {apart.max():.0f} at most."
        " Random weights make noise: then it should be the same noise."
    )
    return f"<h2>The first frame</h2><p class=note>{note}</p><div class=frames>{''.join(shown)}</div>"

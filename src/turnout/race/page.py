"""The race as one HTML file with nothing outside it: who won and how surely, where the time went, what came out."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from html import escape
from pathlib import Path

from rich.console import Console
from rich.markup import escape as plain
from torch import Tensor

from turnout.bench import report
from turnout.race.looks import LOOKS, STYLE
from turnout.race.machine import in_words
from turnout.race.pictures import frame, png, side_by_side
from turnout.race.run import ACCELERATED, COMPILED, STOCK, Lane, Race, in_ms

FEW_PIXELS = 240  # across: a picture with fewer is enlarged
SAME = 0.03  # of a figure: less is not worth a colour
WAITING = "waiting"  # the part of a card's time in which no kernel ran


def page(race: Race) -> str:
    """The whole file."""
    unit = "op" if race.machine["card"] is None else "kernel"
    said = f"The stock model against itself after <code>turnout.accelerate</code>, {escape(race.dtype)}, {race.weights} weights"
    ran_on = escape(in_words(race.machine, race.versions, race.date, race.commit))
    parts = [
        f"<h1>{escape(race.what)}</h1><p class=note>{said}.</p><p class=note>{ran_on}.</p>", _tiles(race), _bars(race, unit),
        _frames(race), _kinds(race, unit), _routes(race), _figures(race, unit),
        f"<h2>What was patched</h2><pre>{escape(str(race.report))}</pre>",
    ]  # fmt: skip
    head = (
        "<meta charset=utf-8><meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<title>{escape(race.model)}: {escape(race.headline())}</title><style>{STYLE}</style>"
    )
    return f"<!doctype html><html lang=en><head>{head}</head><body><main>{''.join(parts)}</main></body></html>\n"


def check_path(path: Path) -> None:
    """Raise ValueError if the page cannot be written there: asked before a race, which may take minutes."""
    if path.is_dir():
        raise ValueError(f"--report {path}: this is a folder; name a file in it, such as {path / 'race.html'}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        there = path.exists()
        with path.open("ab"):
            pass
        if not there:
            path.unlink()
    except OSError as failure:
        raise ValueError(f"--report {path}: it cannot be written: {failure.strerror}") from failure


def write(race: Race, path: Path) -> None:
    """The page, and the first frames beside it as a picture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(race), encoding="utf-8")
    frames = _first_frames(race)
    if frames:
        path.with_suffix(".png").write_bytes(png(side_by_side(*frames.values())))


def show(race: Race, console: Console) -> None:
    """The figures and the routes, for a terminal."""
    columns = ("", "ms", "spread", "first call", "host ms", "extra MiB", "dB to float32", "dB to stock", "max error")
    table = report.table(*columns, title=f"{race.what}, {race.dtype}")
    for name, lane in race.lanes.items():
        shown = [f"{lane.ms:.2f}", f"{lane.spread:.2f}", _first(lane), _host(lane), _mib(lane), *_likeness(lane)]
        table.add_row(_lane_name(race, name), *shown) if lane.failed is None else table.add_row(name, "failed")
    console.print(table)
    for name, lane in race.lanes.items():
        if lane.failed is not None:
            console.print(f"{name}: {plain(lane.failed)}", highlight=False)
    if race.lanes[ACCELERATED].trace is not None:
        routes = report.table("op", "route", "calls", "ms", "share", "why", title="routes of the accelerated model")
        for s in race.routes():
            routes.add_row(s.op, s.route, str(s.calls), f"{s.ms:.1f}", f"{100 * s.share:.0f} %", s.why)
        console.print(routes)
    console.print(in_words(race.machine, race.versions, race.date, race.commit), highlight=False, markup=False)
    console.print(f"[bold]{plain(race.headline())}[/bold], {len(race.report.patched)} instances patched", highlight=False)


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
    return _decibels(lane.psnr), _decibels(lane.psnr_stock), _or_blank(lane.max_error, lambda error: f"{error:.2g}")


def _tiles(race: Race) -> str:
    """What a reader wants to know first: speed and how sure it is, memory, likeness."""
    stock, fast = race.lanes[STOCK], race.lanes[ACCELERATED]
    if fast.failed is not None:
        return f"<dl class=tiles><div><dt>Speed</dt><dd class='big bad'>none</dd><dd>{escape(fast.failed)}</dd></div></dl>"
    mood = {"faster": "good", "slower": "bad"}.get(race.verdict, "")
    low, high = race.bounds
    times = f"{race.verdict}: {in_ms(stock.ms)} &plusmn; {in_ms(stock.spread)} &rarr; {in_ms(fast.ms)} &plusmn; {in_ms(fast.spread)} ms"
    rounds = f"{len(fast.samples)} rounds, {low:.2f}&times; to {high:.2f}&times;"
    tiles = [("Speed", f"{race.speedup:.2f}&times;", f"{times}; {rounds}", mood)]
    memory, likeness = "Memory beside the weights", "Likeness to float32 (PSNR)"
    if stock.peak_mib is None or fast.peak_mib is None:
        tiles.append((memory, "&ndash;", "not counted on a CPU", ""))
    else:
        change = fast.peak_mib / stock.peak_mib - 1 if stock.peak_mib else 0.0
        mood = "good" if change < -SAME else "bad" if change > SAME else ""
        tiles.append((memory, f"{100 * change:+.0f} %".replace("-", "&minus;"), f"{_mib(stock)} &rarr; {_mib(fast)} MiB at the peak", mood))
    if math.isnan(fast.psnr):
        tiles.append((likeness, "&ndash;", f"not measured: {escape(race.no_truth)}", ""))
    else:
        value, other = (_decibels(lane.psnr) + (" dB" if math.isfinite(lane.psnr) else "") for lane in (fast, stock))
        tiles.append((likeness, value, f"stock: {other}; more is closer", ""))
    cells = (f"<div><dt>{name}</dt><dd class='big {mood}'>{value}</dd><dd>{said}</dd></div>" for name, value, said, mood in tiles)
    return f"<dl class=tiles>{''.join(cells)}</dl>"


def _key(kind: str) -> str:
    return f"<span class=key title='{LOOKS[kind].meaning}'><span class='swatch {kind}'></span>{kind}</span>"


def shares(race: Race, lane: str) -> dict[str, float]:
    """The shares of a lane's median call by kind of kernel, and on a card the share in which it waited; 1 in all."""
    times, whole = race.kinds_ms(lane), race.lanes[lane].ms
    waited = max(0.0, whole - sum(times.values())) if race.machine["card"] is not None else 0.0
    total = sum(times.values()) + waited
    found = {kind: times[kind] / total for kind in LOOKS if kind in times}
    return found | ({WAITING: waited / total} if waited else {})


def _bars(race: Race, unit: str) -> str:
    """One bar for each lane, as long as its median, divided by the shares of kinds."""
    profiled = [name for name, lane in race.lanes.items() if lane.trace is not None and lane.trace.kernels]
    if not profiled:
        return ""
    found = {name: shares(race, name) for name in profiled}
    keys = "".join(_key(kind) for kind in LOOKS if any(kind in parts for parts in found.values()))
    longest = max(race.lanes[name].ms for name in profiled)
    bars = []
    for name, parts in found.items():
        lane = race.lanes[name]
        width, at, drawn = 100 * lane.ms / longest, 0.0, []
        for kind, share in parts.items():
            said = f"{kind}: {100 * share:.1f} %, {in_ms(share * lane.ms)} ms"
            drawn.append(f"<rect class={kind} x={at:.3f} y=0 width={width * share:.3f} height=100><title>{said}</title></rect>")
            at += width * share
        most = ", ".join(f"{kind} {100 * share:.0f} %" for kind, share in sorted(parts.items(), key=lambda item: -item[1])[:4])
        bars.append(
            f"<p class=lane><b>{escape(_lane_name(race, name))}</b> {in_ms(lane.ms)} ms <span class=note>&middot; {most}</span></p>"
            f"<svg class=band viewBox='0 0 100 100' preserveAspectRatio=none role=img aria-label='{escape(name)}, mostly {most}'>"
            f"{''.join(drawn)}</svg>"
        )
    idle = f" In the grey part the card had no {unit} to run." if any(WAITING in parts for parts in found.values()) else ""
    note = (
        "Each bar is as long as the median call. Its colours are shares of it, from one more call under the profiler, whose"
        f" own times, which it makes longer, are not shown.{idle} Point at a part to see what it is."
    )
    return f"<h2>The time, by kind of {unit}</h2><p class=note>{note}</p><p class=keys>{keys}</p>{''.join(bars)}"


def _table(head: list[str], rows: list[list[str]]) -> str:
    """The first cell of a row names it, all others are numbers."""
    titles = "".join(f"<th scope=col{' class=n' if i else ''}>{cell}</th>" for i, cell in enumerate(head))
    body = "".join(f"<tr><th scope=row>{name}</th>{''.join(f'<td class=n>{cell}</td>' for cell in cells)}</tr>" for name, *cells in rows)
    return f"<div class=table><table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>"


def _kinds(race: Race, unit: str) -> str:
    found = {name: race.kinds_ms(name) for name, lane in race.lanes.items() if lane.trace}
    if not found:
        return ""
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


def _routes(race: Race) -> str:
    if race.lanes[ACCELERATED].trace is None:
        return ""
    title = "<h2>Which routes were taken</h2>"
    if not race.routes():
        return f"{title}<p>No routed op was called.</p>"
    rows = []
    for s in race.routes():
        name = f"{escape(s.op)} &rarr; <b>{escape(s.route)}</b><div class=note>{escape(s.why)}</div>"
        rows.append([name, f"{s.calls:,}", f"{s.ms:,.1f}", f"{100 * s.share:.1f}&nbsp;%"])
    note = "<p class=note>What each op of turnout was sent down in the accelerated model, and why.</p>"
    return title + note + _table(["op &rarr; route", "calls", "ms", "of the kernels"], rows)


def _figures(race: Race, unit: str) -> str:
    lanes = {name: lane for name, lane in race.lanes.items() if lane.failed is None}
    every = lanes.values()
    rows = [
        ["time, ms", "median of calls that took turns", *(f"{lane.ms:,.2f}" for lane in every)],
        [
            "spread, ms",
            "interquartile range of the calls; of fewer than four, slowest less fastest",
            *(f"{lane.spread:,.2f}" for lane in every),
        ],
        ["rounds", "in each of which every lane ran", *(str(len(lane.samples)) for lane in every)],
        ["first call", "with all that is compiled or loaded for it", *map(_first, every)],
        ["host, ms", "until all was asked for; as long as the time itself where the card waits for its host", *map(_host, every)],
        ["memory, MiB", "beside the weights, at the peak", *map(_mib, every)],
        ["PSNR, dB", "against the stock model in float32", *(_likeness(lane)[0] for lane in every)],
        ["PSNR, dB", "against stock in the same dtype", *(_likeness(lane)[1] for lane in every)],
        ["largest difference", "from stock in the same dtype", *(_likeness(lane)[2] for lane in every)],
        [f"{unit}s", "in one run", *("" if lane.trace is None else f"{len(lane.trace.kernels):,}" for lane in every)],
    ]
    named = [[f"{name} <span class='note wide'>{what}</span>", *cells] for name, what, *cells in rows if any(cells)]
    failed = "".join(f"<p>{escape(name)} failed: {escape(lane.failed)}</p>" for name, lane in race.lanes.items() if lane.failed)
    heads = [escape(_lane_name(race, name)) for name in lanes]
    return "<h2>All figures</h2>" + _table(["", *heads], named) + failed


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

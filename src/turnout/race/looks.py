"""How the page of a race looks: a colour and a meaning for each kind of kernel, and the style sheet, in light and in dark."""

from __future__ import annotations

from typing import NamedTuple


class Look(NamedTuple):
    """How a kind of kernel is drawn, and what it is."""

    colour: str
    meaning: str


# In the order they are drawn, from the ground up: what a model is made of first, what only moves or prepares its data last.
# Every colour has a contrast of 3 to 1 at least on the light and on the dark ground of a band.
LOOKS = {
    "conv": Look("#2f6fde", "convolutions"),
    "gemm": Look("#0f93b0", "matrix products"),
    "attention": Look("#8757e0", "softmax of queries and keys, times values"),
    "scan": Look("#c24fbd", "state-space scans"),
    "norm": Look("#178a5c", "norms, with the SiLU behind them where it is fused"),
    "resample": Look("#6a951c", "upsampling and downsampling"),
    "reduce": Look("#5f7f3c", "sums, means, softmax"),
    "elementwise": Look("#bd7d0a", "number by number: SiLU, additions, products"),
    "copy": Look("#d6453d", "copies, casts, concatenation, padding"),
    "layout": Look("#e0558f", "channels moved to the front or to the back"),
    "fill": Look("#a5694f", "memory set to one value"),
    "other": Look("#7d848e", "everything else"),
}

_STYLE = """
:root {
  color-scheme: light dark; --bar: 120px;
  --text: #1b1f24; --muted: #57606a; --line: #dfe3e8; --ground: #fff; --card: #f1f3f6; --good: #146c43; --bad: #a33b12;
}
@media (prefers-color-scheme: dark) {
  :root { --text: #e8eaed; --muted: #a3adb8; --line: #343b44; --ground: #14171b; --card: #1f242b; --good: #5fd39b; --bad: #ffa07a; }
}
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--ground); margin: 0; }
main { max-width: 1060px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 25px; line-height: 1.25; margin: 0 0 4px; }
h2 { font-size: 18px; margin: 38px 0 4px; }
p { margin: 0 0 10px; }
.note { color: var(--muted); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: 12px; margin: 20px 0 0; }
.tiles div { background: var(--card); border-radius: 10px; padding: 12px 16px; }
.tiles dt { color: var(--muted); }
.tiles dd { margin: 0; }
.tiles .big { font-size: 32px; font-weight: 650; line-height: 1.25; }
.good { color: var(--good); }
.bad { color: var(--bad); }
.key { white-space: nowrap; }
.keys .key { display: inline-block; margin-right: 16px; }
.swatch { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px; vertical-align: -1px; }
.lane { margin: 14px 0 3px; }
.band { display: block; width: 100%; height: 40px; background: var(--card); shape-rendering: crispEdges; }
.band rect:hover { opacity: 0.6; }
.waiting { fill: var(--line); }
.table { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
td, th { padding: 5px 14px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; text-align: left; font-weight: 400; }
thead th { color: var(--muted); vertical-align: bottom; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
td:last-child, th:last-child { padding-right: 0; }
th .note { font-size: 13px; overflow-wrap: anywhere; }
.bar { height: 5px; border-radius: 2px; margin: 1px 0 3px auto; }
.frames { display: grid; grid-template-columns: 1fr 1fr; gap: 12px; }
figure { margin: 0; }
figure img { display: block; width: 100%; height: auto; }
.enlarged { image-rendering: pixelated; }
pre { font-size: 13px; white-space: pre-wrap; overflow-wrap: anywhere; background: var(--card); border-radius: 10px; padding: 12px 16px; }
@media (max-width: 560px) {
  :root { --bar: 40px; }
  .wide { display: none; }
  .tiles div:last-child { grid-column: 1 / -1; }
  .band { height: 32px; }
  td, th { padding-right: 8px; font-size: 14px; }
}
"""

STYLE = _STYLE + "".join(f".{kind} {{ fill: {look.colour}; background: {look.colour}; }}\n" for kind, look in LOOKS.items())

"""Write the parts of the documentation that follow from data: python -m benchmarks.docs_pages [--check]

Whole files under docs/results, the runs of GPU tests that turnout knows of (launch/verified.json), and the
parts between `<!-- generated: NAME -->` and `<!-- end: NAME -->` in other pages. No figure in them is typed
by hand: they come from benchmarks/results and from the registries of turnout. With --check nothing is
written; it ends with status 1 where a page is not what it would be.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
Row = dict[str, Any]

README_MODELS = ("wan-vae", "wan22-vae", "flux-vae", "ltx-vae", "flux", "wan", "mamba", "mamba-decode")
README_DEVICE = "nvidia-h200"
WIDTH = 110  # columns of lines in pages that people edit; tables of results are as wide as they need
# Files of results that are not of an op's cases.
OTHERS = ("card", "first-call", "fuzz", "gpu-tests", "race", "ranks", "router")


def pages() -> dict[Path, str]:
    """Every page with generated parts, and what it should hold."""
    texts = {ROOT / "docs" / "results" / f"{slug}.md": device_page(slug) for slug in slugs()}
    texts[ROOT / "src" / "turnout" / "launch" / "verified.json"] = verified()
    parts: dict[str, Callable[[], str]] = {
        "races": readme_races,
        "devices": devices,
        "versions": versions,
        "models": models,
        "parts": fused_parts,
        "cards": cards,
        "routes": routes,
    }
    sources = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for path in sources:
        text = path.read_text(encoding="utf-8")
        names = re.findall(r"^<!-- generated: (\w+) -->$", text, re.MULTILINE)
        for name in names:
            marks = f"<!-- generated: {name} -->\n", f"<!-- end: {name} -->"
            before, after = text.index(marks[0]) + len(marks[0]), text.index(marks[1])
            text = f"{text[:before]}\n{parts[name]()}\n{text[after:]}"
        if names:
            texts[path] = text
    return texts


def slugs() -> list[str]:
    """The devices that have results, the GPUs first."""
    result = [folder.name for folder in RESULTS.iterdir() if folder.is_dir()]
    return sorted(result, key=lambda slug: (slug.startswith("cpu"), slug))


def rows(slug: str, name: str) -> list[Row]:
    path = RESULTS / slug / f"{name}.jsonl"
    return (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    )


def notes() -> dict[str, Any]:
    return json.loads((RESULTS / "notes.json").read_text(encoding="utf-8"))


# ---- how things are written


def table(head: Sequence[str], body: Iterable[Sequence[str]], numbers: int = 0) -> str:
    """A table of Markdown; the last `numbers` columns are aligned to the right."""
    rules = ["---"] * (len(head) - numbers) + ["--:"] * numbers
    lines = [head, rules, *body]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def items(lines: Iterable[str]) -> str:
    """A list of Markdown, its lines wrapped."""
    options = {
        "width": WIDTH,
        "subsequent_indent": "  ",
        "break_on_hyphens": False,
        "break_long_words": False,
    }
    return "".join(f"{textwrap.fill('- ' + line, **options)}\n" for line in lines)


def in_time(us: float) -> str:
    """Microseconds as a reader wants them.

    >>> in_time(61.62), in_time(1063.1), in_time(1833552.0)
    ('61.6 us', '1.06 ms', '1834 ms')
    """
    if us < 1000:
        return f"{us:.1f} us" if us < 100 else f"{us:.0f} us"
    ms = us / 1e3
    return f"{ms:.2f} ms" if ms < 10 else f"{ms:.1f} ms" if ms < 100 else f"{ms:.0f} ms"


def short(version: str) -> str:
    """A version without its build: 2.11.0+cu130 is 2.11.0."""
    return version.split("+")[0]


def measured_with(row: Row) -> str:
    """The state of the code and the versions that a row was measured with."""
    code = f"`{row['commit']}`" if row.get("commit") else "not recorded"
    software = row["versions"]
    triton = (
        [f"Triton {short(software['triton'])}"]
        if software.get("triton") and row.get("device") != "cpu"
        else []
    )
    return ", ".join([code, f"torch {short(software['torch'])}", *triton])


# ---- races


def newest(rows: list[Row]) -> list[Row]:
    """The last row of each race by its date; of rows without a date, the first."""
    by_race: dict[tuple, Row] = {}
    for row in rows:
        key = (row["model"], row["dtype"], row["what"])
        if key not in by_race or row.get("date", "") > by_race[key].get("date", ""):
            by_race[key] = row
    return list(by_race.values())


def race_cells(row: Row) -> list[str]:
    stock, fast = row["lanes"]["stock"], row["lanes"]["accelerated"]
    if "failed" in fast:
        return [row["what"], row["dtype"], in_time(1e3 * stock["ms"]), "", "wrong", "", "", "", ""]
    compiled, graphs = row["lanes"].get("torch.compile", {}), row["lanes"].get("graph", {})
    memory = "" if fast["peak_mib"] is None else f"{stock['peak_mib']:.0f} to {fast['peak_mib']:.0f}"
    likeness = (
        "" if not (stock.get("psnr") and fast.get("psnr")) else f"{stock['psnr']:.1f} to {fast['psnr']:.1f}"
    )
    verdict = f" ({row['verdict']})" if row.get("verdict") not in (None, "faster") else ""
    return [
        row["what"],
        row["dtype"],
        in_time(1e3 * stock["ms"]),
        in_time(1e3 * compiled["ms"]) if "ms" in compiled else "",
        f"**{in_time(1e3 * fast['ms'])}**",
        in_time(1e3 * graphs["ms"]) if "ms" in graphs else "",
        f"{row['speedup']:.2f}x{verdict}",
        memory,
        likeness,
    ]


RACE_HEAD = (
    "model",
    "dtype",
    "stock",
    "torch.compile",
    "turnout",
    "turnout, CUDA graphs",
    "speed-up",
    "memory, MiB",
    "PSNR, dB",
)


def race_table(slug: str) -> str:
    result = rows(slug, "race")
    body = [[*race_cells(row), measured_with(row)] for row in result]
    head = [*RACE_HEAD, "measured with"]
    graphs = RACE_HEAD.index("turnout, CUDA graphs")
    if not any(cells[graphs] for cells in body):
        for cells in (head, *body):
            del cells[graphs]
    caveats = [
        f"- {row['what']}, `{note['commit']}`: {note['note']}."
        for note in notes()["races"]
        for row in result
        if note["device"] == slug and (note["model"], note["commit"]) == (row["model"], row.get("commit"))
    ]
    return table(head, body) + ("\n" + "\n".join(caveats) + "\n" if caveats else "")


def readme_races() -> str:
    """The table of whole models in the README: each model's newest row on one card."""
    results = {row["model"]: row for row in reversed(newest(rows(README_DEVICE, "race")))}
    body, caveats = [], []
    for name in README_MODELS:
        row = results[name]
        kind, _, stock, compiled, fast, graphs, *rest = race_cells(row)
        title = notes()["titles"].get(kind) or re.sub(r", \w+:", ",", kind).split(" (")[0]
        if compiled:
            caveats.append(f"{title}: torch.compile takes {compiled}.")
        if graphs:
            caveats.append(f"{title}: CUDA graphs take {graphs}.")
        marks = [
            note for note in notes()["races"] if (note["model"], note["commit"]) == (name, row.get("commit"))
        ]
        caveats += [f"{title}: {note['note']}." for note in marks]
        body.append([title, stock, fast, *rest])
    used = [results[name] for name in README_MODELS]
    device, dtypes = used[0]["device"], sorted({row["dtype"] for row in used})
    conditions = sorted({measured_with(row) for row in used})
    message = f"{device}, {' and '.join(dtypes)}, random weights, commit {'; commit '.join(conditions)}:"
    head = ("model", "stock", "turnout", "speed-up", "memory", "PSNR")
    return f"{message}\n\n{table(head, body)}" + (f"\n{items(caveats)}" if caveats else "")


# ---- ops


def best_peer(row: Row) -> tuple[str, float] | None:
    peers = {name.removeprefix("peer:"): us for name, us in row["us"].items() if name.startswith("peer:")}
    return min(peers.items(), key=lambda peer: peer[1]) if peers else None


def op_cells(row: Row) -> list[str]:
    if "us" not in row:
        return [row["case"], row["dtype"], row["chosen"], "wrong output", "", "", "", "", measured_with(row)]
    peer, ours = best_peer(row), row["us"]["turnout"]
    device_us = row["device_us"]["turnout"]
    return [
        row["case"],
        row["dtype"],
        row["chosen"],
        in_time(ours),
        f"{in_time(peer[1])} ({peer[0]})" if peer else "",
        f"{peer[1] / ours:.2f}x" if peer else "",
        f"{row['bound_us'] / device_us:.0%}" if device_us else "",
        f"{row['error']:.1e} / {row['reference_error']:.1e}",
        measured_with(row),
    ]


OP_HEAD = (
    "case",
    "dtype",
    "route",
    "turnout",
    "best peer",
    "gain",
    "of bound",
    "error, ours / torch's",
    "measured with",
)


def gains_table(by_op: dict[str, list[Row]]) -> str:
    """How the routed calls of each op compare with the best peer of the same row."""
    body = []
    for op, result in by_op.items():
        timed = [(best_peer(row), row["us"]["turnout"]) for row in result if "us" in row]
        gains = [peer[1] / ours for peer, ours in timed if peer]
        if gains:
            mean = statistics.geometric_mean(gains)
            slower = sum(gain < 1 for gain in gains)
            link = f"[`{op}`](#{op})"
            body.append(
                [
                    link,
                    str(len(gains)),
                    f"{mean:.2f}x",
                    f"{min(gains):.2f}x",
                    f"{max(gains):.2f}x",
                    str(slower),
                ]
            )
    head = ("op", "rows with a peer", "geometric mean", "least", "greatest", "rows where the peer is faster")
    return table(head, body, numbers=5)


def device_page(slug: str) -> str:
    """All results of one device."""
    by_op: dict[str, list[Row]] = defaultdict(list)
    for path in sorted((RESULTS / slug).glob("*.jsonl")):
        if path.stem not in OTHERS:
            by_op[path.stem] = rows(slug, path.stem)
    device = next((row["device"] for result in by_op.values() for row in result), slug)
    heading = device if device != "cpu" else slug
    parts = [
        "<!-- Generated by python -m benchmarks.docs_pages: do not edit. -->",
        f"# Results: {heading}",
        notes()["devices"].get(slug, ""),
        "[What the columns mean](index.md#how-to-read-the-tables).",
    ]
    if rows(slug, "race"):
        parts += ["## Whole models", race_table(slug)]
    for title, name, make_table in (
        ("First calls", "first-call", first_call_table),
        ("Several ranks", "ranks", ranks_table),
        ("Host time of a call", "router", router_table),
        ("GPU tests", "gpu-tests", tests_table),
    ):
        if result := rows(slug, name):
            parts += [f"## {title}", make_table(result)]
    parts += ["## Ops against the best peer", gains_table(by_op)]
    for op, result in by_op.items():
        parts += [f"## {op}", table(OP_HEAD, [op_cells(row) for row in result])]
    if fuzz := rows(slug, "fuzz"):
        parts += ["## Random calls against float64", fuzz_table(fuzz)]
    return "\n\n".join(part.rstrip("\n") for part in parts if part) + "\n"


def first_call_table(result: list[Row]) -> str:
    """Seconds of first and second calls, and how many kernels they compiled."""

    def cell(row: Row, first: str, compilations: str, second: str = "") -> str:
        if row[first] is None:
            return ""
        after = f", then {row[second]:.2f} s" if second else ""
        return f"{row[first]:.2f} s ({row[compilations]} compiled{after})"

    body = [
        [
            row["what"],
            row["dtype"],
            cell(row, "cold_s", "compilations", "second_s"),
            cell(row, "other_size_s", "other_size_compilations", "other_size_second_s"),
            cell(row, "warmed_s", "warmed_compilations"),
            str(row["cores"]),
            measured_with(row),
        ]
        for row in result
    ]
    head = ("model", "dtype", "nothing compiled", "another size", "after `turnout warm`", "cores")
    return table([*head, "measured with"], body)


def ranks_table(result: list[Row]) -> str:
    """What several ranks give: the bits of one, or a predicted speed-up."""
    body = []
    for row in result:
        if row["engine"] == "lockstep":
            outcome, most = "the same bits" if row["same_bits"] else "OTHER BITS", ""
        else:
            peaks = [rank["peak_mib"] for rank in row["of_ranks"] if rank["peak_mib"] is not None]
            outcome = f"{row['predicted_speedup']:.2f}x predicted"
            most = f"{max(peaks):.0f} (one: {row['one_rank_peak_mib']:.0f})" if peaks else ""
        cells = [row["title"], row["dtype"], str(row["ranks"]), row["engine"], outcome, most]
        body.append([*cells, measured_with(row)])
    head = ("model", "dtype", "ranks", "engine", "result", "memory of a rank, MiB", "measured with")
    return table(head, body)


def router_table(result: list[Row]) -> str:
    """Medians over the cases of each kind of op."""
    by_kind: dict[str, list[Row]] = defaultdict(list)
    for row in result:
        by_kind[row["kind"]].append(row)
    body = []
    for kind, of_kind in by_kind.items():
        ours, theirs = (
            statistics.median(row[name] for row in of_kind) for name in ("turnout_us", "torch_us")
        )
        used = sorted({measured_with(row) for row in of_kind})
        body.append([kind, str(len(of_kind)), in_time(ours), in_time(theirs), "; ".join(used)])
    return table(("kind", "calls", "turnout, median", "plain PyTorch, median", "measured with"), body)


def tests_table(result: list[Row]) -> str:
    """How many GPU tests passed."""
    body = [
        [str(row["passed"]), str(row["tests"]), ", ".join(row["failed"]), measured_with(row)]
        for row in result
    ]
    return table(("passed", "tests", "failed", "measured with"), body)


def verified() -> str:
    """The package's own copy of the runs in which all GPU tests passed."""
    runs = [
        {
            "torch": short(row["versions"]["torch"]),
            "triton": short(row["versions"]["triton"]),
            "card": row["machine"]["card"],
            "tests": row["tests"],
            "passed": row["passed"],
            "commit": row["commit"],
        }
        for slug in slugs()
        for row in rows(slug, "gpu-tests")
        if row["passed"] == row["tests"]
    ]
    return json.dumps(runs, indent=2) + "\n"


def fuzz_table(result: list[Row]) -> str:
    body = [
        [
            row["op"],
            f"{row['cases']:,}",
            f"{row['calls']:,}",
            f"{len(row['wrong']):,}",
            ", ".join(map(str, row["commits"])),
        ]
        for row in result
    ]
    return table(("op", "cases", "calls of routes", "wrong", "commits"), body)


def devices() -> str:
    """The list of devices with results."""
    lines = []
    for slug in slugs():
        count = sum(len(rows(slug, path.stem)) for path in (RESULTS / slug).glob("*.jsonl"))
        lines.append(f"[{slug}]({slug}.md): {notes()['devices'].get(slug, '')} {count} rows.")
    return items(lines)


# ---- from the registries


def in_version(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def releases(result: Iterable[str]) -> str:
    """Releases in words: "diffusers 0.36.0, 0.37.0"."""
    by_package: dict[str, list[str]] = defaultdict(list)
    for each in set(result):
        package, version = each.split()
        by_package[package].append(version)
    return "; ".join(
        f"{package} {', '.join(sorted(versions, key=lambda v: tuple(map(int, v.split('.')))))}"
        for package, versions in sorted(by_package.items())
    )


def versions() -> str:
    """Torch and Triton, and the pairs that every route was run with on a card."""
    from turnout.launch.support import COMPILED, Verified
    from turnout.routing.versions import TORCH, TRITON

    oldest, newest_known = map(in_version, TRITON)
    compiled = ", ".join(map(in_version, COMPILED))
    ran = [Verified(**run) for run in json.loads(verified())]
    return items(
        [
            f"torch {in_version(TORCH[0])} to {in_version(TORCH[1])}; older ones are refused at import.",
            f"Triton {oldest} to {newest_known}; every kernel is compiled by the tests with {compiled}.",
            *(f"Run on a card: torch {each.torch} with Triton {each.triton}; {each}." for each in ran),
        ]
    )


def models() -> str:
    """The models that are known, by package, with their races."""
    from turnout.models.accelerate import MODELS
    from turnout.race.models import RACERS

    by_package: dict[str, list[str]] = defaultdict(list)
    for key in sorted(MODELS):
        name = key.rsplit(".", 1)[1]
        races = [f"`{race}`" for race, racer in RACERS.items() if racer.model == name]
        by_package[key.split(".")[0]].append(f"`{name}`" + (f": {', '.join(races)}" if races else ""))
    return "\n".join(
        f"Of {package}, with the races of each:\n\n{items(names)}" for package, names in by_package.items()
    )


def fused_parts() -> str:
    """The classes that have an adapter of their own, by the releases they were tried with and by module."""
    file = ROOT / "src" / "turnout" / "models" / "fingerprints.json"
    grouped: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for key, prints in sorted(json.loads(file.read_text(encoding="utf-8")).items()):
        module, name = key.rsplit(".", 1)
        tried = releases(release for result in prints.values() for release in result)
        grouped[tried][module].append(f"`{name}`")
    return "\n".join(f"{tried}:\n\n{_modules(modules)}" for tried, modules in grouped.items())


def _modules(classes: dict[str, list[str]]) -> str:
    """A list of modules, each with its classes."""
    return items(f"`{module}`: {', '.join(names)}" for module, names in classes.items())


def cards() -> str:
    """The cards whose peaks are known, and how many rows are shipped for each."""
    from turnout.routing.device import known_cards
    from turnout.routing.store import load_shipped

    body = []
    for device in known_cards():
        shipped = len(load_shipped(device.slug).rows)
        stands_in = f"those of {device.sibling}" if device.sibling and not shipped else ""
        body.append([device.name, f"`{device.slug}`", str(shipped) if shipped else stands_in or "none"])
    return table(("card", "name", "measured rows that are shipped"), body)


def routes() -> str:
    """Every op with the functions that call it, and its routes by their numerics."""
    import turnout
    from turnout.routing.op import OPS
    from turnout.routing.public import PUBLIC

    lines = []
    for name, op in OPS.items():
        functions = [f"`{function}`" for function, public in PUBLIC.items() if op in public.ops]
        callers = f" (called by {' and '.join(functions)})" if functions else " (called by other ops only)"
        callers = "" if functions == [f"`{name}`"] else callers
        by_class: dict[str, list[str]] = defaultdict(list)
        for route in turnout.routes(op):
            by_class[route.numerics].append(f"`{route.name}`")
        listed = "; ".join(f"{numerics}: {', '.join(names)}" for numerics, names in by_class.items())
        lines.append(f"**`{name}`**{callers}. {listed[:1].upper()}{listed[1:]}.")
    return items(lines)


def main(words: list[str]) -> int:
    checking = words == ["--check"]
    if words and not checking:
        print(__doc__)
        return 2
    stale = []
    for path, text in pages().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(path)
            if not checking:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
    left = {path for path in (ROOT / "docs" / "results").glob("*.md") if path.stem not in {"index", *slugs()}}
    for path in sorted(left):
        stale.append(path)
        if not checking:
            path.unlink()
    for path in stale:
        print(f"{'stale' if checking else 'written'}: {path.relative_to(ROOT)}")
    if checking and stale:
        print("python -m benchmarks.docs_pages writes them")
    return int(checking and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The blocks of code in the documentation."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GENERATED = {path for path in (DOCS / "results").glob("*.md") if path.stem != "index"}
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(set(DOCS.rglob("*.md")) - GENERATED)]

_BLOCK = re.compile(
    r"^(<!-- needs a GPU -->\n+)?^```(\S*)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL
)


class Block(NamedTuple):
    """One fenced block: its language, title, text and line, and whether it is marked as needing a GPU."""

    language: str
    title: str
    text: str
    line: int
    needs_gpu: bool


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(result[2], result[3] or "", result[4], 1 + text[: result.start(4)].count("\n"), bool(result[1]))
        for result in _BLOCK.finditer(text)
    ]


def titled(page: Path, title: str) -> str:
    """The text of the one block with this title."""
    [block] = [block for block in blocks(page) if block.title == title]
    return block.text


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))

"""For mkdocs: links to files of the repository are names of these files on the site, which has none of them."""

from __future__ import annotations

import re
from typing import Any

TO_THE_REPOSITORY = re.compile(r"\[(`[^`]+`)\]\((?:\.\./)+(?:src|tests|benchmarks|examples)/[^)]*\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    return TO_THE_REPOSITORY.sub(r"\1", markdown)

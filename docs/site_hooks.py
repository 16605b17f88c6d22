"""A hook of mkdocs that replaces links to source files of the repository by the names of these files.

The site does not hold the files, so the links would lead nowhere.
"""

from __future__ import annotations

import re
from typing import Any

TO_THE_REPOSITORY = re.compile(r"\[(`[^`]+`)\]\((?:\.\./)+(?:src|tests|benchmarks|examples)/[^)]*\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    return TO_THE_REPOSITORY.sub(r"\1", markdown)

"""An extension of mkdocstrings that turns the examples of docstrings into blocks of code.

Markdown would take their `>>>` for quotations.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(
    r"(?:^>>> .*\n?)(?:^(?!\s*$).*\n?)*(?:\n?^>>> (?:.*\n?)(?:^(?!\s*$).*\n?)*)*", re.MULTILINE
)


def fenced(text: str) -> str:
    """A docstring with its examples in fences.

    >>> print(fenced("Adds.\\n\\n>>> 1 + 1\\n2"))
    Adds.
    <BLANKLINE>
    ```pycon
    >>> 1 + 1
    2
    ```
    """
    return EXAMPLE.sub(lambda example: f"```pycon\n{example[0].rstrip()}\n```\n", text).rstrip("\n")


class Doctests(griffe.Extension):
    """Puts fences around the examples of every docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)

"""What a Python function refers to: names, and the variables of its closure."""

from __future__ import annotations

import types


def names_in(code: types.CodeType) -> frozenset[str]:
    """Every name in a code object and those inside it: globals, attributes, what is imported."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(code.co_names).union(*map(names_in, inner))


def is_filled(cell: types.CellType) -> bool:
    """Whether a variable of a closure has a value yet."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True

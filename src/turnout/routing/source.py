"""Fingerprints of routes: a hash of the route's code and of the kernels it calls, blind to comments, docstrings and layout."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
from collections.abc import Callable
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def fingerprint(*functions: Callable) -> str:
    """Hash of functions and of all they name, directly or through others, in their own files and in the files of `ops` those import."""
    texts: dict[str, str] = {}
    for function in functions:
        if isinstance(function, functools.partial):
            function = function.func
        defined = _definitions(Path(inspect.getfile(function)))
        waiting = [function.__name__]
        while waiting:
            name = waiting.pop()
            if name in defined and name not in texts:
                texts[name], named = defined[name]
                waiting += named
    return hashlib.sha256("\n".join(texts[name] for name in sorted(texts)).encode()).hexdigest()[:16]


@functools.cache
def _definitions(home: Path) -> dict[str, tuple[str, frozenset[str]]]:
    """Top-level functions and constants of a file and of the files of `ops` it imports, as name: (text, names used)."""
    found: dict[str, tuple[str, frozenset[str]]] = {}
    seen, waiting = set(), [home]
    while waiting:
        file = waiting.pop()
        if file in seen:
            continue
        seen.add(file)
        tree = ast.parse(file.read_text())
        modules = [n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module]
        files = [_ROOT.joinpath(*m.split(".")).with_suffix(".py") for m in modules if m.startswith("turnout.ops.")]
        waiting += [f for f in files if f.exists()]
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                node.decorator_list = []  # guards and costs may change without making a timing untrue
                found.setdefault(node.name, _described(node))
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        found.setdefault(target.id, _described(node))
    return found


def _described(node: ast.stmt) -> tuple[str, frozenset[str]]:
    for part in ast.walk(node):
        if isinstance(part, ast.FunctionDef) and ast.get_docstring(part) is not None:
            part.body = part.body[1:] or [ast.Pass()]
    names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} | {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
    return ast.unparse(node), frozenset(names)

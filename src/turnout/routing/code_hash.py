"""Hash the kernels behind a route: which compiled code a timing belongs to.

A measured time stays true for as long as the card runs the same code. So the hash covers the kernels' own
source: the functions a route launches, and all they use, followed through files whose name ends in
`kernels.py`. It does not cover host code, guards, costs and declarations, nor comments, docstrings, types,
file names, and the names of functions and local variables: all of these may change without measuring again.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from turnout.routing.forks import lock_across_forks

FOLLOWED = "kernels"  # how the names of modules end whose definitions belong to a kernel


class Module(NamedTuple):
    """A kernels file: its definitions by name, and the (module, name) that each imported name stands for."""

    definitions: dict[str, ast.stmt]
    imports: dict[str, tuple[str, str]]


def code_hash(*kernels: str) -> str:
    """Hash the source of kernels, each given as "package.module:function", in any order.

    >>> first, second = "textwrap:dedent", "textwrap:indent"
    >>> code_hash(first, second) == code_hash(second, first) != code_hash(first)
    True
    """
    with _lock:
        digests = [_kernel_digest(kernel) for kernel in kernels]
    return hashlib.sha256("\n".join(sorted(digests)).encode()).hexdigest()[:16]


def _kernel_digest(kernel: str) -> str:
    module, colon, name = kernel.partition(":")
    if not colon:
        raise ValueError(f'kernel {kernel!r}, expected "package.module:function"')
    if name not in _module(module).definitions:
        raise ValueError(f"kernel {kernel!r}: module {module} does not define {name}")
    return _digest(module, name)


@functools.cache
def _module(name: str) -> Module:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ValueError(f"module {name!r} of a kernel was not found")
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    definitions = {defined: node for node in tree.body for defined in _defined_names(node)}
    imports = {alias: place for node in tree.body for alias, place in _followed_imports(node)}
    return Module(definitions, imports)


def _defined_names(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    else:
        targets = node.targets if isinstance(node, ast.Assign) else []
    return [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]


def _followed_imports(node: ast.stmt) -> Iterator[tuple[str, tuple[str, str]]]:
    """The names that `from ... kernels import ...` brings. Other imports are the compiler's own names."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").endswith(FOLLOWED):
        for alias in node.names:
            yield alias.asname or alias.name, (node.module or "", alias.name)


_lock = lock_across_forks()
# (module, name) of the definitions that are being hashed: a recursive use is hashed as its index in here.
_open: list[tuple[str, str]] = []


@functools.cache
def _digest(module: str, name: str) -> str:
    """Hash one definition, with the hashes of those it uses in place of their names."""
    _open.append((module, name))
    try:
        text = _canonical_text(module, _module(module).definitions[name])
    finally:
        _open.pop()
    return hashlib.sha256(text.encode()).hexdigest()


def _canonical_text(module: str, node: ast.stmt) -> str:
    own_module = _module(module)
    local_names = _local_names(node)

    def stands_for(name: str) -> str:
        if name in local_names:
            return f"local{local_names[name]}"
        place = (module, name) if name in own_module.definitions else own_module.imports.get(name)
        if place is None:
            return name  # a builtin, or a name of Triton's or Numba's
        if place in _open:
            return f"open{len(_open) - _open.index(place)}"
        return _digest(*place) if place[1] in _module(place[0]).definitions else name

    return _serialized(_Canonical(stands_for).visit(ast.parse(ast.unparse(node)).body[0]))


def _local_names(node: ast.stmt) -> dict[str, int]:
    """Names that a function binds, numbered as they appear. A module's constants bind none."""
    if not isinstance(node, ast.FunctionDef):
        return {}
    names: dict[str, int] = {}
    for part in ast.walk(node):
        name = None
        if isinstance(part, ast.arg):
            name = part.arg
        elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            name = part.id
        elif isinstance(part, ast.FunctionDef) and part is not node:
            name = part.name
        if name is not None:
            names.setdefault(name, len(names))
    return names


class _Canonical(ast.NodeTransformer):
    """Rewrites a definition so that only what a compiler sees is left."""

    def __init__(self, stands_for: Any):
        self.stands_for = stands_for

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = self.stands_for(node.id)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.name, node.returns = "function", None
        self._drop_docstring(node)
        return self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.name = "class"
        self._drop_docstring(node)
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.arg = self.stands_for(node.arg)
        node.annotation = node.annotation if _is_constexpr(node.annotation) else None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is None or _is_constexpr(node.annotation):
            return self.generic_visit(node)
        return self.generic_visit(ast.copy_location(ast.Assign([node.target], node.value, lineno=0), node))

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        """What a message says does not count, and versions of Python read it differently; its values do."""
        values = [self.visit(part.value) for part in node.values if isinstance(part, ast.FormattedValue)]
        return ast.Tuple(values, ast.Load())

    @staticmethod
    def _drop_docstring(node: Any) -> None:
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]


def _is_constexpr(annotation: ast.expr | None) -> bool:
    return annotation is not None and ast.unparse(annotation).endswith("constexpr")


def _serialized(part: Any) -> str:
    """Write a syntax tree alike in all versions of Python, which `ast.unparse` and `ast.dump` do not."""
    if isinstance(part, ast.AST):
        ignored = ("ctx", "kind", "type_comment", "type_params", "simple")
        fields = ((name, getattr(part, name, None)) for name in part._fields if name not in ignored)
        inner = ", ".join(f"{name}={_serialized(value)}" for name, value in fields if value not in (None, []))
        return f"{type(part).__name__}({inner})"
    return f"[{', '.join(map(_serialized, part))}]" if isinstance(part, list) else repr(part)

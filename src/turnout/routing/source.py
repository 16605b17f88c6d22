"""Fingerprints of routes: a hash of the route's code and of the kernels it calls, blind to comments, docstrings, types and file names.

Followed are the names that the code uses, through the imports of its own file and those inside functions, into all files of `turnout.ops`.
Of classes the fields count, and methods that are called by name somewhere in what was followed. Guards, costs and the declarations of ops
do not: they may change without making a timing untrue.
"""

from __future__ import annotations

import ast
import copy
import functools
import hashlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

_ROOT = Path(__file__).parents[2]
Place = tuple[Path, str]  # a file, and a name at its top


class Definition(NamedTuple):
    """Code, where the names in it lead, and the attributes it asks for."""

    code: str
    leads_to: frozenset[Place]
    attributes: frozenset[str]


def fingerprint(*functions: Callable) -> str:
    """Hash of functions and of all they use, directly or through others."""
    codes = {definition.code for definition in followed(*functions).values()}
    return hashlib.sha256("\n".join(sorted(codes)).encode()).hexdigest()[:16]


def followed(*functions: Callable) -> dict[Place, Definition]:
    """Functions and all they use, by where they are."""
    found: dict[Place, Definition] = {}
    methods: dict[str, list[tuple[Place, Definition]]] = {}
    waiting: list[Place] = []
    asked: set[str] = set()

    def take(place: Place, definition: Definition) -> None:
        if place in found:
            return
        found[place] = definition
        waiting.extend(definition.leads_to)
        for attribute in definition.attributes - asked:
            asked.add(attribute)
            for method in methods.get(attribute, []):
                take(*method)

    for function in functions:
        function = inspect.unwrap(function.func if isinstance(function, functools.partial) else function)
        file, name = Path(inspect.getfile(function)), function.__qualname__
        take((file, name), _definitions(file)[name])
    while waiting:
        file, name = waiting.pop()
        known = _definitions(file)
        if name not in known or (file, name) in found:
            continue
        take((file, name), known[name])
        for inner, definition in known.items():
            if inner.startswith(f"{name}.") and ".<locals>." not in inner:
                methods.setdefault(inner.rpartition(".")[2], []).append(((file, inner), definition))
                if inner.rpartition(".")[2] in asked:
                    take((file, inner), definition)
    return found


@functools.cache
def _definitions(file: Path) -> dict[str, Definition]:
    """What a file defines, by qualified name: functions, classes, their methods, functions inside functions, constants."""
    tree = ast.parse(file.read_text())
    imports = {name: place for node in tree.body for name, place in _imported(node)}
    own = {name: (file, name) for node in tree.body for name in _names(node)}
    found: dict[str, Definition] = {}
    for node in tree.body:
        for name in _names(node):
            for qualified, part in _parts(name, node):
                found[qualified] = _described(part, own | imports)
    return found


def _names(node: ast.stmt) -> list[str]:
    """What a statement at the top of a file defines. Ops are left out: they are declared with their reference, costs and cases."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign | ast.AnnAssign) and not (isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "Op"):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]
    return []


def _parts(name: str, node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """A definition, and those in it under names of their own. A class comes without its methods, a function with what is inside."""
    inner = [n for n in ast.walk(node) if isinstance(n, ast.FunctionDef) and n is not node]
    if isinstance(node, ast.ClassDef):
        methods = [n for n in node.body if isinstance(n, ast.FunctionDef)]
        for method in methods:
            yield f"{name}.{method.name}", method
        fields = copy.copy(node)
        fields.body, fields.decorator_list = [n for n in node.body if n not in methods] or [ast.Pass()], []
        yield name, fields
        return
    for function in inner:
        yield f"{name}.<locals>.{function.name}", function
    yield name, node


def _imported(node: ast.AST) -> Iterator[tuple[str, Place]]:
    """Names that an import of `turnout.ops` brings, and where they lead. A module leads to its file, with no name."""
    if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("turnout.ops"):
        return
    home = _ROOT.joinpath(*(node.module or "").split("."))
    for alias in node.names:
        module = home / f"{alias.name}.py"
        place = (module, "") if module.exists() else (home / "__init__.py" if home.is_dir() else home.with_suffix(".py"), alias.name)
        if place[0].exists():
            yield alias.asname or alias.name, place


def _described(node: ast.AST, known: dict[str, Place]) -> Definition:
    """`known` says where names lead that are not defined inside."""
    node = _Bare().visit(ast.parse(ast.unparse(node)).body[0])
    known = known | {name: place for part in ast.walk(node) for name, place in _imported(part)}
    leads_to: set[Place] = set()
    attributes: set[str] = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and part.id in known and known[part.id][1]:
            leads_to.add(known[part.id])
        elif isinstance(part, ast.Attribute):
            attributes.add(part.attr)
            module = known.get(part.value.id) if isinstance(part.value, ast.Name) else None
            if module is not None and not module[1]:
                leads_to.add((module[0], part.attr))
    return Definition(_written(node), frozenset(leads_to), frozenset(attributes))


def _written(part: Any) -> str:
    """A syntax tree in one way for all versions of Python, which `ast.unparse` and `ast.dump` have not. Without the names of our own files,
    which were followed."""
    if isinstance(part, ast.ImportFrom) and (part.module or "").startswith("turnout."):
        part.module = "turnout"
    if isinstance(part, ast.AST):
        fields = ((name, getattr(part, name, None)) for name in part._fields if name not in ("ctx", "kind", "type_comment", "type_params"))
        return f"{type(part).__name__}({', '.join(f'{name}={_written(value)}' for name, value in fields if value not in (None, []))})"
    return f"[{', '.join(map(_written, part))}]" if isinstance(part, list) else repr(part)


class _Bare(ast.NodeTransformer):
    """Takes away what says nothing of how long a call takes: docstrings, types, and the declarations of routes."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        node.returns = None
        node.decorator_list = [d for d in node.decorator_list if not (isinstance(d, ast.Call) and ast.unparse(d.func).endswith(".route"))]
        return self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        constant = node.annotation is not None and ast.unparse(node.annotation).endswith("constexpr")
        node.annotation = node.annotation if constant else None
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        """What is said does not count, what is asked for it does."""
        return ast.Tuple([self.visit(part.value) for part in node.values if isinstance(part, ast.FormattedValue)], ast.Load())

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        return self.generic_visit(node) if node.value is None else ast.copy_location(ast.Assign([node.target], node.value, lineno=0), node)

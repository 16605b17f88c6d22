"""Which stock code an adapter was written for.

An adapter replaces methods of a class, and relies on what the modules do that it reads past. Of all these it
has a fingerprint for each release it was tried with, in fingerprints.json: a hash of their source, without
comments, docstrings and layout. Where upstream has other code, or a user's subclass a method of its own, the
adapter refuses: what it computes may not be what that code computes.

`benchmarks/fingerprints.py` adds the releases that are installed, after trying the models with them.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.metadata
import inspect
import json
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turnout.models.patch import Adapter

TABLE = Path(__file__).with_name("fingerprints.json")


def unlike_stock(cls: type, key: str, adapter: type[Adapter]) -> Iterator[str]:
    """Why an adapter of the class named `key` does not fit `cls`: that class, or one derived from it."""
    releases_by_fingerprint = _table().get(key, {})
    current = fingerprint(cls, adapter)
    if current in releases_by_fingerprint:
        return
    library = key.partition(".")[0]
    if current is None:
        yield (
            f"the source of {cls.__qualname__} cannot be read, "
            "so nobody knows whether it is what this adapter was written for"
        )
    elif f"{cls.__module__}.{cls.__qualname__}" != key:
        yield f"its class has code of its own where this adapter replaces that of {key.rpartition('.')[2]}"
    else:
        releases = ", ".join(sorted({name for names in releases_by_fingerprint.values() for name in names}))
        yield (
            f"its code in {library} {_version(library)} is not that of the releases "
            f"this adapter was written for ({releases or 'none'})"
        )


@functools.cache
def fingerprint(cls: type, adapter: type[Adapter]) -> str | None:
    """Of the methods that the adapter replaces, and of the classes that it reads past; None where there is no
    source.
    """
    try:
        parts = [_code(getattr(cls, name)) for name in sorted(_replaced(cls, adapter))]
        parts += [_code(each.forward) for each in _read_past(cls, adapter)]
    except (OSError, TypeError, SyntaxError):
        return None
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _replaced(cls: type, adapter: type[Adapter]) -> set[str]:
    from turnout.models.patch import methods_of

    return {name for name, _ in methods_of(adapter) if hasattr(cls, name)}


def _read_past(cls: type, adapter: type[Adapter]) -> Iterator[Any]:
    """The classes of the library, not torch's, that the adapter reads past, where the module of `cls` has
    them.
    """
    names = () if adapter.inside is None else adapter.inside.reads
    for owner in cls.__mro__:
        module = vars(sys.modules.get(owner.__module__))
        classes = [
            module[name] for name in names if isinstance(name, str) and inspect.isclass(module.get(name))
        ]
        if classes:
            yield from classes
            return


def _code(function: Any) -> str:
    return written_out(ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body[0])


def written_out(node: Any) -> str:
    """A syntax tree as text, the same in every Python: what is empty is left out, for newer ones have more of
    that. Docstrings are too.

    >>> import ast
    >>> print(written_out(ast.parse("x = [1]  # one").body[0]))
    Assign(targets=[Name(id='x' ctx=Store())] value=List(elts=[Constant(value=1)] ctx=Load()))
    """
    if isinstance(node, list):
        return f"[{' '.join(map(written_out, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = {
        name: value for name, value in ast.iter_fields(node) if value not in (None, []) and name != "kind"
    }
    if isinstance(node, ast.JoinedStr):  # 3.12 makes several parts of some texts
        fields["values"] = _joined(node.values)
    if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node, clean=False) is not None:
        fields["body"] = fields["body"][1:]
    return (
        f"{type(node).__name__}({' '.join(f'{name}={written_out(value)}' for name, value in fields.items())})"
    )


def _joined(parts: list[Any]) -> list[Any]:
    """The parts of an f-string, with texts that are neighbours in one, and none that is empty."""
    joined: list[Any] = []
    for part in parts:
        if isinstance(part, ast.Constant) and not part.value:
            continue
        if joined and all(isinstance(each, ast.Constant) for each in (joined[-1], part)):
            joined[-1] = ast.Constant(f"{joined[-1].value}{part.value}")
        else:
            joined.append(part)
    return joined


@functools.cache
def _table() -> dict[str, dict[str, list[str]]]:
    return json.loads(TABLE.read_text())


def _version(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return "without a version"


def add_installed(releases_by_fingerprint: dict[str, type[Adapter]], keys: Iterable[str]) -> int:
    """Add the fingerprints of these classes, as they are installed here, to the table; how many are new."""
    table, new = json.loads(TABLE.read_text()) if TABLE.exists() else {}, 0
    for key in sorted(keys):
        module, _, name = key.rpartition(".")
        try:
            cls = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue  # this release has no such model
        current = fingerprint(cls, releases_by_fingerprint[key])
        releases = table.setdefault(key, {}).setdefault(current, [])
        release = f"{key.partition('.')[0]} {_version(key.partition('.')[0])}"
        if release not in releases:
            releases.append(release)
            new += 1
    TABLE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    return new

"""Compile CPU kernels with Numba, and keep the machine code on disk for the next process.

`kernel` is the decorator of every CPU kernel, `inlined` that of the small functions that kernels are made of.

Numba's own disk cache (`cache=True`) is not used, for three reasons. It looks at the file of the kernel only, so that old
code runs after a change in a file the kernel imports. Two processes that compile for different types at the same time may
mix up their entries, as the index is read and written without a lock. And it unpickles whatever lies in its folder, which
may be one that others can write.

Here a compiled kernel is one file. Its name is a hash of all that the machine code depends on: the source files the kernel
reaches through imports inside turnout, the argument types, the compile options, the CPU's features, and the versions of
Python, NumPy, Numba, llvmlite and turnout. So nothing stale is ever found. The file is written in one step, holds its own key
and a checksum, and whatever does not match is a miss. The folder is the user's own: `numba` below TURNOUT_CACHE_DIR or
the user's cache folder, created with mode 0700, and refused if it belongs to someone else or others may write there.

Compiling goes on to its end when a signal arrives (`uninterrupted`); the next call finds Numba as it should be.

All names that are private to Numba are used in this module: see `missing_from_numba`.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import os
import pickle
import stat
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).parents[1]
_MAGIC = b"turnout kernel 1\n"
_CONFIG = ("OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "BOUNDSCHECK", "DEBUGINFO_DEFAULT", "ENABLE_AVX")  # of Numba's settings
_DIGEST = hashlib.sha256().digest_size

_given_up: set[str] = set()  # what is not tried any more in this process, after one warning: "keep", or "find and keep"


def kernel(function: Callable[..., Any] | None = None, *, fastmath: bool | set[str] = False) -> Any:
    """Compile a function for a CPU: it releases the GIL, divides as NumPy does, and is kept on disk.

    `fastmath` are the freedoms that LLVM has with floating point: True for all, or their names. Use it as `@kernel` or
    `@kernel(fastmath=...)`.
    """
    import numba

    from turnout.ops.threads import uninterrupted

    if function is None:
        return functools.partial(kernel, fastmath=fastmath)
    dispatcher: Any = numba.njit(nogil=True, error_model="numpy", fastmath=fastmath)(function)
    if dispatcher is not function:  # NUMBA_DISABLE_JIT gives the function itself
        dispatcher._cache = KernelCache(function, dispatcher.targetoptions)
        dispatcher._compile_for_args = functools.partial(uninterrupted, dispatcher._compile_for_args)
    return dispatcher


def inlined(function: Callable[..., Any]) -> Any:
    """Compile a function into each kernel that calls it."""
    import numba

    return numba.njit(inline="always")(function)


class KernelCache:
    """Finds and keeps what Numba compiles of one kernel. Numba's dispatcher calls it in place of a cache of its own."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]):
        self.name = f"{function.__module__}.{function.__qualname__}"
        self.options = {name: sorted(value) if isinstance(value, set) else value for name, value in options.items()}
        file = Path(inspect.getfile(function))
        # Read while the module is imported: what is changed later is not what is compiled. In an archive there is no file.
        self.sources = sources(file) if file.is_file() else None

    @property
    def cache_path(self) -> str:
        return str(folder())

    def enable(self) -> None:
        pass

    def disable(self) -> None:
        pass

    def flush(self) -> None:
        pass

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled kernel for these argument types, or None if it is not there or cannot be used."""
        from numba.core.compiler import CompileResult

        if self.sources is None or not _may("find and keep"):
            return None
        target_context.refresh()
        key = self._key(sig, target_context.codegen())
        try:
            payload = _read(self._file(key), key)
            if payload is None:
                return None
            result = CompileResult._rebuild(target_context, *payload)
            return result if result.signature.args == tuple(sig) else None
        except Exception:  # a file of another kind, or of another Numba, is as good as none
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep a compiled kernel. Where that fails, say so once and do not try again in this process."""
        if self.sources is None or any(not x.can_cache for x in data.lifted) or data.library.has_dynamic_globals:
            return
        if not _may("keep"):
            return
        key = self._key(sig, data.codegen)
        try:
            _write(self._file(key), key, data._reduce())
        except Exception as failure:
            _give_up("keep", f"{folder()} cannot be written ({failure})")

    def _key(self, sig: Any, codegen: Any) -> str:
        """All that the machine code depends on, as text."""
        return repr((self.name, tuple(map(str, sig)), self.options, self.sources, codegen.magic_tuple(), _environment()))

    def _file(self, key: str) -> Path:
        return folder() / f"{self.name}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.bin"


# What a kernel depends on


@functools.cache
def _environment() -> tuple:
    """Versions and settings that the machine code depends on."""
    import llvmlite
    import numba
    import numpy as np
    from numba.core import config

    from turnout import __version__

    versions = (sys.version, np.__version__, numba.__version__, llvmlite.__version__, __version__)
    return (*versions, *(getattr(config, name, None) for name in _CONFIG))


def sources(file: Path) -> tuple[tuple[str, str], ...]:
    """The files that a file reaches through imports inside turnout, itself included: names inside the package and hashes."""
    reached: dict[Path, str] = {}
    waiting = [file]
    while waiting:
        file = waiting.pop()
        if file not in reached:
            reached[file], imports = _source(file)
            waiting.extend(imports)
    return tuple(sorted((os.path.relpath(file, _PACKAGE), digest) for file, digest in reached.items()))


@functools.cache
def _source(file: Path) -> tuple[str, tuple[Path, ...]]:
    """A file's hash, and the files of turnout that it imports. Read once: that is the text which was imported."""
    text = file.read_bytes()
    return hashlib.sha256(text).hexdigest(), tuple(_imports(ast.parse(text).body))


def _imports(statements: list[ast.stmt]) -> Iterator[Path]:
    """Files of turnout that are imported when statements run. What is imported inside functions is nothing a kernel can use."""
    for statement in statements:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(statement, ast.Import):
            yield from filter(None, (_module(alias.name) for alias in statement.names))
        elif isinstance(statement, ast.ImportFrom):
            if statement.level:
                raise ImportError(f"a kernel's file has a relative import of {statement.module}; name the module in full")
            modules = [_module(f"{statement.module}.{alias.name}") for alias in statement.names]
            yield from filter(None, modules)
            if None in modules and (package := _module(statement.module or "")) is not None:
                yield package
        for name in ("body", "orelse", "finalbody"):
            yield from _imports(getattr(statement, name, []))
        for handler in getattr(statement, "handlers", []):
            yield from _imports(handler.body)


def _module(name: str) -> Path | None:
    """The file of a module of turnout, or None where there is no such module."""
    package, *parts = name.split(".")
    if package != _PACKAGE.name:
        return None
    place = _PACKAGE.joinpath(*parts)
    return next((file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()), None)


# Where compiled kernels lie


@functools.cache
def folder() -> Path:
    """Where compiled kernels lie. Decided once in a process, as kernels are compiled once."""
    from turnout.routing.store import cache_folder

    return cache_folder().absolute() / "numba"


def _may(what: str) -> bool:
    """Whether the folder may be used. Asks Numba and the file system until something is wrong for the first time."""
    if what in _given_up or "find and keep" in _given_up:
        return False
    missing = missing_from_numba()
    if missing is not None:
        _give_up("find and keep", f"this version of Numba has no {missing}", "Install a version of Numba that turnout supports.")
        return False
    try:
        why = why_unsafe(folder())
    except FileNotFoundError:
        return True  # it is created when there is something to keep
    except OSError as failure:
        why = f"cannot be looked at ({failure})"
    if why is not None:
        _give_up("find and keep", f"{folder()} {why}")
    return why is None


def why_unsafe(place: Path) -> str | None:
    """Why files in a folder cannot be trusted, or None. A link is judged by where it leads."""
    found = place.stat()
    if not stat.S_ISDIR(found.st_mode):
        return "is not a folder"
    return _why_of_others(found)


def _why_of_others(found: os.stat_result) -> str | None:
    if os.name != "posix":  # elsewhere the user's cache folder has an access list of its own
        return None
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}, and you are user {os.geteuid()}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"may be written by others (mode {stat.S_IMODE(found.st_mode):04o})"
    return None


def _give_up(what: str, why: str, remedy: str = "Set TURNOUT_CACHE_DIR to a folder that only you can write.") -> None:
    """Stop using the folder in this process, and say so once."""
    from turnout.routing.op import TurnoutWarning

    if what not in _given_up:
        _given_up.add(what)
        message = f"turnout: compiled CPU kernels are not kept, so every process compiles them again: {why}. {remedy}"
        warnings.warn(message, TurnoutWarning, stacklevel=2)


def _read(file: Path, key: str) -> Any:
    """What is kept in a file under a key, or None. Nothing is unpickled that is not ours, whole and of that key."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    with open(file, "rb", opener=lambda path, _: os.open(path, flags)) as opened:
        found = os.fstat(opened.fileno())
        if not stat.S_ISREG(found.st_mode) or _why_of_others(found) is not None:
            return None
        content = opened.read()
    head = len(_MAGIC) + _DIGEST
    if not content.startswith(_MAGIC) or hashlib.sha256(content[head:]).digest() != content[len(_MAGIC) : head]:
        return None
    kept_key, payload = pickle.loads(content[head:])
    return payload if kept_key == key else None


def _write(file: Path, key: str, payload: Any) -> None:
    """Keep something in a file, which appears whole or not at all."""
    from numba.core.serialize import dumps

    file.parent.parent.mkdir(parents=True, exist_ok=True)
    file.parent.mkdir(mode=0o700, exist_ok=True)
    body = dumps((key, payload))
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=".", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as opened:
            opened.write(_MAGIC + hashlib.sha256(body).digest() + body)
        os.replace(temporary, file)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@functools.cache
def missing_from_numba() -> str | None:
    """The first of Numba's private names that this module uses and this version has not, or None if all are there."""
    import numba
    from numba.core import caching, codegen, compiler, serialize

    for name in ("_cache", "_compile_for_args", "targetoptions"):
        if not hasattr(numba.njit(lambda: None), name):
            return f"Dispatcher.{name}"
    for owner, name in (
        (compiler.CompileResult, "_reduce"),
        (compiler.CompileResult, "_rebuild"),
        (codegen.CPUCodegen, "magic_tuple"),
        (codegen.CodeLibrary, "has_dynamic_globals"),
        (serialize, "dumps"),
    ):
        if not hasattr(owner, name):
            return f"{owner.__name__}.{name}"
    calls = {"load_overload": ["self", "sig", "target_context"], "save_overload": ["self", "sig", "data"]}
    for name, parameters in calls.items():
        method = getattr(caching.FunctionCache, name, None)
        if method is None or list(inspect.signature(method).parameters) != parameters:
            return f"FunctionCache.{name}({', '.join(parameters[1:])})"
    return None

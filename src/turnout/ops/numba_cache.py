"""Compile CPU kernels with Numba, and keep the machine code on disk for the next process.

`kernel` is the decorator of every CPU kernel, `inlined` that of the small functions that kernels are made
of.

Numba's own disk cache (`cache=True`) is not used, for three reasons. It looks at the file of the kernel
only, so old code runs after a change in a file that the kernel imports. Two processes that compile one
kernel for different types at the same time may mix up their entries, as the index is read and written
without a lock. And it unpickles whatever lies in its folder, which may be one that others can write.

Here a compiled kernel is one file. Its name is a hash of all that the machine code depends on: the source
files that the kernel reaches through imports inside turnout, the argument types, the compile options, the
CPU's features, and the versions of Python, NumPy, Numba, llvmlite and turnout. So nothing stale is ever
found. The file is written in one step and holds its own key and a checksum; whatever does not match is a
miss. The folder is the user's own: `numba` below TURNOUT_CACHE_DIR or the user's cache folder, created with
mode 0700, and refused if it belongs to someone else or others may write there. What was not used for a
month is deleted.

A compilation goes on to its end when a signal arrives, so that the next call finds Numba as it should be.

The names of the cache and the dispatcher that are private to Numba are used here only; `missing_from_numba`
looks for them, and without them kernels are compiled in every process.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import inspect
import os
import pickle
import stat
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).parents[1]
_MAGIC = b"turnout kernel 1\n"
_DIGEST = hashlib.sha256().digest_size
_DAY = 86400  # seconds
_KEPT_DAYS = 30  # after its last use
# Settings of Numba that change the machine code.
_CONFIG = ("OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "BOUNDSCHECK", "DEBUGINFO_DEFAULT", "ENABLE_AVX")

# What is not tried any more in this process, after one warning: "keep", or "find and keep".
_given_up: set[str] = set()


def kernel(function: Callable[..., Any] | None = None, *, fastmath: bool | set[str] = False) -> Any:
    """Compile a function for a CPU: it releases the GIL, divides as NumPy does, and is kept on disk.

    `fastmath` are the freedoms that LLVM has with floating point: True for all, or their names. Use it as
    `@kernel` or `@kernel(fastmath=...)`.
    """
    import numba

    from turnout.ops.threads import uninterrupted

    if function is None:
        return functools.partial(kernel, fastmath=fastmath)
    dispatcher: Any = numba.njit(nogil=True, error_model="numpy", fastmath=fastmath)(function)
    if dispatcher is function:  # with NUMBA_DISABLE_JIT
        return function
    missing = missing_from_numba()
    if missing is None:
        dispatcher._cache = KernelCache(function, dispatcher.targetoptions)
        dispatcher._compile_for_args = functools.partial(uninterrupted, dispatcher._compile_for_args)
    else:
        remedy = "Install a version of Numba that turnout supports."
        _give_up("find and keep", f"this version of Numba has no {missing}", remedy)
    return dispatcher


def inlined(function: Callable[..., Any]) -> Any:
    """Compile a function into each kernel that calls it."""
    import numba

    return numba.njit(inline="always")(function)


class KernelCache:
    """Finds and keeps what Numba compiles of one kernel. Numba's dispatcher calls it as its own cache."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]):
        self.name = f"{function.__module__}.{function.__qualname__}"
        self.options = [(name, sorted(x) if isinstance(x, set) else x) for name, x in sorted(options.items())]
        self.sources = ()
        file = Path(inspect.getfile(function))
        if file.is_file():
            self.sources = sources(file)  # now, at the import: what is changed later is not compiled
        else:
            _give_up("find and keep", f"{file} is not a file", "Install turnout as files, not as an archive.")

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

        if not _may("find and keep"):
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
        if not _may("keep") or any(not x.can_cache for x in data.lifted) or data.library.has_dynamic_globals:
            return
        key = self._key(sig, data.codegen)
        try:
            _write(self._file(key), key, data._reduce())
        except Exception as failure:
            _give_up("keep", f"{folder()} cannot be written ({failure})")

    def _key(self, sig: Any, codegen: Any) -> str:
        """All that the machine code depends on, as text."""
        types = tuple(map(str, sig))
        return repr((self.name, types, self.options, self.sources, codegen.magic_tuple(), _environment()))

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

    from turnout._version import __version__

    versions = (sys.version, np.__version__, numba.__version__, llvmlite.__version__, __version__)
    return (*versions, *(getattr(config, name, None) for name in _CONFIG))


def sources(file: Path) -> tuple[tuple[str, str], ...]:
    """Names and hashes of the files that a file reaches through imports inside turnout, itself included."""
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
    """A file's hash, and the files of turnout that it imports. Read once: that text was imported."""
    text = file.read_bytes()
    return hashlib.sha256(text).hexdigest(), tuple(_imports(ast.parse(text).body))


def _imports(statements: list[ast.stmt]) -> Iterator[Path]:
    """Files of turnout that statements import. Not those inside functions: kernels cannot use them."""
    for statement in statements:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(statement, ast.Import):
            yield from filter(None, (_module(alias.name) for alias in statement.names))
        elif isinstance(statement, ast.ImportFrom):
            if statement.level:
                name = "." * statement.level + (statement.module or "")
                raise ImportError(f"a file of kernels imports from {name!r}, it needs the module's full name")
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


def _may(use: str) -> bool:
    """Whether the folder may be used for that. Looks at it until something is wrong for the first time."""
    if use in _given_up or "find and keep" in _given_up:
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
    status = place.stat()
    if not stat.S_ISDIR(status.st_mode):
        return "is not a folder"
    return _why_of_others(status)


def _why_of_others(status: os.stat_result) -> str | None:
    if os.name != "posix":  # elsewhere the user's cache folder has an access list of its own
        return None
    if status.st_uid != os.geteuid():
        return f"belongs to user {status.st_uid}, and you are user {os.geteuid()}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"may be written by others (mode {stat.S_IMODE(status.st_mode):04o})"
    return None


OWN_FOLDER = "Set TURNOUT_CACHE_DIR to a folder that only you can write."


def _give_up(use: str, why: str, remedy: str = OWN_FOLDER) -> None:
    """Stop using the folder in this process, and say so once."""
    from turnout.routing.op import TurnoutWarning

    if use not in _given_up:
        _given_up.add(use)
        result = "compiled CPU kernels are not kept, so every process compiles them again"
        warnings.warn(f"turnout: {result}: {why}. {remedy}", TurnoutWarning, stacklevel=2)


def _read(file: Path, key: str) -> Any:
    """What is kept in a file under a key, or None. Only what is the user's own and whole is unpickled."""
    flags = os.O_RDONLY
    for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"):  # no link, no waiting for a FIFO; Windows
        flags |= getattr(os, name, 0)
    with open(file, "rb", opener=lambda path, _: os.open(path, flags)) as opened:
        status = os.fstat(opened.fileno())
        if not stat.S_ISREG(status.st_mode) or _why_of_others(status) is not None:
            return None
        content = opened.read()
        if time.time() - status.st_mtime > _DAY:
            with contextlib.suppress(OSError):  # a folder that can only be read
                os.utime(file)
    head = len(_MAGIC) + _DIGEST
    if content[:head] != _MAGIC + hashlib.sha256(content[head:]).digest():
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
    _prune(file.parent)


@functools.cache
def _prune(place: Path) -> None:
    """Delete, once in a process, what was not used for a month: other versions' kernels, halves of writes."""
    for file in place.iterdir():
        with contextlib.suppress(OSError):  # another process may be first
            if time.time() - file.lstat().st_mtime > _KEPT_DAYS * _DAY:
                file.unlink()


@functools.cache
def missing_from_numba() -> str | None:
    """The first of Numba's private names used here that this version has not, or None if it has all."""
    import numba
    from numba.core import caching, codegen, compiler, serialize

    dispatcher = numba.njit(lambda: None)
    for owner, name in (
        (dispatcher, "_cache"),
        (dispatcher, "_compile_for_args"),
        (dispatcher, "targetoptions"),
        (compiler.CompileResult, "_reduce"),
        (compiler.CompileResult, "_rebuild"),
        (codegen.CPUCodegen, "magic_tuple"),
        (codegen.CodeLibrary, "has_dynamic_globals"),
        (serialize, "dumps"),
    ):
        if not hasattr(owner, name):
            return f"{'Dispatcher' if owner is dispatcher else owner.__name__}.{name}"
    calls = {"load_overload": ["self", "sig", "target_context"], "save_overload": ["self", "sig", "data"]}
    for name, parameters in calls.items():
        method = getattr(caching.FunctionCache, name, None)
        if method is None or list(inspect.signature(method).parameters) != parameters:
            return f"FunctionCache.{name}({', '.join(parameters[1:])})"
    return None

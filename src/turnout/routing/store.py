"""Read and write the files of measured rows: nothing in them is trusted, and no file is ever half written.

All of them are JSON. A file that cannot be read counts as absent and is listed by `turnout doctor`; it never
raises. Reading never waits: only plain files below 16 MiB are opened, and links are not followed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from turnout.routing.device import Device
from turnout.routing.row import SCHEMA, Row, Unreadable, brief, printable

SHIPPED = Path(__file__).parents[1] / "tables"
LARGEST = 16 * 2**20  # bytes
_ABANDONED = 3600  # seconds after which a temporary file is taken to be left over


class Loaded(NamedTuple):
    """The rows that could be read, and a line for each row or file that could not."""

    rows: list[Row]
    problems: list[str]


def cache_folder() -> Path:
    """The folder for turnout's files: TURNOUT_CACHE_DIR, or `turnout` in the user's cache folder."""
    if chosen := os.environ.get("TURNOUT_CACHE_DIR"):
        return Path(chosen)
    import platformdirs  # here: calls of ops that read no rows do not need it

    return Path(platformdirs.user_cache_dir("turnout", appauthor=False))


def folder(device: Device) -> Path:
    """Where this machine's rows for a device lie, one file each."""
    return cache_folder() / f"v{SCHEMA}" / device.slug


def load_here(device: Device) -> Loaded:
    """The rows that `tune` made on this machine."""
    place = folder(device)
    try:
        files = sorted(file for file in place.iterdir() if file.suffix == ".json")
    except FileNotFoundError:
        return Loaded([], [])
    except OSError as failure:
        return Loaded([], [f"{printable(str(place))}: {failure.strerror}"])
    rows, problems = [], []
    for file in files:
        try:
            rows.append(Row.parse(read_json(file)))
        except FileNotFoundError:  # somebody deleted it just now
            continue
        except Unreadable as why:
            problems.append(f"{printable(str(file))}: {why}")
    return Loaded(rows, problems)


def load_shipped(slug: str) -> Loaded:
    """The rows that are shipped for the device with this slug."""
    return load_table(SHIPPED / f"{slug}.json")


def load_table(file: Path) -> Loaded:
    """The rows of a table, as `export` writes it."""
    try:
        content = read_json(file)
    except FileNotFoundError:
        return Loaded([], [])
    except Unreadable as why:
        return Loaded([], [f"{file}: {why}"])
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema != SCHEMA:
        return Loaded([], [f"{file}: schema {brief(schema)}, this version of turnout reads {SCHEMA}"])
    rows, problems = [], []
    listed = content.get("rows")
    if not isinstance(listed, list):
        return Loaded([], [f"{file}: rows is {brief(listed)}, it needs to be a list"])
    for i, value in enumerate(listed):
        try:
            rows.append(Row.parse(value))
        except Unreadable as why:
            problems.append(f"{file}, row {i}: {why}")
    return Loaded(rows, problems)


def read_json(file: Path) -> Any:
    """Read a JSON file; raise `Unreadable` for anything that is not a small plain file of JSON."""
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as failure:
        raise Unreadable("a link" if file.is_symlink() else str(failure.strerror)) from failure
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise Unreadable("not a plain file")
        if status.st_size > LARGEST:
            raise Unreadable(f"{status.st_size} bytes, at most {LARGEST} are read")
        with os.fdopen(handle, "rb", closefd=False) as source:
            content = source.read(LARGEST + 1)
        return json.loads(content.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except OSError as failure:
        raise Unreadable(str(failure.strerror)) from failure
    except (ValueError, RecursionError) as failure:  # also a number of more digits than Python converts
        if isinstance(failure, Unreadable):
            raise
        raise Unreadable("not JSON" if isinstance(failure, ValueError) else "nested too deeply") from failure
    finally:
        os.close(handle)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a JSON object of its pairs; raise `Unreadable` if two have the same name."""
    content = dict(pairs)
    if len(content) < len(pairs):
        raise Unreadable("an object with the same name twice")
    return content


def publish(row: Row, device: Device) -> Path | None:
    """Write a row into this machine's folder, and return its file; None, with a warning, if that fails."""
    place = folder(device)
    name = hashlib.sha256(row.identity.encode()).hexdigest()[:16]
    file = place / f"{row.op}-{name}.json"
    try:
        place.mkdir(parents=True, exist_ok=True)
        _write(file, json.dumps(row.json(), indent=1))
        _delete_leftovers(place)
    except OSError as failure:
        warnings.warn(
            f"turnout: {place} cannot be written ({failure}); what was measured is not kept", stacklevel=2
        )
        return None
    return file


def _delete_leftovers(place: Path) -> None:
    """Delete temporary files of processes that were killed while writing, an hour later."""
    for part in place.glob(".*.part"):
        with contextlib.suppress(OSError):
            if time.time() - part.lstat().st_mtime > _ABANDONED:
                part.unlink()


def export(rows: Iterable[Row], device: Device, path: Path) -> None:
    """Write rows into a table to ship, one row a line so that diffs are readable; its other rows stay."""
    merged = {row.identity: row for row in (*load_table(path).rows, *rows)}
    head = json.dumps({"schema": SCHEMA, "device": device.name})[:-1]
    lines = ",\n".join(json.dumps(merged[key].json()) for key in sorted(merged))
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, f'{head}, "rows": [\n{lines}\n]}}\n')


def write_json(file: Path, value: Any) -> bool:
    """Write a small JSON file, and return whether that worked: such files only save time later."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        _write(file, json.dumps(value, indent=1))
    except OSError:
        return False
    return True


def _write(file: Path, text: str) -> None:
    """Write a file in one step: readers see the old or the new content, also if this is interrupted."""
    with _temporary(file) as (handle, temporary):
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, file)


@contextlib.contextmanager
def _temporary(file: Path) -> Iterator[tuple[int, str]]:
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=".", suffix=".part")
    try:
        yield handle, temporary
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise

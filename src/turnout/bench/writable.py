"""Check that results can be written before anything is measured: measuring may take minutes."""

from __future__ import annotations

import os
from pathlib import Path


def check_file(option: str, path: Path) -> None:
    """Raise ValueError, naming the option that gave the path, if no file can be written there.

    A folder that is missing is made; a file that is there stays as it is.
    """
    if path.is_dir():
        raise ValueError(f"{option} {path}: this is a folder; give the name of a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        was_there = path.exists()
        with path.open("ab"):
            pass
        if not was_there:
            path.unlink()
    except OSError as failure:
        reason = f"it cannot be written ({failure.strerror}); give another file"
        raise ValueError(f"{option} {path}: {reason}") from failure


def check_folder(option: str, folder: Path, *, remedy: str = "give another") -> None:
    """Raise ValueError, naming the option that gave the folder, if no file can be written into it.

    A folder that is missing is made. The error ends with `remedy`.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        reason = f"the folder cannot be made ({failure.strerror}); {remedy}"
        raise ValueError(f"{option} {folder}: {reason}") from failure
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{option} {folder}: the folder cannot be written to; {remedy}")

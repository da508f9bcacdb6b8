"""Files that a user names: one that exists is kept, unless it is to be replaced."""

from __future__ import annotations

import os
from pathlib import Path

from hypercomm.errors import FileKeptError, HyperCommError
from hypercomm.layout.checks import as_flag
from hypercomm.layout.text import shown


def as_new_file(
    path: str | os.PathLike[str], force: bool, error: type[HyperCommError]
) -> tuple[Path, bool]:
    """Return a file that can be written, and `force`, before anything is worked out for it.

    Args:
        path: The file.
        force: Whether one that exists is replaced.
        error: What is raised where there can be no such file.

    Raises:
        FileKeptError: It exists, and is not to be replaced, or is a folder.
    """
    replaced = as_flag(force, "force", error)
    try:
        file = Path(os.fspath(path))
        exists, has_folder = file.exists(), file.parent.is_dir()
    except TypeError as wrong:
        raise error(f"path must be that of a file, got {shown(path)}") from wrong
    except (OSError, ValueError) as wrong:
        raise error(_unwritable(path, wrong)) from wrong
    if not has_folder:
        raise error(f"{shown(str(file))} cannot be written: there is no folder {file.parent}")
    if exists and (not replaced or file.is_dir()):
        raise _kept(file)
    return file, replaced


def write_file(file: Path, content: str | bytes, force: bool, error: type[HyperCommError]) -> None:
    """Write a file of `as_new_file`.

    Raises:
        FileKeptError: It has come to exist meanwhile.
    """
    try:
        with file.open("wb" if force else "xb") as target:
            target.write(content if isinstance(content, bytes) else content.encode())
    except FileExistsError as wrong:
        raise _kept(file) from wrong
    except (OSError, ValueError) as wrong:
        raise error(_unwritable(file, wrong)) from wrong


def _kept(file: Path) -> FileKeptError:
    if file.is_dir():
        return FileKeptError(f"{file} is a folder; name another file")
    return FileKeptError(f"{file} exists, and is kept; force=True (--force) replaces it")


def _unwritable(path: object, wrong: Exception) -> str:
    return f"{shown(str(path))} cannot be written: {getattr(wrong, 'strerror', None) or wrong}"

"""Files that a command line asks for: looked at before the work, written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from fxsafe.dflash.errors import SettingsError

__all__ = ["require_writable", "write_whole"]


def require_writable(option: str, path: Path) -> None:
    """Before the work, which may last hours; what stands there is left.

    Raises:
        SettingsError: ``path`` cannot be written; the message names ``option``.
    """
    try:
        if _is_written_through(path):
            with path.open("ab"):
                return
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise SettingsError(f"{option} {path} cannot be written: {error}") from None


def write_whole(path: Path, text: str) -> None:
    """All or nothing, where there is a file or none.

    Raises:
        OSError: the disk is full, for one; the file has what it had.
    """
    if _is_written_through(path):
        path.write_text(text)
        return
    beside = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        beside.write_text(text)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _is_written_through(path: Path) -> bool:
    """A link (``/dev/stdout``), a pipe or a device, which a new file must not take the place of."""
    return path.is_symlink() or (path.exists() and not path.is_file())

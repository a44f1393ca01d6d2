"""Small JSON files in the runtime directory that outlive the agent, always replaced as a whole by rename."""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING, TypeVar

from weightcache import records
from weightcache.server import listen

if TYPE_CHECKING:
    from pathlib import Path

T = TypeVar("T")


def replace(path: Path, text: str, mode: int = 0o644, gid: int | None = None, reader: int | None = None) -> None:
    """Write ``text`` to ``path`` so that a reader sees the old file or the new one, never half of one.

    ``reader``: a user that may read it beside those whom ``mode`` and ``gid`` let.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with open(fd, "w", encoding="utf-8") as file:
            file.write(text)
            # Where one of the two fails, fewer may read it than was meant, which is no reason to write nothing.
            if gid is not None:
                with contextlib.suppress(OSError):
                    os.fchown(file.fileno(), -1, gid)
            os.fchmod(file.fileno(), mode)
            if reader is not None:
                with contextlib.suppress(OSError):
                    listen.allow(file.fileno(), reader, os.R_OK)
        temporary.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def write(path: Path, value: object) -> None:
    """Write a record."""
    replace(path, json.dumps(records.to_plain(value)) + "\n")


def read(path: Path, cls: type[T], unreadable: T) -> T | None:
    """The record in ``path``, None without a file; a file that makes no sense still counts, as ``unreadable``."""
    try:
        return records.from_plain(cls, json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        return unreadable


def remove(path: Path) -> None:
    """Remove a marker, if it is there."""
    path.unlink(missing_ok=True)

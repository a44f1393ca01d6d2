"""The traces of one user's starts: numbered files below the state directory, of which the newest are kept.

The launcher holds a lock on the file of its start, which tells a start that goes on from one whose launcher was killed,
and keeps another launcher from removing it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import time
from pathlib import Path

from weightcache import paths

KEPT = 50
_NAME = re.compile(r"(\d{6,9})\.jsonl", re.ASCII)
_ATTEMPTS = 1000


def directory() -> Path:
    """Where the traces are."""
    return paths.state_dir() / "starts"


def numbers(where: Path) -> list[int]:
    """The numbers of all traces, oldest first. Raises OSError, except for a directory that is not there."""
    try:
        names = [entry.name for entry in os.scandir(where)]
    except FileNotFoundError:
        return []
    return sorted(int(found[1]) for name in names if (found := _NAME.fullmatch(name)))


def file(where: Path, number: int) -> Path:
    """The trace of one start."""
    return where / f"{number:06d}.jsonl"


def create(where: Path) -> tuple[Path, int]:
    """A new, locked, empty trace and its descriptor, which its caller owns. Raises OSError."""
    where.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = where.stat()
    if info.st_uid != os.geteuid() or info.st_mode & 0o022:
        raise PermissionError(f"{where} can be written by others")
    number = max(numbers(where), default=0)
    for _ in range(_ATTEMPTS):
        number += 1
        path = file(where, number)
        try:
            fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:  # another launch took this number just now
            continue
        _lock(fd)
        return path, fd
    raise FileExistsError(f"no free number in {where}")


def _lock(fd: int) -> None:
    """Take the lock of a new trace. Whoever looks whether somebody has it, has it for a moment."""
    for _ in range(20):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.005)
            continue
        except OSError:  # a file system without locks
            return
        return


def in_use(fd: int) -> bool:
    """Whether another process holds the lock of a trace that is open as ``fd``."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def prune(where: Path, keep: int = KEPT) -> None:
    """Remove the oldest traces beyond ``keep``, but none whose launcher still runs. Raises nothing."""
    with contextlib.suppress(OSError):
        for number in numbers(where)[:-keep]:
            with contextlib.suppress(OSError):
                _remove(file(where, number))


def _remove(path: Path) -> None:
    if not stat.S_ISREG(path.lstat().st_mode):
        return
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not in_use(fd):
            path.unlink()
    finally:
        os.close(fd)

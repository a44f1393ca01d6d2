"""Small files that processes of one host share: opened without following links, written by rename."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from pathlib import Path

from weightcache.errors import NoRoom, PermissionRefused, WeightcacheError

LONGEST = 256 * 1024
"""Bytes; more is no file of ours."""
_OWN_LACK = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def failed(path: Path, done: str, error: OSError) -> WeightcacheError:
    """That ``path`` cannot be ``done``; NoRoom for what this process lacks, which says nothing about ``path``."""
    kind = NoRoom if error.errno in _OWN_LACK else WeightcacheError
    return kind(f"{path} cannot be {done} ({error.strerror or error})")


def open_regular(path: Path, flags: int, mode: int = 0o660) -> int:
    """A descriptor of the regular file at ``path``, which the caller owns.

    Raises FileNotFoundError, NoRoom for want of a descriptor, and another WeightcacheError for whatever else is wrong,
    a symbolic link included.
    """
    try:
        # Without O_NONBLOCK, opening a FIFO to read it would wait.
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY, mode)
    except FileNotFoundError:
        raise
    except PermissionError:
        raise PermissionRefused(f"this user may not open {path} (is it in the group that owns the file?)") from None
    except OSError as error:
        raise failed(path, "opened", error) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise WeightcacheError(f"{path} is no regular file")
    return fd


def grant(fd: int, mode: int) -> None:
    """Have the open file's mode be ``mode``, which a umask may have narrowed when it was made; its owner alone can."""
    if stat.S_IMODE(os.fstat(fd).st_mode) != mode:
        with contextlib.suppress(OSError):
            os.fchmod(fd, mode)


def read(path: Path) -> bytes:
    """What is in the file. Raises as open_regular does, and a WeightcacheError for more than LONGEST bytes."""
    with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
        try:
            data = file.read(LONGEST + 1)
        except OSError as error:
            raise failed(path, "read", error) from None
    if len(data) > LONGEST:
        raise WeightcacheError(f"{path} has more than {LONGEST} bytes")
    return data


def replace(path: Path, text: str, mode: int = 0o640) -> None:
    """Put ``text`` at ``path``, whole or not at all. Not synced: who reads it lives no longer than the kernel.

    Raises WeightcacheError.
    """
    try:
        fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                os.fchmod(fd, mode)
                file.write(text)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise failed(path, "written", error) from None

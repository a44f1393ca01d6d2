"""Bytes of a file as locks: the kernel gives one back when its owner dies, whatever killed it (fcntl(2), OFD locks).

An OFD lock belongs to the open file, not to the process. A forked child shares it, so that the lock outlives its owner
until that child has ended, called exec, or closed its copy: whoever holds a ByteLock may start others by exec alone
(its descriptor is close-on-exec), or has the child call close(), which gives nothing back as long as the parent has
the file open.

The file is never removed: a new one of the same name would be another lock, and have a second owner.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from pathlib import Path

from weightcache.errors import WeightcacheError
from weightcache.standby import files

MODE = 0o660
"""Also for another user of the directory's group, as after a change of a unit's User=."""
_GETLK, _SETLK, _SETLKW = 36, 37, 38
"""F_OFD_GETLK, F_OFD_SETLK and F_OFD_SETLKW."""
_FLOCK = struct.Struct("@hhqqi0q")
"""struct flock: l_type, l_whence, l_start, l_len, l_pid. l_pid has to be 0."""


class ByteLock:
    """Byte ``byte`` of the file at ``path``, which is made if it is not there. Raises a WeightcacheError."""

    def __init__(self, path: Path, byte: int) -> None:
        self.path, self.byte = path, byte
        self._held = False
        try:
            self._fd = files.open_regular(path, os.O_RDWR | os.O_CREAT, MODE)
            files.grant(self._fd, MODE)
        except FileNotFoundError:
            raise WeightcacheError(f"{path.parent} is not there, so that no lock can be made in it") from None

    @property
    def held(self) -> bool:
        """Whether this object has taken the byte."""
        return self._held

    def take(self) -> None:
        """Wait until the byte is free, however long that takes, and take it. Signal handlers run meanwhile.

        Not to be closed by another thread meanwhile.
        """
        self._call(_SETLKW, fcntl.F_WRLCK)
        self._held = True

    def try_take(self) -> bool:
        """Take the byte if it is free."""
        try:
            self._call(_SETLK, fcntl.F_WRLCK)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            return False
        self._held = True
        return True

    def give_back(self) -> None:
        """Let the next one take the byte."""
        if self._held:
            self._call(_SETLK, fcntl.F_UNLCK)
            self._held = False

    def close(self) -> None:
        """Close the file, which gives the byte back unless a forked process has it open still."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self._held = False
            os.close(fd)

    def _call(self, command: int, kind: int) -> None:
        fcntl.fcntl(self._fd, command, _FLOCK.pack(kind, os.SEEK_SET, self.byte, 1, 0))


def is_taken(path: Path, byte: int, count: int = 1) -> bool:
    """Whether somebody has taken one of ``count`` bytes from ``byte`` on, at least one; no file means nobody.

    Raises NoRoom for want of a descriptor, and another WeightcacheError for what is wrong with the file.
    """
    try:
        fd = files.open_regular(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        # Asked for a lock that would write, which F_OFD_GETLK answers for a file that is open to be read.
        found = fcntl.fcntl(fd, _GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, count, 0))
    finally:
        os.close(fd)
    return int(_FLOCK.unpack(found)[0]) != fcntl.F_UNLCK

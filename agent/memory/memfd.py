"""Sealed memory files (memfd_create(2)): bytes that nobody can change or truncate once published."""

from __future__ import annotations

import fcntl
import os

from weightcache.errors import ProtocolError

# The values come from linux/fcntl.h and linux/memfd.h; Python 3.11 has no name for the last one.
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEAL_SEAL, SEAL_SHRINK, SEAL_GROW, SEAL_WRITE = 1, 2, 4, 8
_MFD_NOEXEC_SEAL = 8
REQUIRED_SEALS = SEAL_SHRINK | SEAL_GROW | SEAL_WRITE


def create(name: str) -> int:
    """A new empty memfd that can be sealed; the caller owns it."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError:  # before Linux 6.3
        return os.memfd_create(name, flags)


def seal(fd: int) -> None:
    """Forbid writing, growing and shrinking for ever. Fails with EBUSY while a writable mapping exists."""
    fcntl.fcntl(fd, _F_ADD_SEALS, REQUIRED_SEALS | _SEAL_SEAL)


def is_sealed(fd: int) -> bool:
    """Whether ``fd`` is a memfd that nobody can change any more."""
    try:
        return fcntl.fcntl(fd, _F_GET_SEALS) & REQUIRED_SEALS == REQUIRED_SEALS
    except OSError:
        return False


def sealed(name: str, data: bytes) -> int:
    """A sealed memfd that holds ``data``; the caller owns it."""
    fd = create(name)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        seal(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_sealed(fd: int, limit: int) -> bytes:
    """All bytes of a sealed memfd of at most ``limit`` bytes. Raises ProtocolError if it could still change."""
    if not is_sealed(fd):
        raise ProtocolError("a memory file that is not sealed")
    size = os.fstat(fd).st_size
    if size > limit:
        raise ProtocolError(f"a memory file of {size} bytes where at most {limit} are allowed")
    chunks, offset = [], 0
    while offset < size:
        chunks.append(os.pread(fd, min(size - offset, 1 << 24), offset))
        offset += len(chunks[-1])
    return b"".join(chunks)

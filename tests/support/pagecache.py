"""The kernel's page cache: drop a file from it, and count what of a file is in it. Counting reads nothing."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

_PROT_NONE = 0
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
_MAP_FAILED = ctypes.c_void_p(-1).value


def files(folder: Path) -> list[Path]:
    """The regular files below a folder (or the file itself)."""
    return [folder] if folder.is_file() else sorted(path for path in folder.rglob("*") if path.is_file())


def drop(paths: Iterable[Path]) -> None:
    """Take files out of the page cache. Pages that a process maps or that are still being written stay."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def resident(paths: Iterable[Path]) -> int:
    """Bytes of files, in whole pages, that are in the page cache. Only the owner of a file or root learns the truth."""
    return sum(map(_resident, paths))


def _resident(path: Path) -> int:
    size = path.stat().st_size
    if size == 0:
        return 0
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        address = _libc.mmap(None, size, _PROT_NONE, mmap.MAP_SHARED, fd, 0)
    finally:
        os.close(fd)
    if address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), "mmap", str(path))
    try:
        pages = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
        if _libc.mincore(address, size, pages) != 0:
            raise OSError(ctypes.get_errno(), "mincore", str(path))
    finally:
        _libc.munmap(address, size)
    return sum(page & 1 for page in pages.raw) * mmap.PAGESIZE

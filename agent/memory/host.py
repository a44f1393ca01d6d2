"""Host memory as shareable arenas: one sealed memfd each. For machines without a GPU, CPU engines, demos and CI.

Mappings are made with mmap(2) through ctypes: Python's own ``mmap`` keeps a duplicate of every descriptor. Readers map
MAP_PRIVATE | PROT_READ, because MAP_SHARED of a write-sealed memfd is refused before Linux 6.7, and check the seals
first: without F_SEAL_SHRINK any holder could truncate the file, and reading beyond its end is SIGBUS.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from weightcache.errors import AttachFailed, LoadFailed, NoRoom
from weightcache.memory import memfd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

GRANULARITY = 64 * 1024
"""Arena sizes are multiples of this many bytes: every base page size of Linux (4, 16 or 64 KiB) divides it."""

# Values of linux/mman.h that Python 3.11 has no names for.
_PROT_NONE, _MAP_FIXED, _MAP_NORESERVE, _MADV_DONTFORK = 0, 0x10, 0x4000, 10
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class HostRegion:
    """A range of addresses with arenas mapped back to back, read-only. It must outlive every tensor made from it."""

    def __init__(self, reserved: int, size: int) -> None:
        """Reserve ``reserved`` bytes of address space, of which ``size`` will be mapped. Raises NoRoom."""
        self.size = size
        self._reserved = reserved
        self._base = _reserve(reserved)

    def bytes_at(self, offset: int, size: int) -> torch.Tensor:
        """A uint8 CPU tensor over ``size`` bytes at ``offset``, without a copy; it does not keep the region alive.

        Raises AttachFailed outside the mapped bytes.
        """
        if offset < 0 or size < 0 or offset + size > self.size:
            raise AttachFailed(f"bytes {offset} to {offset + size} lie outside the {self.size} bytes of the arenas")
        if size == 0:  # torch.frombuffer refuses an empty buffer
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        # The buffer looks writable whatever the mapping is: torch warns about read-only buffers.
        buffer = (ctypes.c_uint8 * size).from_address(self._base + offset)
        return torch.frombuffer(buffer, dtype=torch.uint8)

    def close(self) -> None:
        """Unmap. No tensor of the region may be used afterwards."""
        if self._reserved:
            _libc.munmap(self._base, self._reserved)
        self.size = self._reserved = 0

    def _map(self, fd: int, offset: int, size: int, prot: int, flags: int) -> None:
        _mmap(self._base + offset, size, prot, flags | _MAP_FIXED, fd)


class HostWritableRegion(HostRegion):
    """Arenas under construction, mapped for writing; ``size`` is the number of bytes that arenas back so far."""

    def __init__(self, reserved: int, free_bytes: Callable[[], int]) -> None:
        """Reserve ``reserved`` bytes of address space. Raises NoRoom."""
        super().__init__(reserved, 0)
        self._free_bytes = free_bytes
        self._arenas: list[tuple[int, int]] = []  # descriptor, bytes
        self._frozen = False

    def extend(self, size: int) -> None:
        """Create one more arena of ``size`` bytes (a multiple of GRANULARITY) at the end, zero-filled.

        Raises NoRoom, before anything is allocated, when the host has too little memory: overcommitted pages would
        end in SIGBUS or the OOM killer at first touch.
        """
        if self._frozen or size <= 0 or size % GRANULARITY or self.size + size > self._reserved:
            raise ValueError(f"no arena of {size} bytes at {self.size} of {self._reserved} (frozen: {self._frozen})")
        free = self._free_bytes()
        if size > free:
            raise NoRoom(f"an arena needs {size} bytes of host memory and only {free} are available")
        fd = memfd.create(f"weightcache-arena-{len(self._arenas)}")
        try:
            os.posix_fallocate(fd, 0, size)
            self._map(fd, self.size, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED)
            # A forked child would inherit the writable mapping and so forbid the seal for as long as it lives.
            _libc.madvise(self._base + self.size, size, _MADV_DONTFORK)
        except OSError as error:
            os.close(fd)
            raise NoRoom(f"the host cannot back an arena of {size} bytes ({os.strerror(error.errno or 0)})") from None
        except BaseException:
            os.close(fd)
            raise
        self._arenas.append((fd, size))
        self.size += size

    def freeze(self) -> tuple[int, ...]:
        """Make this process's own mapping read-only in place, seal, and return one descriptor per arena.

        The descriptors become the caller's. Addresses stay, so existing tensors stay valid, and a write through one
        of them is SIGSEGV from here on. Raises LoadFailed where something still maps an arena for writing.
        """
        offset = 0
        for fd, size in self._arenas:
            # The seal needs every writable mapping gone; MAP_FIXED swaps it for the readers' kind without a gap.
            try:
                self._map(fd, offset, size, mmap.PROT_READ, mmap.MAP_PRIVATE)
                memfd.seal(fd)
            except OSError as error:
                reason = os.strerror(error.errno or 0)
                raise LoadFailed(f"cannot seal the arena of {size} bytes at {offset} ({reason})") from None
            offset += size
        fds = tuple(fd for fd, _ in self._arenas)
        self._arenas.clear()
        self._frozen = True
        return fds

    def close(self) -> None:
        """Unmap and forget the arenas; they live on where their descriptors are held."""
        super().close()
        for fd, _ in self._arenas:
            os.close(fd)
        self._arenas.clear()


class HostMemory:
    """Host memory through sealed memfds."""

    name = "host"
    granularity = GRANULARITY

    def reserve(self, size: int) -> HostWritableRegion:
        """Reserve addresses for ``size`` bytes without backing them. Raises NoRoom."""
        return HostWritableRegion(-(-size // GRANULARITY) * GRANULARITY, self.free_bytes)

    def map(self, fds: Sequence[int], sizes: Sequence[int]) -> HostRegion:
        """Map arenas of ``sizes`` bytes back to back, read-only; the descriptors stay the caller's.

        Raises AttachFailed for a descriptor that is no sealed memfd of exactly that size.
        """
        if len(fds) != len(sizes):
            raise AttachFailed(f"{len(fds)} descriptors for {len(sizes)} arenas")
        for index, (fd, size) in enumerate(zip(fds, sizes, strict=True)):
            if not memfd.is_sealed(fd):
                raise AttachFailed(f"arena {index} is not a sealed memory file: its bytes could change")
            actual = os.fstat(fd).st_size
            if actual != size or size <= 0 or size % mmap.PAGESIZE:
                raise AttachFailed(f"arena {index} has {actual} bytes where the agent announced {size}")
        region = HostRegion(sum(sizes), sum(sizes))
        offset = 0
        try:
            for fd, size in zip(fds, sizes, strict=True):
                region._map(fd, offset, size, mmap.PROT_READ, mmap.MAP_PRIVATE)
                offset += size
        except OSError as error:
            region.close()
            raise AttachFailed(f"cannot map an arena of {size} bytes ({os.strerror(error.errno or 0)})") from None
        return region

    def free_bytes(self) -> int:
        """Bytes that this process can still get: MemAvailable, bounded by the limits of its control groups."""
        return max(0, min([_mem_available(), *_cgroup_headroom()]))


def _mmap(address: int | None, size: int, prot: int, flags: int, fd: int) -> int:
    result: int = _libc.mmap(address, size, prot, flags, fd, 0)
    if result == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def _reserve(size: int) -> int:
    if size == 0:
        return 0
    try:
        return _mmap(None, size, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)
    except OSError as error:
        reason = os.strerror(error.errno or errno.ENOMEM)
        raise NoRoom(f"cannot reserve {size} bytes of address space ({reason})") from None


def _mem_available(meminfo: Path = Path("/proc/meminfo")) -> int:
    """MemAvailable of proc(5) in bytes."""
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * mmap.PAGESIZE


def _cgroup_headroom(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> Iterator[int]:
    """Bytes left below each memory limit of this process's control groups (cgroup v2 or v1) and their parents."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, usage, prefix = root, "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            base, limit, usage, prefix = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
        else:
            continue
        group = base / path.lstrip("/")
        while True:
            try:
                maximum = (group / limit).read_text().strip()
                if maximum != "max":
                    # File cache counts as used and goes away under pressure; arenas (shmem) are on the anonymous lists.
                    stat = dict(row.split() for row in (group / "memory.stat").read_text().splitlines())
                    cache = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
                    yield int(maximum) - int((group / usage).read_text()) + cache
            except (OSError, ValueError):
                pass  # the root group has no such files, and a container may not see its parents
            if group == base or base not in group.parents:
                break
            group = group.parent

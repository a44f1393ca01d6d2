"""/proc/PID/smaps: which memory a process shares with others and which is its own."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

_HEADER = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ (\S+) (\d+) *(.*)")
_SIZE = re.compile(r"(\w+): +(\d+) kB")


@dataclass(slots=True)
class Mapping:
    """One mapping. Sizes are bytes; ``sizes`` holds every line of smaps that has one, under its own name."""

    start: int
    end: int
    permissions: str
    device: str
    inode: int
    path: str
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Addresses, resident or not."""
        return self.end - self.start

    @property
    def rss(self) -> int:
        """Resident bytes."""
        return self.sizes["Rss"]

    @property
    def pss(self) -> int:
        """Resident bytes, each page divided by the number of processes that map it."""
        return self.sizes["Pss"]

    @property
    def shared(self) -> int:
        """Resident bytes that other processes map too."""
        return self.sizes["Shared_Clean"] + self.sizes["Shared_Dirty"]

    @property
    def private(self) -> int:
        """Resident bytes that only this process maps."""
        return self.sizes["Private_Clean"] + self.sizes["Private_Dirty"]

    @property
    def private_dirty(self) -> int:
        """Resident bytes that only this process maps, and that were written."""
        return self.sizes["Private_Dirty"]

    @property
    def anonymous(self) -> int:
        """Resident bytes that belong to no file, which in a file's mapping means copied on write."""
        return self.sizes["Anonymous"]


def parse(text: str) -> list[Mapping]:
    """The mappings in the text of a smaps file."""
    found: list[Mapping] = []
    for line in text.splitlines():
        if header := _HEADER.fullmatch(line):
            start, end, permissions, device, inode, path = header.groups()
            found.append(Mapping(int(start, 16), int(end, 16), permissions, device, int(inode), path))
        elif size := _SIZE.fullmatch(line):
            found[-1].sizes[size[1]] = int(size[2]) * 1024
    return found


def read(pid: int | str = "self") -> list[Mapping]:
    """The mappings of a process."""
    return parse(Path(f"/proc/{pid}/smaps").read_text())


def memfds(mappings: Iterable[Mapping], inodes: Collection[int] | None = None) -> list[Mapping]:
    """The mappings of memfds: those of ``inodes`` (``os.fstat(fd).st_ino``), or all."""
    return [m for m in mappings if m.path.startswith("/memfd:") and (inodes is None or m.inode in inodes)]


def private_anonymous(pid: int | str = "self") -> int:
    """Bytes that a process allocated or copied for itself: what weights from disk would add to."""
    return sum(m.sizes["Anonymous"] for m in read(pid) if "s" not in m.permissions)

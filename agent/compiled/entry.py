"""One stamp's directory: what it stands for, its lock, when it was used, and what lies in it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from weightcache.compiled import places

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

STAMP, LOCK, REHEARSED = "stamp.json", "lock", "rehearsed.json"
OWN = (STAMP, LOCK, REHEARSED)
"""The files that no compiler wrote."""
WARMED = "warmed"
"""The folder of what no compiler wrote either: starts that came to serve (weightcache.launch.caches)."""

_MOST = 1 << 20
_MOST_KEPT = 100


@dataclass(frozen=True, slots=True)
class Entry:
    """One stamp's directory. ``facts`` is empty where its file cannot be read.

    ``used`` is the time of day when its last use began or ended.
    """

    directory: Path
    facts: Mapping[str, str] = field(default_factory=dict)
    stay: tuple[str, ...] = ()
    """The variables whose compilers keep writing where they did before weightcache came."""
    used: float = 0.0

    @property
    def stamp(self) -> str:
        """Its name."""
        return self.directory.name


@dataclass(frozen=True, slots=True)
class Measured:
    """What lies in a directory: regular files, and the bytes that they take on the disk."""

    files: int = 0
    bytes: int = 0


def measure(directory: Path) -> Measured:
    """Count compiled files below ``directory``; what goes while this looks is not counted."""
    files = size = 0
    for path in walk(directory):
        with contextlib.suppress(OSError):
            size += path.lstat().st_blocks * 512
            files += 1
    return Measured(files, size)


def walk(directory: Path) -> Iterator[Path]:
    """The regular files below ``directory`` that compilers wrote."""
    for folder, folders, names in os.walk(directory):
        if folder == str(directory):
            folders[:] = [name for name in folders if name != WARMED]
            names = [name for name in names if name not in OWN]
        for name in names:
            path = Path(folder, name)
            with contextlib.suppress(OSError):
                if stat.S_ISREG(path.lstat().st_mode):
                    yield path


def read(directory: Path) -> Entry:
    """What is known of a stamp's directory; garbage in it is no error."""
    facts: dict[str, str] = {}
    stay: tuple[str, ...] = ()
    with contextlib.suppress(OSError, ValueError, TypeError, RecursionError), (directory / STAMP).open("rb") as file:
        found = json.loads(file.read(_MOST))
        if isinstance(found, dict) and isinstance(found.get("facts"), dict):
            facts = {str(name): str(value) for name, value in found["facts"].items()}
            known = {place.variable for place in places.PLACES}
            stay = tuple(name for name in found.get("stay", []) if isinstance(name, str) and name in known)
    used = 0.0
    for name in (LOCK, "."):
        with contextlib.suppress(OSError):
            used = used or (directory / name).stat().st_mtime
    return Entry(directory, facts, stay, used)


def rehearsed(entry: Entry) -> dict[str, float]:
    """What ``remember`` wrote down in this environment, with the time of day; garbage is nothing."""
    try:
        with (entry.directory / REHEARSED).open("rb") as file:
            found = json.loads(file.read(_MOST))
        return {str(what): float(when) for what, when in found.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def remember(entry: Entry, what: str) -> None:
    """Write down that ``what`` was rehearsed now. A full disk only means that it happens again."""
    latest = sorted({**rehearsed(entry), what: time.time()}.items(), key=lambda item: item[1])[-_MOST_KEPT:]
    with contextlib.suppress(OSError):
        fd, made = tempfile.mkstemp(prefix=f".{REHEARSED}-", dir=entry.directory)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(json.dumps(dict(latest)))
        Path(made).replace(entry.directory / REHEARSED)


def in_use(entry: Entry) -> bool:
    """Whether a launcher holds it now."""
    try:
        fd = lock(entry.directory, fcntl.LOCK_EX)
    except OSError:
        return False
    if fd is None:
        return True
    os.close(fd)
    return False


def lock(directory: Path, kind: int) -> int | None:
    """A descriptor that holds the directory's lock; None if others hold it, or it is no longer the directory's."""
    path = directory / LOCK
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), path.lstat()):
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None

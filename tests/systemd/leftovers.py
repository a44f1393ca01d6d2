"""What a machine occupies on the host, and how it is taken back, also after a run that was cut off.

A machine is a folder below STATE with a lock that its owner holds, one cgroup in each hierarchy that systemd uses, and
the processes in them. Mounts are in a namespace of these processes and end with them.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

STATE = Path("/run/weightcache-test")
PREFIX = "weightcache-test-"
KILL_SECONDS = 20.0

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Place:
    """A claimed place for one machine."""

    name: str
    folder: Path
    cgroups: tuple[Path, ...]
    lock: IO[bytes]

    def leave(self) -> None:
        """End every process of the machine and remove what it occupied."""
        _clear(self.cgroups)
        with _exclusive():  # or else another run takes a half-removed folder for one that was left behind
            shutil.rmtree(self.folder)
        self.lock.close()


def hierarchies() -> tuple[Path, ...]:
    """The mount points of the cgroup hierarchies that systemd organises: cgroup2, and name=systemd beside it."""
    found = []
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind, options, *_ = line.split()
        if kind == "cgroup2" or (kind == "cgroup" and "name=systemd" in options.split(",")):
            found.append(Path(where))
    return tuple(dict.fromkeys(found))


def claim() -> Place:
    """A new place, after taking back those of runs that are over."""
    with _exclusive():
        _reap()
        name = f"{PREFIX}{os.getpid()}-{next(_numbers)}"
        folder = STATE / name
        for part in ("cgroups", "files", "mnt"):
            (folder / part).mkdir(parents=True)
        lock = (folder / "lock").open("wb")
        fcntl.flock(lock, fcntl.LOCK_EX)
    cgroups = tuple(top / name for top in hierarchies())
    for number, cgroup in enumerate(cgroups):
        cgroup.mkdir()
        (folder / "cgroups" / str(number)).symlink_to(cgroup)
    return Place(name, folder, cgroups, lock)


@contextlib.contextmanager
def _exclusive() -> Iterator[None]:
    STATE.mkdir(mode=0o700, exist_ok=True)
    with (STATE / ".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _reap() -> None:
    cgroups = [path for top in hierarchies() for path in top.glob(f"{PREFIX}*")]
    for folder in STATE.glob(f"{PREFIX}*"):
        if not _owned(folder):
            _clear([path for path in cgroups if path.name == folder.name])
            shutil.rmtree(folder)
    _clear([path for path in cgroups if path.exists() and not (STATE / path.name).exists()])


def _owned(folder: Path) -> bool:
    try:
        with (folder / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _clear(cgroups: tuple[Path, ...] | list[Path]) -> None:
    """Kill what runs in these cgroups and remove them, bottom up. Raises TimeoutError."""
    deadline = time.monotonic() + KILL_SECONDS
    while cgroups := [path for path in cgroups if path.exists()]:
        for top in cgroups:
            for path in sorted((entry for entry in top.rglob("*") if entry.is_dir()), reverse=True):
                _end(path)
            _end(top)
        if time.monotonic() > deadline:
            raise TimeoutError(f"cannot remove {', '.join(map(str, cgroups))}")
        if any(path.exists() for path in cgroups):
            time.sleep(0.01)


def _end(cgroup: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        for pid in (cgroup / "cgroup.procs").read_text().split():
            # 0 is a process that this process namespace does not show.
            if pid != "0":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
    with contextlib.suppress(OSError):
        cgroup.rmdir()

"""The directories of all stamps: made whole, used under a lock that ends with its holder, collected when out of use.

DIRECTORY/STAMP/stamp.json    what the stamp stands for
DIRECTORY/STAMP/lock          shared by the launchers that use it, exclusive for who removes it; its time: when the last
                              use began or ended
DIRECTORY/STAMP/...           one folder for each compiler
DIRECTORY/.new-*, .gone-*     one that is being made, or removed, or was when its process was killed
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from weightcache import paths
from weightcache.compiled import places
from weightcache.compiled.entry import LOCK, STAMP, Entry, lock, measure, read
from weightcache.errors import PermissionRefused, WeightcacheError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from weightcache.compiled.stamp import Stamp
    from weightcache.config import CompiledConfig

NAME = "compiled"
MEASURED = ".measured"
SCHEMA = 1
LOCK_SECONDS = 5.0
ABANDONED_SECONDS = 3600.0
"""A directory that is being made is complete within milliseconds."""
DAY = 86400.0

_STAMP = re.compile(r"[0-9a-f]{16}")


@dataclass(slots=True)
class Held:
    """A directory in use, for as long as this is open or the process lives. Owns the descriptor of the lock."""

    entry: Entry
    fd: int

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # an engine may have used it for longer than keep_days
            os.utime(self.fd)
        os.close(self.fd)


def of_user(make: bool = True) -> Store:
    """The store of this user (paths.cache_dir); see ``open_store``."""
    try:
        return open_store(paths.cache_dir(), make)
    except RuntimeError:  # neither $HOME nor an entry in passwd(5), as in some containers
        raise PermissionRefused("this user has no home directory: WEIGHTCACHE_CACHE_DIR names a place") from None


def open_store(cache: Path, make: bool = True) -> Store:
    """The store below a cache directory, made if need be, or empty if not ``make``. Raises PermissionRefused."""
    root = cache / NAME
    if make or root.exists():
        _private(cache)
        _private(root)
    return Store(root)


@dataclass(frozen=True, slots=True)
class Store:
    """All stamps of one user."""

    root: Path

    def hold(self, stamp: Stamp, environment: Mapping[str, str]) -> Held:
        """Use the directory of ``stamp``, made if need be. Raises WeightcacheError."""
        deadline = time.monotonic() + LOCK_SECONDS
        target = self.root / stamp.digest
        while True:
            try:
                if not target.is_dir():
                    self._make(target, stamp, environment)
                if (fd := lock(target, fcntl.LOCK_SH)) is not None:
                    with contextlib.suppress(OSError):  # a disk that became read-only has what it has
                        os.utime(fd)
                    return Held(read(target), fd)
            except FileNotFoundError:
                self.root.mkdir(mode=0o700, exist_ok=True)  # removed in this moment
            except OSError as error:
                raise WeightcacheError(f"{target} cannot be used ({error.strerror})") from None
            if time.monotonic() > deadline:
                raise WeightcacheError(f"{target} is being removed, and that does not end")
            time.sleep(0.02)

    def entries(self) -> tuple[Entry, ...]:
        """All stamps, the one that was used last first."""
        return tuple(sorted(map(read, self._directories()), key=lambda entry: (-entry.used, entry.stamp)))

    def collect(self, limits: CompiledConfig, own: str = "", pause: float = 0.0) -> tuple[Entry, ...]:
        """Remove what was not used for long, then the oldest until all fit; never the last used, nor one in use.

        ``own`` is kept too. Sizes, which take a walk over all files, are not taken within ``pause`` seconds after the
        last time, nor while there is one stamp. Returns what was removed.
        """
        self._tidy()
        newest, *others = self.entries() or (None,)
        others = [entry for entry in others if entry.stamp != own]
        if newest is None or not others:
            return ()
        limit = time.time() - limits.keep_days * DAY
        gone = [entry for entry in others if entry.used < limit and self.remove(entry)]
        if not self._due(pause):
            return tuple(gone)
        sizes = {entry.stamp: measure(entry.directory).bytes for entry in self.entries()}
        for entry in reversed([entry for entry in others if entry not in gone]):
            if sum(sizes.values()) <= limits.max_bytes:
                break
            if self.remove(entry):
                sizes.pop(entry.stamp, None)
                gone.append(entry)
        return tuple(gone)

    def remove(self, entry: Entry) -> bool:
        """Remove one directory; False if it is in use or cannot be removed."""
        try:
            fd = lock(entry.directory, fcntl.LOCK_EX)
        except OSError:
            return False
        if fd is None:
            return False
        try:
            gone = Path(tempfile.mkdtemp(prefix=f".gone-{entry.stamp}-", dir=self.root))
            entry.directory.rename(gone)  # over an empty directory: one step
        except OSError:
            return False
        finally:
            os.close(fd)
        shutil.rmtree(gone, ignore_errors=True)
        return True

    def _due(self, pause: float) -> bool:
        """Whether sizes were not taken within ``pause`` seconds; from now on they were."""
        marker = self.root / MEASURED
        with contextlib.suppress(OSError):
            if 0 <= time.time() - marker.stat().st_mtime < pause:
                return False
        with contextlib.suppress(OSError):
            marker.touch(mode=0o600)
        return True

    def _directories(self) -> Iterator[Path]:
        try:
            with os.scandir(self.root) as found:
                names = [entry.name for entry in found if entry.is_dir(follow_symlinks=False)]
        except OSError:
            return
        yield from (self.root / name for name in sorted(names) if _STAMP.fullmatch(name))

    def _make(self, target: Path, stamp: Stamp, environment: Mapping[str, str]) -> None:
        # A user's first stamp leaves full caches where they are: they would have to be compiled again elsewhere.
        stay = () if next(self._directories(), None) else places.in_use_before(environment)
        made = Path(tempfile.mkdtemp(prefix=".new-", dir=self.root))
        try:
            text = json.dumps({"schema": SCHEMA, "facts": dict(stamp.facts), "stay": list(stay)}, indent=2) + "\n"
            _write(made / STAMP, text)
            _write(made / LOCK, "")
            with contextlib.suppress(FileExistsError):
                made.rename(target)
        except OSError as error:
            if not target.is_dir():  # else another start was faster: ENOTEMPTY
                raise error from None
        finally:
            shutil.rmtree(made, ignore_errors=True)

    def _tidy(self) -> None:
        """What killed processes left."""
        for path in (*self.root.glob(".gone-*"), *self.root.glob(".new-*")):
            with contextlib.suppress(OSError):
                if path.name.startswith(".gone-") or time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                    shutil.rmtree(path, ignore_errors=True)


def _private(path: Path) -> Path:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
    except OSError as error:
        raise PermissionRefused(f"{path} cannot be made ({error.strerror})") from None
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionRefused(f"{path} is not this user's alone to write, and what lies there is executed")
    return path


def _write(path: Path, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.write(text)

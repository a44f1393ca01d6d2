"""Recordings: what was seen, as JSON lines. The first says what the file is, each further one is a whole Snapshot."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from weightcache import records
from weightcache.errors import UsageError, WeightcacheError
from weightcache.monitor.snapshot import SCHEMA, Snapshot, Source

KIND = "weightcache-recording"


class Recorder:
    """Writes snapshots to a new file that only this user may read: command lines are not for everybody."""

    def __init__(self, path: Path) -> None:
        """Raises UsageError where the file exists or cannot be made."""
        self._path = path
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            raise UsageError(f"{path} exists, and a recording overwrites nothing: choose another name") from None
        except OSError as error:
            raise UsageError(f"{path} cannot be made ({error.strerror})") from None
        self._file = os.fdopen(fd, "wb", buffering=0)
        self._line({"kind": KIND, "schema": SCHEMA})

    def write(self, snapshot: Snapshot) -> None:
        """Append one snapshot. Raises WeightcacheError where that fails; what was written before stays usable."""
        self._line(records.to_plain(snapshot))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _line(self, data: Any) -> None:
        line = memoryview(json.dumps(data, separators=(",", ":")).encode() + b"\n")
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            raise WeightcacheError(f"{self._path} could not be written ({error.strerror})") from None


class Recorded:
    """A source whose snapshots are recorded as they are looked at, at most one in ``seconds``.

    ``problem``: why recording ended early, or None. What is looked at goes on.
    """

    def __init__(self, source: Source, recorder: Recorder, seconds: float) -> None:
        self.problem: WeightcacheError | None = None
        self._source = source
        self._recorder = recorder
        self._seconds = seconds
        self._last = 0.0

    @property
    def changed(self) -> threading.Event | None:
        """The source's own event, where it has one."""
        found: threading.Event | None = getattr(self._source, "changed", None)
        return found

    def snapshot(self) -> Snapshot:
        """The source's."""
        return self.note(self._source.snapshot())

    def note(self, found: Snapshot) -> Snapshot:
        """Record what was got from the source otherwise, and return it."""
        if self.problem is None and not 0 <= found.at - self._last < 0.9 * self._seconds:
            self._last = found.at
            try:
                self._recorder.write(found)
            except WeightcacheError as error:
                self.problem = error
        return found

    def pace(self, seconds: float) -> None:
        """Also of the recording."""
        self._seconds = seconds
        self._source.pace(seconds)

    def close(self) -> None:
        """Close both."""
        self._source.close()
        self._recorder.close()

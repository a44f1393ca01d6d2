"""A source of snapshots that plays a recording (weightcache.monitor.recording)."""

from __future__ import annotations

import bisect
import contextlib
import json
import time
from array import array
from collections.abc import Callable
from pathlib import Path

from weightcache import records
from weightcache.errors import UsageError
from weightcache.monitor.recording import KIND
from weightcache.monitor.snapshot import SCHEMA, Snapshot

LONGEST_LINE = 16 * 2**20


class Replay:
    """Plays a recording from its first line on, ``speed`` times as fast as it was made, and stays at its last one.

    In memory are one snapshot, and 16 bytes a line. A line at the end without a newline was cut off with its writer and
    does not count.
    """

    def __init__(self, path: Path, speed: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        """Checks every line. Raises UsageError that names the file and the line."""
        self._path = path
        self._speed = speed
        self._clock = clock
        self._began: float | None = None
        self._offsets = array("Q")
        self._times = array("d")
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise UsageError(f"{path} cannot be read ({error.strerror})") from None
        try:
            self._shown = self._index()
        except BaseException:
            self._file.close()
            raise
        self._place = 0

    @property
    def ended(self) -> bool:
        """Whether the last snapshot has been reached."""
        return self._place == len(self._times) - 1

    def snapshot(self) -> Snapshot:
        """The one whose time has come; the first call starts the clock."""
        now = self._clock()
        if self._began is None:
            self._began = now
        moment = self._times[0] + (now - self._began) * self._speed
        place = max(bisect.bisect_right(self._times, moment) - 1, 0)
        if place != self._place:
            self._place = place
            with contextlib.suppress(UsageError):  # the file was changed since it was checked
                self._shown = self._read(place)
        return self._shown

    def last(self) -> Snapshot:
        """The last one, at once."""
        return self._read(len(self._times) - 1)

    def pace(self, seconds: float) -> None:
        """A recording has its own pace."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _index(self) -> Snapshot:
        """Remember where each line begins; the first snapshot."""
        first: Snapshot | None = None
        number, offset = 0, 0
        while (line := self._file.readline(LONGEST_LINE + 1)).endswith(b"\n"):
            number += 1
            if number == 1:
                self._check_header(line)
            else:
                snapshot = self._decode(line, number)
                first = first or snapshot
                self._offsets.append(offset)
                # A clock that was set back must not make the search below go wrong.
                self._times.append(max(snapshot.at, self._times[-1] if self._times else snapshot.at))
            offset += len(line)
        if len(line) > LONGEST_LINE:
            raise UsageError(f"{self._path}, line {number + 1}: longer than any snapshot")
        if first is None:
            raise UsageError(f"{self._path} holds no snapshot" if number else f"{self._path} is no recording")
        return first

    def _check_header(self, line: bytes) -> None:
        try:
            header = json.loads(line)
        except (ValueError, RecursionError):
            header = None
        if not isinstance(header, dict) or header.get("kind") != KIND:
            raise UsageError(f"{self._path}, line 1: this is no recording of wcache-top")
        if header.get("schema") != SCHEMA:
            raise UsageError(
                f"{self._path}, line 1: recorded with schema {header.get('schema')!r}, this wcache-top reads {SCHEMA}"
            )

    def _decode(self, line: bytes, number: int) -> Snapshot:
        try:
            return records.from_plain(Snapshot, json.loads(line))
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{self._path}, line {number}: no snapshot ({error})") from None

    def _read(self, place: int) -> Snapshot:
        self._file.seek(self._offsets[place])
        return self._decode(self._file.readline(LONGEST_LINE + 1), place + 2)

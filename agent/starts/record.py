"""One trace: a file of lines of JSON that the launcher and every process of the engine append to.

A line is one write to a descriptor opened with O_APPEND, shorter than a page, so that lines of several processes never
mix. A process that is killed, or a disk that is full, leaves at most half a line. Times are those of CLOCK_MONOTONIC in
seconds, which is the same clock in all processes of a host.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from weightcache import records

SCHEMA = 1
LONGEST = 4095
"""Bytes of a line; the kernel promises nothing about longer ones."""
LONGEST_NAME = 80

Kind = Literal["process", "begin", "end", "point"]


@dataclass(frozen=True, slots=True)
class Mark:
    """One moment in one process.

    ``kind`` process: this process belongs to the start. ``name`` is its role, ``how`` cold (it began with this start,
    at ``facts["began"]``) or warm (it was handed over, and waited since ``facts["waited_since"]``). ``kind`` begin and
    end: of the phase ``name``; they nest. ``kind`` point: ``name`` happened. ``rank`` is the global rank where there is
    one, else -1.
    """

    at: float
    pid: int
    kind: Kind
    name: str
    rank: int = -1
    how: str = ""
    facts: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.at < 1e12 or not 0 < self.pid < 1 << 32 or not 0 < len(self.name) <= LONGEST_NAME:
            raise ValueError("a mark that cannot be")
        if any(not abs(value) < 1e12 for value in self.facts.values()):
            raise ValueError("a fact that cannot be")


@dataclass(frozen=True, slots=True)
class Header:
    """The first line. ``began`` is the moment that the start is counted from, ``epoch`` the same in seconds since 1970.

    ``arguments`` are SGLang's, without secrets and whatever only concerns serving.
    """

    schema: int
    began: float
    epoch: float
    model: str
    arguments: tuple[str, ...]
    levers: tuple[str, ...]
    version: str

    def __post_init__(self) -> None:
        if self.schema != SCHEMA:
            raise ValueError(f"a trace of schema {self.schema}")
        if not 0 <= self.began < 1e12 or not 0 <= self.epoch < 1e12:
            raise ValueError("a time that cannot be")


def encode(line: Mark | Header) -> bytes:
    """One line with its end. A header that is too long loses arguments."""
    plain = records.to_plain(line)
    if isinstance(line, Mark):
        plain = {name: value for name, value in plain.items() if value not in ("", -1, {})}
    data = json.dumps(plain, separators=(",", ":")).encode() + b"\n"
    if len(data) > LONGEST:
        if not isinstance(line, Header) or not line.arguments:
            raise ValueError("a line that is too long")
        return encode(replace(line, arguments=line.arguments[: len(line.arguments) // 2]))
    return data


def decode(data: bytes, kind: type[Mark | Header]) -> Mark | Header:
    """Decode one line. Raises ValueError."""
    if len(data) > LONGEST:
        raise ValueError("a line that is too long")
    try:
        return records.from_plain(kind, json.loads(data))
    except RecursionError:
        raise ValueError("a line that is nested too deeply") from None


class Writer:
    """Appends marks to a trace. Never raises: whatever goes wrong, it falls silent, and ``works`` says so."""

    def __init__(self, fd: int = -1) -> None:
        self._fd = fd

    @classmethod
    def to(cls, path: str) -> Writer:
        """To the existing trace at ``path``; one that is silent where there is none that this process may write."""
        if not path:
            return cls()
        fd = -1
        with contextlib.suppress(OSError, ValueError):
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                os.close(fd)
                fd = -1
        return cls(fd)

    @property
    def works(self) -> bool:
        """Whether everything so far was written."""
        return self._fd >= 0

    def fileno(self) -> int:
        """The descriptor, or -1."""
        return self._fd

    def write(self, line: Mark | Header) -> None:
        """Append one line."""
        if self._fd < 0:
            return
        try:
            data = encode(line)
        except ValueError:
            return
        try:
            complete = os.write(self._fd, data) == len(data)
        except OSError:
            complete = False
        if not complete:
            self.close()

    def mark(
        self,
        kind: Kind,
        name: str,
        *,
        rank: int = -1,
        how: str = "",
        at: float | None = None,
        facts: Mapping[str, float] | None = None,
    ) -> None:
        """Append a mark of this process."""
        if self._fd < 0:
            return
        moment = time.monotonic() if at is None else at
        try:
            rounded = {key: round(value, 6) for key, value in (facts or {}).items()}
            line = Mark(round(moment, 6), os.getpid(), kind, name[:LONGEST_NAME], rank, how, rounded)
        except ValueError:
            return
        self.write(line)

    def close(self) -> None:
        """Write no more."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)


def process_began(pid: int | None = None) -> float:
    """When a process (this one) was forked, on the clock of marks; 10 ms exact. Raises OSError or ValueError."""
    fields = Path(f"/proc/{pid or 'self'}/stat").read_text(errors="replace").rpartition(")")[2].split()
    since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    # A host that slept has two clocks: /proc counts the sleep, and CLOCK_MONOTONIC does not.
    slept = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    return max(0.0, since_boot - slept)

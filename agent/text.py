"""How sizes, durations, tables and text of unknown origin look on a terminal."""

from __future__ import annotations

import os
import pwd
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TextIO

    from weightcache.protocol import LoadProgress

_IMPOSSIBLE = 10**18
"""Whoever says so many seconds or bytes is wrong, or wants to break something (infinity has no units)."""

_COLOURS = {"green": "32", "yellow": "33", "red": "31"}


def escape(text: str) -> str:
    """``text`` with control characters spelled out: model paths and commands come from anybody."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def size(count: int) -> str:
    """Bytes in GB (10^9), or in MB where GB would show nothing."""
    if abs(count) > _IMPOSSIBLE:
        return "an impossible size"
    gigabytes = count / 1e9
    if gigabytes >= 0.01:
        return f"{gigabytes:.1f} GB" if gigabytes >= 10 else f"{gigabytes:.2f} GB"
    return f"{count / 1e6:.2f} MB" if count else "0 GB"


def duration(seconds: float) -> str:
    """Seconds as the one or two largest units."""
    if not seconds < _IMPOSSIBLE:
        return "an impossible time"
    if seconds < 10:
        return f"{max(seconds, 0):.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = int(seconds) // 60
    if minutes < 120:
        return f"{minutes} min"
    hours = minutes // 60
    if hours < 48:
        return f"{hours} h {minutes % 60} min"
    return f"{hours // 24} d {hours % 24} h"


def moment(epoch: float) -> str:
    """A time of day with its date, in local time."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(epoch))
    except (OverflowError, ValueError, OSError):
        return "an impossible time"


def user(uid: int) -> str:
    """A user's name, if there is one."""
    try:
        return escape(pwd.getpwuid(uid).pw_name)
    except (KeyError, OverflowError):
        return f"uid {uid}"


def count(number: int, noun: str) -> str:
    """``1 engine``, ``2 engines``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def progress(now: LoadProgress) -> str:
    """Where a load stands, in one short line."""
    done = f" {size(now.bytes_done)}" if now.bytes_done else ""
    total = f" of {size(now.bytes_total)}" if now.bytes_total else ""
    return f"{escape(now.phase)}{done}{total}, {duration(now.seconds)}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> list[str]:
    """Aligned lines; the columns named in ``right`` are aligned to the right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = []
    for row in (header, *rows):
        cells = [
            cell.rjust(width) if name in right else cell.ljust(width)
            for name, cell, width in zip(header, row, widths, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def coloured(stream: TextIO) -> bool:
    """Whether ``stream`` is a terminal whose user wants colour (https://no-color.org)."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and stream.isatty()


def paint(line: str, word: str, colour: str) -> str:
    """``line`` with the first ``word`` in colour."""
    before, found, after = line.partition(word)
    return f"{before}\x1b[{_COLOURS[colour]}m{found}\x1b[0m{after}" if found else line

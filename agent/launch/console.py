"""Text for a terminal: lines with one prefix, aligned tables, and nothing in them that a terminal would obey."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PREFIX = "weightcache: "
WIDTH = 44
"""Longest value in a table; longer ones lose their middle."""


def clean(text: str) -> str:
    """``text`` with everything that is not printable (control characters, line breaks, direction marks) escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def elided(text: str, width: int = WIDTH) -> str:
    """``text`` in at most ``width`` characters, without its middle."""
    if len(text) <= width:
        return text
    head = (width - 2) // 2
    return f"{text[:head]}..{text[len(text) - (width - 2 - head) :]}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Aligned columns, indented by two; the last column keeps its length."""
    last = len(header) - 1
    cells = [[clean(c) if i == last else elided(clean(c)) for i, c in enumerate(row)] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(last)]
    rule = ["-" * width for width in widths] + ["-" * len(cells[0][last])]
    lines = [
        "  " + " | ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[last]]).rstrip()
        for row in (cells[0], rule, *cells[1:])
    ]
    return "\n".join(lines)


def say(text: str) -> None:
    """One line of the launcher on standard error, beside the server's log."""
    write(PREFIX + clean(text), sys.stderr)


def write(text: str, stream: TextIO) -> None:
    """Print; a reader that went away never ends a server."""
    with contextlib.suppress(OSError, ValueError):
        stream.write(text.encode(stream.encoding or "utf-8", "backslashreplace").decode(stream.encoding or "utf-8"))
        stream.write("\n")
        stream.flush()

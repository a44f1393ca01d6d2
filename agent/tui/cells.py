"""Pieces of text with a style's name, measured in terminal cells: what all tables and pages are made of.

There is no markup on this way: text of unknown origin is only ever text.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from rich.cells import cell_len, chop_cells, get_character_cell_size, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from weightcache import text

STYLES = {
    "": Style.null(),
    "strong": Style(bold=True),
    "dim": Style(dim=True),
    "head": Style(bold=True, underline=True),
    "focus": Style(bold=True, underline=True, color="cyan"),
    "good": Style(color="green"),
    "busy": Style(color="yellow"),
    "bad": Style(color="red", bold=True),
    "weights": Style(color="cyan"),
    "engines": Style(color="blue"),
    "other": Style(color="magenta"),
    "key": Style(bold=True, color="cyan"),
}
"""The terminal's own palette, so that it looks right on a light background too. No style means anything alone."""


class Cell(NamedTuple):
    """A text, one of STYLES, and by what a column sorts it (by the text where it is None)."""

    text: str
    style: str = ""
    order: float | str | None = None


Line = Sequence[Cell]


class Marks(NamedTuple):
    """The characters that are not letters."""

    cut: str
    up: str
    down: str
    weights: str
    engines: str
    other: str
    free: str


UNICODE = Marks("…", "▲", "▼", "█", "▓", "▒", "░")
ASCII = Marks("~", "^", "v", "#", "=", "-", ".")


@functools.lru_cache(4096)
def safe(content: str) -> str:
    """``content`` as plain characters, each one or two cells wide.

    Terminals disagree about characters without a width, so those are spelled out like control characters.
    """
    content = text.escape(content)
    if content.isascii():
        return content
    return "".join(
        char if get_character_cell_size(char) else char.encode("unicode_escape").decode() for char in content
    )


def clip(content: str, width: int, marks: Marks, tail: bool = False) -> str:
    """``content`` in at most ``width`` cells; ``tail`` keeps the end, which tells most of a path."""
    if cell_len(content) <= width:
        return content
    room = width - len(marks.cut)
    if room <= 0:
        return marks.cut[: max(width, 0)]
    if not tail:
        return set_cell_size(content, room).rstrip() + marks.cut
    kept = content[-room:]
    while cell_len(kept) > room:
        kept = kept[1:]
    return marks.cut + kept


def pad(content: str, width: int, right: bool = False) -> str:
    """``content`` with blanks to ``width`` cells."""
    blanks = " " * (width - cell_len(content))
    return blanks + content if right else content + blanks


def fold(content: str, width: int) -> list[str]:
    """``content`` in lines of at most ``width`` cells, broken between words; what is longer than a line is cut."""
    width = max(width, 2)
    lines: list[str] = []
    line = ""
    for word in content.split(" "):
        longer = f"{line} {word}" if line else word
        if cell_len(longer) <= width:
            line = longer
        elif cell_len(word) > width:
            *full, line = chop_cells(longer, width)
            lines += full
        else:
            lines.append(line)
            line = word
    return [*lines, line]


def width_of(line: Line) -> int:
    """Cells of a line."""
    return sum(cell_len(cell.text) for cell in line)


def strip(line: Line, width: int) -> Strip:
    """A line as textual draws it, exactly ``width`` cells."""
    made = Strip([Segment(cell.text, STYLES[cell.style]) for cell in line])
    return made.crop_extend(0, width, STYLES[""])

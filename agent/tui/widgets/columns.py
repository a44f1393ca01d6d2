"""How a table's columns share its width: the least important ones go first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich.cells import cell_len

from weightcache.tui.cells import Cell

GUTTER = 2
GAP = 2


class Column(NamedTuple):
    """A column as wide as its longest cell, at most ``most`` cells.

    ``drop``: where there is too little room, the highest goes first and 0 never. ``least``: this column gives way
    instead, down to so many cells; one a table. ``tail``: of a text that is too long, the end is shown.
    """

    name: str
    drop: int = 0
    right: bool = False
    most: int = 40
    least: int = 0
    tail: bool = False


class Layout(NamedTuple):
    """The columns that are shown, by their number, and how wide."""

    columns: tuple[int, ...]
    widths: tuple[int, ...]

    def column_at(self, x: int) -> int | None:
        """The column whose heading is at the cell ``x``."""
        left = GUTTER
        for column, width in zip(self.columns, self.widths, strict=True):
            if left <= x < left + width + GAP:
                return column
            left += width + GAP
        return None


def lay_out(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], width: int, mark: int | None) -> Layout:
    """Choose and measure the columns for ``width`` cells; the heading of ``mark`` is one cell longer."""
    natural = [_natural(i, column, rows, i == mark) for i, column in enumerate(columns)]
    shown = list(range(len(columns)))
    while (over := _needed(columns, natural, shown) - width) > 0:
        going = max(shown, key=lambda i: columns[i].drop)
        if not columns[going].drop:
            break
        shown.remove(going)
    widths = {i: natural[i] for i in shown}
    over = sum(widths.values()) + GAP * (len(shown) - 1) + GUTTER - width
    # What cannot be dropped is cut: first the column that gives way, then the others from the right.
    for i in sorted(shown, key=lambda i: (not columns[i].least, -i)):
        cut = min(max(over, 0), max(widths[i] - 4, 0))
        widths[i] -= cut
        over -= cut
    return Layout(tuple(shown), tuple(widths[i] for i in shown))


def _natural(index: int, column: Column, rows: Sequence[Sequence[Cell]], marked: bool) -> int:
    longest = max((cell_len(row[index].text) for row in rows), default=0)
    most = longest if column.least else column.most
    return max(len(column.name) + marked, min(longest, most))


def _needed(columns: Sequence[Column], natural: Sequence[int], shown: Sequence[int]) -> int:
    cells = sum(min(natural[i], columns[i].least) if columns[i].least else natural[i] for i in shown)
    return cells + GAP * (len(shown) - 1) + GUTTER

"""A table whose rows are replaced every second while selection, scroll position and everything equal stay."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from rich.cells import cell_len
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from weightcache.tui.cells import Cell, Marks, clip, pad, strip
from weightcache.tui.widgets.columns import GAP, GUTTER, Column, Layout, lay_out


class Row(NamedTuple):
    """``key`` says that two rows of different moments are the same thing; ``dim`` shows it as old."""

    key: Hashable
    cells: tuple[Cell, ...]
    dim: bool = False

    def matches(self, needle: str) -> bool:
        """Whether any cell contains ``needle``, whatever the case."""
        return any(needle in cell.text.casefold() for cell in self.cells)


class Table(ScrollView, can_focus=True):
    """Shows ``rows`` below one line of headings. There are no scroll bars: the heading says which rows are seen."""

    DEFAULT_CSS = "Table { scrollbar-size: 0 0; overflow-x: hidden; overflow-y: auto; height: auto; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "row up", show=False, key_display="up k"),
        Binding("down,j", "move(1)", "row down", show=False, key_display="down j"),
        Binding("pageup", "page(-1)", "page up", show=False),
        Binding("pagedown", "page(1)", "page down", show=False),
        Binding("home", "move(-1000000)", "first row", show=False),
        Binding("end", "move(1000000)", "last row", show=False),
        Binding("enter", "open", "details", key_display="enter", tooltip="details of the selected row"),
    ]

    @dataclass
    class Moved(Message):
        """Another row is selected."""

        table: Table

    @dataclass
    class Opened(Message):
        """Somebody wants to know more about the selected row."""

        table: Table

    def __init__(self, columns: Sequence[Column], marks: Marks, empty: str, *, pinned: bool = False, id: str) -> None:
        """``empty`` stands where there are no rows; with ``pinned``, the first row stays selected whichever it is."""
        super().__init__(id=id)
        self.needle = ""
        self.empty = empty
        self._columns = columns
        self._marks = marks
        self._pinned = pinned
        self._all: Sequence[Row] = ()
        self._rows: list[Row] = []
        self._cursor = 0
        self._sorted: int | None = None
        self._reversed = False
        self._layout = Layout((), ())

    # -- what is shown -------------------------------------------------------------------------------------------------

    @property
    def key(self) -> Hashable | None:
        """The selected row's key; None where there is no row."""
        return self._rows[self._cursor].key if self._rows else None

    @property
    def keys(self) -> list[Hashable]:
        """The keys of all rows that the filter lets through, in their order."""
        return [row.key for row in self._rows]

    def wanted(self, width: int) -> int:
        """The height at which nothing needs to scroll, at any width."""
        return 1 + max(len(self._rows), 1)

    def show(self, rows: Sequence[Row]) -> None:
        """Replace the rows. Only lines that differ are drawn again."""
        self._all = rows
        self._arrange()

    def select(self, key: Hashable) -> bool:
        """Select the row with that key, if it is shown."""
        found = next((i for i, row in enumerate(self._rows) if row.key == key), None)
        if found is not None:
            self._move_to(found)
        return found is not None

    def filter(self, needle: str) -> None:
        """Show only rows that contain ``needle``."""
        self.needle = needle.casefold()
        self._arrange()
        self.refresh_line(self.scroll_offset.y)

    def sort(self, column: int | None) -> None:
        """Sort by a column, or not at all; a second time by the same one reverses."""
        self._reversed = column is not None and column == self._sorted and not self._reversed
        self._sorted = column
        self._arrange()
        self.refresh()

    def sort_by_next(self) -> None:
        """Sort by the shown column after the present one; after the last one, not at all."""
        shown = [None, *self._layout.columns]
        at = shown.index(self._sorted) if self._sorted in shown else 0
        self._sorted, self._reversed = None, False
        self.sort(shown[(at + 1) % len(shown)])

    def reverse(self) -> None:
        """Show the rows the other way round."""
        self._reversed = not self._reversed
        self._arrange()
        self.refresh()

    # -- drawing -------------------------------------------------------------------------------------------------------

    def _arrange(self) -> None:
        before, old, selected = self._rows, self._layout, self.key
        width = self.size.width or self.app.size.width  # a good guess before the first layout
        rows = [row for row in self._all if not self.needle or row.matches(self.needle)]
        if (column := self._sorted) is not None:
            rows.sort(key=lambda row: _order(row.cells[column]))
        if self._reversed:
            rows.reverse()
        self._rows = rows
        at = next((i for i, row in enumerate(rows) if row.key == selected), None)
        if at is None or (self._pinned and self._cursor == 0):
            at = min(self._cursor, max(len(rows) - 1, 0))
        moved_from, self._cursor = self._cursor, at
        self._layout = lay_out(self._columns, [row.cells for row in rows], width, self._sorted)
        self.virtual_size = Size(width, self.wanted(width))
        if at != moved_from:
            self._reveal()
        if self._layout != old or len(rows) != len(before):
            self.refresh()
        else:
            changed = [i for i, pair in enumerate(zip(before, rows, strict=True)) if self._differ(*pair)]
            for i in {*changed, at, moved_from} if at != moved_from else changed:
                self._refresh_row(i)
        if self.key != selected:
            self.post_message(self.Moved(self))

    def _differ(self, before: Row, now: Row) -> bool:
        """Whether two rows look different, as far as they are shown."""
        if before is now:
            return False
        shown = self._layout.columns
        return before.dim != now.dim or any(before.cells[i][:2] != now.cells[i][:2] for i in shown)

    def _refresh_row(self, index: int) -> None:
        y = 1 + index - self.scroll_offset.y
        if 0 < y < self.size.height:
            self.refresh(Region(0, y, self.size.width, 1))

    def render_line(self, y: int) -> Strip:
        """The headings, or a row."""
        width = self.size.width
        if y == 0:
            return self._headings(width)
        index = y - 1 + self.scroll_offset.y
        if index >= len(self._rows):
            missing = self._missing if not self._rows and y == 1 else ""
            return strip([Cell(" " * GUTTER), Cell(clip(missing, width - GUTTER, self._marks), "dim")], width)
        row, selected = self._rows[index], index == self._cursor
        cells = [Cell("> " if selected else "  ", "strong")]
        for i, (column, room) in enumerate(zip(self._layout.columns, self._layout.widths, strict=True)):
            cell, definition = row.cells[column], self._columns[column]
            content = pad(clip(cell.text, room, self._marks, definition.tail), room, definition.right)
            style = "dim" if row.dim and cell.style == "" else cell.style
            cells += [Cell("  ")] * (i > 0) + [Cell(content, style or ("strong" if selected else ""))]
        drawn = strip(cells, width)
        return drawn.apply_style(Style(reverse=True)) if selected and self.has_focus else drawn

    @property
    def _missing(self) -> str:
        return f"nothing here contains {self.needle!r}" if self.needle and self._all else self.empty

    def _headings(self, width: int) -> Strip:
        names = []
        for column, room in zip(self._layout.columns, self._layout.widths, strict=True):
            definition = self._columns[column]
            name = definition.name
            if column == self._sorted:
                name += self._marks.down if self._reversed else self._marks.up
            if definition.least:
                name = self._with_note(name, room)
            names.append(pad(clip(name, room, self._marks), room, definition.right))
        line = pad(clip(" " * GUTTER + (" " * GAP).join(names), width, self._marks), width)
        return strip([Cell(line, "focus" if self.has_focus else "head")], width)

    def _with_note(self, name: str, width: int) -> str:
        """A heading that also tells which rows are seen, and by which filter, as long as there is room for it."""
        room, count = self.size.height - 1, len(self._rows)
        words, short = [], []
        if self.needle:
            words.append(f"contains {self.needle}")
            short.append(f"/{self.needle}")
        if count > room > 0:
            first = self.scroll_offset.y
            last = min(first + room, count)
            words.append(f"{first + 1}-{last} of {count}")
            short.append(f"{first + 1}-{last}/{count}")
        elif self.needle:
            words.append(f"{count} of {len(self._all)}")
        if not words:
            return name
        ways = (f"{name} ({', '.join(words)})", f"{name} {' '.join(short)}", " ".join(short))
        return next((way for way in ways if cell_len(way) <= width), ways[-1])

    # -- moving --------------------------------------------------------------------------------------------------------

    def _move_to(self, index: int) -> None:
        index = max(0, min(index, len(self._rows) - 1))
        if not self._rows or index == self._cursor:
            return
        before, self._cursor = self._cursor, index
        self._refresh_row(before)
        self._refresh_row(index)
        self._reveal()
        self.post_message(self.Moved(self))

    def _reveal(self) -> None:
        room = max(self.size.height - 1, 1)
        first = min(max(self.scroll_offset.y, self._cursor - room + 1), self._cursor)
        self.scroll_to(y=min(first, self.max_scroll_y), animate=False, force=True)

    def action_move(self, by: int) -> None:
        """Select the row so many below."""
        self._move_to(self._cursor + by)

    def action_page(self, by: int) -> None:
        """Select the row so many pages below."""
        self._move_to(self._cursor + by * max(self.size.height - 2, 1))

    def action_open(self) -> None:
        """Ask for the selected row's details."""
        if self._rows:
            self.post_message(self.Opened(self))

    def on_resize(self) -> None:
        """Fit the columns into the new width."""
        self._arrange()
        self._reveal()

    def on_focus(self) -> None:
        """Draw heading and selection as those of the table in focus."""
        self.refresh()

    def on_blur(self) -> None:
        """Draw them as those of another table."""
        self.refresh()

    def on_click(self, event: events.Click) -> None:
        """A heading sorts, a row is selected, and opened by a second click."""
        if event.y == 0:
            if (column := self._layout.column_at(event.x)) is not None:
                self.sort(column)
        elif (index := event.y - 1 + self.scroll_offset.y) < len(self._rows):
            self._move_to(index)
            if event.chain == 2:
                self.action_open()


def _order(cell: Cell) -> tuple[bool, float, str]:
    """Numbers before words, unknown ones last."""
    if isinstance(cell.order, str) or cell.order is None:
        word = cell.text if cell.order is None else cell.order
        return word == "-", 0.0, word.casefold()
    return False, cell.order, ""

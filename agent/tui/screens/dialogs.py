"""Small windows over a screen: a question, and a choice from a list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen

from weightcache.tui.cells import Cell, Marks
from weightcache.tui.comparison import CHOICES, Other, key
from weightcache.tui.widgets.keys import Keys
from weightcache.tui.widgets.page import Build, Page
from weightcache.tui.widgets.table import Row, Table


class Confirm(ModalScreen[bool]):
    """Says what will happen, and does nothing unless the answer is y."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", "yes, do it"),
        Binding("n,escape", "dismiss(False)", "no", key_display="n"),
    ]

    def __init__(self, about: Build) -> None:
        super().__init__()
        self._about = about

    def compose(self) -> ComposeResult:
        """The sentences and the keys."""
        with Vertical(id="window"):
            yield Page(self._about)
            yield Keys(id="window-keys")

    def on_mount(self) -> None:
        """Show them."""
        self.query_one(Page).show(self._about)
        self.query_one(Keys).update()


class Choices(Table):
    """Enter takes the selected row."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "open", "compare")]


class Choose(ModalScreen[Other | None]):
    """A list of what a set can be compared with."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", "back", key_display="esc")]

    def __init__(self, others: Sequence[Other], rows: Sequence[Row], marks: Marks) -> None:
        super().__init__()
        self._others: dict[object, Other] = {key(other): other for other in others}
        self._rows = rows
        self._marks = marks

    def compose(self) -> ComposeResult:
        """The question, the list and the keys."""
        with Vertical(id="window"):
            yield Page(lambda width: [[Cell("Compare with which set, or refused engine?", "strong")]])
            yield Choices(CHOICES, self._marks, "", id="choices")
            yield Keys(id="window-keys")

    def on_mount(self) -> None:
        """Show the list."""
        table = self.query_one(Table)
        table.show(self._rows)
        table.focus()
        self.query_one(Keys).update()

    def on_table_opened(self, event: Table.Opened) -> None:
        """This one."""
        event.stop()
        self.dismiss(self._others.get(event.table.key))

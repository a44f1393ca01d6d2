"""Everything about one thing, kept up to date, and as it was last seen once it is gone."""

from __future__ import annotations

from weightcache.tui.cells import Cell
from weightcache.tui.facts import Fact
from weightcache.tui.screens.view import ReadingView
from weightcache.tui.selection import Find
from weightcache.tui.state import State


class Details(ReadingView):
    """The facts that ``find`` finds."""

    def __init__(self, state: State, find: Find) -> None:
        super().__init__(state)
        self._find = find
        self._last: list[Fact] = []

    def show(self) -> None:
        """Show the facts of now, or the last ones."""
        super().show()
        found = self._find(self.state)
        if found is not None:
            self._last = found
            self.text(found)
        else:
            self.text([*self._last[:1], ("gone", Cell("this is how it was last seen", "busy")), *self._last[1:]])

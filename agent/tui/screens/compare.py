"""A set's fingerprint beside another set's, or a refused engine's."""

from __future__ import annotations

from weightcache.tui import comparison
from weightcache.tui.comparison import Other, Side
from weightcache.tui.screens.view import ReadingView
from weightcache.tui.state import State


class Compare(ReadingView):
    """Fingerprints never change, so this stays even when a set goes."""

    def __init__(self, state: State, left: Side, right: Other) -> None:
        super().__init__(state)
        self._sides = left, right

    def show(self) -> None:
        """Compare."""
        super().show()
        left, right = self._sides
        marks = self.state.marks
        self.reader.show(lambda width: comparison.lines(left, right, marks, width))
